"""The simulator's time, against cases worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from runtime.config.settings import Order
from runtime.plan.cost.rates import MachineRates
from runtime.plan.cost.simulator import (
    Durations,
    ExpertReads,
    Links,
    PhaseTime,
    SimulatedSpan,
    simulate,
    simulate_passes,
)
from runtime.plan.schedule.check import check_schedule
from runtime.plan.schedule.schedule import make_schedule
from runtime.plan.schedule.walk import Walk
from runtime.resources import Resource

NUM_STAGES = 4


def play(
    walk: Walk, num_passes: int, *, read: float = 0.0, copy: float = 0.0, run: float = 0.0, num_lanes: int = 2
) -> PhaseTime:
    durations = Durations(
        read=lambda stage: read, copy=lambda stage: copy, run=lambda stage, lane: run / num_lanes,
        num_pages=walk.num_pages,
    )  # fmt: skip
    return simulate(make_schedule(walk, num_lanes), num_passes, durations)


def disk_walk(num_slots: int, block: int = 1) -> Walk:
    return Walk(num_stages=NUM_STAGES, streamed=tuple(range(NUM_STAGES)), num_slots=num_slots, block=block)


def test_without_prefetch_reads_and_compute_add_up() -> None:
    result = play(disk_walk(1), 3, read=2.0, run=3.0)
    assert result.seconds == pytest.approx(3 * NUM_STAGES * (2 + 3))
    assert result.stall_seconds == result.busy_seconds[Resource.disk] == pytest.approx(3 * NUM_STAGES * 2)


@pytest.mark.parametrize(("read", "run"), [(2.0, 3.0), (3.0, 2.0), (2.0, 2.0)])
@pytest.mark.parametrize("walk", [disk_walk(2), disk_walk(4, block=2)], ids=["lookahead", "block"])
def test_a_pass_ahead_costs_the_longer_of_reading_and_computing(walk: Walk, read: float, run: float) -> None:
    """The shorter one hides: what a pass adds in the steady state is max(read, compute) per stage."""
    pass_seconds = play(walk, 6, read=read, run=run).seconds - play(walk, 5, read=read, run=run).seconds
    assert pass_seconds == pytest.approx(NUM_STAGES * max(read, run))


def test_the_first_stage_is_always_waited_for() -> None:
    """Read 0..2, read 1 hides behind run 0 (2..5), and so on: 2 + 4 x 3."""
    result = play(disk_walk(2), 1, read=2.0, run=3.0)
    assert result.seconds == pytest.approx(2 + NUM_STAGES * 3)
    assert result.stall_seconds == pytest.approx(2)


def test_reads_of_one_disk_queue() -> None:
    """Four reads of 5 s each, none of which overlaps another, then one second of compute."""
    assert play(disk_walk(4), 1, read=5.0, run=1.0).seconds == pytest.approx(4 * 5 + 1)


@pytest.mark.parametrize(("read", "copy", "run"), [(3.0, 1.0, 2.0), (1.0, 3.0, 2.0), (1.0, 2.0, 3.0)])
def test_disk_link_and_device_work_side_by_side(read: float, copy: float, run: float) -> None:
    walk = Walk(num_stages=NUM_STAGES, streamed=(0, 1, 2, 3), num_slots=2, num_staging_slots=2, copies=True)
    added = play(walk, 6, read=read, copy=copy, run=run).seconds - play(walk, 5, read=read, copy=copy, run=run).seconds
    assert added == pytest.approx(NUM_STAGES * max(read, copy, run))


def test_a_read_begins_when_a_copy_has_left_its_memory() -> None:
    """Copies of 5 s, from 1 to 6 and from 6 to 11: into memory that the first one leaves stage 2 is read from 6 to 7,
    and stage 3 from 11 to 12 into that of the second."""
    walk = Walk(num_stages=NUM_STAGES, streamed=(0, 1, 2, 3), num_slots=2, num_staging_slots=2, copies=True)
    durations = Durations(read=lambda stage: 1.0, copy=lambda stage: 5.0)
    [played] = simulate_passes([(make_schedule(walk, 1), durations)])
    reads = [(str(span.action), span.begin) for span in played.spans if span.resource is Resource.disk]
    assert reads[:4] == [("read 0", 0.0), ("read 1", 1.0), ("read 2", 6.0), ("read 3", 11.0)]


def test_pages_come_evenly_over_the_turns_of_resident_stages_too() -> None:
    """Half of the stages are resident, reading a stage takes as long as computing two, and a barrier ends each turn."""
    walk = Walk(num_stages=8, streamed=(0, 2, 4, 6), num_slots=2, num_pages=4, order=Order.flexgen)
    added = play(walk, 6, read=4.0, run=2.0).seconds - play(walk, 5, read=4.0, run=2.0).seconds
    assert added == pytest.approx(8 * 2)


def test_resident_stages_are_never_waited_for() -> None:
    result = play(Walk(num_stages=NUM_STAGES, streamed=(), num_slots=0), 5, read=9.0, run=1.0)
    assert (result.seconds, result.stall_seconds) == (pytest.approx(5 * NUM_STAGES), 0.0)
    assert result.busy_seconds[Resource.disk] == 0.0


def test_a_resident_stage_buys_time_to_read() -> None:
    """Read 4, run 2: with every other stage resident two runs hide one read."""
    walk = Walk(num_stages=NUM_STAGES, streamed=(0, 2), num_slots=2)
    added = play(walk, 6, read=4.0, run=2.0).seconds - play(walk, 5, read=4.0, run=2.0).seconds
    assert added == pytest.approx(NUM_STAGES * 2)


def test_a_page_takes_its_share_of_a_stage() -> None:
    """Pages of the next stage come beside the first lanes; reading and computing take the longer of the two."""
    walk = Walk(num_stages=4, streamed=(0, 1, 2, 3), num_slots=3, num_pages=2, order=Order.cgopipe)
    added = play(walk, 6, read=4.0, run=3.0).seconds - play(walk, 5, read=4.0, run=3.0).seconds
    assert added == pytest.approx(NUM_STAGES * 4)
    one_pass = play(walk, 1, read=4.0, run=3.0).busy_seconds[Resource.disk]
    assert one_pass == pytest.approx(4 * (NUM_STAGES + 2.5))  # stages 0, 1 and page 0 of 2 lie ready as a pass ends


LAYERS = tuple(range(8))


def unit(stage: int, lane: int) -> float:
    return 1.0


def bubbles(order: Order, num_slots: int, num_lanes: int) -> PhaseTime:
    """Every lane's `pre`, `attend` and `post` takes a second; so does every page of weights, over disk and link."""
    walk = Walk(
        num_stages=len(LAYERS), streamed=LAYERS, num_slots=num_slots, num_staging_slots=2, copies=True,
        num_pages=num_lanes, cpu_attention=LAYERS, order=order,
    )  # fmt: skip
    schedule = make_schedule(walk, num_lanes)
    check_schedule(schedule, walk, num_lanes)
    weights = Durations(
        read=lambda stage: num_lanes, copy=lambda stage: num_lanes, pre=unit, attend=unit, post=unit,
        num_pages=num_lanes,
    )  # fmt: skip
    return simulate(schedule, 4, weights)


