"""Memory that all ranks on a machine see, what they leave there for one another, and how they fill it with weights.

It is a file without a name: rank 0 makes it, the others open it by rank 0's own descriptor, and it goes with the last
of them, however they end. Ranks take buffers out of it in one order, so that each finds the others' where its own is.

A page of weights is whole once all shares have arrived, and its slot may be filled again once all ranks have freed it.
Each rank counts both in cells that the others look at; the order in which slots are taken is that of the schedule, so
that the same slot has the same number everywhere.
"""

import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ..closing import Closing
from ..errors import ConfigError, Interrupted, require
from ..plan.shape.extents import Extent, share_of
from ..store.reader import Reader
from ..store.transfer import ChunkTiming, PendingTransfer
from ..stream.device import ComputeDevice
from ..stream.filling import SessionResources, WeightReader
from ..stream.pinned import Pinnable, pin
from ..units import GIB, round_up
from .ranks import Ranks

Mapped = TypeVar("Mapped", bound=mmap.mmap)
FILE_BYTES = 16 * 1024 * GIB  # of addresses; only what is written takes memory
PAGE_BYTES = 4096
POLL_SECONDS, NUM_POLLS = 1e-4, 20  # between two looks at the cells; looks between two at the other processes


class SharedMemory(Closing, SessionResources):
    """Buffers of one session, which outlive it. Not thread-safe."""

    def __init__(self, ranks: Ranks, descriptor: int):
        self.ranks = ranks
        self._descriptor, self._taken_bytes = descriptor, 0

    def close(self) -> None:
        os.close(self._descriptor)

    @staticmethod
    def create(ranks: Ranks) -> "SharedMemory":
        """Raises ConfigError where a rank cannot see it."""
        require(
            ranks.is_on_one_machine,
            "devices.gather=memory: ranks are on several machines, or in several containers, and see no memory in "
            "common: set devices.gather=collective, or start all ranks on one node (srun --nodes=1)",
        )
        descriptor = os.memfd_create("weightstream-weights")
        os.ftruncate(descriptor, FILE_BYTES)
        return SharedMemory(ranks, descriptor)

    @staticmethod
    def open(ranks: Ranks, place: tuple[int, int]) -> "SharedMemory":
        """What another rank's `place` says. Raises ConfigError."""
        path = "/proc/{}/fd/{}".format(*place)
        try:
            return SharedMemory(ranks, os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise ConfigError(
                f"devices=sharded: rank {ranks.rank} cannot open the memory of rank 0, {path}: {error.strerror}"
            ) from error

    @property
    def address(self) -> tuple[int, int]:
        """The process and the descriptor by which others open it."""
        return os.getpid(), self._descriptor

    def map(self, num_bytes: int, kind: type[Mapped] = mmap.mmap) -> Mapped:
        """Whole pages, zero until somebody writes. Every rank takes the same ones in the same order."""
        size = round_up(max(num_bytes, 1), PAGE_BYTES)
        memory = kind(self._descriptor, size, mmap.MAP_SHARED, offset=self._taken_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._taken_bytes += size
        return memory

    def weight_reader(self, device: ComputeDevice, reader: Reader, *, count: int) -> "SharedReader":
        return SharedReader(self, device, reader, count=count)

    def cells(self, count: int) -> torch.Tensor:
        """int64; each is written by one rank alone, which only ever raises it."""
        return torch.frombuffer(self.map(8 * count), dtype=torch.int64)[:count]


class SharedReader(WeightReader):
    """Reads of all ranks of a machine. Two threads wait, so that the engine's goes on: one until a slot is free
    everywhere, the other until this rank's share is there, to say so."""

    def __init__(self, memory: SharedMemory, device: ComputeDevice, reader: Reader, *, count: int):
        """`count`: of numbers."""
        self._memory, self._device, self._reader = memory, device, reader
        size = memory.ranks.size
        self._rank, self._size = memory.ranks.rank, size
        cells = memory.cells(2 * size * count).view(2, size, count).numpy()
        self._freed, self._arrived = cells[0], cells[1]
        self._num_begun, self._num_freed = [0] * count, [0] * count  # fills and frees, as this rank orders them
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="share-read")
        self._announcing = ThreadPoolExecutor(1, thread_name_prefix="share-there")
        self._is_abandoned = threading.Event()

    def close(self) -> None:
        self._reading.shutdown(wait=True)
        self._announcing.shutdown(wait=True)

    def abandon(self) -> None:
        self._is_abandoned.set()

    def buffer(self, num_bytes: int) -> torch.Tensor:
        memory = self._memory.map(num_bytes, Pinnable)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        if self._device.is_accelerator:
            pin(memory, buffer)
        return buffer

    def fill(self, number: int, extents: Sequence[Extent], buffer: torch.Tensor) -> "SharedTransfer":
        self._num_begun[number] += 1
        count, num_freed = self._num_begun[number], self._num_freed[number]
        share = share_of(extents, self._rank, self._size)

        def read() -> PendingTransfer:
            self._wait(self._freed, number, num_freed)
            return self._reader.submit(share, buffer.numpy().data)

        def mark_arrived(begun: Future[PendingTransfer]) -> PendingTransfer:
            transfer = begun.result()
            transfer.wait()
            self._arrived[self._rank, number] = count
            return transfer

        return SharedTransfer(self, self._announcing.submit(mark_arrived, self._reading.submit(read)), number, count)

    def free(self, number: int) -> None:
        self._num_freed[number] += 1
        self._freed[self._rank, number] = self._num_freed[number]

    def is_complete(self, number: int, count: int) -> bool:
        """Whether all shares of the first `count` fills have arrived."""
        return bool((self._arrived[:, number] >= count).all())

    def wait_complete(self, number: int, count: int) -> None:
        """Raises PeerEnded, or Interrupted, where they may never arrive."""
        self._wait(self._arrived, number, count)

    def _wait(self, cells: NDArray[np.int64], number: int, count: int) -> None:
        num_looks = 0
        while not (cells[:, number] >= count).all():
            if self._is_abandoned.is_set():
                raise Interrupted("start the same command again to go on")
            if num_looks % NUM_POLLS == 0:
                self._memory.ranks.require_running()
            num_looks += 1
            time.sleep(POLL_SECONDS)


class SharedTransfer:
    """A page on its way, of which each rank reads a share; `timing` is of this one's."""

    def __init__(self, filling: SharedReader, begun: Future[PendingTransfer], number: int, count: int):
        self._filling, self._begun, self._number, self._count = filling, begun, number, count

    @property
    def is_done(self) -> bool:
        return self._begun.done() and self._filling.is_complete(self._number, self._count)

    def wait(self) -> None:
        """Returns when all shares are there; raises what this rank's read raised, and what `wait_whole` raises."""
        self._begun.result()
        self._filling.wait_complete(self._number, self._count)

    @property
    def timing(self) -> ChunkTiming:
        return self._begun.result().timing
