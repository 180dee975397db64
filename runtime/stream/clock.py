"""What a stream carried, and when work ran, in the host's monotonic seconds, also where a device runs it long after it
was queued.

On a CPU work is over when the call returns, and is told of at once. An accelerator's events are read once per pass.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

Moment: TypeAlias = float | torch.Event  # seconds on a CPU; on an accelerator a point in a stream's work
Then: TypeAlias = Callable[[float, float], None]  # told when the work began and ended


class Reference(NamedTuple):
    """An event and when it happened. A fresh one each pass: events count in float32 milliseconds, clocks drift."""

    event: torch.Event
    seconds: float


class TimedWork(NamedTuple):
    begin: torch.Event
    end: torch.Event
    then: Then
    reference: Reference


class DeviceClock:
    """One per device. Any thread may begin and end work, the engine's alone resolves. `new_event` makes events with
    timing; None: a CPU's clock. `compute_stream` is where references are recorded: an event without a stream would take
    one of the current device, which is each thread's own."""

    def __init__(
        self,
        new_event: Callable[[], torch.Event] | None = None,
        compute_stream: Callable[[], torch.Stream | None] = lambda: None,
    ):
        self._new_event, self._compute_stream = new_event, compute_stream
        self._spare: deque[torch.Event] = deque()  # of work that was told of
        self._reference: Reference | None = None
        self._making_reference = threading.Lock()
        self._running: deque[TimedWork] = deque()  # appending and popping are atomic; exchanging a list would lose work

    def begin(self, stream: torch.Stream | None = None) -> Moment:
        """Marks the moment before work is queued on `stream`, behind what it waits for. The moment is good for one
        `end`, which takes its event back."""
        if self._new_event is None:
            return time.monotonic()
        if self._reference is None:
            with self._making_reference:
                if self._reference is None:
                    self._reference = self._make_reference(self._new_event())
        return self._record_event(stream)

    def end(self, begin: Moment, then: Then, stream: torch.Stream | None = None) -> None:
        """Marks the moment after work was queued. `then` is called now on a CPU, and on an accelerator by the first
        `resolve` that finds the work done."""
        if isinstance(begin, int | float):
            then(begin, time.monotonic())
            return
        assert self._new_event is not None, "a CPU's moments are seconds"
        assert self._reference is not None, "end before begin"
        self._running.append(TimedWork(begin, self._record_event(stream), then, self._reference))

    def wait(self, compute_stream: torch.Stream) -> None:
        """Waits for all that is queued there, once per pass: with timing, by an event that is a new reference."""
        if self._new_event is None:
            compute_stream.synchronize()
        else:
            self._reference = self._make_reference(self._new_event())

    def resolve(self) -> None:
        """Tells of the work that is done: once per pass, behind `wait`."""
        if self._new_event is None:
            return
        for _ in range(len(self._running)):
            work = self._running.popleft()
            if work.end.query():
                work.then(_seconds(work.begin, work.reference), _seconds(work.end, work.reference))
                self._spare += (work.begin, work.end)
            else:
                self._running.append(work)

    def _record_event(self, stream: torch.Stream | None) -> torch.Event:
        assert self._new_event is not None, "a CPU's moments are seconds"
        try:
            event = self._spare.pop()
        except IndexError:
            event = self._new_event()
        event.record(stream)
        return event

    def _make_reference(self, event: torch.Event) -> Reference:
        event.record(self._compute_stream())
        event.synchronize()
        return Reference(event, time.monotonic())


def _seconds(event: torch.Event, reference: Reference) -> float:
    return reference.seconds + reference.event.elapsed_time(event) / 1000


def _by_stage() -> defaultdict[int, float]:
    return defaultdict(float)


@dataclass(kw_only=True)
class StreamCounters:
    """`reads` and `copies` are the busy seconds of disk and link, `stalls` those that compute waited, all by stage.

    A hit is a streamed stage whose bytes were there when a lane first asked for it. On an accelerator the host's
    waiting may hide behind compute that is queued already, so `stalls` is an upper bound there.

    Of experts that are read one by one: those of the layers that lanes passed, and those of them that a token visited,
    each once, however many lanes asked; and how many were brought in, each as often as that happened.
    """

    bytes_read: int = 0  # disk -> host
    bytes_copied: int = 0  # host -> device
    bytes_returned: int = 0  # device -> host
    bytes_written: int = 0  # host -> disk
    num_hits: int = 0
    num_misses: int = 0
    num_experts: int = 0
    num_experts_hit: int = 0
    num_experts_read: int = 0
    reads: defaultdict[int, float] = field(default_factory=_by_stage)
    copies: defaultdict[int, float] = field(default_factory=_by_stage)
    stalls: defaultdict[int, float] = field(default_factory=_by_stage)

    def count_acquire(self, is_in_time: bool) -> None:
        """A lane asks for a streamed stage, for the first time since it was brought in."""
        self.num_hits += is_in_time
        self.num_misses += not is_in_time
