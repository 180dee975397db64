"""An accelerator made of host memory, whose streams run as late, as early or as irregularly as their events allow.

On a real device a missing wait is a race that is mostly won. Here a copy that may be late is late: it happens when
something that waits for it is waited for. One that may be early overtakes whatever it does not wait for. Fresh memory,
and what is freed or about to be overwritten, is full of NaN, so who comes too early, or too late, reads wrong bytes.
"""

import threading
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from random import Random
from typing import TypeVar

import torch

from runtime.stream.clock import DeviceClock
from runtime.stream.device import ComputeDevice, DeviceMemory
from runtime.units import GIB
from tests.fake_recording import Tape
from tests.fake_streams import POISON, FakeEvent, FakeStream, Pace, Within

T = TypeVar("T")
__all__ = ["POISON", "Careless", "FakeDevice", "FakeEvent", "FakeStream", "Pace"]


class FakeDevice(ComputeDevice):
    """`late`: which streams are, in the order in which they are made, the compute stream first; the others are late.
    With `seed`, all are irregular instead.

    torch's own operations run at once, so compute is never behind the host, unless a test queues its own with
    `compute`: with `defers_compute`, `compute_waits_for` holds up only that.
    """

    def __init__(self, late: tuple[bool, ...] = (), *, defers_compute: bool = False, seed: int | None = None):
        self.lock, self.chance = threading.RLock(), Random(seed)
        paces = (Pace.late if is_late else Pace.early for is_late in late)
        self._paces: Iterator[Pace] = chain(paces, repeat(Pace.late)) if seed is None else repeat(Pace.irregular)
        self._streams: list[FakeStream] = []
        self._defers_compute, self._host = defers_compute, ComputeDevice("cpu")
        self.torch_device, self.is_accelerator, self.library_bytes = torch.device("cpu"), True, 0
        self._compute_stream = self.new_stream()
        self.copy_stream = self.new_stream()
        self.clock = DeviceClock(self._timed_event, self.compute_stream)

    def new_stream(self) -> FakeStream:
        self._streams.append(FakeStream(self, next(self._paces)))
        return self._streams[-1]

    def new_event(self) -> FakeEvent:
        return FakeEvent()

    def _timed_event(self) -> FakeEvent:
        return FakeEvent(enable_timing=True)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return self._host.host_buffer(num_bytes).fill_(POISON)

    def host_pages(self, num_bytes: int) -> torch.Tensor:
        return self.host_buffer(num_bytes)

    def compute_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(max(num_bytes, 1), dtype=torch.uint8).fill_(POISON)

    def on_stream(self, stream: FakeStream) -> Within:
        return Within(stream)

    def compute_stream(self) -> FakeStream:
        return self._compute_stream

    def compute(self, work: Callable[[], object]) -> None:
        self._compute_stream.enqueue(work)

    def compute_waits_for(self, event: FakeEvent) -> None:
        super().compute_waits_for(event)
        if not self._defers_compute:
            self._compute_stream.synchronize()

    @property
    def can_record(self) -> bool:
        return True

    def record_graph(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        tape = Tape()
        with tape:
            outputs = work()
        tape.forget()
        return outputs, tape.replay

    def advance(self) -> None:
        """Lets streams run as far as they like."""
        with self.lock:
            while any(stream.run_if_it_likes() for stream in self._streams):
                pass

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        self.clock.resolve()

    def memory(self) -> DeviceMemory:
        return DeviceMemory(unreserved=GIB, reserved=0, allocated=0)

    def empty_caches(self) -> None:
        pass

    def set_memory_limit(self, num_bytes: int | None) -> None:
        pass

    def peak_reserved_bytes(self) -> int:
        return 0

    def used_bytes(self) -> int:
        return 0

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
