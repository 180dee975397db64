"""KV pages (keys and values of 16 tokens) in a file, read and written by several threads, with O_DIRECT if possible and
a checksum for each page. The file has no name, so the system deletes it even if the process is killed.

A slot is memory for pages of one layer. A page has a number, which is its index in the layer's part of the file, and a
position, which is its index in a slot. A run is a range of consecutive pages that one system call transfers.
"""

import errno
import fcntl
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..closing import Closing
from ..errors import BudgetError, ConfigError, KVFileError
from ..plan.placement.kv import KVLayout, consecutive_ranges
from ..units import MIB, format_bytes
from .transfer import ChunkTiming, PendingTransfer, TransferThreads, transfer

log = logging.getLogger(__name__)

MAX_VIEWS = 1024  # memory ranges in one system call (IOV_MAX)
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
NEVER_WRITTEN = -1  # instead of a page's checksum
ADVICE = "free disk space, set kv.directory to another disk, or lower policy.num_micro_batches or micro_batch_size"


class KVFile(Closing):
    """KV pages on disk. Owns the file and its threads. Any thread may call its methods, but a page that is being read
    or written may be used again only after `wait`.

    `layout`: the layers and their pages. `directory`: None is the system's temporary directory (TMPDIR). Raises
    BudgetError if the disk has too little space, and ConfigError if the directory cannot be used.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        directory: str | None = None,
        num_threads: int = 4,
        chunk_bytes: int = 4 * MIB,
        direct: bool = True,
    ):
        self._layout, self._chunk_bytes = layout, chunk_bytes
        self.directory = directory or tempfile.gettempdir()
        space = _describe_space(self.directory, layout.tier_bytes)
        if layout.tier_bytes > free_bytes(self.directory):
            raise BudgetError(f"{self.directory}: {space}: {ADVICE}")
        log.debug("%s: %s", self.directory, space)
        self._file = open_unnamed(self.directory)
        self._is_direct = direct and make_direct(self._file, self.directory)
        self._threads = TransferThreads(num_threads, "kv-file")
        self._row = {layer: row for row, layer in enumerate(sorted(layout.page_bytes))}  # of `_checksums`
        # CRC-32 by row and page. The plan counts CHECKSUM_BYTES for each element.
        self._checksums = np.full((len(self._row), layout.num_pages), NEVER_WRITTEN, dtype=np.int64)
        self._zeros = memoryview(bytes(max(map(layout.stride_bytes, layout.page_bytes), default=0)))

    def close(self) -> None:
        self._threads.close()
        self._file.close()

    def read(self, layer: int, positions: Mapping[int, int], slot: memoryview) -> PendingTransfer:
        """Starts reading each page of a layer to position `positions[page]` of the slot. The slot must be aligned to
        memory pages, and must stay alive until the read is done. Pages that were never written are zeros. `wait` raises
        KVFileError if a checksum does not match."""
        stride = self._layout.stride_bytes(layer)
        checksums = self._checksums[self._row[layer]]
        written = [page for page in positions if checksums[page] != NEVER_WRITTEN]
        for page in positions.keys() - set(written):
            _page_view(slot, positions[page], stride)[:] = self._zeros[:stride]
        return self._threads.begin(
            [
                partial(self._read, layer, run, [_page_view(slot, positions[page], stride) for page in run])
                for run in self._runs(written, stride)
            ]
        )

    def write(self, layer: int, positions: Mapping[int, int], slot: memoryview) -> PendingTransfer:
        """Starts writing each page of a layer from position `positions[page]` of the slot, which must not change until
        the write is done. `wait` may raise KVFileError."""
        stride = self._layout.stride_bytes(layer)
        return self._threads.begin(
            [
                partial(self._write, layer, run, [_page_view(slot, positions[page], stride) for page in run])
                for run in self._runs(positions, stride)
            ]
        )

    def forget(self, pages: Sequence[int]) -> None:
        """Marks these pages as never written, in every layer."""
        self._checksums[:, list(pages)] = NEVER_WRITTEN

    def _runs(self, pages: Iterable[int], stride: int) -> Iterator[range]:
        """Divides the pages into runs within the limits of one system call. `stride`: bytes per page."""
        return consecutive_ranges(pages, min(MAX_VIEWS, max(1, self._chunk_bytes // stride)))

    def _read(self, layer: int, run: range, views: list[memoryview]) -> ChunkTiming:
        """Reads a run of pages into `views`, one per page, and verifies checksums."""
        begin, offset = time.monotonic(), self._offset(layer, run[0])
        num_bytes = sum(map(len, views))
        try:
            done = transfer(os.preadv, self._file.fileno(), views, offset, num_bytes, is_direct=self._is_direct)
        except OSError as error:
            raise self._io_error("reading", layer, run, error) from error
        self._drop_page_cache(offset, num_bytes)
        for page, view in zip(run, views, strict=True):
            if done < num_bytes or self._checksum(layer, view) != self._checksums[self._row[layer], page]:
                raise KVFileError(
                    f"{self.directory}: page {page} of layer {layer}, {self._layout.page_bytes[layer]:,} bytes at "
                    f"{self._offset(layer, page):,} of the KV file, does not match its checksum: check the disk, or "
                    "set kv.directory to another one"
                )
        return ChunkTiming(begin, time.monotonic(), done)

    def _write(self, layer: int, run: range, views: list[memoryview]) -> ChunkTiming:
        """Writes a run of pages from `views`, one per page, and keeps their checksums."""
        begin, offset = time.monotonic(), self._offset(layer, run[0])
        num_bytes = sum(map(len, views))
        checksums = [self._checksum(layer, view) for view in views]
        try:
            done = transfer(os.pwritev, self._file.fileno(), views, offset, num_bytes, is_direct=self._is_direct)
            if done < num_bytes:
                raise OSError(errno.EIO, f"only {done:,} bytes were written")
        except OSError as error:
            raise self._io_error("writing", layer, run, error) from error
        self._drop_page_cache(offset, num_bytes)
        self._checksums[self._row[layer], run.start : run.stop] = checksums
        return ChunkTiming(begin, time.monotonic(), done)

    def _checksum(self, layer: int, view: memoryview) -> int:
        return zlib.crc32(view[: self._layout.page_bytes[layer]])

    def _offset(self, layer: int, page: int) -> int:
        return self._layout.offset_bytes(layer) + page * self._layout.stride_bytes(layer)

    def _drop_page_cache(self, offset: int, num_bytes: int) -> None:
        """Starts write-back of the byte range, and drops clean pages from the page cache. Not needed with O_DIRECT."""
        if not self._is_direct:
            os.posix_fadvise(self._file.fileno(), offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def _io_error(self, operation: str, layer: int, run: range, error: OSError) -> KVFileError:
        num_bytes = len(run) * self._layout.stride_bytes(layer)
        message = (
            f"{self.directory}: {operation} {num_bytes:,} bytes at {self._offset(layer, run[0]):,} of the KV file "
            f"(layer {layer}, pages {run[0]} to {run[-1]}) failed: {error.strerror}"
        )
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message += f"; {_describe_space(self.directory, self._layout.tier_bytes)}: {ADVICE}"
        return KVFileError(message)


def _page_view(slot: memoryview, position: int, stride: int) -> memoryview:
    return slot[position * stride : (position + 1) * stride]


def _describe_space(directory: str, num_bytes: int) -> str:
    return f"the KV cache needs up to {format_bytes(num_bytes)} on disk, {format_bytes(free_bytes(directory))} are free"


def open_unnamed(directory: str, *, key: str = "kv.directory") -> BinaryIO:
    """Opens an unbuffered anonymous file with mode 0600 (O_TMPFILE if supported); the caller closes it. Logs a warning
    if `directory`, the value of setting `key`, is on an in-memory file system."""
    try:
        file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise _directory_error(directory, key, error) from error
    if _is_memory(directory):
        log.warning("%s=%s is on an in-memory file system, outside of the memory budgets; use a disk", key, directory)
    return file


def make_direct(file: BinaryIO, directory: str) -> bool:
    """Sets O_DIRECT. Returns False, with a warning, if the file system refuses it."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        log.warning("%s: this file system refuses O_DIRECT; the KV cache goes through the page cache", directory)
        return False
    return True


def free_bytes(directory: str, *, key: str = "kv.directory") -> int:
    try:
        return shutil.disk_usage(directory).free
    except OSError as error:
        raise _directory_error(directory, key, error) from error


def _directory_error(directory: str, key: str, error: OSError) -> ConfigError:
    return ConfigError(f"{key}={directory}: cannot create a file there: {error.strerror}")


def _is_memory(directory: str) -> bool:
    """True if the directory is on a file system in memory."""
    device = Path(directory).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    # A line is: mount ID, parent ID, device number ... " - " type of the file system ...
    mounts = [line.partition(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return any(mount.split()[2] == number and kind.split()[0] in MEMORY_FILE_SYSTEMS for mount, _, kind in mounts)
