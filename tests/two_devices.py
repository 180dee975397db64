"""torch's accelerator with two devices, made of host memory, for `ComputeDevice` itself to run on.

Work is done when it is queued. What it checks is whose device things are taken of: as in torch, each thread has a
current device, 0 until it says otherwise; an event that is recorded without a stream takes the current device's; time
between events of two devices is an error; and a stream object remembers what to go back to, so that it is entered once
at a time.
"""

import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace, TracebackType

import pytest
import torch

from runtime.stream.device import ComputeDevice
from runtime.units import GIB

NUM_DEVICES = 2


class FakeAccelerator:
    """`implied` holds each device that was taken because it was the current one; `memory` says what is free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._threads, self._lock = threading.local(), threading.Lock()
        self._num_streams, self.now = 0, 0.0
        self.limits: dict[int, float] = {}  # shares of a device's memory
        self.settings: list[str] = []  # of the allocator
        self.implied, self.made = set[int](), Counter[str]()
        self.is_within = threading.Event()  # a copy on a stream that was entered
        self._default = [self._stream_of(index) for index in range(NUM_DEVICES)]
        self.capability, self.type = (8, 0), "cuda"
        self.module = SimpleNamespace(
            mem_get_info=lambda device: (GIB * (1 + self.index_of(device)), 4 * GIB),
            set_per_process_memory_fraction=lambda share, device: self.limits.update({self.index_of(device): share}),
            get_device_name=lambda device: "Fake",
            get_device_capability=lambda device: self.capability,
        )
        self._install(monkeypatch)

    @property
    def current(self) -> int:
        return getattr(self._threads, "index", 0)

    def take_current(self) -> int:
        self.implied.add(self.current)
        return self.current

    def index_of(self, device: torch.device | int | None) -> int:
        index = device.index if isinstance(device, torch.device) else device
        return self.take_current() if index is None else index

    def set_current(self, index: int) -> None:
        self._threads.index = index

    def current_stream(self, device: torch.device | None = None) -> "FakeStream":
        return getattr(self._threads, "streams", {}).get(index := self.index_of(device), self._default[index])

    def set_stream(self, stream: "FakeStream") -> None:
        self._threads.streams = {**getattr(self._threads, "streams", {}), stream.device_index: stream}

    def _stream_of(self, index: int) -> "FakeStream":
        with self._lock:
            self._num_streams += 1
        return FakeStream(self, index, self._num_streams)

    def _new_stream(
        self,
        device: torch.device | None = None,
        *,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int | None = None,
    ) -> "FakeStream":
        if stream_id is None:
            return self._stream_of(self.index_of(device))
        assert device_index is not None, "torch wants all three"
        assert device_type is not None, "torch wants all three"
        return FakeStream(self, device_index, stream_id)

    def _new_event(self, device: torch.device | None = None, *, enable_timing: bool = False) -> "FakeEvent":
        self.made["timed events" if enable_timing else "events"] += 1
        return FakeEvent(self, is_timed=enable_timing)

    def _install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        empty: Callable[..., torch.Tensor] = torch.empty

        def fake_empty(
            *sizes: object, device: torch.device | None = None, pin_memory: bool = False, **rest: object
        ) -> torch.Tensor:
            """Not pinned, and on no device."""
            if device is None or device.type != self.type:
                return empty(*sizes, device=device, **rest)
            self.index_of(device)
            return empty(*sizes, **rest)

        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", self.settings.append, raising=False)
        monkeypatch.setattr(torch, "empty", fake_empty)
        monkeypatch.setattr(torch, "Stream", self._new_stream)
        monkeypatch.setattr(torch, "Event", self._new_event)
        monkeypatch.setattr(torch, "get_device_module", lambda device: self.module)
        for name, function in self._functions().items():
            monkeypatch.setattr(torch.accelerator, name, function)

    def _functions(self) -> dict[str, Callable[..., object]]:
        return {
            "is_available": lambda: True,
            "current_accelerator": lambda: torch.device(self.type),
            "device_count": lambda: NUM_DEVICES,
            "current_device_index": lambda: self.current,
            "current_stream": self.current_stream,
            "synchronize": lambda device=None: self.index_of(device) and None,
            "memory_allocated": lambda device=None: self.index_of(device) * 0,
            "memory_reserved": lambda device=None: self.index_of(device) * 0,
            "max_memory_allocated": lambda device=None: 100 + self.index_of(device),
            "max_memory_reserved": lambda device=None: 200 + self.index_of(device),
            "empty_cache": lambda: None,
            "empty_host_cache": lambda: None,
        }


class FakeStream:
    device_type = 1

    def __init__(self, accelerator: FakeAccelerator, device_index: int, stream_id: int):
        self._accelerator, self.device_index, self.stream_id = accelerator, device_index, stream_id
        self._before: tuple[int, FakeStream] | None = None

    def __enter__(self) -> "FakeStream":
        if self._before is not None:
            raise RuntimeError("Stream's context should not be initialized.")  # torch up to 2.10
        accelerator = self._accelerator
        self._before = (accelerator.current, accelerator.current_stream(torch.device("cuda", self.device_index)))
        accelerator.set_current(self.device_index)
        accelerator.set_stream(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._before is not None, "left before it was entered"
        index, stream = self._before
        self._before = None
        self._accelerator.set_stream(stream)
        self._accelerator.set_current(index)

    def wait_event(self, event: "FakeEvent") -> None:
        assert event.device_index in (None, self.device_index), "a stream waits for its own device's events"

    def synchronize(self) -> None:
        pass


class FakeEvent:
    def __init__(self, accelerator: FakeAccelerator, *, is_timed: bool):
        self._accelerator, self._is_timed = accelerator, is_timed
        self.device_index: int | None = None
        self.milliseconds = 0.0

    def record(self, stream: FakeStream | None = None) -> None:
        recorded = stream if stream is not None else self._accelerator.current_stream()
        if self.device_index not in (None, recorded.device_index):
            raise RuntimeError("Event device does not match recording stream's device")
        self.device_index = recorded.device_index
        self._accelerator.now += 1.0
        self.milliseconds = self._accelerator.now

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "FakeEvent") -> float:
        if not (self._is_timed and other._is_timed) or self.device_index != other.device_index:
            raise RuntimeError("CUDA error: invalid resource handle")
        return other.milliseconds - self.milliseconds


class SecondDevice(ComputeDevice):
    """`cuda:1` as `ComputeDevice` makes it, but that models find their tensors on the CPU."""

    def __init__(self) -> None:
        super().__init__("cuda:1")
        self.torch_device = torch.device("cpu", 1)
