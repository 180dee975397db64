"""A table that compares runs: settings that differ, and results.

The shards of a run are grouped. The table is printed as text, and written as Markdown, Parquet and a picture of rates.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import pyarrow as pa

from runtime.units import format_bytes, format_seconds

from ..config.settings import GenerateConfig
from ..config.typed import flatten
from ..files.named import publish_named, require_replaceable
from ..files.publishing import JsonValue, canonical_json, make_directory, write_all, write_parquet
from ..record.run_reader import Condition
from .figures import RunFigures
from .settings import differing_keys, effective_settings
from .text_tables import format_columns

SHARD_NAME = re.compile(r"-\d{5}-of-\d{5}$")
MAX_CHARS = 40  # of a setting in the table
DIGEST, DIGEST_CHARS = re.compile(r"[0-9a-f]{40,}"), 10
MEASURED = (
    *("state", "rows", "errors", "elapsed", "in passes", "rows/min", "prefill tok/s", "decode tok/s"),
    *("tokens", "peak memory"),
)


@dataclass(frozen=True, kw_only=True)
class Overview:
    """A comparison of runs. `keys`: the settings that differ."""

    runs: Sequence[RunFigures]
    keys: Sequence[str]

    def text(self, width: int = 120) -> str:
        """Formats the table in columns. If it is wider than `width` characters, the results come in parts, and then the
        settings, in a list for each run."""
        head, rows = self._cells()
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        columns, num_left = range(1, len(head)), 2 + len(self.keys)
        is_narrow = sum(widths) + 2 * len(columns) <= width
        parts = [list(columns)] if is_narrow else _parts_within(columns[len(self.keys) :], widths, width)
        tables = [
            format_columns(
                [head[i] for i in (0, *part)],
                [[row[i] for i in (0, *part)] for row in rows],
                numbers=[place for place, i in enumerate((0, *part)) if i >= num_left],
            )
            for part in parts
        ]
        if not is_narrow and self.keys:
            tables.append(self._settings_lines(width))
        return "\n\n".join("\n".join(lines) for lines in tables)

    def _settings_lines(self, width: int) -> list[str]:
        """The settings of each run in which runs differ, without those at their default."""
        defaults, lines = flatten(GenerateConfig()), ["settings that differ, where they are not the default:"]
        for name, shards in _group_shards(self.runs):
            settings = effective_settings(shards[0].settings)
            changed = {key: settings[key] for key in self.keys if key in settings}
            words = [
                f"{key}={_shorten(format_setting(value))}"
                for key, value in changed.items()
                if key not in defaults or value != defaults[key]
            ]
            lines.append(fill("  ".join([f"{name}:", *(words or ["-"])]), width, subsequent_indent="    "))
        return lines

    def markdown(self) -> str:
        head, rows = self._cells()
        num_left = 2 + len(self.keys)
        rule = ["---" if i < num_left else "---:" for i in range(len(head))]
        escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, rule, *rows)]
        return "\n".join(f"| {' | '.join(row)} |" for row in escaped) + "\n"

    def table(self) -> pa.Table:
        """A row for each run and shard, with numbers as numbers and settings as text."""
        return pa.Table.from_pylist([self._values(run) for run in self.runs])

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """The head, and a row for each run, each shard, and the totals of a run's shards."""
        rows: list[list[str]] = []
        for name, shards in _group_shards(self.runs):
            count = shards[0].run.shard[1]
            if len(shards) > 1 or count > 1:
                rows.append([name, *[""] * len(self.keys), *_combined_cells(shards)])
            for run in shards:
                texts = self._settings(run).values()
                cut = [_shorten(text) for text in texts]
                own = f"  shard {run.run.shard[0]} of {count}" if count > 1 else name
                rows.append([own, *cut, *_cells(run)])
        return ["run", *self.keys, *MEASURED], rows

    def _settings(self, run: RunFigures) -> dict[str, str]:
        settings = effective_settings(run.settings)
        return {key: format_setting(settings[key]) if key in settings else "" for key in self.keys}

    def _values(self, run: RunFigures) -> dict[str, object]:
        summary, (index, count) = run.summary, run.run.shard
        return {
            "run": run.run.location,
            "shard": index,
            "num_shards": count,
            "state": run.run.condition.value,
            "num_rows": run.num_rows,
            "num_done": run.num_done,
            "num_errors": run.num_errors,
            "elapsed_seconds": run.elapsed_seconds,
            "seconds": run.seconds,
            "rows_per_minute": run.rows_per_minute,
            "prefill_tokens_per_second": summary.measured.prefill,
            "decode_tokens_per_second": summary.measured.decode_useful,
            "prompt_tokens": summary.prompt_tokens,
            "generated_tokens": summary.useful_tokens,
            "peak_host_bytes": summary.peak.host_bytes,
            "peak_device_bytes": summary.peak.device_bytes,
            **self._settings(run),
        }


def make_overview(runs: Iterable[RunFigures]) -> Overview:
    figures = list(runs)
    return Overview(runs=figures, keys=differing_keys([run.settings for run in figures]))


def format_setting(value: JsonValue) -> str:
    """Formats a value as on a command line. A text with several lines or control characters is formatted as JSON."""
    return value if isinstance(value, str) and value.isprintable() else canonical_json(value)


