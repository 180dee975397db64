"""Parallel loops over independent items on a shared pool of threads."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Generic, TypeVar

Item = TypeVar("Item")


class SparePool(Generic[Item]):
    """Thread-safe pool of reusable objects."""

    def __init__(self) -> None:
        self._items: list[Item] = []

    def take(self, make: Callable[[], Item]) -> Item:
        """Removes an object from the pool, or makes one if the pool is empty."""
        try:
            return self._items.pop()
        except IndexError:  # testing `if self._items` first would be a race: another thread could pop in between
            return make()

    def give_back(self, item: Item) -> None:
        self._items.append(item)


class HelperThreads:
    """Daemon threads that run calls. Their overhead is a third of that of `concurrent.futures`, which matters for
    matrix products that take a millisecond."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._num_threads, self._starting = 0, Lock()  # the lock prevents that two callers start the same thread

    def submit(self, call: Callable[[], None], num_threads: int) -> None:
        """Queues `call` `num_threads` times, to run on different threads if they are free. `call` must not raise."""
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
    """Calls `function` once per item, on this thread and up to `num_threads - 1` others. Waits until all calls are
    done, then raises the first exception, if any."""
    if num_threads == 1 or len(items) == 1:
        for item in items:
            function(item)
        return
    # Each call is removed from the list when it runs, so threads that start late do not keep items alive.
    calls, results = [partial(function, item) for item in reversed(items)], SimpleQueue[BaseException | None]()

    def run_remaining() -> None:
        while calls:
            try:
                call = calls.pop()
            except IndexError:  # another thread took the last call in between
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
