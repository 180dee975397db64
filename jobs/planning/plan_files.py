"""Files that `jobs.plan` writes: the table and picture of a sweep (predicted throughput by the varied quantity,
colored by the binding resource), the hierarchical roofline of a plan, and the trace and picture of its simulated
passes."""

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
from runtime.trace import Span

from ..files.named import publish_named, require_replaceable
from ..files.publishing import write_all
from ..pictures.figure import figure
from ..pictures.trace_file import PREDICTED, publish_trace
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
LINE, REFUSED = "#444444", "#f3dddd"
MARGIN = 2**0.25  # beside the first and the last value
WEIGHT_ROADS = (Resource.disk, Resource.host_to_device, Resource.host_memory)
NUM_LAYERS_SHOWN = 3  # in the panel that looks closer
ROOFS_HEIGHT_PIXELS = 720
ROOF_COLORS = {"device memory": "#f58518", "host memory": "#54a24b", "link": "#4c78a8", "disk": "#b279a2"}
MARKS = (("o", "#e45756"), ("s", "#333333"))
POINT_COLOR = "#666666"
LEFT_OCTAVES, RIGHT_OCTAVES = 2, 2  # of the intensities that matter
TERA = 1e12


def draw_sweep(path: Path, outcomes: Sequence[SweepPoint], title: str, marks: Mapping[str, float]) -> None:
    """Publishes the picture of a sweep as svg or png, by the suffix. Raises OutputError. `marks`: named values of the
    only axis."""
    axes_seen = list({id(each.axis): each.axis for each in outcomes}.values())
    top = 1.12 * max((rate for rates in _rates(outcomes) for rate in rates), default=0.0)
    with figure(path, HEIGHT_PIXELS) as made:
        panels = made.subplots(1, len(axes_seen), squeeze=False, sharey=True)[0]
        for panel, axis in zip(panels, axes_seen, strict=True):
            mine = [each for each in outcomes if each.axis is axis]
            _panel(panel, axis, mine)
            panel.set_ylim(0, top or 1.0)
            for name, value in marks.items():
                _mark(panel, value, name, "#e45756", height=1.0)
        panels[0].yaxis.set_major_formatter(NUMBERS)
        panels[0].set_ylabel("predicted [tokens/s]")
        made.suptitle(title, x=0.065, ha="left", fontsize=10)
        bound = {each.binding for each in outcomes}
        handles: list[Line2D | Patch] = [
            Line2D([], [], color=LINE, linestyle="-", label="total, generated"),
            Line2D([], [], color=LINE, linestyle="--", label="decode"),
        ]
        for resource, color in COLORS.items():
            if resource in bound:
                label = f"{resource.value} binds decode"
                handles.append(Line2D([], [], color=color, marker="o", linestyle="", label=label))
        if any(each.planned is None for each in outcomes):
            handles.append(Patch(color=REFUSED, label="does not fit"))
        made.legend(handles=handles, loc="lower center", ncols=8, frameon=False)
        made.subplots_adjust(left=0.065, right=0.985, top=0.92, bottom=0.19, wspace=0.06)


def _panel(axes: Axes, axis: Axis, outcomes: Sequence[SweepPoint]) -> None:
    values = [each.value for each in outcomes]
    axes.set_xscale("log")
    axes.set_xlim(min(values) / MARGIN, max(values) * MARGIN)
    axes.set_xlabel(f"{axis.name} [{axis.unit}]")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(NUMBERS)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, color="#ddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for value in (each.value for each in outcomes if each.planned is None):
        axes.axvspan(value / MARGIN, value * MARGIN, color=REFUSED, linewidth=0)
    fitting = [each for each in outcomes if each.planned is not None]
    where = [each.value for each in fitting]
    decode, total = _rates(fitting)
    for rates, style in ((decode, "--"), (total, "-")):
        axes.plot(where, rates, color=LINE, linewidth=1.4, linestyle=style, zorder=2)
    for resource, color in COLORS.items():
        bound = [at for at, each in enumerate(fitting) if each.binding is resource]
        for rates in (decode, total):
            axes.scatter([where[at] for at in bound], [rates[at] for at in bound], color=color, s=34, zorder=3)
    _mark(axes, axis.base_value, "the plan", "#888888")


