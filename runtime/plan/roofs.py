"""A plan under the hierarchical roofline: the roofs over a decode pass, and where its operations stand below them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ..config import Tier
from .cost.machine import Machine
from .cost.roofline import Level
from .cost.work import LayerWork
from .planner import RunPlan
from .search.ridge_points import Standing, compute_level, hit_share, host_level, road_bytes_per_second, standing
from .shape.model import ModelShape


@dataclass(frozen=True, kw_only=True)
class Roof:
    """FLOP/s of a processor, where each byte comes over `road`."""

    level: Level
    road: str


@dataclass(frozen=True, kw_only=True)
class Operation:
    """`intensity`: FLOPs for each byte over the road that it is short of; `own_intensity`: for each byte that it
    touches where it runs."""

    name: str
    intensity: float
    own_intensity: float
    flops_per_second: float


@dataclass(frozen=True, kw_only=True)
class TurningPoint:
    """Where one roof meets another."""

    name: str
    intensity: float
    flops_per_second: float


@dataclass(frozen=True, kw_only=True)
class Roofs:
    """`turning_points`: those that are known, and above 0. `needed_sequences` make a block that reaches P2."""

    roofs: Sequence[Roof]
    operations: Sequence[Operation]
    turning_points: Sequence[TurningPoint]
    needed_sequences: float
    num_sequences: int
    num_rows: int  # that feed-forward layers take at once


def roofs_of(shape: ModelShape, machine: Machine, tier: Tier, plan: RunPlan) -> Roofs:
    work = LayerWork.of(shape)
    num_sequences = max((len(block.members) for block in plan.blocks), default=1)
    is_batched = plan.placement.decode_walk.order.style.batches_experts
    num_rows = num_sequences if is_batched else plan.lane_size
    stand = standing(work, machine, tier, num_sequences=num_sequences, num_rows=num_rows)
    return Roofs(
        roofs=_roofs(work, machine),
        operations=[_attention(stand, machine, plan), _feed_forward(stand, work, machine, tier, plan, num_rows)],
        turning_points=_turning_points(stand, machine, tier),
        needed_sequences=stand.needed_sequences,
        num_sequences=num_sequences,
        num_rows=num_rows,
    )


def _roofs(work: LayerWork, machine: Machine) -> list[Roof]:
    rates, compute = machine.rates, compute_level(work, machine.rates)

    def over(road: str, bytes_per_second: float) -> Roof:
        level = Level(name="compute", flops_per_second=compute.flops_per_second, bytes_per_second=bytes_per_second)
        return Roof(level=level, road=road)

    disk = over("disk", rates.disk_bytes_per_second)
    if machine.device_bytes is None:
        return [over("host memory", compute.bytes_per_second), disk]
    cpu = host_level(rates) or Level(
        name="CPU", flops_per_second=inf, bytes_per_second=rates.cpu_attention_bytes_per_second
    )
    roofs = [
        over("device memory", compute.bytes_per_second),
        Roof(level=Level(name="CPU", flops_per_second=cpu.flops_per_second, bytes_per_second=cpu.bytes_per_second),
             road="host memory"),
        over("link", rates.link_in_bytes_per_second),
        disk,
    ]  # fmt: skip
    return [roof for roof in roofs if roof.level.bytes_per_second < inf]


def _turning_points(stand: Standing, machine: Machine, tier: Tier) -> list[TurningPoint]:
    """P1 is about the link, P2 about the whole road of streamed weights."""
    roads = {
        "P1": (stand.points.p1, machine.rates.link_in_bytes_per_second),
        "P2": (stand.points.p2, road_bytes_per_second(machine, tier)),
    }
    return [
        TurningPoint(name=name, intensity=intensity, flops_per_second=rate * intensity)
        for name, (intensity, rate) in roads.items()
        if intensity
    ]


def _attention(stand: Standing, machine: Machine, plan: RunPlan) -> Operation:
    """Decode attention, by the bytes of keys and values."""
    rates, placement = machine.rates, plan.placement
    if placement.decode_walk.attending:
        where, rate = "on the CPU", rates.cpu_attention_bytes_per_second
    elif placement.decode_walk.travelling:
        roads = (rates.attention_bytes_per_second, road_bytes_per_second(machine, Tier.cpu))
        where, rate = "KV comes over", min(roads)
    else:
        where, rate = "beside its KV", rates.attention_bytes_per_second
    return Operation(
        name=f"attention, {where}",
        intensity=stand.attention,
        own_intensity=stand.attention,
        flops_per_second=rate * stand.attention,
    )


def _feed_forward(
    stand: Standing, work: LayerWork, machine: Machine, tier: Tier, plan: RunPlan, num_rows: int
) -> Operation:
    """Weights that many sequences share. Where all of them stay, no road but that of their own memory."""
    own = num_rows * work.ffn_flops_per_token / work.ffn_bytes / hit_share(work, num_rows)
    attained = float(compute_level(work, machine.rates).attainable(own))
    if not plan.placement.decode_walk.streamed:
        return Operation(name="feed-forward, resident", intensity=own, own_intensity=own, flops_per_second=attained)
    across = road_bytes_per_second(machine, tier) * stand.feed_forward
    return Operation(
        name="feed-forward, streamed",
        intensity=stand.feed_forward,
        own_intensity=own,
        flops_per_second=min(attained, across),
    )
