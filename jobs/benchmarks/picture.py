"""Rates beside each other as bars, with the spread of their rounds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from ..report.figure import figure

BAR_PIXELS, FRAME_PIXELS = 34, 110
OURS, OTHERS = "#4c78a8", "#bab0ac"


def draw_rates(path: Path, rates: Mapping[str, Sequence[float]], peers: Sequence[str], title: str, unit: str) -> None:
    """Publishes it, as svg or png by the suffix; raises OutputError. The fastest stands on top; `peers` are grey."""
    names = sorted(rates, key=lambda name: median(rates[name]))
    middles = [median(rates[name]) for name in names]
    below = [middle - min(rates[name]) for name, middle in zip(names, middles, strict=True)]
    above = [max(rates[name]) - middle for name, middle in zip(names, middles, strict=True)]
    with figure(path, FRAME_PIXELS + BAR_PIXELS * len(names)) as made:
        axes = made.subplots()
        colours = [OTHERS if name in peers else OURS for name in names]
        bars = axes.barh(names, middles, xerr=[below, above], color=colours, ecolor="#444444", capsize=2)
        axes.bar_label(bars, [f"{middle:,.4g}" for middle in middles], padding=6)
        axes.set_xlim(0, 1.12 * max(map(max, rates.values())))
        axes.set_xlabel(unit)
        axes.set_title(title, loc="left", fontsize=10)
        made.tight_layout()