def _rates(outcomes: Sequence[SweepPoint]) -> tuple[list[float], list[float]]:
    """Tokens per second of the points that fit: of decode passes, and in total."""
    found = [each.planned.throughput for each in outcomes if each.planned is not None]
    return [decode or 0.0 for _, decode, _ in found], [total or 0.0 for _, _, total in found]


def _mark(axes: Axes, value: float, name: str, color: str, height: float = 0.03) -> None:
    """Draws a labeled line at a value of the axis."""
    low, high = axes.get_xlim()
    if low <= value <= high:
        axes.axvline(value, color=color, linewidth=1, linestyle=":")
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "right"}
        axes.annotate(name, (value, height), (-3, 3), color=color, **place)


def draw_roofline(path: Path, roofs: RooflineReport, title: str) -> None:
    """Publishes the roofline as svg or png, by the suffix. Raises OutputError."""
    begin, end = min(roofs.intensities) / 2**LEFT_OCTAVES, max(roofs.intensities) * 2**RIGHT_OCTAVES
    peaks, bottom = roofs.peaks, roofs.lowest(begin) / 2
    with figure(path, ROOFS_HEIGHT_PIXELS) as made:
        axes = made.add_axes((0.075, 0.1, 0.9, 0.8))
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
            at, height = point.intensity, point.flops_per_second
            axes.plot([at, at], [bottom, height], color=POINT_COLOR, linewidth=1, linestyle=":")
            axes.plot([at], [height], marker="D", color=POINT_COLOR, markersize=6, linestyle="", zorder=5)
            axes.annotate(point.text, (at, height), (6, -14), textcoords="offset points", color=POINT_COLOR)
        for operation, (marker, color) in zip(roofs.operations, MARKS, strict=True):
            _operation(axes, operation, marker, color)
        axes.legend(loc="lower right", frameon=True, framealpha=0.9)


