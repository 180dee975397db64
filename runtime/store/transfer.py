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
    """Time of a chunk or of a whole transfer, in monotonic seconds, without queueing."""

    begin: float
    end: float
    num_bytes: int


ChunkResult = ChunkTiming | BaseException
Chunk = Callable[[], ChunkTiming]


class PendingTransfer:
    """Chunks in flight between a file and memory. One thread may wait for it, and not again after an interrupt."""

    def __init__(self, num_chunks: int, answers: SimpleQueue[ChunkResult]):
        self._num_chunks, self._answers = num_chunks, answers
        self._arrived: list[ChunkResult] = []

    @property
    def is_done(self) -> bool:
        return len(self._arrived) + self._answers.qsize() == self._num_chunks

    def wait(self) -> None:
        """Waits for all chunks, then raises the first error if there was one."""
        while len(self._arrived) < self._num_chunks:
            self._arrived.append(self._answers.get())
        for answer in self._arrived:
            if isinstance(answer, BaseException):
                raise answer

    @property
    def timing(self) -> ChunkTiming:
        """Time from the first chunk's begin to the last one's end; valid after `wait`."""
        timings = [answer for answer in self._arrived if isinstance(answer, ChunkTiming)]
        return ChunkTiming(
            begin=min((t.begin for t in timings), default=0.0),
            end=max((t.end for t in timings), default=0.0),
            num_bytes=sum(t.num_bytes for t in timings),
        )


class TransferThreads(Closing):
    """Threads that run chunks in submission order. `close` waits for chunks in flight and drops the others.

    `concurrent.futures` creates a lock and a condition for each chunk: a twelfth of the interpreter's time in decode
    passes.
    """

    def __init__(self, num_threads: int, name: str):
        self._queue: SimpleQueue[tuple[Chunk, SimpleQueue[ChunkResult]] | None] = SimpleQueue()
        self._threads = [
            Thread(target=self._serve, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
        ]
        self._lock = Lock()  # nothing may be queued behind the end markers
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
        answers = SimpleQueue[ChunkResult]()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("a transfer was begun after its threads had been closed")
            for chunk in chunks:
                self._queue.put((chunk, answers))
        return PendingTransfer(len(chunks), answers)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            chunk, answers = item
            try:
                answers.put(CancelledError() if self._is_closed else chunk())
            except BaseException as error:
                answers.put(error)
            del item, chunk, answers  # while this thread waits, it must not keep target memory alive


def transfer(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    views: Sequence[memoryview],
    offset: int,
    num_bytes: int,
    *,
    is_direct: bool,
) -> int:
    """Calls `os.preadv` or `os.pwritev` until `num_bytes` of the views have gone, or no more go. Returns how many did.
    Raises OSError."""
    left, done = list(views), 0
    while done < num_bytes:
        count = call(descriptor, left, offset + done)
        if is_direct and done + count < num_bytes:
            # A short direct transfer may end between blocks: go on from the last whole one.
            count = round_down(count, ALIGNMENT_BYTES)
        if count == 0:
            break
        done += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
    return done
