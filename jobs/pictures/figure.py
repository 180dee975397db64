"""Matplotlib figures as files. Needs no display."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from ..files.named import publish_named

WIDTH_PIXELS, PIXELS_PER_INCH = 1200, 100
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text instead of outlines
    "svg.hashsalt": "weightstream",  # the same picture gives the same bytes
}


@contextmanager
def figure(path: Path, height_pixels: float) -> Iterator[Figure]:
    """Yields a figure, and writes it to `path` at the end, as svg or png by the suffix. Replaces an older file. Raises
    OutputError."""
    size = WIDTH_PIXELS / PIXELS_PER_INCH, height_pixels / PIXELS_PER_INCH
    with rc_context(STYLE):
        drawing = Figure(figsize=size, dpi=PIXELS_PER_INCH)
        yield drawing
        kind = path.suffix[1:]
        metadata = {"Date": None} if kind == "svg" else None  # the same picture gives the same bytes
        publish_named(path, lambda file: drawing.savefig(file, format=kind, metadata=metadata))
