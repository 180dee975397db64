"""Weights in host memory that the processes of one machine share. A piece is the weights of one call of `get_or_fill`,
such as a stage; the first process that needs a piece reads it from disk.

The memory is an anonymous file (memfd_create(2)), which the kernel frees with its last process. A table at its start
lists the pieces, and marks those that are completely read (full). Each piece has a lock (an open file description lock,
fcntl(2)): a process that uses the piece holds it for reading, one that fills or frees the piece for writing. The kernel
releases locks of a killed process. If it was filling a piece, the piece is not marked, and the next process reads it.
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
COUNT = struct.Struct("<Q")  # number of pieces: the begin of the table
PIECE = struct.Struct("<32sQQQ")  # entry of the table: key, offset, bytes, and 1 if the piece is full
FLOCK = struct.Struct("hhqqi4x")  # C's struct flock on 64 bits
MAX_PIECES = (TABLE_BYTES - COUNT.size) // PIECE.size


def new_shared_memory() -> int:
    """Returns the file descriptor of new, empty shared memory. Processes that inherit it share the memory. Raises
    OSError."""
    descriptor = os.memfd_create("weightstream-weights", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, TABLE_BYTES)
    return descriptor


class _Piece(NamedTuple):
    """Location of a piece."""

    table_offset: int  # of its entry
    offset: int  # of its bytes in the file
    num_bytes: int


class SharedWeights(Closing):
    """The shared weights, as used by one of `num_sharers` processes. The caller owns the inherited `descriptor`.
    Tensors from `get_or_fill` stay valid after `close`."""

    def __init__(self, descriptor: int, num_sharers: int):
        self.num_sharers = num_sharers
        # Locks belong to an open file description. The inherited one is the same in all processes, so open a new one.
        self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        self._users: Counter[int] = Counter()  # number of this process's tensors on each piece, by table offset
        # Reentrant: garbage collection may call `_release` on any thread, even within `get_or_fill`.
        self._mutex = threading.RLock()
        self._is_closed = False

    def close(self) -> None:
        with self._mutex:
            self._is_closed = True
            self._close_if_unused()

    def get_or_fill(
        self, extents: Sequence[Extent], num_bytes: int, fill: Callable[[torch.Tensor], None], *, is_pinned: bool
    ) -> torch.Tensor:
        """Returns page-aligned, read-only uint8 memory of at least `num_bytes` with the bytes of `extents`. Calls
        `fill` to read them, unless another process has read them; waits while another process reads them. Raises errors
        of `fill`, OSError, MemoryError."""
        with self._mutex:
            # The key identifies a piece within one model; all processes use the same model.
            key = hashlib.sha256(repr((num_bytes, *extents)).encode()).digest()
            piece = self._find_or_add(key, num_bytes)
            memory = _MappedPiece(self._descriptor, piece.num_bytes, offset=piece.offset)
            if piece.num_bytes >= HUGE_PAGE_BYTES:
                with suppress(OSError):  # a kernel without huge pages in shared memory
                    memory.madvise(mmap.MADV_HUGEPAGE)
            buffer = torch.frombuffer(memory, dtype=torch.uint8)
            try:
                self._lock(fcntl.F_RDLCK, piece.offset)  # no other process can free the piece now
                if not self._is_full(piece):
                    self._lock(fcntl.F_UNLCK, piece.offset)
                    self._lock(fcntl.F_WRLCK, piece.offset)
                    if not self._is_full(piece):  # another process may have filled it before this one got the lock
                        fill(buffer)
                        self._mark(piece, is_full=True)  # only after `fill`: a killed process must not mark it
                    self._lock(fcntl.F_RDLCK, piece.offset)
            except BaseException:
                if not self._users[piece.table_offset]:
                    self._lock(fcntl.F_UNLCK, piece.offset)
                raise
            self._users[piece.table_offset] += 1
            memory.on_release = partial(self._release, piece)
        if is_pinned:
            pin(memory, buffer)
        return buffer

    def _find_or_add(self, key: bytes, num_bytes: int) -> _Piece:
        """Finds the piece with this key, or adds it to the table."""
        size = round_up(max(num_bytes, 1), mmap.PAGESIZE)
        self._lock(fcntl.F_WRLCK, 0)
        try:
            table = os.pread(self._descriptor, TABLE_BYTES, 0)
            (count,), end = COUNT.unpack_from(table), TABLE_BYTES  # end: where the next piece begins
            for table_offset in range(COUNT.size, COUNT.size + count * PIECE.size, PIECE.size):
                found_key, offset, found_bytes, _ = PIECE.unpack_from(table, table_offset)
                end = round_up(offset + found_bytes, HUGE_PAGE_BYTES)
                if found_key == key:
                    return _Piece(table_offset, offset, found_bytes)
            if count == MAX_PIECES:
                raise OSError(f"the table of shared weights is full: {MAX_PIECES:,} pieces")
            os.ftruncate(self._descriptor, end + size)
            table_offset = COUNT.size + count * PIECE.size
            os.pwrite(self._descriptor, PIECE.pack(key, end, size, 0), table_offset)
            os.pwrite(self._descriptor, COUNT.pack(count + 1), 0)  # last: without it, the entry does not exist
            return _Piece(table_offset, end, size)
        finally:
            self._lock(fcntl.F_UNLCK, 0)

    def _is_full(self, piece: _Piece) -> bool:
        return bool(PIECE.unpack(os.pread(self._descriptor, PIECE.size, piece.table_offset))[3])

    def _mark(self, piece: _Piece, *, is_full: bool) -> None:
        os.pwrite(self._descriptor, struct.pack("<Q", is_full), piece.table_offset + PIECE.size - 8)

    def _release(self, piece: _Piece, memory: mmap.mmap) -> None:
        """Called when a tensor of the piece is deleted. Frees the piece's memory if no process uses it any more."""
        with self._mutex:
            self._users[piece.table_offset] -= 1
            if not self._users[piece.table_offset]:
                with suppress(OSError):  # the lock fails if another process uses the piece
                    self._lock(fcntl.F_WRLCK, piece.offset, blocking=False)
                    self._mark(piece, is_full=False)  # before the bytes are freed, in case this process is killed
                    memory.madvise(mmap.MADV_REMOVE)
                self._lock(fcntl.F_UNLCK, piece.offset)
                del self._users[piece.table_offset]
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_closed and not self._users and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _lock(self, kind: int, offset: int, *, blocking: bool = True) -> None:
        """Sets or releases a lock. It is a lock of one byte: a piece's first byte, or byte 0 for the table."""
        command = fcntl.F_OFD_SETLKW if blocking else fcntl.F_OFD_SETLK
        fcntl.fcntl(self._descriptor, command, FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))


class _MappedPiece(Pinnable):
    """Mapping of a piece; deleted with the last tensor that uses it."""

    on_release: Callable[[mmap.mmap], None] | None = None  # called with this mapping when it is deleted

    def __del__(self) -> None:
        super().__del__()
        if self.on_release is not None and not sys.is_finalizing():  # at exit, locks end with the process
            self.on_release(self)
