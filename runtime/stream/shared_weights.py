"""Weights in host memory shared by the processes of one machine: each piece is read once, by the first that needs it.

The memory is an anonymous file (memfd_create(2)), which the kernel frees with its last process. A table at its start
lists the pieces. Each piece has an open file description lock (fcntl(2)), which ends with its process: a piece that a
killed process was reading stays unmarked, and the next process reads it.
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
COUNT = struct.Struct("<Q")  # number of pieces, before the table
PIECE = struct.Struct("<32sQQQ")  # key, offset, bytes, and 1 if the piece is completely read
FLOCK = struct.Struct("hhqqi4x")  # struct flock, 64 bits
MAX_PIECES = (TABLE_BYTES - COUNT.size) // PIECE.size


def new_shared_memory() -> int:
    """Descriptor of new, empty shared memory; processes that inherit it share it. Raises OSError."""
    descriptor = os.memfd_create("weightstream-weights", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, TABLE_BYTES)
    return descriptor


class _Piece(NamedTuple):
    table_offset: int  # in the table
    offset: int
    num_bytes: int


class SharedWeights(Closing):
    """View of the shared weights in one of `num_sharers` processes. The caller owns the inherited `descriptor`. Tensors
    of `get_or_fill` stay valid after `close`."""

    def __init__(self, descriptor: int, num_sharers: int):
        self.num_sharers = num_sharers
        # Opened anew: locks belong to an open file description, and all processes inherit the same one.
        self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        self._users: Counter[int] = Counter()  # tensors of this process, by table offset
        # Reentrant: garbage collection may release a piece on any thread, even within `get_or_fill`.
        self._mutex = threading.RLock()
        self._is_closed = False

    def close(self) -> None:
        with self._mutex:
            self._is_closed = True
            self._close_if_unused()

    def get_or_fill(
        self, extents: Sequence[Extent], num_bytes: int, fill: Callable[[torch.Tensor], None], *, is_pinned: bool
    ) -> torch.Tensor:
        """Page-aligned, read-only uint8 memory of at least `num_bytes` with `extents`, read by `fill` unless another
        process has read it. Waits while one does. Raises errors of `fill`, OSError, MemoryError."""
        with self._mutex:
            # Identifies a piece within one model; all sharers use the same model.
            key = hashlib.sha256(repr((num_bytes, *extents)).encode()).digest()
            piece = self._find_or_add(key, num_bytes)
            memory = _MappedPiece(self._descriptor, piece.num_bytes, offset=piece.offset)
            if piece.num_bytes >= HUGE_PAGE_BYTES:
                with suppress(OSError):  # a kernel without huge pages in shared memory
                    memory.madvise(mmap.MADV_HUGEPAGE)
            buffer = torch.frombuffer(memory, dtype=torch.uint8)
            try:
                self._lock(fcntl.F_RDLCK, piece.offset)  # while it is held, no other process frees the piece
                if not self._is_full(piece):
                    self._lock(fcntl.F_UNLCK, piece.offset)
                    self._lock(fcntl.F_WRLCK, piece.offset)
                    if not self._is_full(piece):  # another process may have read it before this one got the lock
                        fill(buffer)
                        self._mark(piece, is_full=True)  # after the bytes: a killed reader leaves it unmarked
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
            (count,), end = COUNT.unpack_from(table), TABLE_BYTES
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
            os.pwrite(self._descriptor, COUNT.pack(count + 1), 0)  # last: a process killed before it added nothing
            return _Piece(table_offset, end, size)
        finally:
            self._lock(fcntl.F_UNLCK, 0)

    def _is_full(self, piece: _Piece) -> bool:
        return bool(PIECE.unpack(os.pread(self._descriptor, PIECE.size, piece.table_offset))[3])

    def _mark(self, piece: _Piece, *, is_full: bool) -> None:
        os.pwrite(self._descriptor, struct.pack("<Q", is_full), piece.table_offset + PIECE.size - 8)

    def _release(self, piece: _Piece, memory: mmap.mmap) -> None:
        """Frees the memory of a piece that no process uses."""
        with self._mutex:
            self._users[piece.table_offset] -= 1
            if not self._users[piece.table_offset]:
                with suppress(OSError):  # another process uses it
                    self._lock(fcntl.F_WRLCK, piece.offset, blocking=False)
                    self._mark(piece, is_full=False)  # before the bytes are freed: it must never look full without them
                    memory.madvise(mmap.MADV_REMOVE)
                self._lock(fcntl.F_UNLCK, piece.offset)
                del self._users[piece.table_offset]
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_closed and not self._users and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _lock(self, kind: int, offset: int, *, blocking: bool = True) -> None:
        """Sets or releases the lock of one byte: a piece's first byte, or byte 0 for the table."""
        command = fcntl.F_OFD_SETLKW if blocking else fcntl.F_OFD_SETLK
        fcntl.fcntl(self._descriptor, command, FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))


class _MappedPiece(Pinnable):
    """Mapping of a piece; deleted with the last tensor that uses it."""

    on_release: Callable[[mmap.mmap], None] | None = None

    def __del__(self) -> None:
        super().__del__()
        if self.on_release is not None and not sys.is_finalizing():  # at exit, locks end with the process
            self.on_release(self)
