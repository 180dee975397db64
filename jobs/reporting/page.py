"""One run as one page that needs nothing beside it: no script, no font, no request."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from runtime.errors import ConfigError
from runtime.trace import Span
from runtime.units import counted, format_bytes, format_seconds

from ..config.settings import GenerateConfig
from ..config.typed import flatten
from ..files.named import publish_named, require_replaceable
from ..files.publishing import JsonValue, make_directory, write_all
from ..pictures.trace_file import read_trace
from ..record.found import Condition
from .charts import stacked, throughput, utilisation
from .comparison import comparison
from .figures import RunFigures
from .html import Child, Html, element, joined, table
from .overview import NO_SETTINGS, shown
from .samples import Sample, failed_rows, good_rows

log = logging.getLogger(__name__)
NUM_FAILED = 50
CAME_TO = {"model.dtype"}  # recorded as what `auto` came to: whether anybody has set it is not known
# Whatever should come into the page some day: a browser loads nothing for it, and runs nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True, kw_only=True)
class Page:
    """What one page shows. `spans`: of the trace of the last start, empty where there is none."""

    figures: RunFigures
    spans: Sequence[Span]
    num_samples: int

    def html(self) -> str:
        style = Html(files("jobs").joinpath("data", "report.css").read_text(encoding="utf-8"))
        head = [
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=POLICY),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("meta", name="color-scheme", content="light dark"),
            element("title", f"{self.figures.name} - Millrace"),
            element("style", style),
        ]
        body = [self._header(), element("main", list(self._sections())), self._footer()]
        return f"<!doctype html>\n{element('html', element('head', head), element('body', body), lang='en')}\n"

    def _header(self) -> Html:
        figures, settings = self.figures, self.figures.settings
        condition = figures.run.condition
        what = [shown(settings[key]) for key in ("model.name", "dataset.kind", "offload.tier") if key in settings]
        model = settings.get("model.path")
        if isinstance(model, str):
            what[:1] = [model.rstrip("/").rpartition("/")[2]]
        return element(
            "header",
            element("p", "Millrace run", class_="kicker"),
            element("h1", figures.name, " ", element("span", condition.value, class_=f"state {condition.value}")),
            element("p", " · ".join(what), class_="quiet"),
            element("p", figures.state, class_="problem") if condition is Condition.damaged else None,
            element("dl", [element("div", element("dt", name), element("dd", value)) for name, value in self._tiles()]),
        )

    def _tiles(self) -> Iterator[tuple[str, Child]]:
        figures, summary = self.figures, self.figures.summary
        of = "" if figures.num_rows in (None, figures.num_done) else f" of {figures.num_rows:,}"
        yield "rows", [f"{figures.num_done:,}", element("small", of)]
        yield "failed", element("span", f"{figures.num_errors:,}", class_="bad" if figures.num_errors else None)
        if summary.elapsed is not None:
            starts = f" in {counted(summary.elapsed.num_starts, 'start')}" if summary.elapsed.num_starts > 1 else ""
            yield "elapsed", [format_seconds(summary.elapsed.seconds), element("small", starts)]
        yield "time in passes", format_seconds(figures.seconds)
        if summary.elapsed is not None and summary.elapsed.first_token_seconds is not None:
            yield "first token after", format_seconds(summary.elapsed.first_token_seconds)
        yield "rows per minute", _figure(figures.rows_per_minute)
        yield "prefill", [_figure(summary.measured.prefill), element("small", " tokens/s")]
        yield "decode", [_figure(summary.measured.decode_useful), element("small", " tokens/s")]
        yield "generated", [f"{summary.useful_tokens:,}", element("small", " tokens")]
        yield "peak host memory", format_bytes(summary.peak.host_bytes)
        if summary.peak.device_bytes:
            yield "peak device memory", format_bytes(summary.peak.device_bytes)

    def _sections(self) -> Iterator[Html]:
        figures = self.figures
        yield section("Settings", _settings(figures.settings), _bound(figures))
        if figures.passes:
            yield section("Predicted beside measured", comparison(figures))
            yield section("Throughput over time", throughput(figures.passes), note=THROUGHPUT_NOTE)
        if self.spans:
            yield section("What was busy", utilisation(self.spans), note=TRACE_NOTE)
        if ledgers := [each for each in _list(figures.noted.get("ledgers")) if isinstance(each, dict)]:
            yield section("Memory as planned", [_ledger(each) for each in ledgers], note=LEDGER_NOTE)
        if failed := failed_rows(figures, NUM_FAILED):
            first = "" if figures.num_errors <= NUM_FAILED else f", the first {NUM_FAILED}"
            yield section(f"Rows that failed{first}", _failed(failed))
        if self.num_samples and (samples := good_rows(figures, self.num_samples)):
            yield section("Samples", [_sample(each) for each in samples], note="Rows from all over the run.")

    def _footer(self) -> Html:
        versions = self.figures.run.manifest.get("versions")
        named = versions if isinstance(versions, dict) else {}
        begun = ", ".join(f"{name} {version}" for name, version in named.items())
        return element("footer", element("p", f"{self.figures.run.place} · begun with {begun or 'unknown versions'}"))


def write_page(figures: RunFigures, num_samples: int, directory: Path | None) -> Path:
    """Publishes the page as report.html in `directory`, or in the run's own, of a run at a URL in this one, in place of
    one of before. Raises ConfigError where that is somebody's own file, OutputError."""
    folder = make_directory(directory) if directory is not None else Path() if figures.run.url else figures.run.path
    path = folder / "report.html"
    if directory is not None or figures.run.url:
        require_replaceable([path], f"directory={folder}")
    text = Page(figures=figures, spans=_spans(figures), num_samples=num_samples).html()
    publish_named(path, lambda file: write_all(file, text.encode()))
    return path


