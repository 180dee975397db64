"""An accelerator made of host memory, whose streams run as late, or as early, as their events allow.

On a real device a missing wait is a race that is mostly won. Here a copy that may be late is late: it happens when
something that waits for it is waited for. One that may be early overtakes whatever it does not wait for. Fresh memory
is full of NaN, so whoever comes too early, or too late, reads wrong bytes.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat

import torch

from runtime.stream.clock import DeviceClock, Then
from runtime.stream.device import ComputeDevice, Part
from runtime.stream.device_memory import DeviceMemory
from runtime.units import GIB

POISON = 0xFF  # four of them are a NaN


class FakeStream:
    """Work in order. A late stream runs only when it is waited for, an early one whenever it can."""

    def __init__(self, device: "FakeDevice", *, is_late: bool):
        self.device, self._is_late = device, is_late
        self._queue: deque[Callable[[], None] | Point] = deque()
        self.num_queued = self.num_done = 0

    def enqueue(self, work: "Callable[[], None] | Point") -> None:
        with self.device.lock:
            self._queue.append(work)
            self.num_queued += 1
        self.device.advance()

    def wait_event(self, event: "FakeEvent") -> None:
        """As on a device: what the event stands for now, whatever it is recorded for later."""
        if event.point is not None:
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

    def run_if_early(self) -> bool:
        """Runs one piece of work unless that waits for another stream."""
        if self._is_late or not self._queue or (isinstance(self._queue[0], Point) and not self._queue[0].is_reached):
            return False
        self._run_next()
        return True

    def _run_next(self) -> None:
        work = self._queue.popleft()
        if not isinstance(work, Point):
            work()
        self.num_done += 1


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


class FakeEvent:
    """Happened as long as it was never recorded, as on a device."""

    def __init__(self) -> None:
        self.point: Point | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        assert stream is not None, "an event of a copy belongs on the copy's stream"
        self.point = Point(stream)

    def synchronize(self) -> None:
        if self.point is not None:
            self.point.wait()


class FakeDevice(ComputeDevice):
    """`late`: which streams are, in the order in which they are made, the compute stream first; the others are late.

    torch's own operations run at once, so compute is never behind the host, unless a test queues its own with
    `compute`: with `defers_compute`, `compute_waits_for` holds up only that.
    """

    def __init__(self, late: tuple[bool, ...] = (), *, defers_compute: bool = False):
        self.lock = threading.RLock()
        self._late: Iterator[bool] = chain(late, repeat(True))
        self._streams: list[FakeStream] = []
        self._defers_compute, self._memory = defers_compute, ComputeDevice("cpu")
        self.torch_device, self.is_accelerator = torch.device("cpu"), True
        self._compute_stream = self.new_stream()
        self.copy_stream = self.new_stream()
        self.clock = DeviceClock()

    def new_stream(self) -> FakeStream:
        self._streams.append(FakeStream(self, is_late=next(self._late)))
        return self._streams[-1]

    def new_event(self) -> FakeEvent:
        return FakeEvent()

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return self._memory.host_buffer(num_bytes).fill_(POISON)

    def host_pages(self, num_bytes: int) -> torch.Tensor:
        return self.host_buffer(num_bytes)

    def compute_buffer(self, num_bytes: int) -> torch.Tensor:
        return self.host_buffer(num_bytes)

    def copy_all(self, parts: Sequence[Part], *, on: FakeStream, after: FakeEvent, then: Then | None = None) -> None:
        def work() -> None:
            begin = time.monotonic()
            with torch.inference_mode():  # whoever waits for it, also behind the last pass
                for part in parts:
                    part.target.copy_(part.source)
            if then is not None:
                then(begin, time.monotonic())

        self.wait(on, after)
        on.enqueue(work)

    def clear_all(self, targets: Sequence[torch.Tensor], *, on: FakeStream, after: FakeEvent) -> None:
        self.wait(on, after)
        for target in targets:
            on.enqueue(target.zero_)

    def compute_stream(self) -> FakeStream:
        return self._compute_stream

    def compute(self, work: Callable[[], None]) -> None:
        self._compute_stream.enqueue(work)

    def compute_waits_for(self, event: FakeEvent) -> None:
        super().compute_waits_for(event)
        if not self._defers_compute:
            self._compute_stream.synchronize()

    def advance(self) -> None:
        """Lets early streams run as far as they can."""
        with self.lock:
            while any(stream.run_if_early() for stream in self._streams):
                pass

    def settle(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def memory(self) -> DeviceMemory:
        return DeviceMemory(unreserved=GIB, reserved=0, allocated=0)

    def give_back(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 0


class Careless(FakeDevice):
    """One whose stream of the number `forgetful` waits for nobody: for tests of the tests."""

    def __init__(self, late: tuple[bool, ...], *, forgetful: int, defers_compute: bool = False):
        self._forgetful = forgetful
        super().__init__(late, defers_compute=defers_compute)

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        if self._streams.index(stream) != self._forgetful:
            super().wait(stream, event)
