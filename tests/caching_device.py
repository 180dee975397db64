"""A double whose memory behaves like torch's: what was taken once is kept, on the device and pinned, until it is given
back."""

import mmap
import weakref
from dataclasses import dataclass

import torch

from runtime.stream.device import DeviceMemory
from runtime.units import format_bytes
from tests.fake_device import POISON, FakeDevice


@dataclass(kw_only=True)
class Pool:
    """Of one memory. Bytes that were freed stay reserved, and are handed out again before others are taken."""

    total: int
    limit: int | None = None
    reserved: int = 0
    allocated: int = 0

    @property
    def unreserved(self) -> int:
        return self.total - self.reserved

    def take(self, num_bytes: int, error: Exception) -> torch.Tensor:
        if self.allocated + num_bytes > min(self.total, self.limit or self.total):
            raise error
        self.allocated += num_bytes
        self.reserved = max(self.reserved, self.allocated)
        memory = mmap.mmap(-1, num_bytes)
        weakref.finalize(memory, self._freed, num_bytes)  # the tensors that look at it keep it
        return torch.frombuffer(memory, dtype=torch.uint8).fill_(POISON)

    def _freed(self, num_bytes: int) -> None:
        self.allocated -= num_bytes

    def give_back(self) -> None:
        self.reserved = self.allocated


class CachingDevice(FakeDevice):
    def __init__(self, *, device_bytes: int, host_bytes: int):
        super().__init__((False,))
        self.own, self.pinned = Pool(total=device_bytes), Pool(total=host_bytes)

    def compute_buffer(self, num_bytes: int) -> torch.Tensor:
        error = torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {format_bytes(num_bytes)}.")
        return self.own.take(max(num_bytes, 1), error)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        error = MemoryError(f"{format_bytes(num_bytes)} of host memory cannot be pinned (CUDA error: out of memory)")
        return self.pinned.take(max(num_bytes, 1), error)

    def memory(self) -> DeviceMemory:
        return DeviceMemory(unreserved=self.own.unreserved, reserved=self.own.reserved, allocated=self.own.allocated)

    def set_memory_limit(self, num_bytes: int | None) -> None:
        self.own.limit = num_bytes

    def empty_caches(self) -> None:
        self.own.give_back()
        self.pinned.give_back()
