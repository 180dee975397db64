"""Memory shared by all ranks on a machine, and a reader that fills it with weights.

The memory is an anonymous file: rank 0 creates it, other ranks open rank 0's descriptor, and the kernel frees it with
the last process. All ranks allocate buffers in the same order, so the buffers have the same offsets on all ranks.

Streamed weights are read in pages (parts of a layer). A slot is a buffer for one page, which is refilled many times.
Each rank reads a share, about 1/N, of every page. A page is complete when the shares of all ranks have arrived; its
slot may be refilled when all ranks have freed it. Each rank publishes, in shared counters, how many fills of each slot
have arrived and how many it has freed. Slots are used in the schedule's order, so their numbers are equal on all ranks.
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
from ..plan.shape.extents import Extent, reader_share
from ..store.reader import Reader
from ..store.transfer import ChunkTiming, PendingTransfer
from ..stream.device import ComputeDevice
from ..stream.pinned import Pinnable, pin
from ..stream.weight_reader import SessionResources, WeightReader
from ..units import GIB, round_up
from .ranks import POLL_SECONDS, POLLS_PER_CHECK, STOPPED, Ranks

Mapped = TypeVar("Mapped", bound=mmap.mmap)
FILE_BYTES = 16 * 1024 * GIB  # the file is sparse: only parts that are written take memory
PAGE_BYTES = 4096


class SharedMemory(Closing, SessionResources):
    """Memory in which all ranks allocate shared buffers, for one session. Buffers stay valid after `close`. Not
    thread-safe."""

    def __init__(self, ranks: Ranks, descriptor: int):
        self.ranks = ranks
        self._descriptor, self._mapped_bytes = descriptor, 0  # the next buffer begins at this offset of the file

    def close(self) -> None:
        os.close(self._descriptor)

    @staticmethod
    def create(ranks: Ranks) -> "SharedMemory":
        """Creates the memory on rank 0. Raises ConfigError if ranks are on several machines."""
        require(
            ranks.is_on_one_machine,
            "devices.gather=memory: ranks are on several machines or in several containers, without common memory: set "
            "devices.gather=collective, or start all ranks on one node (srun --nodes=1)",
        )
        descriptor = os.memfd_create("weightstream-weights")
        os.ftruncate(descriptor, FILE_BYTES)
        return SharedMemory(ranks, descriptor)

    @staticmethod
    def open(ranks: Ranks, address: tuple[int, int]) -> "SharedMemory":
        """Opens rank 0's memory by its `address`. Raises ConfigError."""
        path = "/proc/{}/fd/{}".format(*address)
        try:
            return SharedMemory(ranks, os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise ConfigError(
                f"devices=sharded: rank {ranks.rank} cannot open rank 0's shared memory {path}: {error.strerror}"
            ) from error

    @property
    def address(self) -> tuple[int, int]:
        """(process id, descriptor) by which other ranks open this memory."""
        return os.getpid(), self._descriptor

    def map(self, num_bytes: int, kind: type[Mapped] = mmap.mmap) -> Mapped:
        """Allocates and maps a zeroed buffer. All ranks must make the same calls, with equal sizes, in the same
        order."""
        size = round_up(max(num_bytes, 1), PAGE_BYTES)
        memory = kind(self._descriptor, size, mmap.MAP_SHARED, offset=self._mapped_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._mapped_bytes += size
        return memory

    def weight_reader(self, device: ComputeDevice, reader: Reader, *, count: int) -> "SharedReader":
        return SharedReader(self, device, reader, count=count)

    def counters(self, count: int) -> torch.Tensor:
        """Allocates shared int64 counters. They need no lock: only one rank writes each, and they never decrease."""
        return torch.frombuffer(self.map(8 * count), dtype=torch.int64)[:count]


class SharedReader(WeightReader):
    """Reads this rank's share of every page directly into shared memory. One thread waits until a slot is free on all
    ranks and starts the read; another waits for the read's end and announces it to other ranks."""

    def __init__(self, memory: SharedMemory, device: ComputeDevice, reader: Reader, *, count: int):
        """`count`: number of slots and of buffers that are filled only once, which are numbered together."""
        self._memory, self._device, self._reader = memory, device, reader
        size = memory.ranks.size
        self._rank, self._size = memory.ranks.rank, size
        counters = memory.counters(2 * size * count).view(2, size, count).numpy()
        self._freed, self._arrived = counters[0], counters[1]  # number of fills by (rank, slot or buffer)
        self._num_begun, self._num_freed = [0] * count, [0] * count  # number of fills by slot or buffer, on this rank
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="share-read")
        self._announcing = ThreadPoolExecutor(1, thread_name_prefix="share-announce")
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
        num_fills, num_freed = self._num_begun[number], self._num_freed[number]
        share = reader_share(extents, self._rank, self._size)

        def read() -> PendingTransfer:
            self._wait(self._freed, number, num_freed)  # other ranks' compute may still read this slot
            return self._reader.submit(share, buffer.numpy().data)

        def mark_arrived(begun: Future[PendingTransfer]) -> PendingTransfer:
            transfer = begun.result()
            transfer.wait()  # other ranks may read the bytes as soon as the counter says that they arrived
            self._arrived[self._rank, number] = num_fills
            return transfer

        return SharedTransfer(
            self, self._announcing.submit(mark_arrived, self._reading.submit(read)), number, num_fills
        )

    def free(self, number: int) -> None:
        self._num_freed[number] += 1
        self._freed[self._rank, number] = self._num_freed[number]

    def is_complete(self, number: int, num_fills: int) -> bool:
        """True if all ranks' shares of the first `num_fills` fills of slot `number` have arrived."""
        return bool((self._arrived[:, number] >= num_fills).all())

    def wait_complete(self, number: int, num_fills: int) -> None:
        """Waits until `is_complete`. Raises PeerEnded if another rank ended, Interrupted if the run stops."""
        self._wait(self._arrived, number, num_fills)

    def _wait(self, counters: NDArray[np.int64], number: int, num_fills: int) -> None:
        """Waits until the counters of slot `number` are at least `num_fills` on all ranks."""
        num_polls = 0
        while not (counters[:, number] >= num_fills).all():
            if self._is_abandoned.is_set():
                raise Interrupted(STOPPED)
            if num_polls % POLLS_PER_CHECK == 0:
                self._memory.ranks.require_running()
            num_polls += 1
            time.sleep(POLL_SECONDS)


class SharedTransfer:
    """The read of a page into slot `number`, of which each rank reads a share. `num_fills`: number of fills of this
    slot, including this one. `timing` covers only this rank's share."""

    def __init__(self, reader: SharedReader, read: Future[PendingTransfer], number: int, num_fills: int):
        self._reader, self._read, self._number, self._num_fills = reader, read, number, num_fills

    @property
    def is_done(self) -> bool:
        return self._read.done() and self._reader.is_complete(self._number, self._num_fills)

    def wait(self) -> None:
        """Waits for all shares. Raises errors of this rank's read and those of `wait_complete`."""
        self._read.result()
        self._reader.wait_complete(self._number, self._num_fills)

    @property
    def timing(self) -> ChunkTiming:
        return self._read.result().timing
