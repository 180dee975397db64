"""An accelerator whose streams take time, in front of a disk that does: virtual time, so nothing is slow or shaky.

Copies in one direction share one engine, as on most cards: of several streams whoever comes first goes first, part by
part. No byte is read or copied: whether the right ones arrive is what `fake_device` is for.
"""

from collections.abc import Callable, Sequence

import torch

from runtime.store.reader import Reader
from runtime.store.transfer import ChunkTiming
from runtime.stream.clock import DeviceClock, TimingCallback
from runtime.stream.device import ComputeDevice, CopyPart
from runtime.units import GIB
from tests.virtual_time import Gate, Resource, VirtualQueue, VirtualTime


class TimedStream:
    """Does its work in order, on a thread of its own."""

    def __init__(self, clock: VirtualTime):
        self._clock, self._given = clock, VirtualQueue[Callable[[], None]](clock)
        clock.start(self._serve)

    def enqueue(self, work: Callable[[], None]) -> None:
        self._given.put(work)

    def wait_event(self, event: "TimedEvent") -> None:
        """As on a device: what the event stands for now, whatever it is recorded for later."""
        self.enqueue(event.gate.wait)

    def synchronize(self) -> None:
        gate = Gate(self._clock)
        self.enqueue(gate.open)
        gate.wait()

    def _serve(self) -> None:
        while True:
            self._given.get()()


class TimedEvent:
    """Happened as long as it was never recorded, as on a device."""

    def __init__(self, clock: VirtualTime):
        self._clock, self.gate = clock, Gate(clock)
        self.gate.open()

    def record(self, stream: TimedStream | None = None) -> None:
        assert stream is not None, "an event of a copy belongs on the copy's stream"
        self.gate = Gate(self._clock)
        stream.enqueue(self.gate.open)

    def synchronize(self) -> None:
        self.gate.wait()


class TimedDevice(ComputeDevice):
    """`seconds_per_byte` over the link, in either direction. Compute takes what `compute` is told."""

    def __init__(self, clock: VirtualTime, seconds_per_byte: float):
        self.time, self._seconds_per_byte = clock, seconds_per_byte
        self._memory, self._its_own = ComputeDevice("cpu"), set[int]()
        self.torch_device, self.is_accelerator = torch.device("cpu"), True
        self.link_in, self.link_out, self.computing = (Resource(clock) for _ in range(3))
        self._compute_stream, self.copy_stream = self.new_stream(), self.new_stream()
        self.clock = DeviceClock()

    def new_stream(self) -> TimedStream:
        return TimedStream(self.time)

    def new_event(self) -> TimedEvent:
        return TimedEvent(self.time)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return self._memory.host_buffer(num_bytes)

    def host_pages(self, num_bytes: int) -> torch.Tensor:
        return self.host_buffer(num_bytes)

    def compute_buffer(self, num_bytes: int) -> torch.Tensor:
        buffer = self.host_buffer(num_bytes)
        self._its_own.add(buffer.untyped_storage().data_ptr())
        return buffer

    def copy_all(
        self, parts: Sequence[CopyPart], *, on: TimedStream, after: TimedEvent, then: TimingCallback | None = None
    ) -> None:
        begun = list[float]()

        def copied(part: CopyPart) -> None:
            link = self.link_in if part.target.untyped_storage().data_ptr() in self._its_own else self.link_out
            link.use(part.source.nbytes * self._seconds_per_byte)

        self.wait(on, after)
        on.enqueue(lambda: begun.append(self.time.now))
        for part in parts:
            on.enqueue(lambda part=part: copied(part))
        if then is not None:
            on.enqueue(lambda: then(begun[0], self.time.now))

    def compute_stream(self) -> TimedStream:
        return self._compute_stream

    def compute(self, seconds: float) -> None:
        self._compute_stream.enqueue(lambda: self.computing.use(seconds))

    def synchronize(self) -> None:
        self._compute_stream.synchronize()
        self.copy_stream.synchronize()

    def free_bytes(self) -> int:
        return GIB

    def used_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0


class TimedReader(Reader):
    """A disk that serves one chunk after the other, whatever the number of threads."""

    def __init__(self, clock: VirtualTime, seconds_per_byte: float, *, num_threads: int = 2, chunk_bytes: int):
        super().__init__(num_threads=num_threads, chunk_bytes=chunk_bytes)
        self._time, self._seconds_per_byte, self.disk = clock, seconds_per_byte, Resource(clock)

    def _read(self, path: str, offset: int, view: memoryview, needed: int) -> ChunkTiming:
        begin = self._time.now
        self.disk.use(len(view) * self._seconds_per_byte)
        return ChunkTiming(begin, self._time.now, needed)
