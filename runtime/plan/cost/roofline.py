"""The hierarchical roofline model, HRM (MoE-Lightning, Cao et al. 2025, section 3): which memory bounds what, where the
turning points of a model's feed-forward layers lie on a machine, and where a policy stands to them.

A **level** is a memory with the processor beside it: host memory and the CPU, an accelerator and its own. An operation
has one **intensity** at its own level, FLOPs for each byte it touches there, and another one across levels, FLOPs for
each byte that must first come over. Many sequences share the weights that come over, a micro-batch those it touches: so
a block's size moves the one and a micro-batch's the other.
"""

from dataclasses import dataclass

import numpy as np

from ..shape.numbers import Floats
from .machine import Machine
from .rates import MachineRates
from .work import LayerWork


@dataclass(frozen=True, kw_only=True)
class Level:
    """A processor's peak, and the rate of the memory beside it."""

    name: str
    flops_per_second: float
    bytes_per_second: float

    def attainable(self, intensity: float | Floats) -> float | Floats:
        """FLOP/s of an operation whose bytes are all here: the classical roofline."""
        return np.minimum(self.flops_per_second, self.bytes_per_second * intensity)


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


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """Intensities in FLOPs per byte: decode attention's, and that of feed-forward weights which N sequences share.
    `needed_sequences`: N that reaches P2.

    `p1` and `p2`, the turning points, are intensities across levels, for each byte that would come over the link. Below
    `p1` an operation is faster where its bytes are; above `p2` the link no longer bounds it. Between the two the link
    does, and what helps is more work for each byte: more sequences.
    """

    p1: float | None  # None: how fast the lower level multiplies is not known
    p2: float
    attention: float
    feed_forward: float
    needed_sequences: float


def operating_point(
    work: LayerWork, machine: Machine, *, reads: bool, num_sequences: float, num_rows: float
) -> OperatingPoint:
    """The operating point of a decode pass over `num_sequences`, whose feed-forward layers take `num_rows` at once."""
    rates, link = machine.rates, link_bytes_per_second(machine, reads=reads)
    lower = host_level(rates) if machine.device_bytes is not None else None
    per_sequence = work.ffn_flops_per_token / work.ffn_bytes
    upper = compute_level(work, rates)
    p2 = second_turning_point(upper, num_rows * per_sequence / hit_share(work, num_rows), link)
    return OperatingPoint(
        p1=None if lower is None else first_turning_point(lower, rates.link_in_bytes_per_second),
        p2=p2,
        attention=work.pair_flops / work.kv_bytes if work.kv_bytes else float("inf"),
        feed_forward=num_sequences * per_sequence,
        needed_sequences=p2 / per_sequence,
    )


def hit_share(work: LayerWork, num_rows: float) -> float:
    """The share of the experts' bytes that a micro-batch touches."""
    if not work.num_experts:
        return 1.0
    return work.hits(max(1, round(num_rows))) / work.num_experts


def link_bytes_per_second(machine: Machine, *, reads: bool) -> float:
    """The slowest hop of streamed weights, of which some or all come from disk or, unless it `reads`, none."""
    hops = [machine.rates.weights_in_bytes_per_second] if machine.device_bytes is not None else []
    if reads or not hops:
        hops.append(machine.rates.disk_bytes_per_second)
    return min(hops)


def compute_level(work: LayerWork, rates: MachineRates) -> Level:
    """Where the model computes. Products of few rows take what it takes to read their weights: that is how fast its
    memory is."""
    rows, rate = min(rates.gemm_flops_per_second.items())
    weights = work.dense_weights + work.num_experts * work.expert_weights
    return Level(
        name="compute",
        flops_per_second=float(np.max([*rates.gemm_flops_per_second.values()])),
        bytes_per_second=rate / (2 * rows) * work.num_bytes / weights,
    )


def host_level(rates: MachineRates) -> Level | None:
    """The CPU beside an accelerator; None where its rates are not known."""
    if rates.cpu_flops_per_second is None:
        return None
    return Level(
        name="host",
        flops_per_second=rates.cpu_flops_per_second,
        bytes_per_second=rates.cpu_attention_bytes_per_second,
    )
