"""Threads that read and write files at given offsets in the background, with timing.

A transfer is divided into chunks, each of which one thread reads or writes.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple

from ..closing import Closing
from ..plan.shape.extents import ALIGNMENT_BYTES
from ..units import round_down


class ChunkTiming(NamedTuple):
    """When a chunk or a whole transfer ran, in seconds of the monotonic clock. Excludes the wait in the queue."""

    begin: float
    end: float
    num_bytes: int


ChunkResult = ChunkTiming | BaseException
Chunk = Callable[[], ChunkTiming]  # reads or writes the chunk


class PendingTransfer:
    """A transfer that may still run. One thread may call `wait`, and must not call it again if it was interrupted."""

    def __init__(self, num_chunks: int, queue: SimpleQueue[ChunkResult]):
        self._num_chunks, self._queue = num_chunks, queue
        self._results: list[ChunkResult] = []

    @property
    def is_done(self) -> bool:
        return len(self._results) + self._queue.qsize() == self._num_chunks

    def wait(self) -> None:
        """Waits for all chunks, then raises the first error if there was one."""
        while len(self._results) < self._num_chunks:  # all, even after an error: other chunks still use the memory
            self._results.append(self._queue.get())
        for result in self._results:
            if isinstance(result, BaseException):
                raise result

    @property
    def timing(self) -> ChunkTiming:
        """The time from the begin of the first chunk to the end of the last chunk. Valid after `wait`."""
        timings = [result for result in self._results if isinstance(result, ChunkTiming)]
        return ChunkTiming(
            begin=min((t.begin for t in timings), default=0.0),
            end=max((t.end for t in timings), default=0.0),
            num_bytes=sum(t.num_bytes for t in timings),
        )


class TransferThreads(Closing):
    """Threads that run chunks in order of `begin`. `close` waits for running chunks and drops chunks still in the
    queue.

    `concurrent.futures` is not used: its lock and condition per chunk take 8 % of the interpreter's time in decode
    passes.
    """

    def __init__(self, num_threads: int, name: str):
        self._queue: SimpleQueue[tuple[Chunk, SimpleQueue[ChunkResult]] | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._serve, name=f"{name}-{index}", daemon=True) for index in range(num_threads)
        ]
        self._lock = Lock()  # orders `begin` and `close`: a chunk queued after the end markers would never run
        self._is_closed = False
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for _ in self._threads:
                self._queue.put(None)  # end marker for one thread
        for thread in self._threads:
            thread.join()

    @property
    def num_waiting(self) -> int:
        """Number of chunks that no thread has taken yet."""
        return self._queue.qsize()

    def begin(self, chunks: Sequence[Chunk]) -> PendingTransfer:
        """Queues the chunks of a transfer. Raises RuntimeError after `close`."""
        results = SimpleQueue[ChunkResult]()
        self.add(chunks, results)
        return PendingTransfer(len(chunks), results)

    def add(self, chunks: Sequence[Chunk], results: SimpleQueue[ChunkResult]) -> None:
        """Queues chunks, whose results go to `results`. Raises RuntimeError after `close`."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("transfer threads are closed")
            for chunk in chunks:
                self._queue.put((chunk, results))

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            chunk, results = item
            try:
                results.put(CancelledError() if self._is_closed else chunk())
            except BaseException as error:
                results.put(error)
            del item, chunk, results  # while this thread waits for the next item, it must not keep memory alive


def begin_together(groups: Sequence[tuple[TransferThreads, Sequence[Chunk]]]) -> PendingTransfer:
    """Queues the chunks of one transfer, each for the threads that must run it. Raises RuntimeError after `close`."""
    if len(groups) == 1:
        threads, chunks = groups[0]
        return threads.begin(chunks)
    results = SimpleQueue[ChunkResult]()
    for threads, chunks in groups:
        threads.add(chunks, results)
    return PendingTransfer(sum(len(chunks) for _, chunks in groups), results)


def transfer(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    views: Sequence[memoryview],
    offset: int,
    num_bytes: int,
    *,
    is_direct: bool,
) -> int:
    """Calls `os.preadv` or `os.pwritev` until `num_bytes` are transferred, or a call transfers nothing. Returns the
    number of bytes transferred. `views`: memory ranges to fill or write, in order. Raises OSError."""
    remaining, done = list(views), 0
    while done < num_bytes:
        count = call(descriptor, remaining, offset + done)
        if is_direct and done + count < num_bytes:
            # O_DIRECT needs aligned offsets: repeat the block in which a short transfer ended.
            count = round_down(count, ALIGNMENT_BYTES)
        if count == 0:
            break
        done += count
        # Drop the views that are complete, and cut the view in which the call ended.
        while remaining and count >= len(remaining[0]):
            count -= len(remaining.pop(0))
        if remaining:
            remaining[0] = remaining[0][count:]
    return done
