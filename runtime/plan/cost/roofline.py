"""The hierarchical roofline model, HRM (MoE-Lightning, Cao et al. 2025, section 3): turning points of a model's
feed-forward layers on a machine, and the operating point of a policy.

A **level** is a processor with its memory: the CPU with host memory, an accelerator with its own. An operation has two
**intensities**: FLOPs per byte read at its level, and FLOPs per byte transferred between levels first. Weights are
transferred once per block, so the block's size sets the intensity across levels. They are read at a level once per
micro-batch, so the micro-batch's size sets the intensity there.
"""

from dataclasses import dataclass

import numpy as np

from ..shape.numbers import Floats
from .machine import Machine
from .rates import MachineRates
from .work import LayerWork


@dataclass(frozen=True, kw_only=True)
class Level:
    """A processor's peak FLOP/s and the bandwidth of its memory."""

    name: str
    flops_per_second: float
    bytes_per_second: float

    def attainable(self, intensity: float | Floats) -> float | Floats:
        """Returns the FLOP/s of an operation with all its bytes at this level: the classical roofline."""
        return np.minimum(self.flops_per_second, self.bytes_per_second * intensity)


def first_turning_point(lower: Level, link_bytes_per_second: float) -> float:
    """Returns P1, the intensity from which transferring data pays.

    With transfer, an operation of intensity I attains at most link * I; at the lower level, min(peak, memory * I). Both
    grow with I, and a link is slower than the memory it reads. So the lower level is faster until its peak: link *
    I = peak, I = peak / link. With a link faster than the memory, transferring always pays: 0.
    """
    if link_bytes_per_second >= lower.bytes_per_second:
        return 0.0
    return lower.flops_per_second / link_bytes_per_second


def second_turning_point(upper: Level, intensity: float, link_bytes_per_second: float) -> float:
    """Returns P2, the intensity from which the link is no longer the bottleneck.

    The upper level attains min(peak, memory * its own intensity), independent of the link. The link's roof meets it at
    link * I = min(peak, memory * intensity). Larger micro-batches raise `intensity` and so P2, up to the peak.
    """
    return float(upper.attainable(intensity)) / link_bytes_per_second


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """Intensities in FLOPs per byte: of decode attention, and of feed-forward weights shared by N sequences.
    `needed_sequences`: N that reaches P2.

    The turning points `p1` and `p2` are intensities across levels. Below `p1` an operation is faster at the lower
    level; above `p2` the link is no longer the bottleneck. Between them it is, and more sequences help.
    """

    p1: float | None  # None: no FLOP/s known for the lower level
    p2: float
    attention: float
    feed_forward: float
    needed_sequences: float


def operating_point(
    work: LayerWork, machine: Machine, *, reads: bool, num_sequences: float, num_rows: float
) -> OperatingPoint:
    """Returns the operating point of a decode pass over `num_sequences`; feed-forward layers process `num_rows` at
    once."""
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
    """Returns the share of expert bytes that a micro-batch touches."""
    if not work.num_experts:
        return 1.0
    return work.hits(max(1, round(num_rows))) / work.num_experts


def link_bytes_per_second(machine: Machine, *, reads: bool) -> float:
    """Returns the rate of streamed weights, over the slowest hop. `reads`: they come from disk."""
    hops = [machine.rates.weights_in_bytes_per_second] if machine.device_bytes is not None else []
    if reads or not hops:
        hops.append(machine.rates.disk_bytes_per_second)
    return min(hops)


def compute_level(work: LayerWork, rates: MachineRates) -> Level:
    """Returns the level of the compute device. Its bandwidth is derived from the smallest measured product, which is
    bound by reading weights."""
    rows, rate = min(rates.gemm_flops_per_second.items())
    weights = work.dense_weights + work.num_experts * work.expert_weights
    return Level(
        name="compute",
        flops_per_second=float(np.max([*rates.gemm_flops_per_second.values()])),
        bytes_per_second=rate / (2 * rows) * work.num_bytes / weights,
    )


def host_level(rates: MachineRates) -> Level | None:
    """Returns the CPU's level with an accelerator; None if its rates are unknown."""
    if rates.cpu_flops_per_second is None:
        return None
    return Level(
        name="host",
        flops_per_second=rates.cpu_flops_per_second,
        bytes_per_second=rates.cpu_attention_bytes_per_second,
    )
