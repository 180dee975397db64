"""Reads extents (aligned byte ranges of files) into host memory in the background, with several threads and O_DIRECT.

If files have copies on other disks, each disk has threads of its own. A thread takes the next chunk as soon as it is
free, so a disk reads as much as it can, and all disks together as fast as the sum of their rates. If files are divided
into stripes, each disk also has a queue of its own, as no other disk has its bytes.

Without O_DIRECT, each read then drops its pages from the page cache, since a checkpoint larger than memory would evict
everything else.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import NamedTuple

from ..closing import Closing
from ..errors import CheckpointError, StorageError
from ..plan.shape.extents import Extent
from ..plan.shape.shapes import StripeRange, Stripes
from ..units import MIB
from .read_errors import PAUSES_SECONDS, is_transient, open_files_hint, with_retries
from .transfer import Chunk, ChunkTiming, PendingTransfer, TransferThreads, begin_together, transfer

log = logging.getLogger(__name__)

GATHER_PARTS = 4  # of many small reads, for each thread: with fewer, the slowest thread would be waited for
MAX_VIEWS = 512  # of one read: Linux takes at most 1,024
RESTORE_FILE = "restore the original file and start the same command again"


class _File(NamedTuple):
    """An open file."""

    descriptor: int
    is_direct: bool
    num_bytes: int  # when it was opened
    modified_ns: int


Fill = Callable[[int, memoryview], None]  # fills memory with a file's bytes from an offset on, up to the file's end


class _Disk:
    """One place of the files: the checkpoint's directory or one of its mirrors."""

    def __init__(self) -> None:
        self.bytes_per_second = inf  # of one thread, an average of recent chunks
        self.has_failed = False

    def add(self, timing: ChunkTiming) -> None:
        """Updates the rate."""
        rate = timing.num_bytes / max(1e-9, timing.end - timing.begin)
        self.bytes_per_second = rate if self.bytes_per_second == inf else 0.8 * self.bytes_per_second + 0.2 * rate


