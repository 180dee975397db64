"""Collects times per stage: the engine and its streams report during a pass, `take_times` adds them up."""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import partial
from typing import TypeVar

from ..resources import Resource
from ..stream.clock import Moment, StreamCounters
from ..stream.device import ComputeDevice
from ..trace import Trace, TracedPass
from .records import StageTimes

T = TypeVar("T")


class PassMonitor:
    """Times of one engine. Only its thread calls methods; functions that `timed` returns may run on other threads.

    Actions of lanes and experts are enclosed in `begin_compute` and `end_compute`, inline attention in `begin_compute`
    and `end_attention`; attention on workers is wrapped by `timed`. `take_times` ends a pass, once the device has
    finished. Streams record their own spans. `str(action)` is the name in the trace."""

    def __init__(self, num_stages: int, device: ComputeDevice, trace: Trace | None = None):
        self._num_stages, self._device, self._trace = num_stages, device, trace
        self._stream = device.compute_stream()
        self._compute: defaultdict[int, float] = defaultdict(float)
        self._attention: deque[tuple[int, float]] = deque()  # workers append, the engine pops: deque is atomic

    def begin_pass(self) -> None:
        """Caches the current compute stream: looking it up takes as long as recording an event."""
        self._stream = self._device.compute_stream()

    def begin_compute(self) -> Moment:
        """Marks the start of compute on the device's stream, after all work queued there."""
        return self._device.clock.begin(self._stream)

    def end_compute(self, stage: int, action: object, begin: Moment, num_rows: int = 0) -> None:
        def computed(begin: float, end: float) -> None:
            self._compute[stage] += end - begin
            if self._trace is not None:
                self._trace.span(Resource.compute, str(action), begin, end, num_rows=num_rows)

        self._device.clock.end(begin, computed, self._stream)

    def end_attention(self, stage: int, begin: Moment) -> None:
        """Ends inline attention. It is part of the lane's action, so it has no span of its own."""
        self._device.clock.end(begin, partial(self._add_attention, stage), self._stream)

    def timed(self, stage: int, action: object, compute: Callable[[], T], num_rows: int = 0) -> Callable[[], T]:
        """Wraps `compute` for a CPU worker: a call records its time in the monitor and the trace."""

        def timed() -> T:
            begin = time.monotonic()
            result = compute()
            end = time.monotonic()
            self._add_attention(stage, begin, end)
            if self._trace is not None:
                self._trace.span(Resource.cpu_attention, str(action), begin, end, num_rows=num_rows)
            return result

        return timed

    def run_traced(self, name: str, compute: Callable[[], T]) -> T:
        """Calls `compute` on the CPU and records it in the trace."""
        begin = time.monotonic()
        result = compute()
        if self._trace is not None:
            self._trace.span(Resource.cpu_attention, name, begin, time.monotonic())
        return result

    def trace_pass(self, phase: str, begin: float, seconds: float, num_rows: int) -> None:
        if self._trace is not None:
            self._trace.add_pass(TracedPass(phase, begin, begin + seconds, num_rows))

    def take_times(self, streams: Rows[Callable[[], StreamCounters]]) -> StageTimes:
        """The times since the last call, including the counters of the streams."""
        self._device.clock.resolve()
        counters = [take() for take in streams]
        attention: defaultdict[int, float] = defaultdict(float)
        for _ in range(len(self._attention)):
            stage, seconds = self._attention.popleft()
            attention[stage] += seconds
        compute, self._compute = self._compute, defaultdict(float)
        return StageTimes(
            read_seconds=self._by_stage(*(c.reads for c in counters)),
            copy_seconds=self._by_stage(*(c.copies for c in counters)),
            compute_seconds=self._by_stage(compute),
            attention_seconds=self._by_stage(attention),
            stall_seconds=self._by_stage(*(c.stalls for c in counters)),
            prefetch_hits=sum(c.num_hits for c in counters),
            prefetch_misses=sum(c.num_misses for c in counters),
            experts_total=sum(c.num_experts for c in counters),
            experts_hit=sum(c.num_experts_hit for c in counters),
            experts_read=sum(c.num_experts_read for c in counters),
            bytes_read_disk=sum(c.bytes_read for c in counters),
            bytes_copied_device=sum(c.bytes_copied for c in counters),
            bytes_copied_host=sum(c.bytes_returned for c in counters),
            bytes_written_disk=sum(c.bytes_written for c in counters),
        )

    def _add_attention(self, stage: int, begin: float, end: float) -> None:
        self._attention.append((stage, end - begin))

    def _by_stage(self, *sums: defaultdict[int, float]) -> tuple[float, ...]:
        return tuple(sum(seconds[stage] for seconds in sums) for stage in range(self._num_stages))
