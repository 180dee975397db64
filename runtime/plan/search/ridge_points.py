"""Where the turning points of a model's feed-forward layers lie on a machine, and where a policy stands to them."""

from dataclasses import dataclass

import numpy as np

from ..cost.machine import Machine
from ..cost.rates import MachineRates
from ..cost.roofline import Level, TurningPoints, first_turning_point, second_turning_point
from ..cost.work import LayerWork
from ..placement.experts import expected_hits


@dataclass(frozen=True, kw_only=True)
class OperatingPoint:
    """Intensities in FLOPs per byte: decode attention's, and that of feed-forward weights which N sequences share.
    `needed_sequences`: N that reaches P2."""

    points: TurningPoints
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
    points = TurningPoints(
        p1=None if lower is None else first_turning_point(lower, rates.link_in_bytes_per_second),
        p2=second_turning_point(upper, num_rows * per_sequence / hit_share(work, num_rows), link),
    )
    return OperatingPoint(
        points=points,
        attention=work.pair_flops / work.kv_bytes if work.kv_bytes else float("inf"),
        feed_forward=num_sequences * per_sequence,
        needed_sequences=points.p2 / per_sequence,
    )


def hit_share(work: LayerWork, num_rows: float) -> float:
    """The share of the experts' bytes that a micro-batch touches."""
    if not work.num_experts:
        return 1.0
    return expected_hits(work.num_experts, work.num_experts_per_token, max(1, round(num_rows))) / work.num_experts


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
