"""The files of `jobs.plan`:

- a sweep: table and picture of predicted tokens/s over the varied quantity, colored by the resource that limits decode
- the hierarchical roofline of a plan
- trace and picture of its simulated passes (forwards)
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from runtime.plan.roofline_report import Operation, RooflineReport, make_roofline_report
from runtime.plan.timeline import Timeline, make_timeline
from runtime.resources import Resource
from runtime.trace import Span, TracedPass

from ..files.named import publish_named, require_replaceable
from ..files.publishing import write_all
from ..pictures.figure import figure
from ..pictures.trace_file import PREDICTED, TracedProcess, publish_trace
from ..pictures.trace_picture import TimeWindow, draw
from .config import PlanConfig, Sweep
from .planning import Planned
from .sweep import RANKS, Axis, SweepPoint, sweep, sweep_axes

HEIGHT_PIXELS = 560
COLORS = {
    Resource.disk: "#b279a2",
    Resource.host_to_device: "#4c78a8",
    Resource.device_to_host: "#72b7b2",
    Resource.compute: "#f58518",
    Resource.cpu_attention: "#54a24b",
    Resource.host_memory: "#9d755d",
}
NUMBERS = "{x:,.6g}"
LINE_COLOR, REFUSED_COLOR = "#444444", "#f3dddd"  # refused: no plan fits
MARGIN = 2**0.25  # factor by which the axis extends below the first value and above the last
WEIGHT_RESOURCES = (Resource.disk, Resource.host_to_device, Resource.host_memory)
NUM_LAYERS_SHOWN = 3  # in the enlarged panel
ROOFS_HEIGHT_PIXELS = 720
ROOF_COLORS = {"device memory": "#f58518", "host memory": "#54a24b", "link": "#4c78a8", "disk": "#b279a2"}
OPERATION_STYLES = (("o", "#e45756"), ("s", "#333333"))  # marker and color
POINT_COLOR = "#666666"
LEFT_OCTAVES, RIGHT_OCTAVES = 2, 2  # margins of the axis, as powers of two
TERA = 1e12


def draw_sweep(path: Path, points: Sequence[SweepPoint], title: str, marks: Mapping[str, float]) -> None:
    """Draws a sweep as svg or png, by the suffix of `path`. `marks`: values on the axes by their names. Raises
    OutputError."""
    sweep_axes = list({id(point.axis): point.axis for point in points}.values())
    top = 1.12 * max((rate for rates in _rates(points) for rate in rates), default=0.0)
    with figure(path, HEIGHT_PIXELS) as drawing:
        panels = drawing.subplots(1, len(sweep_axes), squeeze=False, sharey=True)[0]
        for panel, axis in zip(panels, sweep_axes, strict=True):
            _draw_panel(panel, axis, [point for point in points if point.axis is axis])
            panel.set_ylim(0, top or 1.0)
            for name, value in marks.items():
                _draw_mark(panel, value, name, "#e45756", height=1.0)
        panels[0].yaxis.set_major_formatter(NUMBERS)
        panels[0].set_ylabel("predicted [tokens/s]")
        drawing.suptitle(title, x=0.065, ha="left", fontsize=10)
        binding = {point.binding for point in points}
        handles: list[Line2D | Patch] = [
            Line2D([], [], color=LINE_COLOR, linestyle="-", label="total, generated"),
            Line2D([], [], color=LINE_COLOR, linestyle="--", label="decode"),
        ]
        for resource, color in COLORS.items():
            if resource in binding:
                label = f"{resource.value} binds decode"
                handles.append(Line2D([], [], color=color, marker="o", linestyle="", label=label))
        if any(point.planned is None for point in points):
            handles.append(Patch(color=REFUSED_COLOR, label="does not fit"))
        drawing.legend(handles=handles, loc="lower center", ncols=8, frameon=False)
        drawing.subplots_adjust(left=0.065, right=0.985, top=0.92, bottom=0.19, wspace=0.06)


def _draw_panel(axes: Axes, axis: Axis, points: Sequence[SweepPoint]) -> None:
    values = [point.value for point in points]
    axes.set_xscale("log")
    axes.set_xlim(min(values) / MARGIN, max(values) * MARGIN)
    axes.set_xlabel(f"{axis.name} [{axis.unit}]")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(NUMBERS)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, color="#ddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for value in (point.value for point in points if point.planned is None):
        axes.axvspan(value / MARGIN, value * MARGIN, color=REFUSED_COLOR, linewidth=0)
    fitting = [point for point in points if point.planned is not None]
    x = [point.value for point in fitting]
    decode, total = _rates(fitting)
    for rates, style in ((decode, "--"), (total, "-")):
        axes.plot(x, rates, color=LINE_COLOR, linewidth=1.4, linestyle=style, zorder=2)
    for resource, color in COLORS.items():
        indices = [i for i, point in enumerate(fitting) if point.binding is resource]
        for rates in (decode, total):
            axes.scatter([x[i] for i in indices], [rates[i] for i in indices], color=color, s=34, zorder=3)
    _draw_mark(axes, axis.base_value, "the plan", "#888888")


def _rates(points: Sequence[SweepPoint]) -> tuple[list[float], list[float]]:
    """Tokens per second of the points with a plan: in decode, and in total."""
    throughputs = [point.planned.throughput for point in points if point.planned is not None]
    return [decode or 0.0 for _, decode, _ in throughputs], [total or 0.0 for _, _, total in throughputs]


def _draw_mark(axes: Axes, value: float, name: str, color: str, height: float = 0.03) -> None:
    """Draws a labeled line at a value of the axis."""
    low, high = axes.get_xlim()
    if low <= value <= high:
        axes.axvline(value, color=color, linewidth=1, linestyle=":")
        position = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "right"}
        axes.annotate(name, (value, height), (-3, 3), color=color, **position)


def draw_roofline(path: Path, roofs: RooflineReport, title: str) -> None:
    """Draws the roofline as svg or png, by the suffix of `path`. Raises OutputError."""
    begin, end = min(roofs.intensities) / 2**LEFT_OCTAVES, max(roofs.intensities) * 2**RIGHT_OCTAVES
    peaks, bottom = roofs.peaks, roofs.lowest(begin) / 2
    with figure(path, ROOFS_HEIGHT_PIXELS) as drawing:
        axes = drawing.add_axes((0.075, 0.1, 0.9, 0.8))
        axes.set(xscale="log", yscale="log", xlim=(begin, end), ylim=(bottom, 4 * max(peaks.values())))
        axes.set_xlabel("intensity [FLOPs per byte over the link]")
        axes.set_ylabel("attainable [FLOP/s]")
        axes.grid(True, which="major", color="#ddd", linewidth=0.6)
        axes.set_title(title, loc="left", fontsize=10)
        for roof in roofs.roofs:
            intensities = np.array([begin, min(roof.ridge, end), end])
            heights = np.asarray(roof.level.attainable(intensities))
            axes.plot(intensities, heights, color=ROOF_COLORS[roof.link], linewidth=2, label=roof.text)
        for name, flops in peaks.items():
            text = f"{name}: {flops / TERA:,.3g} TFLOP/s"
            axes.annotate(text, (end, flops), (-4, 4), textcoords="offset points", ha="right", va="bottom")
        for point in roofs.turning_points:
            x, height = point.intensity, point.flops_per_second
            axes.plot([x, x], [bottom, height], color=POINT_COLOR, linewidth=1, linestyle=":")
            axes.plot([x], [height], marker="D", color=POINT_COLOR, markersize=6, linestyle="", zorder=5)
            axes.annotate(point.text, (x, height), (6, -14), textcoords="offset points", color=POINT_COLOR)
        for operation, (marker, color) in zip(roofs.operations, OPERATION_STYLES, strict=True):
            _draw_operation(axes, operation, marker, color)
        axes.legend(loc="lower right", frameon=True, framealpha=0.9)


def _draw_operation(axes: Axes, operation: Operation, marker: str, color: str) -> None:
    """Marks an operation at its intensity over the link. If its intensity over its own memory differs, marks that, too,
    with a hollow marker."""
    rate = operation.flops_per_second
    style = {"marker": marker, "color": color, "markersize": 9, "linestyle": "", "zorder": 5}
    axes.plot([operation.intensity], [rate], label=operation.text, **style)
    if operation.own_intensity != operation.intensity:
        own = operation.own_intensity
        axes.plot([operation.intensity, own], [rate, rate], color=color, linewidth=1, linestyle="--", zorder=4)
        axes.plot([own], [rate], label=operation.own_text, fillstyle="none", **style)


HEAD = (
    f"{'':<34}  {'N':>6} {'mu':>5}  {'attention':<9} {'schedule':<14} {'resident':>8}  "
    f"{'prefill':>10} {'decode':>10} {'total':>10}  binds prefill / decode"
)


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """A row of the table of a sweep. `value`: of the varied quantity, in `unit`. Tokens per second are predictions. If
    no plan fits, `refusal` is the reason, and the columns of the plan are None."""

    varied: str
    value: float
    unit: str
    fits: bool
    num_sequences: int | None = None  # in a block
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None
    attention: str | None = None
    schedule: str | None = None
    resident_share: float | None = None  # fraction of layers
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    total_tokens_per_second: float | None = None
    prefill_binding: str | None = None
    decode_binding: str | None = None
    refusal: str = ""
    note: str = ""

    @staticmethod
    def from_point(point: SweepPoint) -> "SweepRow":
        axis, planned = point.axis, point.planned
        row = SweepRow(
            varied=axis.name,
            value=point.value,
            unit=axis.unit,
            fits=planned is not None,
            refusal=point.refusal,
            note=axis.note or (point.refusal if axis.unit == RANKS else ""),
        )
        if planned is None:
            return row
        run, layers, settings = planned.run, planned.shape.layers, planned.resolved_settings
        (prefill, decode, total), phases = planned.throughput, planned.prediction
        return replace(
            row,
            num_sequences=max(len(block.members) for block in run.blocks),
            micro_batch_size=run.lane_size,
            num_micro_batches=run.num_lanes,
            attention=settings.attention,
            schedule=settings.schedule,
            resident_share=sum(stage.index in run.placement.resident for stage in layers) / len(layers),
            prefill_tokens_per_second=prefill,
            decode_tokens_per_second=decode,
            total_tokens_per_second=total,
            prefill_binding=phases.prefill.binding.value if phases.prefill.binding else None,
            decode_binding=phases.decode.binding.value if phases.decode.binding else None,
        )

    def __str__(self) -> str:
        note = f"  {self.note}" if self.note else ""
        value = f"{self.value:,.0f}" if self.value >= 1000 else f"{self.value:.4g}"
        varied = f"{self.varied:<16}{value:>8} {self.unit:<9}  "
        if not self.fits:
            return f"{varied}does not fit{note}"
        rates = (self.prefill_tokens_per_second, self.decode_tokens_per_second, self.total_tokens_per_second)
        speeds = " ".join("-".rjust(10) if rate is None else f"{rate:>10,.1f}" for rate in rates)
        return (
            f"{varied}{self.num_sequences:>6} {self.micro_batch_size:>5}  {self.attention:<9} {self.schedule:<14} "
            f"{self.resident_share:>8.0%}  {speeds}  "
            f"{self.prefill_binding or '-'} / {self.decode_binding or '-'}{note}"
        )


def run_sweep(config: PlanConfig, planned: Planned, directory: Path) -> Iterator[str]:
    """Yields the lines of the table as plans are made, then writes <sweep>.csv, <sweep>.png and roofline.png. Raises
    ConfigError and OutputError."""
    kind = config.plan.sweep
    assert kind is not None, "plan.sweep is set"
    names = (f"{kind.value}.csv", f"{kind.value}.png", "roofline.png")
    require_replaceable((directory / name for name in names), f"plan.directory={directory}")
    roofs = make_roofline_report(planned.shape, planned.view.machine, planned.run)
    name = f"{planned.shape.name} on {planned.machine.name}"
    points, rows = list[SweepPoint](), list[SweepRow]()
    yield HEAD
    for point in sweep(sweep_axes(config, planned)):
        points.append(point)
        rows.append(SweepRow.from_point(point))
        yield str(rows[-1])
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(asdict(rows[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    publish_named(directory / f"{kind.value}.csv", lambda file: write_all(file, text.getvalue().encode()))
    knees = dict[str, float]()
    if kind is Sweep.batch:
        # The smallest blocks for which reading and copying weights is not the limit: of decode passes by the simulator,
        # and of feed-forward layers by the roofline (P2 of MoE-Lightning).
        fitting = (point for point in points if point.planned is not None)
        compute_bound = [point.value for point in fitting if point.binding not in WEIGHT_RESOURCES]
        knees = {"knee, weights no longer bind": compute_bound[0]} if compute_bound else {}
        knees["P2 of feed-forward layers"] = roofs.needed_sequences
    marks = knees
    if kind is Sweep.format:  # one axis for all formats, by the bytes of weights; equal bytes have one mark
        formats, axis = dict[float, list[str]](), replace(points[0].axis, name="weights")
        for point in points:
            formats.setdefault(point.value, []).append(point.axis.name)
        marks = {", ".join(names): value for value, names in formats.items()}
        points = sorted((replace(point, axis=axis) for point in points), key=lambda point: point.value)
    draw_sweep(directory / f"{kind.value}.png", points, f"{name}, policy={config.policy.kind.value}", marks)
    block = f"a block of {roofs.num_sequences:,} sequences, {roofs.num_rows:,} at once in feed-forward layers"
    draw_roofline(directory / "roofline.png", roofs, f"{name}: a decode pass over {block}")
    yield from (f"{knee}: {num_sequences:,.0f} sequences" for knee, num_sequences in knees.items())


def write_timeline(planned: Planned, directory: Path) -> str:
    """Writes timeline.json and timeline.png. Returns a description of their passes. Raises ConfigError if it would
    replace a file that no command has written, and OutputError."""
    names = ("timeline.json", "timeline.png")
    require_replaceable((directory / name for name in names), f"plan.directory={directory}")
    view = planned.view
    timeline = make_timeline(view.shape, planned.run, view.sizes(planned.sizes), view.machine.rates)
    spans = [Span(s.resource, str(s.action), s.begin, s.end) for s in timeline.spans]
    passes = [TracedPass(name, one.begin, one.end) for name, one in zip(timeline.names, timeline.passes, strict=True)]
    stage_names = [stage.name for stage in view.shape.stages]
    publish_trace(directory / "timeline.json", PREDICTED, spans, passes, stage_names)
    draw(directory / "timeline.png", TracedProcess(spans=spans, passes=passes), _windows(planned, timeline))
    return timeline.description


def _windows(planned: Planned, timeline: Timeline) -> list[TimeWindow]:
    """The time windows of the panels: the whole timeline, and some layers in the middle of the last pass."""
    last = timeline.passes[-1]
    title = f"{planned.shape.name} on {planned.machine.name}, predicted: {timeline.description}"
    whole = TimeWindow(begin=0.0, end=last.end, title=title)
    half = (last.end - last.begin) * NUM_LAYERS_SHOWN / (2 * len(planned.shape.stages))
    middle = (last.begin + last.end) / 2
    closer = TimeWindow(
        begin=max(last.begin, middle - half),
        end=min(last.end, middle + half),
        title=f"about {NUM_LAYERS_SHOWN} layers in the middle of the last pass",
    )
    return [whole, closer]
