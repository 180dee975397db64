"""Reads extents from disk into host memory in the background: several threads, O_DIRECT `preadv`, a deep queue.

Without O_DIRECT, pages are dropped from the page cache after each read: a checkpoint larger than memory must not evict
everything else.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ..closing import Closing
from ..errors import CheckpointError
from ..plan.shape.extents import Extent
from ..units import MIB
from .read_errors import is_transient, open_files_hint, with_retries
from .transfer import Chunk, ChunkTiming, PendingTransfer, TransferThreads, transfer

log = logging.getLogger(__name__)

RESTORE_FILE = "restore the original file and start the same command again"


class _File(NamedTuple):
    descriptor: int
    is_direct: bool
    num_bytes: int  # when it was opened
    modified_ns: int


Fill = Callable[[int, memoryview], None]  # fills memory with a file's bytes from an offset on, up to the file's end


class Reader(Closing):
    """Reads extents in the background, in submission order. Owns its threads and file descriptors."""

    def __init__(
        self,
        *,
        num_threads: int,
        chunk_bytes: int = 16 * MIB,
        direct: bool = True,
        virtual_files: Mapping[str, Fill] | None = None,
    ):
        """`virtual_files`: by name, functions that generate the contents of files not on disk, on reader threads."""
        self._virtual_files = virtual_files or {}
        self._chunk_bytes = chunk_bytes
        self._direct = direct
        self._threads = TransferThreads(num_threads, "reader")
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}  # by path
        self._first_opened: dict[str, _File] = {}
        self._descriptors: list[int] = []
        self._closing = threading.Event()

    def close(self) -> None:
        self._closing.set()
        self._threads.close()  # before the descriptors: a closed number may be reused by another file
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._files.clear()

    def submit(self, extents: Sequence[Extent], target: memoryview) -> PendingTransfer:
        """Starts filling `target` (page-aligned, writable) at each extent's slot_offset. `target` must stay alive until
        the read is done, and must hold all extents: a short buffer would look like a truncated file."""
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
        """Fills `view`; the file may end after the first `needed` bytes."""
        begin = time.monotonic()
        if (fill := self._virtual_files.get(path)) is not None:
            fill(offset, view)
            return ChunkTiming(begin, time.monotonic(), needed)

        def read_once() -> int:
            file = self._open(path)
            num_bytes = min(len(view), file.num_bytes - offset)
            try:
                return transfer(os.preadv, file.descriptor, [view], offset, num_bytes, is_direct=file.is_direct)
            except OSError as error:
                if error.errno == errno.ESTALE:
                    # The next try opens the file again. The stale descriptor stays open: other threads may use it.
                    with self._lock:
                        if self._files.get(path) is file:
                            del self._files[path]
                raise

        done = with_retries(read_once, path, f"reading {needed:,} bytes at {offset:,}", self._closing.wait)
        file = self._open(path)
        if done < needed:
            raise CheckpointError(
                f"{path}: changed while in use: expected {offset + needed:,} bytes or more, found "
                f"{os.fstat(file.descriptor).st_size:,}; {RESTORE_FILE}"
            )
        if not file.is_direct:
            os.posix_fadvise(file.descriptor, offset, done, os.POSIX_FADV_DONTNEED)
        return ChunkTiming(begin, time.monotonic(), done)

    def _open(self, path: str) -> _File:
        """Opens the file, or returns it if open. Raises CheckpointError if it was replaced since its first use."""
        with self._lock:  # several threads open shards
            if path not in self._files:
                file = _open_file(path, self._direct)
                self._descriptors.append(file.descriptor)
                first = self._first_opened.setdefault(path, file)
                if (file.num_bytes, file.modified_ns) != (first.num_bytes, first.modified_ns):
                    raise CheckpointError(f"{path}: was replaced while in use; {RESTORE_FILE}")
                self._files[path] = file
            return self._files[path]


def _open_file(path: str, direct: bool) -> _File:
    try:
        if direct:
            try:
                return _stat_file(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC), is_direct=True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                log.warning("%s: this file system refuses O_DIRECT; reading through the page cache", path)
        return _stat_file(os.open(path, os.O_RDONLY | os.O_CLOEXEC), is_direct=False)
    except OSError as error:
        if is_transient(error):
            raise
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}{open_files_hint(error)}") from error


def _stat_file(descriptor: int, *, is_direct: bool) -> _File:
    status = os.fstat(descriptor)
    return _File(descriptor, is_direct, status.st_size, status.st_mtime_ns)
