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
from concurrent.futures import ThreadPoolExecutor

from ..closing import Closing
from ..errors import CheckpointError
from ..plan.extents import Extent
from ..units import MIB
from .transfer import ChunkTiming, PendingTransfer, transfer

log = logging.getLogger(__name__)


class Reader(Closing):
    """Owns the threads and file descriptors. Reads are served in the order in which they were submitted."""

    def __init__(self, *, num_threads: int, chunk_bytes: int = 16 * MIB, direct: bool = True):
        self._chunk_bytes = chunk_bytes
        self._direct = direct
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="reader")
        self._lock = threading.Lock()
        self._files: dict[str, tuple[int, bool]] = {}  # path -> descriptor, is it O_DIRECT

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def submit(self, extents: Sequence[Extent], target: memoryview) -> PendingTransfer:
        """Fills `target` (page-aligned, writable) at each extent's slot_offset. `target` must live until the read is
        done."""
        chunks = []
        for extent in extents:
            for start in range(0, extent.num_bytes, self._chunk_bytes):
                length = min(self._chunk_bytes, extent.num_bytes - start)
                view = target[extent.slot_offset + start : extent.slot_offset + start + length]
                needed = min(length, extent.used_bytes - start)
                chunks.append(self._pool.submit(self._read, extent.file, extent.offset + start, view, needed))
        return PendingTransfer(chunks)

    def _read(self, path: str, offset: int, view: memoryview, needed: int) -> ChunkTiming:
        """Fills `view`, of which the file may lack what lies behind the `needed` bytes."""
        begin = time.monotonic()
        descriptor, is_direct = self._open(path)
        size = os.fstat(descriptor).st_size
        wanted = min(len(view), size - offset)
        try:
            done = transfer(os.preadv, descriptor, [view], offset, wanted, is_direct=is_direct)
        except OSError as error:
            raise CheckpointError(f"{path}: reading {wanted:,} bytes at {offset:,} failed: {error.strerror}") from error
        if done < needed:
            raise CheckpointError(
                f"{path}: changed while in use: expected {offset + needed:,} bytes or more, found {size:,}; "
                "put the original file back and start the same command again"
            )
        if not is_direct:
            os.posix_fadvise(descriptor, offset, wanted, os.POSIX_FADV_DONTNEED)
        return ChunkTiming(begin=begin, end=time.monotonic(), num_bytes=done)

    def _open(self, path: str) -> tuple[int, bool]:
        with self._lock:
            if path not in self._files:
                self._files[path] = _open_file(path, self._direct)
            return self._files[path]


def _open_file(path: str, direct: bool) -> tuple[int, bool]:
    try:
        if direct:
            try:
                return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                log.warning("%s: this file system refuses O_DIRECT; reading through the page cache", path)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