def _operation(axes: Axes, operation: Operation, marker: str, color: str) -> None:
    """Marks an operation at its intensity over the link. A hollow mark is its intensity over its own memory."""
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
    """Columns of the table. `value` in `unit` is the varied quantity; tokens per second are predictions. If no plan
    fits, its columns are None and `refusal` says why."""

    varied: str
    value: float
    unit: str
    fits: bool
    num_sequences: int | None = None  # of a block
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None
    attention: str | None = None
    schedule: str | None = None
    resident_share: float | None = None  # of the layers
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    total_tokens_per_second: float | None = None
    prefill_binding: str | None = None
    decode_binding: str | None = None
    refusal: str = ""
    note: str = ""

    @staticmethod
    def from_point(outcome: SweepPoint) -> "SweepRow":
        axis, planned = outcome.axis, outcome.planned
        varied = SweepRow(
            varied=axis.name,
            value=outcome.value,
            unit=axis.unit,
            fits=planned is not None,
            refusal=outcome.refusal,
            note=axis.note or (outcome.refusal if axis.unit == RANKS else ""),
        )
        if planned is None:
            return varied
        run, layers, facts = planned.run, planned.shape.layers, planned.resolved_settings
        (prefill, decode, total), phases = planned.throughput, planned.prediction
        return replace(
            varied,
            num_sequences=max(len(block.members) for block in run.blocks),
            micro_batch_size=run.lane_size,
            num_micro_batches=run.num_lanes,
            attention=facts.attention,
            schedule=facts.schedule,
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
    """Yields the lines of the table as plans are made, then publishes <sweep>.csv, <sweep>.png and roofline.png.
    Raises ConfigError, OutputError."""
    kind = config.plan.sweep
    assert kind is not None, "no sweep is asked for"
    names = (f"{kind.value}.csv", f"{kind.value}.png", "roofline.png")
    require_replaceable((directory / name for name in names), f"plan.directory={directory}")
    roofs = make_roofline_report(planned.shape, planned.view.machine, planned.run)
    name = f"{planned.shape.name} on {planned.machine.name}"
    outcomes, rows = list[SweepPoint](), list[SweepRow]()
    yield HEAD
    for outcome in sweep(sweep_axes(config, planned)):
        outcomes.append(outcome)
        rows.append(SweepRow.from_point(outcome))
        yield str(rows[-1])
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(asdict(rows[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    publish_named(directory / f"{kind.value}.csv", lambda file: write_all(file, text.getvalue().encode()))
    knees, shown = dict[str, float](), outcomes
    if kind is Sweep.batch:
        # Blocks from which on it is no longer the link of weights that binds: by the simulator, all of a decode pass;
        # and P2, by the roofline, feed-forward layers alone.
        fitting = (each for each in outcomes if each.planned is not None)
        is_reached = [each.value for each in fitting if each.binding not in WEIGHT_ROADS]
        knees = {"knee, weights no longer bind": is_reached[0]} if is_reached else {}
        knees["P2 of feed-forward layers"] = roofs.needed_sequences
    marks = knees
    if kind is Sweep.format:  # on one axis for all of them, by the bytes of weights that several may have
        names, axis = dict[float, list[str]](), replace(outcomes[0].axis, name="weights")
        for each in outcomes:
            names.setdefault(each.value, []).append(each.axis.name)
        marks = {", ".join(named): value for value, named in names.items()}
        shown = sorted((replace(each, axis=axis) for each in outcomes), key=lambda each: each.value)
    draw_sweep(directory / f"{kind.value}.png", shown, f"{name}, policy={config.policy.kind.value}", marks)
    block = f"a block of {roofs.num_sequences:,} sequences, {roofs.num_rows:,} at once in feed-forward layers"
    draw_roofline(directory / "roofline.png", roofs, f"{name}: a decode pass over {block}")
    yield from (f"{knee}: {num_sequences:,.0f} sequences" for knee, num_sequences in knees.items())


def write_timeline(planned: Planned, directory: Path) -> str:
    """Publishes timeline.json and timeline.png; returns a line that says which passes they show. Raises ConfigError
    if one of the files is not ours to replace, OutputError."""
    names = ("timeline.json", "timeline.png")
    require_replaceable((directory / name for name in names), f"plan.directory={directory}")
    view = planned.view
    timeline = make_timeline(view.shape, planned.run, view.sizes(planned.sizes), view.machine.rates)
    spans = [Span(s.resource, str(s.action), s.begin, s.end) for s in timeline.spans]
    publish_trace(directory / "timeline.json", PREDICTED, spans)
    draw(directory / "timeline.png", spans, _windows(planned, timeline))
    return timeline.description


def _windows(planned: Planned, timeline: Timeline) -> list[TimeWindow]:
    """The whole timeline, and some layers in the middle of the last pass."""
    passes = timeline.passes
    title = f"{planned.shape.name} on {planned.machine.name}, predicted: {timeline.description}"
    marks = [(each.begin, name) for each, name in zip(passes, timeline.names, strict=True)]
    every = TimeWindow(begin=0.0, end=passes[-1].end, title=title, marks=marks)
    last = passes[-1]
    half = (last.end - last.begin) * NUM_LAYERS_SHOWN / (2 * len(planned.shape.stages))
    middle = (last.begin + last.end) / 2
    closer = TimeWindow(
        begin=max(last.begin, middle - half),
        end=min(last.end, middle + half),
        title=f"about {NUM_LAYERS_SHOWN} layers in the middle of the last pass",
    )
    return [every, closer]
