"""The HTML page about a run: one file without scripts, fonts and requests.

The text of rows is untrusted, and is escaped by the template.
"""

import logging
from collections.abc import Mapping
from importlib.resources import files
from itertools import accumulate
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from runtime.errors import ConfigError
from runtime.units import format_bytes, format_count, format_seconds

from ..config.settings import GenerateConfig
from ..config.typed import flatten
from ..files.named import publish_named, require_replaceable
from ..files.publishing import JsonValue, make_directory, write_all
from ..pictures.trace_file import TracedProcess, read_trace
from .charts import NUM_BINS, PHASES, compare_predictions, make_busy_strips, round_axis_limit
from .figures import RunFigures
from .overview import format_setting
from .samples import failed_rows, good_rows
from .settings import IGNORED_SETTINGS, resolved_settings

log = logging.getLogger(__name__)
NUM_FAILED = 50


def escape_control_characters(value: object) -> object:
    """Escapes control characters. Browsers would drop some, and bidirectional marks would reorder the text."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return "".join(char if char.isprintable() or char in "\n\t " else ascii(char)[1:-1] for char in value)


ENVIRONMENT = Environment(autoescape=True, finalize=escape_control_characters, undefined=StrictUndefined)
ENVIRONMENT.filters |= {
    "bytes": format_bytes,
    "counted": format_count,
    "rate": lambda value: "-" if value is None else f"{value:,.1f}",
    "seconds": format_seconds,
    "shown": format_setting,
}
ENVIRONMENT.globals |= {"nice_top": round_axis_limit, "num_bins": NUM_BINS, "phases": PHASES}


def write_page(figures: RunFigures, num_samples: int, directory: Path | None) -> Path:
    """Writes report.html into `directory`. If it is None, writes into the run's directory, or into the current
    directory for a run at a URL. Replaces an earlier report. Raises ConfigError if another file would be replaced, and
    OutputError."""
    folder = make_directory(directory) if directory is not None else Path() if figures.run.url else figures.run.path
    path = folder / "report.html"
    if directory is not None or figures.run.url:
        require_replaceable([path], f"directory={folder}")
    text = _render_page(figures, num_samples) + "\n"
    publish_named(path, lambda file: write_all(file, text.encode()))
    return path


def _render_page(figures: RunFigures, num_samples: int) -> str:
    data = files("jobs").joinpath("data")
    # Indentation is removed, because browsers show spaces between elements.
    template = "".join(map(str.strip, data.joinpath("report.html").read_text(encoding="utf-8").splitlines()))
    settings, defaults, plan = figures.settings, flatten(GenerateConfig()), figures.recorded_summary.get("plan")
    resolved = resolved_settings(settings)
    known = {key: settings[key] for key in defaults if key in settings and key not in resolved}
    changed = {key: value for key, value in known.items() if value != defaults[key]}
    hidden = {*defaults, *IGNORED_SETTINGS} - resolved
    subject = [
        format_setting(settings[key]) for key in ("model.name", "dataset.kind", "offload.tier") if key in settings
    ]
    if isinstance(model := settings.get("model.path"), str):
        subject[:1] = [model.rstrip("/").rpartition("/")[2]]
    versions, traced = figures.run.manifest.get("versions"), _read_last_trace(figures)
    pairs = list(compare_predictions(figures))
    return ENVIRONMENT.from_string(template).render(
        figures=figures,
        style=data.joinpath("report.css").read_text(encoding="utf-8"),
        condition=figures.run.condition.value,
        subject=" · ".join(subject),
        defaults=defaults,
        changed=changed,
        rest={key: value for key, value in known.items() if key not in changed},
        bound={
            "Values chosen for auto": plan if isinstance(plan, dict) else {},
            "Fixed for the whole run": {key: value for key, value in figures.run.semantic.items() if key not in hidden},
        },
        pairs=pairs,
        has_predictions=any(pair.predicted is not None for pair in pairs),
        strips=make_busy_strips(traced),
        traced_seconds=traced.end - traced.begin,
        ledgers=[_ledger(item) for item in _objects(figures.recorded_summary.get("ledgers"))],
        failed=failed_rows(figures, NUM_FAILED),
        num_failed=NUM_FAILED,
        samples=good_rows(figures, num_samples) if num_samples else [],
        versions=", ".join(f"{name} {text}" for name, text in (versions if isinstance(versions, dict) else {}).items()),
    )


def _read_last_trace(figures: RunFigures) -> TracedProcess:
    """Reads the trace of the last start that has a readable one."""
    for path in sorted(figures.run.directory.trace.glob("start-*.json"), reverse=True):
        try:
            if (traced := read_trace(path)).spans:
                return traced
        except ConfigError as error:
            log.warning("%s", error)
    return TracedProcess()


def _objects(value: JsonValue) -> list[Mapping[str, JsonValue]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _ledger(ledger: Mapping[str, JsonValue]) -> dict[str, object]:
    """The planned content of a memory, for a bar of width 1000: each entry with its position and width."""

    def to_float(value: JsonValue) -> float:
        return float(value) if isinstance(value, int | float) else 0.0

    entries = _objects(ledger.get("entries"))
    names = [str(entry.get("name")) for entry in entries]
    sizes = [to_float(entry.get("num_bytes")) for entry in entries]
    whole = max(sum(sizes), 1.0)
    begins = accumulate((1000 * size / whole for size in sizes), initial=0.0)
    equations = [str(entry.get("equation", "")) for entry in entries]
    return {
        "memory": ledger.get("memory"),
        "key": ledger.get("budget_key"),
        "budget": to_float(ledger.get("budget_bytes")),
        "total": sum(sizes),
        "label": ", ".join(f"{name} {format_bytes(size)}" for name, size in zip(names, sizes, strict=True)),
        "entries": [
            {"name": name, "size": size, "equation": equation, "at": at, "width": 1000 * size / whole}
            for name, size, equation, at in zip(names, sizes, equations, begins, strict=False)
        ],
    }
