"""How much of disk, link and compute runs side by side: the real plan, schedule, player, streams and reader on a timed
double, beside what the simulator promises.

    python -m tests.overlap

prints a table for each tier: the seconds of a pass over the most that disk, link or compute take by themselves, so 1.00
is all that can be had; and behind the slash what the simulator says.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import cast

import pytest
import torch

import runtime.engine.monitor
import runtime.store.transfer
import runtime.stream.clock
import runtime.stream.slots
import runtime.stream.weights
from runtime.config.settings import (
    Attention,
    ExpertPaging,
    OffloadConfig,
    Order,
    PolicyConfig,
    Prefetch,
    PrefetchConfig,
    RuntimeConfig,
    Tier,
)
from runtime.engine.experts import BatchedExperts
from runtime.engine.lanes.lane import Lane
from runtime.engine.monitor import PassMonitor
from runtime.engine.player import Player
from runtime.engine.setup import AttentionWorkers, Streams
from runtime.plan.cost.rates import MachineRates
from runtime.plan.cost.simulator import Durations, Script, simulate_each
from runtime.plan.placement.placement import Budgets, Placement
from runtime.plan.planner import plan_run
from runtime.plan.schedule.schedule import Schedule, make_schedule
from runtime.plan.schedule.walk import Walk
from runtime.plan.shape.extents import ALIGNMENT_BYTES
from runtime.plan.shape.model import ModelShape
from runtime.plan.shape.shapes import Parameter, Stage, StageKind, TensorSlice
from runtime.units import GIB
from tests.scripted_crew import PromptStream, ScriptedExperts, ScriptedLane, ScriptedWorkers
from tests.timed_device import TimedDevice, TimedReader
from tests.toy import sizes_of, toy_shape
from tests.virtual_time import VirtualTime

NUM_LAYERS = 24
NUM_LANES = 4
NUM_EXPERTS = 4
ROWS, WIDTH = 256, 64  # of a layer, float32: 16 blocks of the disk
LAYER_BYTES = ROWS * WIDTH * 4
WARM_UP, MEASURED = 2, 1  # passes


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of a whole layer, in all lanes."""

    read: float
    copy: float
    compute: float

    def __str__(self) -> str:
        return f"{self.read:g}, {self.copy:g}, {self.compute:g}"


@dataclass(frozen=True, kw_only=True)
class Case:
    order: Order = Order.zigzag
    kind: Prefetch = Prefetch.lookahead
    depth: int = 1
    tier: Tier = Tier.nvme
    resident_layers: int = 0
    is_in_step: bool = False  # the host waits for every turn's compute, as where it must know which experts are hit

    def __str__(self) -> str:
        depth = f" {self.depth}" if self.kind is Prefetch.lookahead else ""
        return f"{self.order.value}, {self.kind.value}{depth}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Seconds of a pass in the steady state; `bound`: of what takes longest by itself."""

    measured: float
    simulated: float
    bound: float

    def __str__(self) -> str:
        return f"{self.measured / self.bound:.2f} / {self.simulated / self.bound:.2f}"


def shape_of(*, is_mixture: bool) -> ModelShape:
    """Equal layers between outer stages of one block of the disk."""
    toy = toy_shape(NUM_LAYERS)
    return replace(toy, stages=tuple(_small(stage, is_mixture=is_mixture) for stage in toy.stages))