@pytest.mark.parametrize("num_lanes", [2, 3, 4, 8])
def test_compute_stalls_less_from_zigzag_without_overlap_to_flexgen_to_cgopipe(num_lanes: int) -> None:
    results = [
        bubbles(Order.zigzag, 1, num_lanes), bubbles(Order.flexgen, 2, num_lanes), bubbles(Order.cgopipe, 2, num_lanes)
    ]  # fmt: skip
    busy = [result.busy_seconds[Resource.compute] for result in results]
    assert busy == [4 * len(LAYERS) * num_lanes * 2] * 3
    assert all(b.stall_seconds < a.stall_seconds for a, b in pairwise(results))
    assert [r.seconds for r in results] == pytest.approx([busy[0] + r.stall_seconds for r in results])


def test_attention_is_waited_for_in_every_turn_or_where_a_stage_or_a_pass_begins_and_ends() -> None:
    """Attention takes 2 s, `pre` and `post` 1 s each. Flexgen waits 2 s in every turn; the others 1 s for the first
    attention that nothing runs beside, and 1 s for the last one: zigzag in every stage, cgopipe once a pass."""
    durations = Durations(pre=unit, attend=lambda *turn: 2.0, post=unit)

    def stalls(order: Order) -> float:
        walk = Walk(num_stages=8, streamed=(), num_slots=0, cpu_attention=LAYERS, order=order)
        return simulate(make_schedule(walk, 4), 4, durations).stall_seconds

    assert stalls(Order.flexgen) == 4 * 8 * 4 * 2
    assert stalls(Order.zigzag) == 4 * 8 * 2
    assert stalls(Order.cgopipe) == 4 * 2


