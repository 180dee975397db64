"""Readers of weight pages into host buffers: `LocalReader` reads alone; those of ranks read a share of every page."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ..closing import Closing
from ..plan.shape.extents import Extent
from ..store.reader import Reader
from ..store.transfer import ChunkTiming, PendingTransfer
from .device import ComputeDevice


class Transfer(Protocol):
    """A read in flight. `timing` is valid after `wait`."""

    @property
    def is_done(self) -> bool: ...

    @property
    def timing(self) -> ChunkTiming: ...

    def wait(self) -> None: ...


class WeightReader(Closing):
    """Reads weights into host buffers. Not thread-safe, except `abandon`. `number` identifies a buffer; it must be the
    same on all ranks."""

    @abstractmethod
    def buffer(self, num_bytes: int) -> torch.Tensor:
        """New host memory to read into; pinned if there is an accelerator."""

    @abstractmethod
    def fill(self, number: int, extents: Sequence[Extent], buffer: torch.Tensor) -> Transfer:
        """Starts reading the extents into the buffer, which must stay alive until `wait`. Returns at once."""

    def load_once(self, number: int, extents: Sequence[Extent], num_bytes: int) -> torch.Tensor:
        """Reads resident weights into new memory. Blocks until done."""
        buffer = self.buffer(num_bytes)
        self.fill(number, extents, buffer).wait()
        return buffer

    def gather_timing(self, read: Transfer) -> ChunkTiming | None:
        """Timing of the gather from other ranks for a finished read; None if nothing is gathered."""
        return None

    def free(self, number: int) -> None:
        """Marks the buffer as unused on this rank: it may be filled again once all ranks have freed it."""

    def abandon(self) -> None:
        """Makes waits for pending reads fail. Any thread may call it."""

    def close(self) -> None:
        """Waits for pending reads."""


class LocalReader(WeightReader):
    """Reads without other ranks."""

    def __init__(self, device: ComputeDevice, reader: Reader):
        self._device, self._reader = device, reader

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return self._device.host_buffer(num_bytes)

    def fill(self, number: int, extents: Sequence[Extent], buffer: torch.Tensor) -> PendingTransfer:
        return self._reader.submit(extents, buffer.numpy().data)

    def load_once(self, number: int, extents: Sequence[Extent], num_bytes: int) -> torch.Tensor:
        """Reads the weights, or waits for the process that reads them into shared memory."""

        def read(buffer: torch.Tensor) -> None:
            self.fill(number, extents, buffer).wait()

        return self._device.load_host_weights(extents, num_bytes, read)


class SessionResources(AbstractContextManager[object]):
    """Context manager of resources that ranks share in one session."""

    @abstractmethod
    def weight_reader(self, device: ComputeDevice, reader: Reader, *, count: int) -> WeightReader:
        """This rank's reader of weights, for `count` slots and buffers."""
