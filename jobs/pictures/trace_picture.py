"""Draws windows of a trace: a row for each resource, a color for each kind of action, a time axis. Measured and
simulated traces look alike."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from runtime.resources import Resource
from runtime.trace import Span

from .figure import WIDTH_PIXELS, figure
from .trace_file import Tracks

LEFT, RIGHT = 120, 60  # pixels: of the rows' names, of how busy they were
TRACK, GAP, HEAD, FOOT = 20, 8, 64, 44
PIXELS_PER_LETTER, LABEL_MARGIN = 5.6, 8
MIN_SPAN_PIXELS = 0.5
LEGEND_PIXELS = 20  # above the panel, behind the marks' names
EDGE_PIXELS = 4  # wider bars are set apart from their neighbours
COLOURS = {
    "read": "#4c78a8",
    "copy": "#72b7b2",
    "fetch": "#9d755d",
    "store": "#b279a2",
    "run": "#f58518",
    "pre": "#ffbf79",
    "post": "#eeca3b",
    "route": "#ff9da6",
    "end": "#d6a5c9",
    "experts": "#e45756",
    "attend": "#54a24b",
    "send": "#8c6bb1",
    "recv": "#bcbd22",
}
OTHER = "#bab0ac"


@dataclass(frozen=True, kw_only=True)
class TimeWindow:
    """A window of a trace, in seconds. `marks`: named moments."""

    begin: float
    end: float
    title: str = ""
    marks: Sequence[tuple[float, str]] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def visible_spans(self, spans: Sequence[Span]) -> list[Span]:
        found = (span for span in spans if span.end > self.begin and span.begin < self.end)
        return sorted(found, key=lambda span: span.begin)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A span, cut at the edges of the window. `top`: tracks from the top of the picture, gaps included."""

    span: Span
    begin: float
    end: float
    top: float

    @property
    def op(self) -> str:
        return self.span.name.partition(" ")[0]


@dataclass(frozen=True, kw_only=True)
class ResourceLane:
    """The bars of a resource. `busy`: fraction of the window with at least one bar."""

    row: Resource
    top: float
    num_tracks: int
    bars: Sequence[Bar]
    busy: float

    @property
    def middle(self) -> float:
        return self.top + self.num_tracks / 2

    def draw(self, axes: Axes, factor: float, pixels_per_second: float) -> None:
        """Draws the bars and the busy percentage. `factor`: seconds to the unit of the time axis."""
        axes.axhspan(self.top, self.top + self.num_tracks, color="#f4f4f4", zorder=0)
        beside = ("axes fraction", "data")
        axes.annotate(f"{self.busy:.0%}", (1, self.middle), (8, 0), beside, "offset points", va="center")
        groups: dict[tuple[float, str, bool], list[tuple[float, float]]] = defaultdict(list)
        for bar in self.bars:
            pixels = max((bar.end - bar.begin) * pixels_per_second, MIN_SPAN_PIXELS)
            width = pixels / pixels_per_second
            groups[bar.top, bar.op, pixels > EDGE_PIXELS].append((bar.begin * factor, width * factor))
            # the action, or what it is about, or nothing: what there is room for
            texts = (bar.span.name, bar.span.name.partition(" ")[2])
            fitting = (text for text in texts if text and len(text) * PIXELS_PER_LETTER + LABEL_MARGIN < pixels)
            if label := next(fitting, ""):
                middle = (bar.begin + width / 2) * factor
                axes.text(middle, bar.top + 0.47, label, ha="center", va="center", fontsize=7.5, clip_on=True)
        for (top, op, has_edge), ranges in groups.items():
            colour, width = COLOURS.get(op, OTHER), 0.6 if has_edge else 0.0
            axes.broken_barh(ranges, (top + 0.04, 0.86), facecolor=colour, edgecolor="white", linewidth=width)


def draw(path: Path, spans: Sequence[Span], windows: Sequence[TimeWindow]) -> None:
    """Publishes a picture with a panel for each window, as svg or png by the suffix. Rows without any span are left
    out. Raises OutputError."""
    draw_panels(path, [(spans, window) for window in windows])


