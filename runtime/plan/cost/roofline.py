"""The hierarchical roofline model, HRM (MoE-Lightning, Cao et al. 2025, section 3): which memory bounds what.

A **level** is a memory with the processor beside it: host memory and the CPU, an accelerator and its own. An operation
has one **intensity** at its own level, FLOPs for each byte it touches there, and another one across levels, FLOPs for
each byte that must first come over. Many sequences share the weights that come over, a micro-batch those it touches: so
a block's size moves the one and a micro-batch's the other.

Everything here takes and returns numbers or arrays of them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..shape.numbers import Floats


@dataclass(frozen=True, kw_only=True)
class Level:
    """A processor's peak, and the rate of the memory beside it."""

    name: str
    flops_per_second: float
    bytes_per_second: float

    def attainable(self, intensity: float | Floats) -> float | Floats:
        """FLOP/s of an operation whose bytes are all here: the classical roofline."""
        return np.minimum(self.flops_per_second, self.bytes_per_second * intensity)


def attainable(
    level: Level, intensity: float | Floats, link_bytes_per_second: float, intensity_across: float | Floats
) -> NDArray[np.float64]:
    """FLOP/s at `level` of an operation that also has bytes brought there over a link: the lowest of three roofs."""
    return np.minimum(level.attainable(intensity), link_bytes_per_second * intensity_across)


@dataclass(frozen=True, kw_only=True)
class TurningPoints:
    """Intensities across levels, in FLOPs for each byte that would come over the link.

    Below `p1` an operation is faster where its bytes are; above `p2` the link no longer bounds it. Between the two the
    link does, and what helps is more work for each byte: more sequences.
    """

    p1: float | None  # None: how fast the lower level multiplies is not known
    p2: float


def first_turning_point(lower: Level, link_bytes_per_second: float) -> float:
    """P1. Brought over, an operation of intensity I gets at most link * I; where its bytes lie, min(peak, memory * I).

    Both grow with I, and a link is slower than the memory it reads, so the lower level leads until it meets its own
    peak: link * I = peak, I = peak / link. A link faster than the memory leads from the start: 0.
    """
    if link_bytes_per_second >= lower.bytes_per_second:
        return 0.0
    return lower.flops_per_second / link_bytes_per_second


def second_turning_point(upper: Level, intensity: float, link_bytes_per_second: float) -> float:
    """P2. What the upper level attains on bytes that it has, min(peak, memory * its own intensity), does not depend on
    the link. The link's roof meets it at link * I = min(peak, memory * intensity). Larger micro-batches raise the
    intensity there and so move P2 up, until the peak.
    """
    return float(upper.attainable(intensity)) / link_bytes_per_second
