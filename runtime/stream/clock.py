"""Timing of device work in seconds of the host's monotonic clock, and counters of transfers.

On a CPU, work is done when the call returns, and its time is reported at once. On an accelerator, work is timed by
events in its streams, which are read once per pass.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

Moment: TypeAlias = float | torch.Event  # seconds on a CPU; on an accelerator a point in a stream's work
TimingCallback: TypeAlias = Callable[[float, float], None]  # called with the begin and end of the work


class Reference(NamedTuple):
    """An event and its host time, from which times of other events are computed. Renewed in each pass, since elapsed
    times are float32 milliseconds and the clocks of host and device drift."""

    event: torch.Event
    seconds: float


class TimedWork(NamedTuple):
    """Work whose time is not reported yet."""

    begin: torch.Event
    end: torch.Event
    then: TimingCallback
    reference: Reference


class DeviceClock:
    """Times work on one device. Any thread may call `begin` and `end`; only the engine's thread calls `resolve`."""

    def __init__(
        self,
        new_event: Callable[[], torch.Event] | None = None,
        compute_stream: Callable[[], torch.Stream | None] = lambda: None,
    ):
        """`new_event`: makes timing events; None on a CPU. `compute_stream`: returns the stream of compute."""
        self._new_event, self._compute_stream = new_event, compute_stream
        self._spare_events: deque[torch.Event] = deque()  # their work was reported, so they can be reused
        self._reference: Reference | None = None
        self._reference_lock = threading.Lock()
        self._running: deque[TimedWork] = deque()  # append and popleft are atomic; swapping lists would lose work

    def begin(self, stream: torch.Stream | None = None) -> Moment:
        """Marks the start of work that is queued next on `stream`. Call it after the stream was made to wait for the
        work's dependencies, so that waiting is not timed. Pass the result to exactly one `end`."""
        if self._new_event is None:
            return time.monotonic()
        if self._reference is None:
            with self._reference_lock:  # any thread may be the first to begin work
                if self._reference is None:
                    self._reference = self._make_reference(self._new_event())
        return self._record_event(stream)

    def end(self, begin: Moment, then: TimingCallback, stream: torch.Stream | None = None) -> None:
        """Marks the end of the work. Calls `then` with its times: on a CPU at once, otherwise in the first `resolve`
        after the work is done."""
        if isinstance(begin, int | float):
            then(begin, time.monotonic())
            return
        assert self._new_event is not None, "a CPU's moments are seconds"
        assert self._reference is not None, "end before begin"
        self._running.append(TimedWork(begin, self._record_event(stream), then, self._reference))

    def wait(self, compute_stream: torch.Stream) -> None:
        """Waits for all work queued on the stream, and renews the reference. Call it once per pass."""
        if self._new_event is None:
            compute_stream.synchronize()
        else:
            self._reference = self._make_reference(self._new_event())

    def resolve(self) -> None:
        """Calls the callbacks of finished work. Call it once per pass, after `wait`."""
        if self._new_event is None:
            return
        for _ in range(len(self._running)):
            work = self._running.popleft()
            if work.end.query():
                work.then(_seconds(work.begin, work.reference), _seconds(work.end, work.reference))
                self._spare_events += (work.begin, work.end)
            else:
                self._running.append(work)

    def _record_event(self, stream: torch.Stream | None) -> torch.Event:
        assert self._new_event is not None, "a CPU's moments are seconds"
        try:
            event = self._spare_events.pop()
        except IndexError:
            event = self._new_event()
        event.record(stream)
        return event

    def _make_reference(self, event: torch.Event) -> Reference:
        event.record(self._compute_stream())  # not torch's current stream, whose device differs by thread
        event.synchronize()  # before reading the host's clock, so that event and time are the same moment
        return Reference(event, time.monotonic())


def _seconds(event: torch.Event, reference: Reference) -> float:
    return reference.seconds + reference.event.elapsed_time(event) / 1000


def _by_stage() -> defaultdict[int, float]:
    return defaultdict(float)


@dataclass(kw_only=True)
class StreamCounters:
    """Transfer counters. A hit is a streamed stage whose bytes had arrived when the first lane (micro-batch) needed
    them, otherwise it is a miss. Expert counts include only experts that are read one by one (paged)."""

    bytes_read: int = 0  # disk -> host
    bytes_copied: int = 0  # host -> device
    bytes_returned: int = 0  # device -> host
    bytes_written: int = 0  # host -> disk
    num_hits: int = 0
    num_misses: int = 0
    num_experts: int = 0  # in the stages that ran
    num_experts_hit: int = 0  # with at least one token; an expert used several times counts once
    num_experts_read: int = 0  # an expert read several times counts several times
    # Seconds by stage: the disk was busy, a host-device link was busy, compute waited (on accelerators an upper bound).
    reads: defaultdict[int, float] = field(default_factory=_by_stage)
    copies: defaultdict[int, float] = field(default_factory=_by_stage)
    stalls: defaultdict[int, float] = field(default_factory=_by_stage)

    def count_acquire(self, is_in_time: bool) -> None:
        """Counts a hit or a miss: the first use of a streamed stage after it was fetched."""
        self.num_hits += is_in_time
        self.num_misses += not is_in_time