def _small(stage: Stage, *, is_mixture: bool) -> Stage:
    is_layer = stage.kind is StageKind.layer
    num_bytes = LAYER_BYTES if is_layer else ALIGNMENT_BYTES
    rows = (NUM_EXPERTS, ROWS // NUM_EXPERTS, WIDTH) if is_mixture and is_layer else (num_bytes // WIDTH // 4, WIDTH)
    offset, name = stage.index * LAYER_BYTES, f"w{stage.index}"
    piece = TensorSlice(name=name, file="model", offset=offset, num_bytes=num_bytes, dtype="F32", shape=rows)
    has_experts = is_mixture and is_layer
    parameter = Parameter(name=name, shape=rows, pieces=((piece,),), is_experts=has_experts)
    small = Stage(index=stage.index, name=name, kind=stage.kind, parameters=(parameter,))
    return replace(small, num_experts=NUM_EXPERTS, num_experts_per_token=1) if has_experts else small


def placement_of(shape: ModelShape, case: Case, seconds: Seconds) -> Placement:
    config = RuntimeConfig(
        offload=OffloadConfig(tier=case.tier, resident_layers=case.resident_layers, expert_paging=ExpertPaging.off),
        prefetch=PrefetchConfig(kind=case.kind, depth=case.depth),
        policy=PolicyConfig(
            micro_batch_size=1,
            num_micro_batches=NUM_LANES,
            schedule=case.order,
            attention=Attention.cpu if case.order is Order.cgopipe else Attention.device,
        ),
    )
    rates = MachineRates(
        disk_bytes_per_second=LAYER_BYTES / seconds.read,
        link_in_bytes_per_second=LAYER_BYTES / seconds.copy,
        gemm_flops_per_second={1: 2 * NUM_LANES * ROWS * WIDTH / seconds.compute},
    )
    budgets = Budgets(host_bytes=GIB, device_bytes=GIB)
    return plan_run(shape, config, budgets, sizes_of([1] * NUM_LANES), rates=rates).placement


def durations_of(shape: ModelShape, walk: Walk, seconds: Seconds) -> Durations:
    """Turns of layers share the compute: halves where attention is between, which itself takes nothing; a quarter in
    front of the experts and as much behind. The outer stages compute nothing."""
    size = {stage.index: stage.num_bytes / LAYER_BYTES for stage in shape.stages}
    layers = {stage.index for stage in shape.layers}

    def turn(share: float) -> Callable[[int, int], float]:
        return lambda stage, lane: seconds.compute * share / NUM_LANES if stage in layers else 0.0

    return Durations(
        read=lambda stage: size[stage] * seconds.read,
        copy=lambda stage: size[stage] * seconds.copy,
        run=turn(1.0),
        pre=turn(0.5),
        post=turn(0.5),
        route=turn(0.25),
        experts=lambda stage: seconds.compute / 2 if stage in layers else 0.0,
        end=turn(0.25),
        num_pages=walk.num_pages,
    )


@contextmanager
def virtual_time() -> Iterator[VirtualTime]:
    clock, stream = VirtualTime(), runtime.stream
    with pytest.MonkeyPatch.context() as patch:
        clock.take_over(
            patch, runtime.engine.monitor, runtime.store.transfer, stream.clock, stream.slots, stream.weights
        )
        yield clock


def outcome(case: Case, seconds: Seconds) -> Outcome:
    shape = shape_of(is_mixture=case.order is Order.module_batched)
    placement = placement_of(shape, case, seconds)
    walk = placement.decode_walk
    schedule, durations = make_schedule(walk, NUM_LANES), durations_of(shape, walk, seconds)
    with virtual_time() as clock:
        ends = clock.run(lambda: _played(clock, shape, placement, schedule, case, seconds, durations))
    few, more = simulate_each(Script(schedule, durations.links), [WARM_UP, WARM_UP + MEASURED], durations)
    busy = [(more.busy_seconds[resource] - few.busy_seconds[resource]) / MEASURED for resource in more.busy_seconds]
    return Outcome(
        measured=(ends[-1] - ends[WARM_UP - 1]) / MEASURED,
        simulated=(more.seconds - few.seconds) / MEASURED,
        bound=max(busy),
    )


def _played(
    clock: VirtualTime,
    shape: ModelShape,
    placement: Placement,
    schedule: Schedule,
    case: Case,
    seconds: Seconds,
    durations: Durations,
) -> list[float]:
    """When each pass ended. The host waits for compute behind each, as for its tokens."""
    device, ends = TimedDevice(clock, seconds.copy / LAYER_BYTES), list[float]()
    reader = TimedReader(clock, seconds.read / LAYER_BYTES, chunk_bytes=LAYER_BYTES // 2)

    def bound(stage: int) -> dict[str, torch.Tensor]:
        weights.acquire(stage)
        return {}

    with reader, PromptStream(shape, placement, device, reader) as weights:
        player = Player(
            Streams(
                weights=weights,
                experts=None,
                kv=None,
                exchange=None,
                round_trips=None,
                workers=cast(AttentionWorkers, ScriptedWorkers(clock)),
            ),
            bound,
            cast(BatchedExperts, ScriptedExperts(device, durations, is_in_step=case.is_in_step)),
            PassMonitor(len(shape.stages), device),
            lambda: False,
            first_layer=shape.layers[0].index,
        )
        for _ in range(WARM_UP + MEASURED):
            lanes = [
                ScriptedLane(device, placement.decode_walk, durations, lane, is_in_step=case.is_in_step)
                for lane in range(NUM_LANES)
            ]
            player.play(schedule, placement.decode_walk, [cast(Lane, lane) for lane in lanes])
            device.wait_for_compute()
            ends.append(clock.now)
        device.synchronize()
    return ends


RATIOS = (
    Seconds(read=20, copy=20, compute=20),
    Seconds(read=60, copy=20, compute=20),
    Seconds(read=20, copy=10, compute=30),
    Seconds(read=10, copy=30, compute=20),
)
PREFETCHES = (
    {"kind": Prefetch.lookahead, "depth": 1},
    {"kind": Prefetch.lookahead, "depth": 2},
    {"kind": Prefetch.block},
    {"kind": Prefetch.cost_aware},
)


def main() -> None:
    for tier, is_in_step in product((Tier.nvme, Tier.cpu), (False, True)):
        whose = "waits for the compute of each turn" if is_in_step else "queues ahead of the device"
        print(f"offload={tier.value}, a host that {whose}; ms of a layer to read, copy, compute")
        print(f"{'':28}", *(f"{seconds!s:>12}" for seconds in RATIOS), sep=" | ")
        for order, prefetch in product(Order, PREFETCHES):
            case = Case(order=order, tier=tier, is_in_step=is_in_step, **prefetch)
            print(f"{case!s:28}", *(f"{outcome(case, seconds)!s:>12}" for seconds in RATIOS), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
