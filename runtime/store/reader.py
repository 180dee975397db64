"""Reads extents from disk into host memory in the background: several threads, O_DIRECT `preadv`, a deep queue.

Where a file system refuses O_DIRECT the page cache is used and told at once to forget what was read, so that a
checkpoint larger than memory does not push everything else out.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from ..closing import Closing
from ..errors import CheckpointError
from ..plan.extents import Extent
from ..units import MIB
from .transfer import Chunk, ChunkTiming, PendingTransfer, TransferThreads, transfer

log = logging.getLogger(__name__)


class _File(NamedTuple):
    descriptor: int
    is_direct: bool
    num_bytes: int  # when it was opened


class Reader(Closing):
    """Owns the threads and file descriptors. Reads are served in the order in which they were submitted."""

    def __init__(self, *, num_threads: int, chunk_bytes: int = 16 * MIB, direct: bool = True):
        self._chunk_bytes = chunk_bytes
        self._direct = direct
        self._threads = TransferThreads(num_threads, "reader")
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}  # by path

    def close(self) -> None:
        self._threads.close()
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()

    def submit(self, extents: Sequence[Extent], target: memoryview) -> PendingTransfer:
        """Fills `target` (page-aligned, writable) at each extent's slot_offset. `target` must live until the read is
        done, and hold all of it: a read cut short by a small buffer would look like a file that was."""
        chunks = list[Chunk]()
        for extent in extents:
            end = extent.slot_offset + extent.num_bytes
            assert end <= len(target), f"{extent.file}: {end:,} bytes to read into a buffer of {len(target):,}"
            for start in range(0, extent.num_bytes, self._chunk_bytes):
                length = min(self._chunk_bytes, extent.num_bytes - start)
                view = target[extent.slot_offset + start : extent.slot_offset + start + length]
                needed = min(length, extent.used_bytes - start)
                chunks.append(partial(self._read, extent.file, extent.offset + start, view, needed))
        return self._threads.begin(chunks)

    def _read(self, path: str, offset: int, view: memoryview, needed: int) -> ChunkTiming:
        """Fills `view`, of which the file may lack what lies behind the `needed` bytes."""
        begin = time.monotonic()
        file = self._open(path)
        wanted = min(len(view), file.num_bytes - offset)
        try:
            done = transfer(os.preadv, file.descriptor, [view], offset, wanted, is_direct=file.is_direct)
        except OSError as error:
            raise CheckpointError(f"{path}: reading {wanted:,} bytes at {offset:,} failed: {error.strerror}") from error
        if done < needed:
            found = os.fstat(file.descriptor).st_size
            raise CheckpointError(
                f"{path}: changed while in use: expected {offset + needed:,} bytes or more, found {found:,}; "
                "put the original file back and start the same command again"
            )
        if not file.is_direct:
            os.posix_fadvise(file.descriptor, offset, wanted, os.POSIX_FADV_DONTNEED)
        return ChunkTiming(begin, time.monotonic(), done)

    def _open(self, path: str) -> _File:
        with self._lock:
            if path not in self._files:
                self._files[path] = _open_file(path, self._direct)
            return self._files[path]


def _open_file(path: str, direct: bool) -> _File:
    try:
        if direct:
            try:
                return _file_of(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC), is_direct=True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                log.warning("%s: this file system refuses O_DIRECT; reading through the page cache", path)
        return _file_of(os.open(path, os.O_RDONLY | os.O_CLOEXEC), is_direct=False)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error


def _file_of(descriptor: int, *, is_direct: bool) -> _File:
    return _File(descriptor, is_direct, os.fstat(descriptor).st_size)
