"""The simulator's time, against cases worked out by hand."""

import pytest

from runtime.plan.cost import MachineRates, lane_seconds, simulate
from runtime.plan.schedule import Walk, make_schedule

NUM_STAGES = 4


def play(walk: Walk, num_passes: int, *, read: float = 0.0, copy: float = 0.0, run: float = 0.0, num_lanes: int = 2):
    return simulate(
        make_schedule(walk, num_lanes),
        num_passes,
        read_seconds=lambda stage: read,
        copy_seconds=lambda stage: copy,
        run_seconds=lambda stage, lane: run / num_lanes,
    )


def disk_walk(num_slots: int, block: int = 1) -> Walk:
    return Walk(num_stages=NUM_STAGES, streamed=tuple(range(NUM_STAGES)), num_slots=num_slots, block=block)


def test_without_prefetch_reads_and_compute_add_up() -> None:
    result = play(disk_walk(1), 3, read=2.0, run=3.0)
    assert result.seconds == pytest.approx(3 * NUM_STAGES * (2 + 3))
    assert result.stall_seconds == result.disk_seconds == pytest.approx(3 * NUM_STAGES * 2)


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


def test_resident_stages_are_never_waited_for() -> None:
    result = play(Walk(num_stages=NUM_STAGES, streamed=(), num_slots=0), 5, read=9.0, run=1.0)
    assert (result.seconds, result.stall_seconds, result.disk_seconds) == (pytest.approx(5 * NUM_STAGES), 0.0, 0.0)


def test_a_resident_stage_buys_time_to_read() -> None:
    """Read 4, run 2: with every other stage resident two runs hide one read."""
    walk = Walk(num_stages=NUM_STAGES, streamed=(0, 2), num_slots=2)
    added = play(walk, 6, read=4.0, run=2.0).seconds - play(walk, 5, read=4.0, run=2.0).seconds
    assert added == pytest.approx(NUM_STAGES * 2)


RATES = MachineRates(
    disk_bytes_per_second=1.0, link_bytes_per_second=1.0, gemm_flops_per_second={16: 160.0, 1: 20.0, 64: 400.0}
)


@pytest.mark.parametrize(
    ("num_rows", "rate"), [(1, 20.0), (16, 160.0), (64, 400.0), (1000, 400.0), (40, 280.0), (0.5, 10.0)]
)
def test_gemm_rate_is_measured_at_points_and_linear_between(num_rows: float, rate: float) -> None:
    assert RATES.gemm_rate(num_rows) == pytest.approx(rate)  # type: ignore[arg-type]


def test_lane_seconds_are_flops_over_the_rate_at_the_lanes_tokens() -> None:
    seconds = lane_seconds(RATES, [0.0, 100.0], [1, 16, 0])
    table = [[seconds(stage, lane) for lane in range(3)] for stage in range(2)]
    assert table == [[0.0, 0.0, 0.0], [pytest.approx(5.0), pytest.approx(10.0), 0.0]]
