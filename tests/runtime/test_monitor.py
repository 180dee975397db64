"""What the engine and its streams report adds up by stage, and the next pass begins at zero."""

import math
import threading
import tracemalloc

import pytest

from runtime.engine.monitor import PassMonitor
from runtime.engine.records import StageTimes
from runtime.resources import Resource
from runtime.stream.clock import StreamCounters
from runtime.stream.device import ComputeDevice
from runtime.trace import Trace

NUM_STAGES = 4
BY_STAGE = ("read_seconds", "copy_seconds", "compute_seconds", "attention_seconds", "stall_seconds")
DEVICE = ComputeDevice("cpu")


def counted(stage: int, seconds: float, **values: int) -> StreamCounters:
    counters = StreamCounters(**values)
    for sums in (counters.reads, counters.copies, counters.stalls):
        sums[stage] += seconds
    return counters


def run(monitor: PassMonitor, stage: int, lane: int) -> None:
    begin = monitor.begin_compute()
    monitor.end_compute(stage, f"run {stage}.{lane}", begin)


def test_streams_are_added_up_by_stage() -> None:
    weights = counted(1, 2.0, bytes_read=10, bytes_copied=7, num_hits=3, num_misses=1)
    experts = counted(2, 1.0, num_experts=160, num_experts_hit=40, num_experts_read=56)
    kv = counted(1, 0.5, bytes_read=5, bytes_written=4, bytes_returned=2)
    times = PassMonitor(NUM_STAGES, DEVICE).take_times([lambda: weights, lambda: experts, lambda: kv])
    assert times.read_seconds == times.copy_seconds == times.stall_seconds == (0, 2.5, 1, 0)
    assert (times.bytes_read_disk, times.bytes_copied_device) == (15, 7)
    assert (times.bytes_copied_host, times.bytes_written_disk) == (2, 4)
    assert (times.prefetch_hits, times.prefetch_misses) == (3, 1)
    assert (times.experts_total, times.experts_hit, times.experts_read) == (160, 40, 56)


def test_compute_of_all_lanes_adds_up_to_what_the_trace_shows() -> None:
    trace = Trace()
    monitor = PassMonitor(NUM_STAGES, DEVICE, trace)
    for stage in range(NUM_STAGES):
        for lane in range(3):
            run(monitor, stage, lane)
    times, spans = monitor.take_times([]), trace.take()
    assert [span.name for span in spans] == [f"run {stage}.{lane}" for stage in range(NUM_STAGES) for lane in range(3)]
    for stage, seconds in enumerate(times.compute_seconds):
        mine = [span.end - span.begin for span in spans if span.name.startswith(f"run {stage}.")]
        assert seconds == pytest.approx(math.fsum(mine))
    assert {span.resource for span in spans} == {Resource.compute}


def test_attention_on_workers_counts_for_its_stage_and_has_a_row_of_its_own() -> None:
    trace, is_over = Trace(), threading.Event()
    monitor = PassMonitor(NUM_STAGES, DEVICE, trace)
    watched = monitor.timed(2, "attend 2.0", lambda: is_over.wait(0.01))
    workers = [threading.Thread(target=watched) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    times = monitor.take_times([])
    assert times.attention_seconds[2] >= 0.02
    assert sum(times.attention_seconds) == times.attention_seconds[2]
    assert [(span.resource, span.name) for span in trace.take()] == [(Resource.cpu_attention, "attend 2.0")] * 2


def test_attention_that_is_answered_at_once_is_part_of_its_action() -> None:
    trace = Trace()
    monitor = PassMonitor(NUM_STAGES, DEVICE, trace)
    whole = monitor.begin_compute()
    monitor.end_attention(1, monitor.begin_compute())
    monitor.end_compute(1, "run 1.0", whole)
    times = monitor.take_times([])
    assert 0 < times.attention_seconds[1] <= times.compute_seconds[1]
    assert [span.name for span in trace.take()] == ["run 1.0"]


def test_what_a_worker_raises_passes_through() -> None:
    def fails() -> None:
        raise ValueError("a mistake of ours")

    with pytest.raises(ValueError, match="a mistake of ours"):
        PassMonitor(NUM_STAGES, DEVICE).timed(0, "attend 0.0", fails)()


def test_each_pass_begins_at_zero() -> None:
    monitor = PassMonitor(NUM_STAGES, DEVICE)
    run(monitor, 0, 0)
    monitor.end_attention(0, monitor.begin_compute())
    monitor.take_times([])
    nothing = monitor.take_times([StreamCounters])
    assert isinstance(nothing, StageTimes)
    assert all(getattr(nothing, name) == (0.0,) * NUM_STAGES for name in BY_STAGE)


@pytest.mark.parametrize("trace", [None, Trace()], ids=["off", "on"])
def test_an_action_leaves_nothing_behind_unless_there_is_a_trace(trace: Trace | None) -> None:
    monitor = PassMonitor(NUM_STAGES, DEVICE, trace)
    run(monitor, 0, 0)
    num_actions = 1000
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(num_actions):
            run(monitor, 0, 0)
        grown_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert (grown_bytes < num_actions) == (trace is None)
