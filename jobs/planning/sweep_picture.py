"""The outcomes of a sweep as a picture: predicted throughput against what is varied, coloured by what binds."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from runtime.plan.cost.simulator import Resource

from ..report.figure import figure
from .sweep import Axis, Outcome

HEIGHT_PIXELS = 560
COLOURS = {
    Resource.disk: "#b279a2",
    Resource.link_in: "#4c78a8",
    Resource.link_out: "#72b7b2",
    Resource.compute: "#f58518",
    Resource.cpu: "#54a24b",
}
NUMBERS = "{x:,.6g}"
LINE, REFUSED = "#444444", "#f3dddd"
MARGIN = 2**0.25  # beside the first and the last value


def draw_sweep(path: Path, outcomes: Sequence[Outcome], title: str, marks: Mapping[str, float]) -> None:
    """Publishes it, as svg or png by the suffix; raises OutputError. `marks`: named values of the only axis."""
    axes_seen = list({id(each.axis): each.axis for each in outcomes}.values())
    top = 1.12 * max((*_decode(outcomes), *_total(outcomes)), default=0.0)
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
        made.legend(handles=_handles(outcomes), loc="lower center", ncols=8, frameon=False)
        made.subplots_adjust(left=0.065, right=0.985, top=0.92, bottom=0.19, wspace=0.06)


def _panel(axes: Axes, axis: Axis, outcomes: Sequence[Outcome]) -> None:
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
    fitting = [(each.value, each.planned) for each in outcomes if each.planned is not None]
    where = [value for value, _ in fitting]
    for rates, style in ((_decode(outcomes), "--"), (_total(outcomes), "-")):
        axes.plot(where, rates, color=LINE, linewidth=1.4, linestyle=style, zorder=2)
    for resource, colour in COLOURS.items():
        bound = [at for at, (_, plan) in enumerate(fitting) if plan.prediction.decode.binding is resource]
        for rates in (_decode(outcomes), _total(outcomes)):
            axes.scatter([where[at] for at in bound], [rates[at] for at in bound], color=colour, s=34, zorder=3)
    _mark(axes, axis.here, "the plan", "#888888")


def _decode(outcomes: Sequence[Outcome]) -> list[float]:
    return [each.planned.throughput.decode or 0.0 for each in outcomes if each.planned is not None]


def _total(outcomes: Sequence[Outcome]) -> list[float]:
    return [each.planned.throughput.total or 0.0 for each in outcomes if each.planned is not None]


def _mark(axes: Axes, value: float, name: str, colour: str, height: float = 0.03) -> None:
    """A line where the axis has that value, and beside it, at that height, its name."""
    low, high = axes.get_xlim()
    if low <= value <= high:
        axes.axvline(value, color=colour, linewidth=1, linestyle=":")
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "right"}
        axes.annotate(name, (value, height), (-3, 3), color=colour, **place)


def _handles(outcomes: Sequence[Outcome]) -> list[Line2D | Patch]:
    bound = {each.planned.prediction.decode.binding for each in outcomes if each.planned is not None}
    return [
        Line2D([], [], color=LINE, linestyle="-", label="total, generated"),
        Line2D([], [], color=LINE, linestyle="--", label="decode"),
        *(
            Line2D([], [], color=colour, marker="o", linestyle="", label=f"{resource.value} binds decode")
            for resource, colour in COLOURS.items()
            if resource in bound
        ),
        *([Patch(color=REFUSED, label="does not fit")] if any(each.planned is None for each in outcomes) else []),
    ]