def draw_panels(path: Path, shown: Sequence[tuple[Sequence[Span], TimeWindow]]) -> None:
    """Draws as `draw` does, with spans and a window for each panel."""
    panels, windows = [lay_out(spans, window) for spans, window in shown], [window for _, window in shown]
    heights = [TRACK * _num_tracks(lanes) for lanes in panels]
    total = sum(heights) + len(panels) * (HEAD + FOOT)
    with figure(path, total) as made:
        top = 0
        for window, lanes, height in zip(windows, panels, heights, strict=True):
            bottom = 1 - (top + HEAD + height) / total
            width = (WIDTH_PIXELS - LEFT - RIGHT) / WIDTH_PIXELS
            _panel(made.add_axes((LEFT / WIDTH_PIXELS, bottom, width, height / total)), window, lanes)
            top += HEAD + height + FOOT


def lay_out(spans: Sequence[Span], window: TimeWindow) -> list[ResourceLane]:
    """Places the spans of each row: overlapping spans on separate tracks, consecutive ones on the same."""
    lanes, top = list[ResourceLane](), 0.0
    for row in (row for row in Resource if any(span.resource is row for span in spans)):
        mine, tracks = [span for span in window.visible_spans(spans) if span.resource is row], Tracks()
        bars = [
            Bar(
                span=span,
                begin=max(span.begin, window.begin),
                end=min(span.end, window.end),
                top=top + tracks.place(span),
            )
            for span in mine
        ]
        num_tracks = max([round(bar.top - top) + 1 for bar in bars], default=1)
        busy, until = 0.0, window.begin
        for span in mine:
            busy += max(0.0, min(span.end, window.end) - max(span.begin, until))
            until = max(until, span.end)
        lanes.append(ResourceLane(row=row, top=top, num_tracks=num_tracks, bars=bars, busy=busy / window.seconds))
        top += num_tracks + GAP / TRACK
    return lanes


def _num_tracks(lanes: Sequence[ResourceLane]) -> float:
    return max(1.0, sum(lane.num_tracks for lane in lanes) + (len(lanes) - 1) * GAP / TRACK)


def _panel(axes: Axes, window: TimeWindow, lanes: Sequence[ResourceLane]) -> None:
    unit, factor = ("s", 1.0) if window.seconds >= 1 else ("ms", 1e3)
    axes.set_xlim(window.begin * factor, window.end * factor)
    axes.set_ylim(_num_tracks(lanes), 0)
    axes.set_xlabel(f"time [{unit}]")
    axes.xaxis.grid(True, color="#888", alpha=0.35, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.set_yticks([lane.middle for lane in lanes], [lane.row.value for lane in lanes])
    axes.tick_params(axis="y", length=0)
    for lane in lanes:
        lane.draw(axes, factor, (WIDTH_PIXELS - LEFT - RIGHT) / window.seconds)
    axes.annotate("busy", (1, 0), (8, 4), ("axes fraction", "data"), "offset points", va="bottom", color="#666")
    for second, name in window.marks:
        axes.axvline(second * factor, color="#333", linewidth=0.8, linestyle=":")
        axes.annotate(name, (second * factor, 1), (2, 3), ("data", "axes fraction"), "offset points", color="#333")
    axes.set_title(window.title, loc="left", pad=30, fontsize=10)
    _legend(axes, lanes)


def _legend(axes: Axes, lanes: Sequence[ResourceLane]) -> None:
    found = {bar.op for lane in lanes for bar in lane.bars}
    ops = [op for op in COLOURS if op in found] + sorted(found - COLOURS.keys())
    if ops:
        axes.legend(
            handles=[Patch(color=COLOURS.get(op, OTHER), label=op) for op in ops],
            loc="lower left",
            bbox_to_anchor=(0.0, 1 + LEGEND_PIXELS / (TRACK * _num_tracks(lanes))),
            borderaxespad=0.0,
            ncols=len(ops),
            frameon=False,
            handlelength=1.2,
            handleheight=1.2,
        )
