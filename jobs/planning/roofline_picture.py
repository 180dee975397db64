"""A plan's hierarchical roofline as a picture: what roads and processors let through, and what the plan asks for."""

from math import inf, isfinite
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from runtime.plan.roofs import Operation, Roof, Roofs

from ..report.figure import figure

HEIGHT_PIXELS = 720
COLOURS = {"device memory": "#f58518", "host memory": "#54a24b", "link": "#4c78a8", "disk": "#b279a2"}
MARKS = (("o", "#e45756"), ("s", "#333333"))
POINT_COLOUR = "#666666"
LEFT_OCTAVES, RIGHT_OCTAVES = 2, 2  # of the intensities that matter
GIGA, TERA = 1e9, 1e12


def draw_roofline(path: Path, roofs: Roofs, title: str) -> None:
    """Publishes it, as svg or png by the suffix; raises OutputError."""
    with figure(path, HEIGHT_PIXELS) as made:
        axes = made.add_axes((0.075, 0.1, 0.9, 0.8))
        begin, end = _range(roofs)
        axes.set(xscale="log", yscale="log", xlim=(begin, end), ylim=_heights(roofs, begin))
        axes.set_xlabel("intensity [FLOPs per byte over the road]")
        axes.set_ylabel("attainable [FLOP/s]")
        axes.grid(True, which="major", color="#ddd", linewidth=0.6)
        axes.set_title(title, loc="left", fontsize=10)
        for roof in roofs.roofs:
            _roof(axes, roof, begin, end)
        _peaks(axes, roofs, end)
        _turning_points(axes, roofs)
        for operation, (marker, colour) in zip(roofs.operations, MARKS, strict=True):
            _operation(axes, operation, marker, colour)
        axes.legend(loc="lower right", frameon=True, framealpha=0.9)


def _range(roofs: Roofs) -> tuple[float, float]:
    """The range of intensities that holds all points and turning points, and where every roof becomes flat."""
    turning = [each.intensity for each in roofs.turning_points]
    ridges = [roof.level.flops_per_second / roof.level.bytes_per_second for roof in roofs.roofs]
    asked = [value for each in roofs.operations for value in (each.intensity, each.own_intensity)]
    found = [value for value in (*ridges, *asked, *turning) if 0 < value < inf]
    return min(found) / 2**LEFT_OCTAVES, max(found) * 2**RIGHT_OCTAVES


def _heights(roofs: Roofs, begin: float) -> tuple[float, float]:
    rates = [each.flops_per_second for each in roofs.operations]
    peaks = [roof.level.flops_per_second for roof in roofs.roofs if isfinite(roof.level.flops_per_second)]
    return min([*rates, *(float(roof.level.attainable(begin)) for roof in roofs.roofs)]) / 2, 4 * max(peaks)


def _roof(axes: Axes, roof: Roof, begin: float, end: float) -> None:
    level, colour = roof.level, COLOURS[roof.road]
    ridge = min(level.flops_per_second / level.bytes_per_second, end)
    intensities = np.array([begin, ridge, end])
    label = f"{roof.road}, {level.bytes_per_second / GIGA:,.4g} GB/s"
    axes.plot(intensities, np.asarray(level.attainable(intensities)), color=colour, linewidth=2, label=label)


def _peaks(axes: Axes, roofs: Roofs, end: float) -> None:
    peaks = {roof.level.name: roof.level.flops_per_second for roof in roofs.roofs}
    for name, flops in peaks.items():
        if isfinite(flops):
            text = f"{name}: {flops / TERA:,.3g} TFLOP/s"
            axes.annotate(text, (end, flops), (-4, 4), textcoords="offset points", ha="right", va="bottom")


def _turning_points(axes: Axes, roofs: Roofs) -> None:
    bottom = axes.get_ylim()[0]
    for point in roofs.turning_points:
        at, height = point.intensity, point.flops_per_second
        axes.plot([at, at], [bottom, height], color=POINT_COLOUR, linewidth=1, linestyle=":")
        axes.plot([at], [height], marker="D", color=POINT_COLOUR, markersize=6, linestyle="", zorder=5)
        axes.annotate(
            f"{point.name} = {_number(at)}", (at, height), (6, -14), textcoords="offset points", color=POINT_COLOUR
        )


def _operation(axes: Axes, operation: Operation, marker: str, colour: str) -> None:
    """Marks an operation at its intensity over the link; a hollow mark stands where its own memory sees it."""
    rate = operation.flops_per_second
    style = {"marker": marker, "color": colour, "markersize": 9, "linestyle": "", "zorder": 5}
    label = f"{operation.name}: {_number(operation.intensity)} FLOPs per byte, {rate / TERA:,.3g} TFLOP/s"
    axes.plot([operation.intensity], [rate], label=label, **style)
    if operation.own_intensity != operation.intensity:
        own = operation.own_intensity
        axes.plot([operation.intensity, own], [rate, rate], color=colour, linewidth=1, linestyle="--", zorder=4)
        label = f"the same: {_number(own)} FLOPs per byte of its own memory"
        axes.plot([own], [rate], label=label, fillstyle="none", **style)


def _number(intensity: float) -> str:
    return f"{intensity:,.0f}" if intensity >= 100 else f"{intensity:.3g}"
