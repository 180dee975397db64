"""Threads for positional reads and writes: complete transfers or an error, with timing."""

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from queue import SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple

from ..closing import Closing
from ..plan.shape.extents import ALIGNMENT_BYTES
from ..units import round_down


class ChunkTiming(NamedTuple):
    """Time of a chunk or of a whole transfer, in monotonic seconds, without waiting in the queue."""

    begin: float
    end: float
    num_bytes: int


ChunkResult = ChunkTiming | BaseException
Chunk = Callable[[], ChunkTiming]


class PendingTransfer:
    """Chunks in flight between a file and memory. One thread may wait for it, and not again after an interrupt."""

    def __init__(self, num_chunks: int, queue: SimpleQueue[ChunkResult]):
        self._num_chunks, self._queue = num_chunks, queue
        self._results: list[ChunkResult] = []

    @property
    def is_done(self) -> bool:
        return len(self._results) + self._queue.qsize() == self._num_chunks

    def wait(self) -> None:
        """Waits for all chunks, then raises the first error if there was one."""
        while len(self._results) < self._num_chunks:  # all, even after an error: the others still use the memory
            self._results.append(self._queue.get())
        for result in self._results:
            if isinstance(result, BaseException):
                raise result

    @property
    def timing(self) -> ChunkTiming:
        """Time from the first chunk's begin to the last one's end; valid after `wait`."""
        timings = [result for result in self._results if isinstance(result, ChunkTiming)]
        return ChunkTiming(
            begin=min((t.begin for t in timings), default=0.0),
            end=max((t.end for t in timings), default=0.0),
            num_bytes=sum(t.num_bytes for t in timings),
        )


class TransferThreads(Closing):
    """Threads that run chunks in submission order. `close` waits for chunks in flight and drops the others.

    Not `concurrent.futures`, whose lock and condition per chunk take 8 % of the interpreter's time in decode passes.
    """

    def __init__(self, num_threads: int, name: str):
        self._queue: SimpleQueue[tuple[Chunk, SimpleQueue[ChunkResult]] | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._serve, name=f"{name}-{index}", daemon=True) for index in range(num_threads)
        ]
        self._lock = Lock()  # a chunk queued after the end markers would never run
        self._is_closed = False
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def begin(self, chunks: Sequence[Chunk]) -> PendingTransfer:
        results = SimpleQueue[ChunkResult]()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("transfer threads are closed")
            for chunk in chunks:
                self._queue.put((chunk, results))
        return PendingTransfer(len(chunks), results)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            chunk, results = item
            try:
                results.put(CancelledError() if self._is_closed else chunk())
            except BaseException as error:
                results.put(error)
            del item, chunk, results  # while this thread waits, it must not keep target memory alive


def transfer(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    views: Sequence[memoryview],
    offset: int,
    num_bytes: int,
    *,
    is_direct: bool,
) -> int:
    """Calls `os.preadv` or `os.pwritev` until `num_bytes` are transferred or a call transfers none. Returns the number
    of bytes transferred. Raises OSError."""
    remaining, done = list(views), 0
    while done < num_bytes:
        count = call(descriptor, remaining, offset + done)
        if is_direct and done + count < num_bytes:
            # O_DIRECT needs aligned offsets: repeat the block in which a short transfer ended.
            count = round_down(count, ALIGNMENT_BYTES)
        if count == 0:
            break
        done += count
        while remaining and count >= len(remaining[0]):
            count -= len(remaining.pop(0))
        if remaining:
            remaining[0] = remaining[0][count:]
    return done
