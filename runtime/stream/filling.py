"""Who fills the memory that compute finds its weights in: this process alone, or all ranks together, each with its
share of every page, in a way that they hand in.
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
    """Bytes on their way, for the engine's thread to wait for; `timing` is of one that was waited for."""

    @property
    def is_done(self) -> bool: ...

    @property
    def timing(self) -> ChunkTiming: ...

    def wait(self) -> None: ...


class WeightReader(Closing):
    """One thread at a time calls it, but for `abandon`. `number` is of a slot, or of memory that is filled once."""

    @abstractmethod
    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Host memory to be filled: where compute finds it, or pinned in front of an accelerator."""

    @abstractmethod
    def fill(self, number: int, extents: Sequence[Extent], buffer: torch.Tensor) -> Transfer:
        """Begins to read extents into their places; returns at once."""

    def load_once(self, number: int, extents: Sequence[Extent], num_bytes: int) -> torch.Tensor:
        """Memory with weights that stay, once they are read."""
        buffer = self.buffer(num_bytes)
        self.fill(number, extents, buffer).wait()
        return buffer

    def gather_timing(self, read: Transfer) -> ChunkTiming | None:
        """When what was read here and waited for was gathered from others; None where nothing is."""
        return None

    def free(self, number: int) -> None:
        """Nobody here looks at what is in the slot any more."""

    def abandon(self) -> None:
        """Nobody waits any more for what has begun."""

    def close(self) -> None:
        """Waits for what has begun."""


class LocalReader(WeightReader):
    """Reads of this process alone."""

    def __init__(self, device: ComputeDevice, reader: Reader):
        self._device, self._reader = device, reader

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return self._device.host_buffer(num_bytes)

    def fill(self, number: int, extents: Sequence[Extent], buffer: torch.Tensor) -> PendingTransfer:
        return self._reader.submit(extents, buffer.numpy().data)

    def load_once(self, number: int, extents: Sequence[Extent], num_bytes: int) -> torch.Tensor:
        """Reads it, or waits for the one of several workers that does."""

        def read(buffer: torch.Tensor) -> None:
            self.fill(number, extents, buffer).wait()

        return self._device.load_host_weights(extents, num_bytes, read)


class SessionResources(AbstractContextManager[object]):
    """What ranks have in common in a session."""

    @abstractmethod
    def weight_reader(self, device: ComputeDevice, reader: Reader, *, count: int) -> WeightReader:
        """Who fills memory of `count` numbers, for this rank."""
