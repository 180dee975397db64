"""Experts that come one by one to a device that takes time are read, copied and computed side by side."""

import pytest

from runtime.config.settings import ExpertPaging, OffloadConfig, RuntimeConfig, Tier
from runtime.plan.cost.simulator import Durations, ExpertReads, simulate
from runtime.plan.placement.load import Load
from runtime.plan.placement.placement import Budgets
from runtime.plan.placement.placer import choose_placement
from runtime.plan.schedule.schedule import make_schedule
from runtime.plan.schedule.walk import Walk
from runtime.stream.experts import ExpertStream
from runtime.units import GIB
from tests.overlap import RATIOS, Seconds, virtual_time
from tests.timed_device import TimedDevice, TimedReader
from tests.toy import toy_mixture
from tests.virtual_time import VirtualTime

NUM_EXPERTS = 64
SHAPE = toy_mixture(num_layers=1, num_experts=NUM_EXPERTS)
[LAYER] = SHAPE.layers
EXPERT_BYTES = LAYER.num_bytes // NUM_EXPERTS


def seconds_each(clock: VirtualTime, seconds: Seconds, tier: Tier, paging: ExpertPaging, *, is_in_step: bool) -> float:
    offload = OffloadConfig(tier=tier, resident_layers=0, expert_paging=paging)
    budgets = Budgets(host_bytes=GIB, device_bytes=GIB)
    placement = choose_placement(SHAPE, RuntimeConfig(offload=offload), budgets, Load.from_lanes(SHAPE, [], 512))
    device = TimedDevice(clock, seconds.copy / EXPERT_BYTES)
    with (
        TimedReader(clock, seconds.read / EXPERT_BYTES, chunk_bytes=EXPERT_BYTES) as reader,
        ExpertStream(SHAPE, placement, device, reader, paging=paging) as stream,
    ):
        begin = clock.now
        for _ in stream.experts(LAYER.index, range(NUM_EXPERTS)):
            device.compute(seconds.compute)
            if is_in_step:
                device.wait_for_compute()
        device.wait_for_compute()
        return (clock.now - begin) / NUM_EXPERTS


def simulated_each(seconds: Seconds, tier: Tier) -> float:
    reads = ExpertReads(
        num_experts=NUM_EXPERTS,
        read_seconds=NUM_EXPERTS * seconds.read if tier is Tier.nvme else 0.0,
        copy_seconds=NUM_EXPERTS * seconds.copy,
        dense_seconds=0.0,
        lead_seconds=0.0,
    )
    durations = Durations(run=lambda *turn: NUM_EXPERTS * seconds.compute, expert_reads=lambda action: reads)
    schedule = make_schedule(Walk(num_stages=1, streamed=(), num_slots=0), 1)
    return simulate(schedule, 1, durations).seconds / NUM_EXPERTS


@pytest.mark.parametrize("is_in_step", [False, True], ids=["ahead", "in step"])
@pytest.mark.parametrize("paging", [ExpertPaging.hit, ExpertPaging.all])
@pytest.mark.parametrize("tier", [Tier.nvme, Tier.cpu])
def test_an_expert_takes_as_long_as_disk_link_or_compute_alone(
    tier: Tier, paging: ExpertPaging, is_in_step: bool
) -> None:
    """But for the first one, which comes before it can be computed; and as the simulator says."""
    for seconds in RATIOS:
        with virtual_time() as clock:
            found = clock.run(lambda s=seconds: seconds_each(clock, s, tier, paging, is_in_step=is_in_step))
        bound = max(seconds.read if tier is Tier.nvme else 0.0, seconds.copy, seconds.compute)
        assert found <= bound / 0.95, f"{seconds}: {found:.2f} ms, {bound} alone"
        assert found == pytest.approx(simulated_each(seconds, tier), rel=0.05)
