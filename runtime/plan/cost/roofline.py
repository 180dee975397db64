"""The hierarchical roofline model, HRM (MoE-Lightning, Cao et al. 2025, section 3), for feed-forward layers.

A **level** is a processor with its memory: the CPU with host memory (lower), or an accelerator with its own (upper). An
operation has two **intensities**: FLOPs per byte that its level reads, and FLOPs per byte that is transferred to this
level first. Weights are transferred once per block, so the size of the block determines the intensity across levels. A
level reads them once per micro-batch, so the size of the micro-batch determines the intensity within the level.
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
        """Returns the FLOP/s of an operation if all its bytes are in this level's memory: the classical roofline."""
        return np.minimum(self.flops_per_second, self.bytes_per_second * intensity)


def first_turning_point(lower: Level, link_bytes_per_second: float) -> float:
    """Returns P1, the intensity from which an operation is faster after a transfer to the upper level.

    An operation of intensity I attains at most link * I after a transfer, and min(peak, memory * I) at the lower level.
    Both grow with I, and a link is slower than the memory from which it reads. So the lower level is faster until its
    peak is reached: link * I = peak, or I = peak / link. A link faster than the memory would make P1 0.
    """
    if link_bytes_per_second >= lower.bytes_per_second:
        return 0.0
    return lower.flops_per_second / link_bytes_per_second


def second_turning_point(upper: Level, intensity: float, link_bytes_per_second: float) -> float:
    """Returns P2, the intensity across levels from which the link is no longer the bottleneck.

    Without the link, the upper level attains min(peak, memory * `intensity`), where `intensity` counts bytes of its own
    memory. The link allows the same FLOP/s at link * P2. Larger micro-batches raise `intensity`, and so P2 until the
    peak is reached.
    """
    return float(upper.attainable(intensity)) / link_bytes_per_second


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """Intensities of a decode pass across levels, in FLOPs per byte.

    Below `p1` an operation is faster at the lower level. Above `p2` the link is no longer the bottleneck. Between them,
    the link limits the speed, and larger blocks are faster.
    """

    p1: float | None  # None: the FLOP/s of the lower level are not known
    p2: float
    attention: float
    feed_forward: float  # of weights shared by all sequences of a block
    needed_sequences: float  # block size with a feed-forward intensity of `p2`


def operating_point(
    work: LayerWork, machine: Machine, *, reads: bool, num_sequences: float, num_rows: float
) -> OperatingPoint:
    """Returns the operating point of a decode pass over `num_sequences`.

    `num_rows`: tokens per feed-forward product. `reads`: weights come from disk.
    """
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
    """Returns the share of a layer's experts to which at least one of `num_rows` tokens is routed."""
    if not work.num_experts:
        return 1.0
    return work.hits(max(1, round(num_rows))) / work.num_experts


def link_bytes_per_second(machine: Machine, *, reads: bool) -> float:
    """Returns the rate of streamed weights, limited by the slowest link. `reads`: they come from disk."""
    hops = [machine.rates.weights_in_bytes_per_second] if machine.device_bytes is not None else []
    if reads or not hops:
        hops.append(machine.rates.disk_bytes_per_second)
    return min(hops)


def compute_level(work: LayerWork, rates: MachineRates) -> Level:
    """Returns the level of the compute device.

    Its bandwidth is derived from the measured product with the fewest rows, whose time is that of reading its weights.
    """
    rows, rate = min(rates.gemm_flops_per_second.items())
    weights = work.dense_weights + work.num_experts * work.expert_weights
    return Level(
        name="compute",
        flops_per_second=float(np.max([*rates.gemm_flops_per_second.values()])),
        bytes_per_second=rate / (2 * rows) * work.num_bytes / weights,
    )


def host_level(rates: MachineRates) -> Level | None:
    """Returns the level of the CPU next to an accelerator; None if its rates are unknown."""
    if rates.cpu_flops_per_second is None:
        return None
    return Level(
        name="host",
        flops_per_second=rates.cpu_flops_per_second,
        bytes_per_second=rates.cpu_attention_bytes_per_second,
    )
