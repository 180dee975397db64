"""Contents of a plan's roofline diagram: the roofs of a decode pass, and the operations below them.

The **intensity** of an operation is its FLOPs per byte. P1 and P2 are the turning points of the hierarchical roofline
model, see `cost.roofline`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite

from .cost.machine import Machine
from .cost.roofline import (
    Level,
    OperatingPoint,
    compute_level,
    hit_share,
    link_bytes_per_second,
    operating_point,
)
from .cost.work import LayerWork
from .planner import RunPlan
from .shape.model import ModelShape

GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True, kw_only=True)
class PeakLine:
    """One roof of the diagram: the attainable FLOP/s of a processor if all bytes come over `link`."""

    level: Level
    link: str

    @property
    def ridge(self) -> float:
        """The intensity from which the processor's peak FLOP/s limit the roof, not the link."""
        return self.level.flops_per_second / self.level.bytes_per_second

    @property
    def text(self) -> str:
        return f"{self.link}, {self.level.bytes_per_second / GIGA:,.4g} GB/s"


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a decode pass as a point in the diagram."""

    name: str
    intensity: float  # FLOPs per byte over the limiting link
    own_intensity: float  # FLOPs per byte of the processor's own memory
    flops_per_second: float

    @property
    def text(self) -> str:
        return f"{self.name}: {_number(self.intensity)} FLOPs per byte, {self.flops_per_second / TERA:,.3g} TFLOP/s"

    @property
    def own_text(self) -> str:
        return f"{self.name}: {_number(self.own_intensity)} FLOPs per byte of its own memory"


@dataclass(frozen=True, kw_only=True)
class TurningPoint:
    """The intersection of two roofs, P1 or P2."""

    name: str
    intensity: float
    flops_per_second: float

    @property
    def text(self) -> str:
        return f"{self.name} = {_number(self.intensity)}"


def _number(intensity: float) -> str:
    return f"{intensity:,.0f}" if intensity >= 100 else f"{intensity:.3g}"


@dataclass(frozen=True, kw_only=True)
class RooflineReport:
    """Contents of the roofline diagram of a plan."""

    roofs: Sequence[PeakLine]
    operations: Sequence[Operation]
    turning_points: Sequence[TurningPoint]  # with an intensity above 0
    needed_sequences: float  # block size from which the link no longer limits feed-forward products (P2)
    num_sequences: int  # of the largest block
    num_rows: int  # tokens per feed-forward product

    @property
    def intensities(self) -> list[float]:
        """The intensities of all operations, turning points and ridges."""
        values = [roof.ridge for roof in self.roofs] + [point.intensity for point in self.turning_points]
        values += [value for op in self.operations for value in (op.intensity, op.own_intensity)]
        return [value for value in values if 0 < value < inf]

    @property
    def peaks(self) -> dict[str, float]:
        """Known peak FLOP/s, by processor."""
        levels = [roof.level for roof in self.roofs]
        return {level.name: level.flops_per_second for level in levels if isfinite(level.flops_per_second)}

    def lowest(self, intensity: float) -> float:
        """Returns the lowest FLOP/s in the diagram: of all operations, and of all roofs at `intensity`."""
        at_roofs = [float(roof.level.attainable(intensity)) for roof in self.roofs]
        return min([operation.flops_per_second for operation in self.operations] + at_roofs)


def make_roofline_report(shape: ModelShape, machine: Machine, plan: RunPlan) -> RooflineReport:
    work, reads = LayerWork.from_shape(shape), plan.placement.walk.reads
    num_sequences = max((len(block.members) for block in plan.blocks), default=1)
    is_batched = plan.placement.decode_walk.order.style.batches_experts
    num_rows = num_sequences if is_batched else plan.lane_size
    point = operating_point(work, machine, reads=reads, num_sequences=num_sequences, num_rows=num_rows)
    links = {  # P1 lies on the roof of the link; P2 on that of the whole path from disk, if weights are read from it
        "P1": (point.p1, machine.rates.link_in_bytes_per_second),
        "P2": (point.p2, link_bytes_per_second(machine, reads=reads)),
    }
    return RooflineReport(
        roofs=_peak_lines(work, machine),
        operations=[_attention(point, machine, plan), _feed_forward(point, work, machine, reads, plan, num_rows)],
        turning_points=[
            TurningPoint(name=name, intensity=intensity, flops_per_second=rate * intensity)
            for name, (intensity, rate) in links.items()
            if intensity
        ],
        needed_sequences=point.needed_sequences,
        num_sequences=num_sequences,
        num_rows=num_rows,
    )


def _peak_lines(work: LayerWork, machine: Machine) -> list[PeakLine]:
    rates, compute = machine.rates, compute_level(work, machine.rates)

    def roof_over(link: str, bytes_per_second: float) -> PeakLine:
        level = Level(name="compute", flops_per_second=compute.flops_per_second, bytes_per_second=bytes_per_second)
        return PeakLine(level=level, link=link)

    disk = roof_over("disk", rates.disk_bytes_per_second)
    if machine.device_bytes is None:
        return [roof_over("host memory", compute.bytes_per_second), disk]
    cpu_flops = inf if rates.cpu_flops_per_second is None else rates.cpu_flops_per_second
    cpu = Level(name="CPU", flops_per_second=cpu_flops, bytes_per_second=rates.cpu_attention_bytes_per_second)
    roofs = [
        roof_over("device memory", compute.bytes_per_second),
        PeakLine(level=cpu, link="host memory"),
        roof_over("link", rates.link_in_bytes_per_second),
        disk,
    ]
    return [roof for roof in roofs if roof.level.bytes_per_second < inf]


def _attention(point: OperatingPoint, machine: Machine, plan: RunPlan) -> Operation:
    rates, placement = machine.rates, plan.placement
    if placement.decode_walk.cpu_attention:
        place, rate = "on the CPU", rates.cpu_attention_bytes_per_second
    elif placement.decode_walk.offloaded_kv:
        links = (rates.attention_bytes_per_second, link_bytes_per_second(machine, reads=False))
        place, rate = "KV streamed", min(links)
    else:
        place, rate = "KV resident", rates.attention_bytes_per_second
    return Operation(
        name=f"attention, {place}",
        intensity=point.attention,
        own_intensity=point.attention,
        flops_per_second=rate * point.attention,
    )


def _feed_forward(
    point: OperatingPoint, work: LayerWork, machine: Machine, reads: bool, plan: RunPlan, num_rows: int
) -> Operation:
    """Returns the feed-forward products of a layer as one operation. `reads`: weights come from disk in each pass.

    Resident weights are limited by compute memory and FLOP/s only, streamed weights also by the link.
    """
    flops_per_stored_byte = num_rows * work.ffn_flops_per_token / work.ffn_bytes
    own = flops_per_stored_byte / hit_share(work, num_rows)  # only experts with a token are read
    attained = float(compute_level(work, machine.rates).attainable(own))
    if not plan.placement.decode_walk.streamed:
        return Operation(name="feed-forward, resident", intensity=own, own_intensity=own, flops_per_second=attained)
    across = link_bytes_per_second(machine, reads=reads) * point.feed_forward
    return Operation(
        name="feed-forward, streamed",
        intensity=point.feed_forward,
        own_intensity=own,
        flops_per_second=min(attained, across),
    )
