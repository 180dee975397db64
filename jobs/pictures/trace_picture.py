"""Draws measured and simulated traces as a picture: a row for each resource, and a color for each kind of action.

A span is an action with its begin and end. Spans that overlap are on several tracks of the row.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from runtime.resources import Resource
from runtime.trace import Span, TracedPass

from .figure import WIDTH_PIXELS, figure
from .trace_file import TracedProcess, Tracks

LEFT, RIGHT = 120, 60  # pixels, for the names of rows and their busy percentages
TRACK, GAP, HEAD, FOOT = 20, 8, 72, 44
PIXELS_PER_LETTER, LABEL_MARGIN = 5.6, 8
PIXELS_PER_NAME_LETTER = 7.0
MIN_SPAN_PIXELS = 0.5
LEGEND_PIXELS = 20  # above the panel and the names of passes
EDGE_PIXELS = 4  # wider bars have a white edge
MARK_PIXELS = 12  # wider passes have a mark at their begin
COLORS = {
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
OTHER_COLOR = "#bab0ac"


@dataclass(frozen=True, kw_only=True)
class TimeWindow:
    """A window of a trace, in seconds."""

    begin: float
    end: float
    title: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def visible_spans(self, spans: Sequence[Span]) -> list[Span]:
        visible = (span for span in spans if span.end > self.begin and span.begin < self.end)
        return sorted(visible, key=lambda span: span.begin)

    def overlap(self, timed: Sequence[Span | TracedPass]) -> float:
        """The sum of seconds within the window."""
        return sum(max(0.0, min(each.end, self.end) - max(each.begin, self.begin)) for each in timed)

    def predicted(self, measured: TracedProcess, predicted: TracedProcess) -> "TimeWindow | None":
        """The predicted time of the measured passes in this window: prediction and run have a clock of their own. None
        if no pass in the window was predicted."""
        by_name = {each.name: each for each in predicted.passes}
        inside = (each for each in measured.passes if each.end > self.begin and each.begin < self.end)
        pairs = [(each, by_name[each.name]) for each in inside if each.name in by_name]
        if not pairs:
            return None
        (first, begins), (last, ends) = pairs[0], pairs[-1]
        begin = begins.begin + max(0.0, self.begin - first.begin) / first.seconds * begins.seconds
        end = ends.end - max(0.0, last.end - self.end) / last.seconds * ends.seconds
        if self.begin <= measured.begin:
            begin = predicted.begin  # with the reads before the first pass
        return replace(self, begin=begin, end=end)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The bar of a span, cut at the edges of the time window. `top`: distance from the top of the panel, in tracks."""

    span: Span
    begin: float
    end: float
    top: float

    @property
    def op(self) -> str:
        """The kind of action: the first word of the span's name."""
        return self.span.name.partition(" ")[0]


@dataclass(frozen=True, kw_only=True)
class ResourceRow:
    """A row of a panel: the bars of a resource. `busy`: seconds of its actions in a second of passes,
    as in the summary of a run; may exceed 1, where several threads read."""

    resource: Resource
    top: float
    num_tracks: int
    bars: Sequence[Bar]
    busy: float

    @property
    def middle(self) -> float:
        return self.top + self.num_tracks / 2

    def draw(self, axes: Axes, factor: float, pixels_per_second: float) -> None:
        """Draws the bars and the busy percentage. `factor`: converts seconds to the unit of the time axis."""
        axes.axhspan(self.top, self.top + self.num_tracks, color="#f4f4f4", zorder=0)
        coordinates = ("axes fraction", "data")
        axes.annotate(f"{self.busy:.0%}", (1, self.middle), (8, 0), coordinates, "offset points", va="center")
        # Bars are drawn in groups: (top, kind of action, has an edge): begin and width of each bar.
        groups: dict[tuple[float, str, bool], list[tuple[float, float]]] = defaultdict(list)
        for bar in self.bars:
            pixels = max((bar.end - bar.begin) * pixels_per_second, MIN_SPAN_PIXELS)
            width = pixels / pixels_per_second
            groups[bar.top, bar.op, pixels > EDGE_PIXELS].append((bar.begin * factor, width * factor))
            # The label is the name if it fits into the bar, or the part of the name after the action.
            texts = (bar.span.name, bar.span.name.partition(" ")[2])
            fitting = (text for text in texts if text and len(text) * PIXELS_PER_LETTER + LABEL_MARGIN < pixels)
            if label := next(fitting, ""):
                middle = (bar.begin + width / 2) * factor
                axes.text(middle, bar.top + 0.47, label, ha="center", va="center", fontsize=7.5, clip_on=True)
        for (top, op, has_edge), ranges in groups.items():
            color, width = COLORS.get(op, OTHER_COLOR), 0.6 if has_edge else 0.0
            axes.broken_barh(ranges, (top + 0.04, 0.86), facecolor=color, edgecolor="white", linewidth=width)


