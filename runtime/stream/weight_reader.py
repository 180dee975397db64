"""Readers of weights into host buffers. `LocalReader` reads without other ranks. The readers of several ranks (package
`ranks`) each read a part, and gather the parts of other ranks.

A session is the time in which ranks compute one plan together.
"""

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
    """Reads weights into host buffers. Not thread-safe, except `abandon`. Arguments `number` identify a buffer; a
    buffer has the same number on all ranks."""

    @abstractmethod
    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Returns new host memory for reads; pinned if there is an accelerator."""

    @abstractmethod
    def fill(self, number: int, extents: Sequence[Extent], buffer: torch.Tensor) -> Transfer:
        """Starts reading the extents into the buffer, which must stay alive until `Transfer.wait`. Returns at once."""

    def load_once(self, number: int, extents: Sequence[Extent], num_bytes: int) -> torch.Tensor:
        """Reads weights that stay in memory into a new buffer. Blocks until done."""
        buffer = self.buffer(num_bytes)
        self.fill(number, extents, buffer).wait()
        return buffer

    def gather_timing(self, read: Transfer) -> ChunkTiming | None:
        """Returns the time of gathering other ranks' parts of a finished read; None if nothing is gathered."""
        return None

    def free(self, number: int) -> None:
        """Marks the buffer as unused on this rank. It may be filled again when all ranks have called this."""

    def abandon(self) -> None:
        """Makes waiting for pending reads fail. Any thread may call it."""

    def close(self) -> None:
        """Waits for pending reads."""


class LocalReader(WeightReader):
    """Reads all bytes itself. Only weights that stay in memory may have been read by another process on this host."""

    def __init__(self, device: ComputeDevice, reader: Reader):
        self._device, self._reader = device, reader

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return self._device.host_buffer(num_bytes)

    def fill(self, number: int, extents: Sequence[Extent], buffer: torch.Tensor) -> PendingTransfer:
        return self._reader.submit(extents, buffer.numpy().data)

    def load_once(self, number: int, extents: Sequence[Extent], num_bytes: int) -> torch.Tensor:
        """Reads weights that stay in memory. If processes share them, only one reads, and the others wait for it."""

        def read(buffer: torch.Tensor) -> None:
            self.fill(number, extents, buffer).wait()

        return self._device.load_host_weights(extents, num_bytes, read)


class SessionResources(AbstractContextManager[object]):
    """Context manager of what ranks share during a session, such as shared memory. Makes their readers of weights."""

    @abstractmethod
    def weight_reader(self, device: ComputeDevice, reader: Reader, *, count: int) -> WeightReader:
        """Returns this rank's reader of weights, for `count` buffers."""
