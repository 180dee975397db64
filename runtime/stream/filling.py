"""Who fills the memory that compute finds its weights in: this process alone, or all ranks together, each with its
share of every page, straight into memory that all of them see or by one collective for a page.

A page is whole once all shares have arrived, and its slot may be filled again once all ranks have freed it. Each rank
counts both in cells that the others look at; the order in which slots are taken is that of the schedule, so that the
same slot has the same number everywhere.
"""

import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..closing import Closing
from ..errors import Interrupted
from ..plan.shape.extents import Extent, even_shares_of, share_of
from ..ranks.collectives import Collectives, Gathering
from ..ranks.shared_memory import SharedMemory
from ..store.reader import Reader
from ..store.transfer import ChunkTiming, PendingTransfer
from .device import ComputeDevice
from .pinned import Pinnable, pin

LOOK_SECONDS = 0.02  # between two looks for a stop, or for one that has ended
POLL_SECONDS, NUM_POLLS = 1e-4, 20  # between two looks at the cells; looks between two at the other processes


class Transfer(Protocol):
    """Bytes on their way, for the engine's thread to wait for; `timing` is of one that was waited for."""

    @property
    def is_done(self) -> bool: ...

    @property
    def timing(self) -> ChunkTiming: ...

    def wait(self) -> None: ...


class Filling(Closing):
    """One thread at a time calls it, but for `abandon`. `number` is of a slot, or of memory that is filled once."""

    @abstractmethod
    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Host memory to be filled: where compute finds it, or pinned in front of an accelerator."""

    @abstractmethod
    def fill(self, number: int, extents: Sequence[Extent], buffer: torch.Tensor) -> Transfer:
        """Begins to read extents into their places; returns at once."""

    def staying(self, number: int, extents: Sequence[Extent], num_bytes: int) -> torch.Tensor:
        """Memory with weights that stay, once they are read."""
        buffer = self.buffer(num_bytes)
        self.fill(number, extents, buffer).wait()
        return buffer

    def free(self, number: int) -> None:
        """Nobody here looks at what is in the slot any more."""

    def abandon(self) -> None:
        """Nobody waits any more for what has begun."""

    def close(self) -> None:
        """Waits for what has begun."""


class OwnFilling(Filling):
    """Reads of this process alone."""

    def __init__(self, device: ComputeDevice, reader: Reader):
        self._device, self._reader = device, reader

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return self._device.host_buffer(num_bytes)

    def fill(self, number: int, extents: Sequence[Extent], buffer: torch.Tensor) -> PendingTransfer:
        return self._reader.submit(extents, buffer.numpy().data)

    def staying(self, number: int, extents: Sequence[Extent], num_bytes: int) -> torch.Tensor:
        """Reads it, or waits for the one of several workers that does."""

        def read(buffer: torch.Tensor) -> None:
            self.fill(number, extents, buffer).wait()

        return self._device.host_weights(extents, num_bytes, read)


class SharedFilling(Filling):
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
        self._telling = ThreadPoolExecutor(1, thread_name_prefix="share-there")
        self._is_abandoned = threading.Event()

    def close(self) -> None:
        self._reading.shutdown(wait=True)
        self._telling.shutdown(wait=True)

    def abandon(self) -> None:
        self._is_abandoned.set()

    def buffer(self, num_bytes: int) -> torch.Tensor:
        memory = self._memory.mapped(num_bytes, Pinnable)
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

        def tell(begun: Future[PendingTransfer]) -> PendingTransfer:
            transfer = begun.result()
            transfer.wait()
            self._arrived[self._rank, number] = count
            return transfer

        return SharedTransfer(self, self._telling.submit(tell, self._reading.submit(read)), number, count)

    def free(self, number: int) -> None:
        self._num_freed[number] += 1
        self._freed[self._rank, number] = self._num_freed[number]

    def is_whole(self, number: int, count: int) -> bool:
        """Whether all shares of the first `count` fills have arrived."""
        return bool((self._arrived[:, number] >= count).all())

    def wait_whole(self, number: int, count: int) -> None:
        """Raises PeerEnded, or Interrupted, where they may never arrive."""
        self._wait(self._arrived, number, count)

    def _wait(self, cells: NDArray[np.int64], number: int, count: int) -> None:
        num_looks = 0
        while not (cells[:, number] >= count).all():
            if self._is_abandoned.is_set():
                raise Interrupted("start the same command again to go on")
            if num_looks % NUM_POLLS == 0:
                self._memory.ranks.require_going()
            num_looks += 1
            time.sleep(POLL_SECONDS)


class SharedTransfer:
    """A page on its way, of which each rank reads a share; `timing` is of this one's."""

    def __init__(self, filling: SharedFilling, told: Future[PendingTransfer], number: int, count: int):
        self._filling, self._told, self._number, self._count = filling, told, number, count

    @property
    def is_done(self) -> bool:
        return self._told.done() and self._filling.is_whole(self._number, self._count)

    def wait(self) -> None:
        """Returns when all shares are there; raises what this rank's read raised, and what `wait_whole` raises."""
        self._told.result()
        self._filling.wait_whole(self._number, self._count)

    @property
    def timing(self) -> ChunkTiming:
        return self._told.result().timing