class Reader(Closing):
    """Reads extents in the background, in order of `submit`. Owns its threads and file descriptors."""

    def __init__(
        self,
        *,
        num_threads: int,
        chunk_bytes: int = 16 * MIB,
        direct: bool = True,
        virtual_files: Mapping[str, Fill] | None = None,
        copies: Mapping[str, Sequence[str]] | None = None,
        stripes: Mapping[str, Stripes] | None = None,
    ):
        """`num_threads`: for each disk. `chunk_bytes`: bytes that a thread reads at a time. `direct`: use O_DIRECT if
        possible. `virtual_files`: for files that do not exist on disk, functions that fill memory with their bytes, by
        file name; reader threads call them. `copies`: paths of equal files on other disks, by path. `stripes`: of files
        that are divided among disks, by path."""
        self._virtual_files = virtual_files or {}
        self._copies = copies or {}
        self._disks = [_Disk() for _ in range(1 + max(map(len, self._copies.values()), default=0))]
        self._disk_numbers, self._thread = count(), threading.local()
        self._chunk_bytes = chunk_bytes
        self._direct = direct
        self._num_threads = len(self._disks) * num_threads
        self._stripes = stripes or {}
        num_queues = max((len(each.files) for each in self._stripes.values()), default=1)
        self._queues = [TransferThreads(self._num_threads, "reader") for _ in range(num_queues)]  # one per stripe
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}  # by path
        self._first_opened: dict[str, _File] = {}  # by path: sizes and dates at the first opening
        self._descriptors: list[int] = []  # to close at the end
        self._closing = threading.Event()

    def close(self) -> None:
        self._closing.set()
        for threads in self._queues:
            threads.close()  # before the descriptors: a closed number may be reused by another file
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._files.clear()

    def submit(self, extents: Sequence[Extent], target: memoryview) -> PendingTransfer:
        """Starts reading each extent to its slot_offset in `target`, which must be writable and aligned to memory
        pages. `target` must stay alive until the read is done, and must have space for all extents."""
        chunks: list[list[Chunk]] = [[] for _ in self._queues]
        for extent in extents:
            end = extent.slot_offset + extent.num_bytes
            assert end <= len(target), f"{extent.file}: {end:,} bytes to read into a buffer of {len(target):,}"
            if extent.file in self._stripes:
                for stripe, chunk in self._striped_chunks(extent, target):
                    chunks[stripe].append(chunk)
                continue
            for start in range(0, extent.num_bytes, self._chunk_bytes):
                length = min(self._chunk_bytes, extent.num_bytes - start)
                view = target[extent.slot_offset + start : extent.slot_offset + start + length]
                needed = min(length, extent.used_bytes - start)
                chunks[0].append(partial(self._read, extent.file, extent.offset + start, view, needed))
        return begin_together([*zip(self._queues, chunks, strict=True)])

    def gather(self, extents: Sequence[Extent], target: memoryview) -> PendingTransfer:
        """Like `submit`, for many small extents: each thread reads a part of them, one after another."""
        chunks: list[list[Chunk]] = [[] for _ in self._queues]
        for extent in extents:
            if extent.file in self._stripes:
                for stripe, chunk in self._striped_chunks(extent, target):
                    chunks[stripe].append(chunk)
            else:
                view = target[extent.slot_offset : extent.slot_offset + extent.num_bytes]
                chunks[0].append(partial(self._read, extent.file, extent.offset, view, extent.used_bytes))
        return begin_together(
            [(threads, self._group(each)) for threads, each in zip(self._queues, chunks, strict=True)]
        )

    def _group(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Joins chunks, so that each thread of a queue gets a few."""
        size = max(1, -(-len(chunks) // (GATHER_PARTS * self._num_threads)))
        return [partial(_run_all, chunks[first : first + size]) for first in range(0, len(chunks), size)]

    def _striped_chunks(self, extent: Extent, target: memoryview) -> Iterator[tuple[int, Chunk]]:
        """Yields the reads of an extent of a divided file, each with the number of its stripe. One read fills several
        pieces of the target, which are adjacent in the stripe."""
        stripes = self._stripes[extent.file]
        count = max(1, min(MAX_VIEWS, self._chunk_bytes // stripes.piece_bytes))  # pieces of one read
        ranges: list[list[StripeRange]] = [[] for _ in stripes.files]
        for each in stripes.ranges(extent.offset, extent.num_bytes):
            ranges[each.stripe].append(each)
        for stripe, own in enumerate(ranges):
            for first in range(0, len(own), count):
                pieces = own[first : first + count]
                begins = [extent.slot_offset + piece.begin for piece in pieces]
                views = [target[begin : begin + piece.num_bytes] for begin, piece in zip(begins, pieces, strict=True)]
                needed = sum(max(0, min(piece.num_bytes, extent.used_bytes - piece.begin)) for piece in pieces)
                file, offset = stripes.files[stripe], pieces[0].offset
                yield stripe, partial(self._read_file, file, offset, views, needed, PAUSES_SECONDS)

    def _read(self, path: str, offset: int, view: memoryview, needed: int) -> ChunkTiming:
        """Reads bytes from `offset` on into `view`. The file may end after the first `needed` bytes: an extent is
        rounded up to whole disk blocks."""
        if (fill := self._virtual_files.get(path)) is not None:
            begin = time.monotonic()
            fill(offset, view)
            return ChunkTiming(begin, time.monotonic(), needed)
        places = [path, *self._copies.get(path, ())]
        if len(places) == 1:
            return self._read_file(path, offset, [view], needed, PAUSES_SECONDS)
        disk = self._choose_disk(len(places))
        while True:
            is_last = not {*self._working_disks(len(places))} - {disk}
            try:
                timing = self._read_file(places[disk], offset, [view], needed, PAUSES_SECONDS if is_last else ())
            except (CheckpointError, StorageError) as error:
                self._disks[disk].has_failed = True
                if not (others := self._working_disks(len(places))):
                    if is_last:
                        raise
                    continue  # the others failed meanwhile: this one gets the usual tries
                log.warning("%s: reading goes on from %s", error, Path(places[others[0]]).parent)
                disk = others[0]
            else:
                self._disks[disk].add(timing)
                return timing

    def _choose_disk(self, num_disks: int) -> int:
        """The disk from which this thread reads the next chunk: its own, unless that has failed, or a faster one would
        read all waiting chunks before it had read this one."""
        if not hasattr(self._thread, "disk"):
            self._thread.disk = next(self._disk_numbers) % len(self._disks)
        own, working = self._thread.disk, self._working_disks(num_disks)
        if not working:
            return 0
        rates = [disk.bytes_per_second for disk in self._disks]
        fastest = max(working, key=rates.__getitem__)
        if own not in working or rates[own] * (1 + self._queues[0].num_waiting) < rates[fastest]:
            return fastest
        return own

    def _working_disks(self, num_disks: int) -> list[int]:
        """Those of the first `num_disks` disks that have not failed."""
        return [number for number in range(num_disks) if not self._disks[number].has_failed]

    def _read_file(
        self, path: str, offset: int, views: Sequence[memoryview], needed: int, pauses: Sequence[float]
    ) -> ChunkTiming:
        """Reads from this file into `views`, one after another; see `_read`. `pauses`: seconds before each retry."""
        begin, size = time.monotonic(), sum(map(len, views))

        def read_once() -> int:
            file = self._open(path)
            num_bytes = min(size, file.num_bytes - offset)
            try:
                return transfer(os.preadv, file.descriptor, views, offset, num_bytes, is_direct=file.is_direct)
            except OSError as error:
                if error.errno == errno.ESTALE:
                    # The next try opens the file again. The stale descriptor stays open: other threads may use it.
                    with self._lock:
                        if self._files.get(path) is file:
                            del self._files[path]
                raise

        done = with_retries(read_once, path, f"reading {needed:,} bytes at {offset:,}", self._closing.wait, pauses)
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
        """Returns the open file, which it opens if needed. Raises CheckpointError if the file was replaced since its
        first use."""
        with self._lock:  # several threads open files
            if path not in self._files:
                file = _open_file(path, self._direct)
                self._descriptors.append(file.descriptor)
                first = self._first_opened.setdefault(path, file)
                if (file.num_bytes, file.modified_ns) != (first.num_bytes, first.modified_ns):
                    raise CheckpointError(f"{path}: was replaced while in use; {RESTORE_FILE}")
                self._files[path] = file
            return self._files[path]


def _run_all(chunks: Sequence[Chunk]) -> ChunkTiming:
    """Runs chunks one after another."""
    timings = [chunk() for chunk in chunks]
    return ChunkTiming(timings[0].begin, timings[-1].end, sum(timing.num_bytes for timing in timings))


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