def _spans(figures: RunFigures) -> Sequence[Span]:
    """The trace of the last start that has one which can be read."""
    for path in sorted(figures.run.directory.trace.glob("start-*.json"), reverse=True):
        try:
            if spans := read_trace(path):
                return spans
        except ConfigError as error:
            log.warning("%s", error)
    return []


THROUGHPUT_NOTE = "Over the time spent in passes; what lies between two starts does not count."
TRACE_NOTE = "Of the last start that was traced, darker where more of the time was work. millrace trace draws a window."
LEDGER_NOTE = "Above what the process holds before a model is loaded, which the peak includes."


def section(title: str, *children: Child, note: str | None = None) -> Html:
    return element("section", element("h2", title), element("p", note, class_="quiet") if note else None, children)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _list(value: JsonValue) -> Sequence[JsonValue]:
    return value if isinstance(value, list) else []


def _ledger(ledger: Mapping[str, JsonValue]) -> Html:
    entries = [each for each in _list(ledger.get("entries")) if isinstance(each, dict)]
    sizes = [(str(each.get("name")), _bytes(each.get("num_bytes"))) for each in entries]
    total, budget = sum(size for _, size in sizes), _bytes(ledger.get("budget_bytes"))
    rows = [
        [
            element("i", class_=f"part{number % 8}"),
            name,
            format_bytes(size),
            element("span", str(each.get("equation", "")), class_="quiet"),
        ]
        for number, (each, (name, size)) in enumerate(zip(entries, sizes, strict=True))
    ]
    share = f"{format_bytes(total)} of {format_bytes(budget)}"
    return element(
        "article",
        element("h3", f"{ledger.get('memory')} memory ", element("small", f"{share} ({ledger.get('budget_key')})")),
        stacked(sizes, max(total, 1.0)),
        table(["", "for", "size", "which is"], rows, class_="ledger"),
    )


def _bytes(value: JsonValue) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _failed(rows: Sequence[Sample]) -> Html:
    lines = [[_place(row), row.id, row.error or row.status] for row in rows]
    return table(["row", "id", "why"], lines, class_="failed")


def _place(row: Sample) -> str:
    return "" if row.row_index is None else f"{row.row_index:,}"


def _sample(row: Sample) -> Html:
    counts = f"{counted(row.num_prompt_tokens, 'token')} → {row.num_completion_tokens:,}, {row.finish_reason or '-'}"
    lost = element("p", "The run kept no column of its input: dataset.keep_columns=true does.", class_="quiet")
    prompt = element("pre", row.prompt) if row.prompt is not None else lost
    return element(
        "article",
        element("h3", row.id, " ", element("small", counts)),
        prompt,
        element("pre", row.completion, class_="completion"),
        class_="sample",
    )


def _settings(settings: Mapping[str, JsonValue]) -> Html:
    defaults = flatten(GenerateConfig())
    known = {key: settings[key] for key in defaults if key in settings and key not in CAME_TO}
    changed = {key: value for key, value in known.items() if value != defaults[key]}
    rest = [[key, shown(value)] for key, value in known.items() if key not in changed]
    own = [[key, shown(value), element("span", shown(defaults[key]), class_="quiet")] for key, value in changed.items()]
    return joined(
        [
            table(["changed", "to", "default"], own, class_="settings"),
            element(
                "details",
                element("summary", f"{counted(len(rest), 'setting')} as by default"),
                table(["setting", "value"], rest, class_="settings"),
            ),
        ]
    )


def _bound(figures: RunFigures) -> Html:
    """What the run is bound to, and what each `auto` came to."""
    defaults, semantic = flatten(GenerateConfig()), figures.run.semantic
    hidden = {*defaults, *NO_SETTINGS} - CAME_TO
    bound = [[key, shown(value)] for key, value in semantic.items() if key not in hidden]
    plan = figures.noted.get("plan")
    came = [[key, shown(value)] for key, value in plan.items()] if isinstance(plan, dict) else []
    return joined(
        element("details", element("summary", name), table(["", ""], rows, class_="settings"))
        for name, rows in (("What each auto came to", came), ("What the run is bound to", bound))
        if rows
    )