def draw(path: Path, process: TracedProcess, windows: Sequence[TimeWindow]) -> None:
    """Publishes a picture (svg or png, by suffix) with a panel per window. Omits empty rows. Raises OutputError."""
    draw_panels(path, [(process, window) for window in windows])


def draw_panels(path: Path, panels: Sequence[tuple[TracedProcess, TimeWindow]]) -> None:
    """Draws as `draw` does, with separate spans for each panel."""
    layouts = [lay_out(process, window) for process, window in panels]
    heights = [TRACK * _num_tracks(rows) for rows in layouts]
    total = sum(heights) + len(panels) * (HEAD + FOOT)
    with figure(path, total) as drawing:
        top = 0
        for (process, window), rows, height in zip(panels, layouts, heights, strict=True):
            bottom = 1 - (top + HEAD + height) / total
            width = (WIDTH_PIXELS - LEFT - RIGHT) / WIDTH_PIXELS
            axes = drawing.add_axes((LEFT / WIDTH_PIXELS, bottom, width, height / total))
            _draw_panel(axes, window, rows, process.passes)
            top += HEAD + height + FOOT


def lay_out(process: TracedProcess, window: TimeWindow) -> list[ResourceRow]:
    """Places the spans of each row: overlapping spans on separate tracks, consecutive ones on the same."""
    rows, top, spans = list[ResourceRow](), 0.0, process.spans
    pass_seconds = window.overlap(process.passes or [TracedPass("", window.begin, window.end)])
    for resource in (resource for resource in Resource if any(span.resource is resource for span in spans)):
        row_spans, tracks = [span for span in window.visible_spans(spans) if span.resource is resource], Tracks()
        edges = [(max(span.begin, window.begin), min(span.end, window.end)) for span in row_spans]
        bars = [
            Bar(span=span, begin=begin, end=end, top=top + tracks.place(span))
            for span, (begin, end) in zip(row_spans, edges, strict=True)
        ]
        num_tracks = max([round(bar.top - top) + 1 for bar in bars], default=1)
        busy = window.overlap(row_spans) / pass_seconds if pass_seconds else 0.0
        rows.append(ResourceRow(resource=resource, top=top, num_tracks=num_tracks, bars=bars, busy=busy))
        top += num_tracks + GAP / TRACK
    return rows


def _num_tracks(rows: Sequence[ResourceRow]) -> float:
    return max(1.0, sum(row.num_tracks for row in rows) + (len(rows) - 1) * GAP / TRACK)


def _draw_panel(axes: Axes, window: TimeWindow, rows: Sequence[ResourceRow], passes: Sequence[TracedPass]) -> None:
    pixels_per_second = (WIDTH_PIXELS - LEFT - RIGHT) / window.seconds
    unit, factor = ("s", 1.0) if window.seconds >= 1 else ("ms", 1e3)
    axes.set_xlim(window.begin * factor, window.end * factor)
    axes.set_ylim(_num_tracks(rows), 0)
    axes.set_xlabel(f"time [{unit}]")
    axes.xaxis.grid(True, color="#888", alpha=0.35, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.set_yticks([row.middle for row in rows], [row.resource.value for row in rows])
    axes.tick_params(axis="y", length=0)
    for row in rows:
        row.draw(axes, factor, pixels_per_second)
    if not any(row.bars for row in rows):
        axes.text(
            0.5, 0.5, "no action in this window", ha="center", va="center", transform=axes.transAxes, color="#666"
        )
    axes.annotate("busy", (1, 0), (8, 4), ("axes fraction", "data"), "offset points", va="bottom", color="#666")
    for each in passes:
        if window.begin <= each.begin < window.end and each.seconds * pixels_per_second > MARK_PIXELS:
            begin = each.begin * factor
            axes.axvline(begin, color="#333", linewidth=0.8, linestyle=":")
            if len(each.name) * PIXELS_PER_NAME_LETTER < (min(each.end, window.end) - each.begin) * pixels_per_second:
                axes.annotate(each.name, (begin, 1), (2, 3), ("data", "axes fraction"), "offset points", color="#333")
    axes.set_title(window.title, loc="left", pad=38, fontsize=10)
    _draw_legend(axes, rows)


def _draw_legend(axes: Axes, rows: Sequence[ResourceRow]) -> None:
    drawn = {bar.op for row in rows for bar in row.bars}
    ops = [op for op in COLORS if op in drawn] + sorted(drawn - COLORS.keys())
    if ops:
        axes.legend(
            handles=[Patch(color=COLORS.get(op, OTHER_COLOR), label=op) for op in ops],
            loc="lower left",
            bbox_to_anchor=(0.0, 1 + LEGEND_PIXELS / (TRACK * _num_tracks(rows))),
            borderaxespad=0.0,
            ncols=len(ops),
            frameon=False,
            handlelength=1.2,
            handleheight=1.2,
        )
