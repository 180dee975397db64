"""Parallel loops over independent items on a shared pool of threads."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Generic, TypeVar

Item = TypeVar("Item")


class SparePool(Generic[Item]):
    """Thread-safe pool of reusable objects; creates one if none is free."""

    def __init__(self) -> None:
        self._items: list[Item] = []

    def take(self, make: Callable[[], Item]) -> Item:
        try:
            return self._items.pop()
        except IndexError:  # not `if self._items`: another thread could pop in between
            return make()

    def give_back(self, item: Item) -> None:
        self._items.append(item)


class HelperThreads:
    """Daemon threads that run calls. Takes a third of the overhead of `concurrent.futures`, which matters for matrix
    products of a millisecond."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._num_threads, self._starting = 0, Lock()  # two callers must not start the same thread

    def submit(self, call: Callable[[], None], num_threads: int) -> None:
        """Queues `call` for up to `num_threads` threads. It must not raise."""
        if self._num_threads < num_threads:
            with self._starting:
                for number in range(self._num_threads, num_threads):
                    Thread(target=self._serve, name=f"helper-{number}", daemon=True).start()
                    self._num_threads += 1
        for _ in range(num_threads):
            self._calls.put(call)

    def _serve(self) -> None:
        while True:
            self._calls.get()()


@cache
def _helpers() -> HelperThreads:
    return HelperThreads()


def parallel_for(items: Sequence[Item], function: Callable[[Item], None], num_threads: int) -> None:
    """Calls `function` once per item, on this thread and up to `num_threads - 1` others. Returns when all are done,
    then raises the first exception, if any."""
    if num_threads == 1 or len(items) == 1:
        for item in items:
            function(item)
        return
    # Calls leave the list when they run: helpers that start late must not keep items alive.
    calls, results = [partial(function, item) for item in reversed(items)], SimpleQueue[BaseException | None]()

    def run_remaining() -> None:
        while calls:
            try:
                call = calls.pop()
            except IndexError:  # race: another thread took the last call
                return
            try:
                call()
                results.put(None)
            except BaseException as error:
                results.put(error)

    _helpers().submit(run_remaining, min(num_threads, len(items)) - 1)
    run_remaining()
    errors = [error for error in (results.get() for _ in items) if error is not None]
    if errors:
        raise errors[0]