@pytest.mark.parametrize(("is_kv_on_disk", "seconds"), [(False, 14), (True, 16)])
def test_kv_goes_over_the_link_both_ways_at_once_or_over_one_disk(is_kv_on_disk: bool, seconds: float) -> None:
    """Four turns of 3 s, whose KV takes 2 s each way, in two slots. Over the link all but the first fetch hides. The
    disk stores turn 0 from 5 to 7 and fetches turn 2 from 7 to 9, so that it runs at 9 and not at 8; turn 3 at 13."""
    walk = Walk(num_stages=1, streamed=(), num_slots=0, offloaded_kv=(0,), num_kv_slots=2)
    roads = Links(is_kv_on_disk=is_kv_on_disk)
    durations = Durations(run=lambda *turn: 3.0, fetch=lambda *turn: 2.0, store=lambda *turn: 2.0, links=roads)
    result = simulate(make_schedule(walk, 4), 1, durations)
    assert result.seconds == pytest.approx(seconds)


def test_experts_run_once_for_all_lanes() -> None:
    walk = Walk(num_stages=2, streamed=(), num_slots=0, batched_experts=(0, 1), order=Order.module_batched)
    durations = Durations(route=lambda *turn: 1.0, experts=lambda stage: 5.0, end=lambda *turn: 0.5)
    assert simulate(make_schedule(walk, 3), 1, durations).seconds == pytest.approx(2 * (3 * 1 + 5 + 3 * 0.5))


RATES = MachineRates(
    disk_bytes_per_second=1.0, link_in_bytes_per_second=1.0, gemm_flops_per_second={16: 160.0, 1: 20.0, 64: 400.0}
)


@pytest.mark.parametrize(
    ("num_rows", "rate"), [(1, 20.0), (16, 160.0), (64, 400.0), (1000, 400.0), (40, 280.0), (0.5, 10.0)]
)
def test_gemm_rate_is_measured_at_points_and_linear_between(num_rows: float, rate: float) -> None:
    assert RATES.gemm_rate(num_rows) == pytest.approx(rate)  # type: ignore[arg-type]


def busy_in(spans: Sequence[SimulatedSpan], resource: Resource) -> float:
    return sum(span.end - span.begin for span in spans if span.resource is resource)


@pytest.mark.parametrize(("share", "pass_seconds"), [(0.1, 11.0), (0.5, 12.0)])
def test_passes_take_as_long_as_all_that_goes_through_host_memory(share: float, pass_seconds: float) -> None:
    """Four stages are read and copied in 2 s each, and attend for 1 s in each of two lanes, for which host memory takes
    0.5 s: 16 s of disk and link at their share, and 4 s. Without it a pass takes 11 s."""
    walk = Walk(
        num_stages=NUM_STAGES, streamed=(0, 1, 2, 3), num_slots=2, num_staging_slots=2, copies=True,
        cpu_attention=(0, 1, 2, 3), order=Order.cgopipe,
    )  # fmt: skip
    free = Durations(read=lambda stage: 2.0, copy=lambda stage: 2.0, pre=unit, attend=unit, num_pages=walk.num_pages)
    shared = replace(
        free,
        host_attend=lambda *turn: 0.5,
        host_shares={Resource.disk.number: share, Resource.host_to_device.number: share},
    )
    schedule = make_schedule(walk, 2)
    many, more = (simulate(schedule, count, shared) for count in (6, 7))
    busy = more.busy_seconds[Resource.host_memory] - many.busy_seconds[Resource.host_memory]
    assert busy == pytest.approx(16 * share + 4)
    assert more.seconds - many.seconds == pytest.approx(pass_seconds)
    assert more.stall_seconds == pytest.approx(more.seconds - more.busy_seconds[Resource.compute])
    assert simulate_passes([(schedule, shared)] * 7)[-1].end == pytest.approx(more.seconds)
    assert simulate(schedule, 1, free).busy_seconds[Resource.host_memory] == 0


