"""Matplotlib figures, without a display."""

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
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "weightstream",  # the same picture is the same file
}


@contextmanager
def figure(path: Path, height_pixels: float) -> Iterator[Figure]:
    """A new figure, published at `path` as svg or png, by its suffix, when the context ends. Replaces an older file.
    Raises OutputError."""
    with rc_context(STYLE):
        made = Figure(figsize=(WIDTH_PIXELS / PIXELS_PER_INCH, height_pixels / PIXELS_PER_INCH), dpi=PIXELS_PER_INCH)
        yield made
        kind = path.suffix[1:]
        metadata = {"Date": None} if kind == "svg" else None
        publish_named(path, lambda file: made.savefig(file, format=kind, metadata=metadata))
