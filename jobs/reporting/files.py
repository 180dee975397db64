"""The files of a table of runs: Markdown, Parquet, and its rates as a picture. It stands alone because of matplotlib,
which is loaded only to draw."""

from collections.abc import Sequence
from pathlib import Path

from ..files.named import publish_named, require_replaceable
from ..files.publishing import make_directory, write_all, write_parquet
from ..pictures.figure import figure
from .figures import RunFigures
from .overview import Overview

BAR_PIXELS, FRAME_PIXELS = 26, 110
COLOURS = {"prefill": "#4c78a8", "decode": "#f58518"}


def write_overview(overview: Overview, directory: Path) -> list[Path]:
    """Publishes table.md, table.parquet and, where anything was measured, rates.png, in place of those of before.
    Raises ConfigError where one of them is somebody's own, OutputError."""
    markdown, table, picture = (directory / name for name in ("table.md", "table.parquet", "rates.png"))
    require_replaceable((markdown, table, picture), f"directory={directory}")
    make_directory(directory)
    publish_named(markdown, lambda file: write_all(file, overview.markdown().encode()))
    publish_named(table, lambda file: write_parquet(overview.table(), file))
    measured = [run for run in overview.runs if run.passes]
    if not measured:
        return [markdown, table]
    draw_rates(picture, measured)
    return [markdown, table, picture]


def draw_rates(path: Path, runs: Sequence[RunFigures]) -> None:
    """Publishes bars of tokens per second, prefill and decode beside each other, in the order of the table."""
    names = [run.name for run in runs]
    rates = {
        "prefill": [run.summary.measured.prefill or 0.0 for run in runs],
        "decode": [run.summary.measured.decode_useful or 0.0 for run in runs],
    }
    with figure(path, FRAME_PIXELS + BAR_PIXELS * len(names)) as picture:
        panels = picture.subplots(1, 2, sharey=True)
        for axes, (phase, values) in zip(panels, rates.items(), strict=True):
            bars = axes.barh(range(len(names)), values, color=COLOURS[phase])
            axes.bar_label(bars, [f"{value:,.1f}" if value else "-" for value in values], padding=4)
            axes.set_xlim(0, 1.18 * max(max(values), 1e-9))
            axes.set_xlabel("tokens/s")
            axes.set_title(phase, loc="left", fontsize=10)
        panels[0].set_yticks(range(len(names)), names)
        panels[0].invert_yaxis()
        picture.tight_layout()
