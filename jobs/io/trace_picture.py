"""A window of a trace as a picture: SVG, a row for each resource, a colour for each kind of action, a time axis."""

from collections.abc import Sequence
from html import escape
from math import floor, log10

from runtime.trace import Row, Span

from .trace_file import Tracks

WIDTH, LEFT, RIGHT = 1200, 120, 60  # pixels: of all, of the rows' names, of how busy they were
TRACK, GAP, HEAD, FOOT = 20, 10, 34, 30
PIXELS_PER_LETTER = 6.0
MIN_SPAN_PIXELS = 0.5
NUM_TICKS = 8
COLOURS = {
    "read": "#4c78a8",
    "copy": "#72b7b2",
    "fetch": "#9d755d",
    "store": "#b279a2",
    "run": "#f58518",
    "pre": "#ffbf79",
    "post": "#eeca3b",
    "route": "#ffbf79",
    "end": "#eeca3b",
    "experts": "#e45756",
    "attend": "#54a24b",
}
OTHER = "#bab0ac"


def draw(spans: Sequence[Span], *, begin: float, end: float) -> str:
    """The SVG of what ran between two seconds of a trace. Rows on which nothing ever ran are left out.

    Beside each row: the share of the window in which it was busy.
    """
    seen = sorted((s for s in spans if s.end > begin and s.begin < end), key=lambda span: span.begin)
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)
    body, top = [_legend(seen)], HEAD
    for row in (row for row in Row if any(span.row is row for span in spans)):
        mine = [span for span in seen if span.row is row]
        tracks = Tracks()
        places = [tracks.place(span) for span in mine]
        height = TRACK * max([track + 1 for track in places], default=1)
        middle = top + height / 2 + 4
        body.append(f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{height}" fill="#f4f4f4"/>')
        body.append(_text(LEFT - 8, middle, row.value, anchor="end"))
        body.append(_text(WIDTH - RIGHT + 8, middle, f"{_busy(mine, begin, end):.0%}"))
        body += [
            _bar(span, LEFT + (max(span.begin, begin) - begin) * scale, LEFT + (min(span.end, end) - begin) * scale, y)
            for span, y in zip(mine, (top + TRACK * track for track in places), strict=True)
        ]
        top += height + GAP
    body += [_tick(LEFT + (tick - begin) * scale, top - GAP, tick, end - begin) for tick in _ticks(begin, end)]
    size = f'width="{WIDTH}" height="{top + FOOT}" viewBox="0 0 {WIDTH} {top + FOOT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>\n"])


def _bar(span: Span, left: float, right: float, top: float) -> str:
    width = max(right - left, MIN_SPAN_PIXELS)
    op, _, target = span.name.partition(" ")
    tip = escape(f"{span.name}: {_seconds_text(span.end - span.begin)} from {span.begin:.6f} s")
    shape = f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{TRACK - 2}" fill="{COLOURS.get(op, OTHER)}">'
    label = next((text for text in (span.name, target) if text and len(text) * PIXELS_PER_LETTER < width), "")
    return f"{shape}<title>{tip}</title></rect>" + (_text(left + 2, top + TRACK - 7, label) if label else "")


def _legend(spans: Sequence[Span]) -> str:
    found = {span.name.partition(" ")[0] for span in spans}
    entries = [op for op in COLOURS if op in found] + sorted(found - COLOURS.keys())
    return "".join(
        f'<rect x="{LEFT + 80 * i}" y="8" width="12" height="12" fill="{COLOURS.get(op, OTHER)}"/>'
        + _text(LEFT + 80 * i + 17, 18, op)
        for i, op in enumerate(entries)
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'


def _tick(x: float, bottom: float, second: float, window: float) -> str:
    unit, factor = ("s", 1.0) if window >= 1 else ("ms", 1e3)
    line = f'<line x1="{x:.2f}" y1="{HEAD}" x2="{x:.2f}" y2="{bottom + 4}" stroke="#888" stroke-opacity="0.4"/>'
    return line + _text(x, bottom + 18, f"{second * factor:.6g} {unit}", anchor="middle")


def _ticks(begin: float, end: float) -> list[float]:
    """At round seconds: steps of 1, 2 or 5 times a power of ten."""
    least = (end - begin) / NUM_TICKS
    power = 10.0 ** floor(log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    first = -floor(-begin / step)
    return [number * step for number in range(first, floor(end / step) + 1)]


def _busy(spans: Sequence[Span], begin: float, end: float) -> float:
    """Share of the window in which at least one of the spans ran; they are sorted by their begin."""
    busy, until = 0.0, begin
    for span in spans:
        busy += max(0.0, min(span.end, end) - max(span.begin, until))
        until = max(until, span.end)
    return busy / (end - begin)


def _seconds_text(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
