"""Streams and events of an accelerator that is made of host memory.

A stream takes what is queued while a thread is in its context: whatever writes, in place or to `out=`, waits for its
turn; what only looks at shapes is done at once. Everything runs as late, as early or as irregularly as events allow.
A copy spoils its target as soon as it may begin, so that nobody who does not wait for its end finds the old bytes good.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from random import Random
from types import TracebackType
from typing import NamedTuple, Protocol

import torch
from torch.overrides import TorchFunctionMode

POISON = 0xFF  # four of them are a NaN
MOST_DELAY_SECONDS = 2e-4

Work = Callable[[], object]


class Pace(Enum):
    """When a stream does what it could do: when that is waited for, at once, or now and then."""

    late = "late"
    early = "early"
    irregular = "irregular"


def spoil(tensor: torch.Tensor) -> None:
    with torch.inference_mode():  # whoever's thread it is: what was allowed was asked when it was queued
        tensor.fill_(float("nan") if tensor.is_floating_point() else POISON if tensor.dtype is torch.uint8 else -1)


class Host(Protocol):
    """The device that streams belong to."""

    lock: threading.RLock
    chance: Random

    def advance(self) -> None: ...


class FakeStream:
    """Work in order."""

    def __init__(self, device: Host, pace: Pace):
        self.device, self.pace = device, pace
        self._queue: deque[Work | Point | Instant] = deque()
        self.num_queued = self.num_done = 0

    def enqueue(self, *works: "Work | Point | Instant") -> None:
        with self.device.lock:
            self._queue.extend(works)
            self.num_queued += len(works)
            self.device.advance()

    def wait_event(self, event: "FakeEvent") -> None:
        """As on a device: what the event stands for now, whatever it is recorded for later."""
        if event.point is not None and not event.point.is_reached:
            self.enqueue(event.point)

    def synchronize(self) -> None:
        Point(self).wait()

    def run_to(self, num_done: int) -> None:
        """Runs what others wait for, and what that waits for in turn."""
        while self.num_done < num_done:
            work = self._queue[0]
            if isinstance(work, Point):
                work.stream.run_to(work.num)
            self._run_next()

    def run_if_it_likes(self) -> bool:
        """Runs one piece of work unless that waits for another stream, or this one takes its time."""
        if not self._queue:
            return False
        work = self._queue[0]
        if isinstance(work, Point):
            may_run = work.is_reached
        else:
            may_run = self.pace is Pace.early or isinstance(work, Instant)
            may_run = may_run or (self.pace is Pace.irregular and self.device.chance.random() < 0.5)
        if may_run:
            self._run_next()
        return may_run

    def _run_next(self) -> None:
        work = self._queue.popleft()
        if isinstance(work, Instant):
            work.run()
        elif not isinstance(work, Point):
            work()
        self.num_done += 1


class Within:
    """A stream's context. It remembers what its thread goes back to, as torch's does, so no other may enter it."""

    def __init__(self, stream: FakeStream):
        self._stream, self._thread, self._modes = stream, 0, list[Queueing]()

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if self._modes and self._thread != thread:
            raise RuntimeError("Stream's context should not be initialized.")  # torch up to 2.10
        self._thread = thread
        self._modes.append(Queueing(self._stream))
        self._modes[-1].__enter__()
        if self._stream.pace is Pace.irregular:
            time.sleep(self._stream.device.chance.random() * MOST_DELAY_SECONDS)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._modes.pop().__exit__(kind, value, traceback)


class Point:
    """The end of what a stream had been given at some time."""

    def __init__(self, stream: FakeStream):
        self.stream, self.num = stream, stream.num_queued

    @property
    def is_reached(self) -> bool:
        return self.stream.num_done >= self.num

    def wait(self) -> None:
        device = self.stream.device
        with device.lock:
            self.stream.run_to(self.num)
            device.advance()


class Instant(NamedTuple):
    """Work that takes no time: it is done as soon as nothing is before it, however late its stream."""

    run: Work


class Queueing(TorchFunctionMode):
    """What the thread that is in the stream's context calls for."""

    def __init__(self, stream: FakeStream):
        super().__init__()
        self._stream = stream

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        name = func.__name__
        target = given.get("out", args[0] if args and name.endswith("_") and not name.endswith("__") else None)
        if target is None:
            return func(*args, **given)
        assert isinstance(target, torch.Tensor), f"{name} on a stream writes {target}"
        if target.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed")

        def work() -> None:
            with torch.inference_mode():
                func(*args, **given)

        reads_target = name not in ("copy_", "zero_", "fill_") and "out" not in given
        is_at_once = self._stream.pace is Pace.early
        self._stream.enqueue(*([] if reads_target or is_at_once else [Instant(partial(spoil, target))]), work)
        return target


class FakeEvent:
    """Happened as long as it was never recorded, as on a device. `spoils`: memory that is nobody's once its user has
    recorded this, on any stream but `keeps_on`."""

    def __init__(self, *, enable_timing: bool = False):
        self.point: Point | None = None
        self.spoils: torch.Tensor | None = None
        self.keeps_on: FakeStream | None = None
        self._is_timed, self._seconds = enable_timing, 0.0

    def record(self, stream: FakeStream | None = None) -> None:
        if stream is None:
            raise RuntimeError("an event recorded without a stream is the current device's, which is another one")
        if self.spoils is not None and stream is not self.keeps_on:
            stream.enqueue(partial(spoil, self.spoils))
        if self._is_timed:
            stream.enqueue(Instant(self._stamp))
        self.point = Point(stream)

    def _stamp(self) -> None:
        self._seconds = time.monotonic()

    def query(self) -> bool:
        return self.point is None or self.point.is_reached

    def synchronize(self) -> None:
        if self.point is not None:
            self.point.wait()

    def elapsed_time(self, end: "FakeEvent") -> float:
        """Milliseconds."""
        for event in (self, end):
            if not event._is_timed or event.point is None:
                raise ValueError("Both events must be created with argument 'enable_timing=True' and recorded")
            if not event.query():
                raise RuntimeError("CUDA error: device not ready")
        return (end._seconds - self._seconds) * 1000
