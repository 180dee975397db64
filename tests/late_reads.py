"""Reads and writes of files without threads of their own, and what waits for them likewise: as late as somebody waits
for it, or as early as it is asked for.

A thread that reads is nearly always done in time. One that is late finds whoever does not wait for it, and there is
nothing to hand over between threads.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from threading import RLock
from typing import Any
from unittest import mock

from runtime.closing import Closing
from runtime.store import kv_file, reader
from runtime.store.transfer import Chunk, ChunkResult, PendingTransfer
from runtime.stream import kv, slots


class LateTransfer(PendingTransfer):
    """Any thread may wait for it."""

    def __init__(self, chunks: Sequence[Chunk]):
        super().__init__(len(chunks), SimpleQueue[ChunkResult]())
        self._chunks, self._lock = deque(chunks), RLock()

    def run(self) -> None:
        with self._lock:
            while self._chunks:
                self._queue.put(_answer(self._chunks.popleft()))

    def wait(self) -> None:
        self.run()
        super().wait()


def _answer(chunk: Chunk) -> ChunkResult:
    try:
        return chunk()
    except BaseException as error:
        return error


class NoThreads(Closing):
    """In the place of `TransferThreads`."""

    def __init__(self, *, is_late: bool):
        self._is_late = is_late

    def begin(self, chunks: Sequence[Chunk]) -> PendingTransfer:
        pending = LateTransfer(chunks)
        if not self._is_late:
            pending.run()
        return pending

    def close(self) -> None:
        """What nobody waited for is dropped."""


class LateFuture(Future[Any]):
    """Done by whoever asks what came of it."""

    def __init__(self, executor: "NoExecutor", work: Callable[[], object]):
        super().__init__()
        self._executor, self.work = executor, work

    def result(self, timeout: float | None = None) -> Any:
        self._executor.run_to(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._executor.run_to(self)
        return super().exception(timeout)


class NoExecutor:
    """In the place of a `ThreadPoolExecutor` of one thread: in order."""

    def __init__(self, *, is_late: bool):
        self._is_late, self._lock = is_late, RLock()
        self._given = deque[LateFuture]()

    def submit(self, function: Callable[..., object], *args: object) -> LateFuture:
        future = LateFuture(self, partial(function, *args))
        with self._lock:
            self._given.append(future)
        if not self._is_late:
            self.run_to(future)
        return future

    def run_to(self, future: LateFuture) -> None:
        with self._lock:
            while not future.done():
                self._run(self._given.popleft())

    def _run(self, given: LateFuture) -> None:
        try:
            given.set_result(given.work())
        except BaseException as error:
            given.set_exception(error)

    def shutdown(self, wait: bool) -> None:
        with self._lock:
            while self._given:
                self._run(self._given.popleft())


@contextmanager
def files_are_read(*, is_late: bool) -> Iterator[None]:
    """By readers and files of keys and values that are made within."""

    def threads(num_threads: int, name: str) -> NoThreads:
        return NoThreads(is_late=is_late)

    def executor(num_threads: int, thread_name_prefix: str) -> NoExecutor:
        assert num_threads == 1, f"{thread_name_prefix}: several threads keep no order"
        return NoExecutor(is_late=is_late)

    with ExitStack() as stack:
        for module in (reader, kv_file):
            stack.enter_context(mock.patch.object(module, "TransferThreads", threads))
        for module in (slots, kv):
            stack.enter_context(mock.patch.object(module, "ThreadPoolExecutor", executor))
        yield
