"""Charts as inline SVG without text: a plot is stretched to its box, words around it keep their size on any screen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.resources import Resource
from runtime.trace import Span
from runtime.units import format_bytes, format_seconds

from ..record.passes import PassRow
from .html import Html, element

WIDTH, HEIGHT = 1000, 100  # of a plot's own coordinates
NUM_BINS = 240  # of time


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What a line of the throughput chart shows: the tokens of a pass, and the share of its time that was theirs."""

    name: str
    tokens: Callable[[PassRow], float]
    share: Callable[[PassRow], float]


PHASES = (
    Phase(name="prefill", tokens=lambda row: row.prompt_tokens, share=lambda row: row.prefill_share),
    Phase(name="decode", tokens=lambda row: row.decode_useful, share=lambda row: 1 - row.prefill_share),
)


def throughput(passes: Sequence[PassRow]) -> Html:
    """Tokens per second over the time spent in passes, a plot for each phase."""
    seconds = sum(row.seconds for row in passes)
    charts = [_plot(phase, binned(passes, phase), seconds) for phase in PHASES]
    return element("div", charts, class_="charts")


def binned(passes: Sequence[PassRow], phase: Phase) -> list[float | None]:
    """Tokens per second of a phase in each of NUM_BINS equal times; None where it did not run. A pass that lasts over
    several is divided among them."""
    total = sum(row.seconds for row in passes)
    tokens, seconds, now = [0.0] * NUM_BINS, [0.0] * NUM_BINS, 0.0
    for row in passes:
        begin, end = now / total * NUM_BINS, (now + row.seconds) / total * NUM_BINS
        now += row.seconds
        for i in range(int(begin), min(NUM_BINS, int(end) + 1)):
            inside = max(0.0, min(end, i + 1) - max(begin, i)) / (end - begin) if end > begin else 0.0
            tokens[i] += inside * phase.tokens(row)
            seconds[i] += inside * row.seconds * phase.share(row)
    return [tokens[i] / seconds[i] if seconds[i] > 0 else None for i in range(NUM_BINS)]


def _plot(phase: Phase, rates: Sequence[float | None], seconds: float) -> Html:
    top = nice_top(max((rate for rate in rates if rate is not None), default=0.0))
    marks = [(share, f"{share * top:,.0f}" if top >= 10 else f"{share * top:g}") for share in (0, 0.5, 1)]
    lines = [element("line", x1=0, x2=WIDTH, y1=HEIGHT * share, y2=HEIGHT * share, class_="grid") for share, _ in marks]
    bars = [
        _rect(i * WIDTH / NUM_BINS, HEIGHT * (1 - rate / top), WIDTH / NUM_BINS + 0.3, HEIGHT * rate / top, phase.name)
        for i, rate in enumerate(rates)
        if rate
    ]
    return element(
        "figure",
        element("figcaption", phase.name, element("span", " tokens/s", class_="quiet")),
        element(
            "div",
            _svg([*lines, *bars], f"{phase.name}: tokens per second over time"),
            [element("span", text, class_="y", style=f"top:{100 * (1 - share):g}%") for share, text in marks],
            [element("span", text, class_="x", style=f"left:{at:g}%") for at, text in _times(seconds)],
            class_="plot",
        ),
    )


def nice_top(most: float) -> float:
    """The end of an axis: 1, 2, 2.5 or 5 times a power of ten, not below `most`."""
    power = 10 ** len(f"{most:.0f}")
    tops = [power / 100 * step for step in (1, 2, 2.5, 5, 10, 20, 25, 50, 100)]
    return next((top for top in tops if top >= most and top > 0), power)


def _times(seconds: float) -> list[tuple[float, str]]:
    return [(100 * share, format_seconds(share * seconds)) for share in (0, 0.5, 1)]


def _svg(children: Sequence[Html], label: str, height: int = HEIGHT) -> Html:
    return element(
        "svg", children, viewBox=f"0 0 {WIDTH} {height}", preserveAspectRatio="none", role="img", aria_label=label
    )


def _rect(x: float, y: float, width: float, height: float, class_: str, opacity: float | None = None) -> Html:
    return element(
        "rect", x=f"{x:.5g}", y=f"{y:.5g}", width=f"{width:.5g}", height=f"{height:.5g}", class_=class_,
        fill_opacity=None if opacity is None else f"{opacity:.2g}",
    )  # fmt: skip


def utilisation(spans: Sequence[Span]) -> Html:
    """How busy each resource was, a strip for each, darker where it worked more of the time."""
    seconds = max(span.end for span in spans)
    strips: list[Html] = []
    for resource in (each for each in Resource if any(span.resource is each for span in spans)):
        shares = busy_shares([span for span in spans if span.resource is resource], seconds)
        bars = [
            _rect(i * WIDTH / NUM_BINS, 0, WIDTH / NUM_BINS + 0.3, 20, "busy", share)
            for i, share in enumerate(shares)
            if share >= 0.01
        ]
        mean = sum(shares) / NUM_BINS
        strips.append(
            element(
                "div",
                element("span", resource.value),
                _svg(bars, f"{resource.value}: busy {mean:.0%} of the time", 20),
                element("span", f"{mean:.0%}", class_="number"),
                class_="strip",
            )
        )
    times = element("div", [element("span", text) for _, text in _times(seconds)], class_="times")
    return element("div", strips, times, class_="strips")


def busy_shares(spans: Sequence[Span], seconds: float) -> list[float]:
    """The share of each of NUM_BINS equal times in which at least one of the spans was going on."""
    busy, until = [0.0] * NUM_BINS, 0.0
    for span in sorted(spans, key=lambda span: span.begin):
        begin, end = max(span.begin, until) / seconds * NUM_BINS, span.end / seconds * NUM_BINS
        until = max(until, span.end)
        for i in range(int(begin), min(NUM_BINS, int(end) + 1)):
            busy[i] += max(0.0, min(end, i + 1) - max(begin, i))
    return [min(1.0, share) for share in busy]


def stacked(entries: Sequence[tuple[str, float]], whole: float) -> Html:
    """Parts of a whole in one bar; the names of the parts stand elsewhere, by the same number."""
    at, bars = 0.0, list[Html]()
    for number, (name, size) in enumerate(entries):
        width = WIDTH * size / whole
        title = element("title", f"{name}: {format_bytes(size)}")
        bars.append(
            element("rect", title, x=f"{at:.5g}", y=0, width=f"{width:.5g}", height=20, class_=f"part{number % 8}")
        )
        at += width
    return _svg(bars, ", ".join(f"{name} {format_bytes(size)}" for name, size in entries), 20)