def _parts_within(columns: Sequence[int], widths: Sequence[int], width: int) -> list[list[int]]:
    """Divides columns into parts that fit `width` characters beside the first column; at least one column in each."""
    parts, used = list[list[int]](), width
    for column in columns:
        used += 2 + widths[column]
        if used > width:
            used = widths[0] + 2 + widths[column]
            parts.append([])
        parts[-1].append(column)
    return parts


def _shorten(text: str) -> str:
    if DIGEST.fullmatch(text):
        return text[:DIGEST_CHARS]
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS - 3]}..."


def _group_shards(runs: Sequence[RunFigures]) -> list[tuple[str, list[RunFigures]]]:
    """The shards of each run, with the name of the run, or its path if several runs have the same name."""
    groups: dict[Path, list[RunFigures]] = {}
    for run in runs:
        path = run.run.path
        if run.run.shard[1] > 1:
            path = Path(*(SHARD_NAME.sub("", part) for part in path.parts))
        groups.setdefault(path, []).append(run)
    are_nested = [shards[0].is_nested for shards in groups.values()]
    names = [f"{p.parent.name}/{p.name}" if nested else p.name for p, nested in zip(groups, are_nested, strict=True)]
    return [
        (name if names.count(name) == 1 else str(path), sorted(shards, key=lambda run: run.run.shard))
        for name, (path, shards) in zip(names, groups.items(), strict=True)
    ]


def _cells(run: RunFigures) -> list[str]:
    summary, done = run.summary, run.num_done
    return [
        run.state,
        f"{done:,}" if run.num_rows in (None, done) else f"{done:,} of {run.num_rows:,}",
        f"{run.num_errors:,}",
        "-" if run.elapsed_seconds is None else format_seconds(run.elapsed_seconds),
        format_seconds(run.seconds),
        _format_rate(run.rows_per_minute),
        _format_rate(summary.measured.prefill),
        _format_rate(summary.measured.decode_useful),
        f"{summary.useful_tokens:,}",
        _format_memory(summary.peak.host_bytes, summary.peak.device_bytes),
    ]


def _combined_cells(shards: Sequence[RunFigures]) -> list[str]:
    """The cells with totals over shards, and their states. Rates are empty, because shards may run at different
    times."""
    count = shards[0].run.shard[1]
    peaks = [run.summary.peak for run in shards]
    return [
        shard_states(shards, count),
        f"{sum(run.num_done for run in shards):,}",
        f"{sum(run.num_errors for run in shards):,}",
        *[""] * 5,
        f"{sum(run.summary.useful_tokens for run in shards):,}",
        _format_memory(max(peak.host_bytes for peak in peaks), max(peak.device_bytes for peak in peaks)),
    ]


def shard_states(shards: Sequence[RunFigures], count: int) -> str:
    """Formats the number of finished shards, and the indices of shards in other states."""
    conditions = {run.run.shard[0]: run.run.condition for run in shards}
    done = sum(condition is Condition.done for condition in conditions.values())
    others = {
        condition.value: [str(index) for index, state in sorted(conditions.items()) if state is condition]
        for condition in Condition
        if condition is not Condition.done
    } | {"missing": [str(index) for index in range(count) if index not in conditions]}
    named = [f"{', '.join(indexes)} {name}" for name, indexes in others.items() if indexes]
    return "; ".join([f"{done} of {count} shards done", *named])


def _format_rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.1f}"


def _format_memory(host_bytes: int, device_bytes: int) -> str:
    if not host_bytes:
        return "unknown"  # before the end of the first pass
    return format_bytes(host_bytes) + (f" + {format_bytes(device_bytes)} device" if device_bytes else "")


BAR_PIXELS, FRAME_PIXELS = 26, 110
COLORS = {"prefill": "#4c78a8", "decode": "#f58518"}


def write_overview(overview: Overview, directory: Path) -> list[Path]:
    """Writes table.md, table.parquet and, if there are measurements, rates.png. Replaces earlier ones. Raises
    ConfigError if it would replace a file that no command has written, and OutputError."""
    markdown, table, picture = (directory / name for name in ("table.md", "table.parquet", "rates.png"))
    require_replaceable((markdown, table, picture), f"directory={directory}")
    make_directory(directory)
    publish_named(markdown, lambda file: write_all(file, overview.markdown().encode()))
    publish_named(table, lambda file: write_parquet(overview.table(), file))
    measured = [run for run in overview.runs if run.passes]
    if not measured:
        return [markdown, table]
    draw_rates(picture, measured)
    return [markdown, table, picture]


def draw_rates(path: Path, runs: Sequence[RunFigures]) -> None:
    """Draws bars of tokens per second in prefill and in decode, in the order of the table."""
    from ..pictures.figure import figure  # imports matplotlib

    names = [run.name for run in runs]
    rates = {
        "prefill": [run.summary.measured.prefill or 0.0 for run in runs],
        "decode": [run.summary.measured.decode_useful or 0.0 for run in runs],
    }
    with figure(path, FRAME_PIXELS + BAR_PIXELS * len(names)) as picture:
        panels = picture.subplots(1, 2, sharey=True)
        for axes, (phase, values) in zip(panels, rates.items(), strict=True):
            bars = axes.barh(range(len(names)), values, color=COLORS[phase])
            axes.bar_label(bars, [f"{value:,.1f}" if value else "-" for value in values], padding=4)
            axes.set_xlim(0, 1.18 * max(max(values), 1e-9))
            axes.set_xlabel("tokens/s")
            axes.set_title(phase, loc="left", fontsize=10)
        panels[0].set_yticks(range(len(names)), names)
        panels[0].invert_yaxis()
        picture.tight_layout()