@pytest.mark.parametrize("order", [Order.zigzag, Order.cgopipe])
def test_spans_are_what_resources_are_busy_with_and_none_of_one_resource_overlap(order: Order) -> None:
    walk = Walk(
        num_stages=8, streamed=LAYERS, num_slots=2, num_staging_slots=2, copies=True, cpu_attention=LAYERS, order=order,
        num_pages=2,
    )  # fmt: skip
    durations = Durations(read=lambda stage: 3.0, copy=lambda stage: 2.0, pre=unit, attend=unit, post=unit, num_pages=2)
    schedule = make_schedule(walk, 2)
    result, played = simulate(schedule, 3, durations), simulate_passes([(schedule, durations)] * 3)
    spans = [span for each in played for span in each.spans]
    assert played[-1].end == result.seconds
    for resource in Resource:
        assert busy_in(spans, resource) == pytest.approx(result.busy_seconds[resource])
        mine = sorted((span.begin, span.end) for span in spans if span.resource is resource)
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(mine))


def test_slots_are_filled_again_only_for_another_walk() -> None:
    """Two passes of one walk: each stage is read once in each, and the first two once more for the next pass."""
    one = (make_schedule(disk_walk(2), 1), Durations(read=lambda stage: 1.0, run=unit))
    other = (make_schedule(replace(disk_walk(2), streamed=(1, 2, 3)), 1), one[1])
    names = [[str(span.action) for span in each.spans if span.resource is Resource.disk] for each in simulate_passes(
        [one, one, other]
    )]  # fmt: skip
    assert len(names[0]) == NUM_STAGES + len(one[0].prologue)
    assert len(names[1]) == NUM_STAGES
    assert len(names[2]) == 3 + len(other[0].prologue)


def test_experts_that_an_action_brings_in_are_seen_on_their_roads() -> None:
    reads = ExpertReads(num_experts=4, read_seconds=8.0, copy_seconds=4.0, dense_seconds=1.0, lead_seconds=0.0)
    walk = Walk(num_stages=1, streamed=(), num_slots=0)
    durations = Durations(run=lambda *turn: 3.0, expert_reads=lambda action: reads)
    [played] = simulate_passes([(make_schedule(walk, 1), durations)])
    found = {span.resource: (str(span.action), span.begin, span.end) for span in played.spans}
    assert found[Resource.disk] == ("read 0", 1.0, 9.0)
    assert found[Resource.host_to_device] == ("copy 0", 6.0, 10.0), "4 s of work"
    assert found[Resource.compute][2] == pytest.approx(10.5)


def test_resources_have_the_names_of_trace_files_and_are_numbered_as_these_are_drawn() -> None:
    names = ["disk", "host-to-device", "device-to-host", "compute", "CPU attention", "host memory"]
    assert [(each.number, each.value) for each in Resource] == list(enumerate(names))


@pytest.mark.parametrize("resource", [Resource.compute, Resource.host_to_device])
def test_spans_last_as_long_as_the_work_and_not_as_long_as_it_waits_for_experts(resource: Resource) -> None:
    reads = ExpertReads(num_experts=4, read_seconds=8.0, copy_seconds=4.0, dense_seconds=1.0, lead_seconds=0.0)
    walk = Walk(num_stages=2, streamed=(), num_slots=0)
    durations = Durations(run=lambda *turn: 3.0, expert_reads=lambda action: reads)
    schedule = make_schedule(walk, 1)
    [played] = simulate_passes([(schedule, durations)])
    spans = [span for span in played.spans if span.resource is resource]
    busy = simulate(schedule, 1, durations).busy_seconds[resource]
    assert sum(span.end - span.begin for span in spans) == pytest.approx(busy)
    assert busy == {Resource.compute: 2 * 3.0, Resource.host_to_device: 2 * 4.0}[resource] < played.end
    assert all(before.end <= after.begin for before, after in pairwise(spans))
