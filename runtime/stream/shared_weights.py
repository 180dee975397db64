"""Weights in host memory that the processes of one machine have in common: each piece is read once, by whoever wants it
first, and lies there once.

The memory is a file without a name (memfd_create(2)), which the kernel frees with the last process that has it,
however that ends. A table at its begin says which piece lies where. Locks of open file descriptions (fcntl(2)) go with
their process: of one that is killed as it reads a piece, the piece is not there, and the next one reads it.
"""

import fcntl
import hashlib
import mmap
import os
import struct
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from ..closing import Closing
from ..plan.shape.extents import Extent
from ..units import MIB, round_up
from .pinned import HUGE_PAGE_BYTES, Pinnable, pin

TABLE_BYTES = 8 * MIB
COUNT = struct.Struct("<Q")  # of pieces, in front of them
PIECE = struct.Struct("<32sQQQ")  # key, offset, bytes, and whether all of it is there
FLOCK = struct.Struct("hhqqi4x")  # struct flock, 64 bits
MOST_PIECES = (TABLE_BYTES - COUNT.size) // PIECE.size


def new_shared_memory() -> int:
    """The descriptor of such memory, without a piece; processes that inherit it share it. Raises OSError."""
    descriptor = os.memfd_create("weightstream-weights", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, TABLE_BYTES)
    return descriptor


class _Piece(NamedTuple):
    place: int  # in the table
    offset: int
    num_bytes: int


class SharedWeights(Closing):
    """The pieces that one of `num_sharers` processes sees. `descriptor` is inherited, and stays the caller's. What
    `filled` gave is valid until nobody looks at it any more, also behind `close`."""

    def __init__(self, descriptor: int, num_sharers: int):
        self.num_sharers = num_sharers
        # Opened anew: locks belong to this opening, and not to the one that was inherited by all.
        self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        self._users: Counter[int] = Counter()  # of this process, by place in the table
        self._mutex = threading.RLock()  # a piece may be let go of by any thread, and in the midst of taking another
        self._is_closed = False

    def close(self) -> None:
        with self._mutex:
            self._is_closed = True
            self._close_if_unused()

    def get_or_fill(
        self, extents: Sequence[Extent], num_bytes: int, fill: Callable[[torch.Tensor], None], *, is_pinned: bool
    ) -> torch.Tensor:
        """uint8 memory of `num_bytes` or some more, page-aligned, that holds `extents`: as another process has read
        them, or as `fill` does. Waits for another that is about it. Nobody may write into it. Raises what `fill`
        raises, OSError, and MemoryError where it cannot be pinned."""
        with self._mutex:
            # What tells pieces of one model apart; those who share have one model.
            key = hashlib.sha256(repr((num_bytes, *extents)).encode()).digest()
            piece = self._find_or_add(key, num_bytes)
            memory = _MappedPiece(self._descriptor, piece.num_bytes, offset=piece.offset)
            if piece.num_bytes >= HUGE_PAGE_BYTES:
                with suppress(OSError):  # a kernel without huge pages in shared memory
                    memory.madvise(mmap.MADV_HUGEPAGE)
            buffer = torch.frombuffer(memory, dtype=torch.uint8)
            try:  # it is filled if it is not, and others are kept from giving it back
                self._lock(fcntl.F_RDLCK, piece.offset)
                if not self._is_full(piece):
                    self._lock(fcntl.F_UNLCK, piece.offset)
                    self._lock(fcntl.F_WRLCK, piece.offset)
                    if not self._is_full(piece):
                        fill(buffer)
                        self._mark(piece, is_full=True)
                    self._lock(fcntl.F_RDLCK, piece.offset)
            except BaseException:
                if not self._users[piece.place]:
                    self._lock(fcntl.F_UNLCK, piece.offset)
                raise
            self._users[piece.place] += 1
            memory.on_release = partial(self._release, piece)
        if is_pinned:
            pin(memory, buffer)
        return buffer

    def _find_or_add(self, key: bytes, num_bytes: int) -> _Piece:
        """The piece of this key, with a place in the memory if it had none."""
        size = round_up(max(num_bytes, 1), mmap.PAGESIZE)
        self._lock(fcntl.F_WRLCK, 0)
        try:
            table = os.pread(self._descriptor, TABLE_BYTES, 0)
            (count,), end = COUNT.unpack_from(table), TABLE_BYTES
            for place in range(COUNT.size, COUNT.size + count * PIECE.size, PIECE.size):
                found, offset, found_bytes, _ = PIECE.unpack_from(table, place)
                end = round_up(offset + found_bytes, HUGE_PAGE_BYTES)
                if found == key:
                    return _Piece(place, offset, found_bytes)
            if count == MOST_PIECES:
                raise OSError(f"more than {MOST_PIECES:,} pieces of weights are shared")
            os.ftruncate(self._descriptor, end + size)
            place = COUNT.size + count * PIECE.size
            os.pwrite(self._descriptor, PIECE.pack(key, end, size, 0), place)
            os.pwrite(self._descriptor, COUNT.pack(count + 1), 0)  # last: whoever is killed has changed nothing before
            return _Piece(place, end, size)
        finally:
            self._lock(fcntl.F_UNLCK, 0)

    def _is_full(self, piece: _Piece) -> bool:
        return bool(PIECE.unpack(os.pread(self._descriptor, PIECE.size, piece.place))[3])

    def _mark(self, piece: _Piece, *, is_full: bool) -> None:
        os.pwrite(self._descriptor, struct.pack("<Q", is_full), piece.place + PIECE.size - 8)

    def _release(self, piece: _Piece, memory: mmap.mmap) -> None:
        """Gives the memory of a piece back that no process has any more."""
        with self._mutex:
            self._users[piece.place] -= 1
            if not self._users[piece.place]:
                with suppress(OSError):  # another process has it
                    self._lock(fcntl.F_WRLCK, piece.offset, waits=False)
                    self._mark(piece, is_full=False)
                    memory.madvise(mmap.MADV_REMOVE)
                self._lock(fcntl.F_UNLCK, piece.offset)
                del self._users[piece.place]
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_closed and not self._users and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _lock(self, kind: int, offset: int, *, waits: bool = True) -> None:
        """Takes, changes or gives back the lock of one byte, which stands for a piece, or at 0 for the table."""
        how = fcntl.F_OFD_SETLKW if waits else fcntl.F_OFD_SETLK
        fcntl.fcntl(self._descriptor, how, FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))


class _MappedPiece(Pinnable):
    """A piece in the memory of this process, until nobody looks at it any more."""

    on_release: Callable[[mmap.mmap], None] | None = None

    def __del__(self) -> None:
        super().__del__()
        if self.on_release is not None and not sys.is_finalizing():  # then locks go with the process
            self.on_release(self)