class GatheredFilling(Filling):
    """Reads of all ranks, wherever they are, each its share of every page, into memory of this process.

    Shares are of one size, in whole blocks; the few blocks that do not divide by the ranks each of them reads itself. A
    slot is this process' own, so it may be filled again once compute here has left it. A thread of its own comes to
    the collectives, in the order in which pages are asked for, which is the schedule's and so the same everywhere.
    """

    def __init__(self, collectives: Collectives, device: ComputeDevice, reader: Reader):
        self._collectives, self._device, self._reader = collectives, device, reader
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shares-gathered")

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def abandon(self) -> None:
        self._collectives.abandon()

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return self._device.host_buffer(num_bytes)

    def fill(self, number: int, extents: Sequence[Extent], buffer: torch.Tensor) -> "GatheredTransfer":
        ranks = self._collectives.ranks
        own, begin, end = even_shares_of(extents, ranks.rank, ranks.size)
        reading = self._reader.submit(own, buffer.numpy().data)
        return GatheredTransfer(self._collectives, self._thread.submit(self._gather, reading, buffer[begin:end]))

    def _gather(self, reading: PendingTransfer, pieces: torch.Tensor) -> tuple[ChunkTiming, ChunkTiming]:
        try:
            reading.wait()
        except BaseException:
            self._collectives.abandon()  # the next page is not this one
            raise
        begin = time.monotonic()
        if len(pieces):
            self._collectives.gather(pieces)
        return reading.timing, ChunkTiming(begin, time.monotonic(), pieces.nbytes)


class GatheredTransfer:
    """A page on its way, of which each rank reads a share; `timing` is of this one's."""

    def __init__(self, collectives: Collectives, told: Future[tuple[ChunkTiming, ChunkTiming]]):
        self._ranks, self._told = collectives.ranks, told

    @property
    def is_done(self) -> bool:
        return self._told.done()

    def wait(self) -> None:
        """Returns when all shares are there; raises what this rank's read raised, PeerEnded, and Interrupted."""
        while not wait_for([self._told], LOOK_SECONDS).done:
            self._ranks.require_going()
        self._told.result()

    @property
    def timing(self) -> ChunkTiming:
        return self._told.result()[0]

    @property
    def gathered(self) -> ChunkTiming:
        """When the page was gathered, once it was waited for."""
        return self._told.result()[1]


Together: TypeAlias = SharedMemory | Collectives | Gathering


def filling_of(together: Together | None, device: ComputeDevice, reader: Reader, *, count: int) -> Filling:
    """Who fills memory of `count` numbers. None, or a part of the model: this process reads alone."""
    if together is None or isinstance(together, Gathering):
        return OwnFilling(device, reader)
    if isinstance(together, Collectives):
        return GatheredFilling(together, device, reader)
    return SharedFilling(together, device, reader, count=count)
