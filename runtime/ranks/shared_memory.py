"""Memory that all ranks on a machine see, and what they leave there for one another.

It is a file without a name: rank 0 makes it, the others open it by rank 0's own descriptor, and it goes with the last
of them, however they end. Ranks take buffers out of it in one order, so that each finds the others' where its own is.
"""

import mmap
import os
from contextlib import suppress
from typing import TypeVar

import torch

from ..closing import Closing
from ..errors import ConfigError, require
from ..units import GIB, round_up
from .ranks import Ranks

Mapped = TypeVar("Mapped", bound=mmap.mmap)
FILE_BYTES = 16 * 1024 * GIB  # of addresses; only what is written takes memory
PAGE_BYTES = 4096


class SharedMemory(Closing):
    """Buffers of one session, which outlive it. Not thread-safe."""

    def __init__(self, ranks: Ranks, descriptor: int):
        self.ranks = ranks
        self._descriptor, self._taken_bytes = descriptor, 0

    def close(self) -> None:
        os.close(self._descriptor)

    @staticmethod
    def made(ranks: Ranks) -> "SharedMemory":
        """Raises ConfigError where a rank cannot see it."""
        require(
            ranks.is_on_one_machine,
            "devices.gather=memory: ranks are on several machines, or in several containers, and see no memory in "
            "common: set devices.gather=collective, or start all ranks on one node (srun --nodes=1)",
        )
        descriptor = os.memfd_create("millrace-weights")
        os.ftruncate(descriptor, FILE_BYTES)
        return SharedMemory(ranks, descriptor)

    @staticmethod
    def opened(ranks: Ranks, place: tuple[int, int]) -> "SharedMemory":
        """What another rank's `place` says. Raises ConfigError."""
        path = "/proc/{}/fd/{}".format(*place)
        try:
            return SharedMemory(ranks, os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise ConfigError(
                f"devices=sharded: rank {ranks.rank} cannot open the memory of rank 0, {path}: {error.strerror}"
            ) from error

    @property
    def place(self) -> tuple[int, int]:
        """The process and the descriptor by which others open it."""
        return os.getpid(), self._descriptor

    def mapped(self, num_bytes: int, kind: type[Mapped] = mmap.mmap) -> Mapped:
        """Whole pages, zero until somebody writes. Every rank takes the same ones in the same order."""
        size = round_up(max(num_bytes, 1), PAGE_BYTES)
        memory = kind(self._descriptor, size, mmap.MAP_SHARED, offset=self._taken_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._taken_bytes += size
        return memory

    def cells(self, count: int) -> torch.Tensor:
        """int64; each is written by one rank alone, which only ever raises it."""
        return torch.frombuffer(self.mapped(8 * count), dtype=torch.int64)[:count]
