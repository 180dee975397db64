"""Work in pieces, done by this thread and by others beside it."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Generic, TypeVar

Item = TypeVar("Item")


class SparePool(Generic[Item]):
    """What threads work with, taken and given back by any of them, so that as much is made as they need at once."""

    def __init__(self) -> None:
        self._items: list[Item] = []

    def take(self, make: Callable[[], Item]) -> Item:
        try:
            return self._items.pop()
        except IndexError:  # asking first would let another thread take it in between
            return make()

    def give_back(self, item: Item) -> None:
        self._items.append(item)


class HelperThreads:
    """Threads that wait for calls to make. A pool of `concurrent.futures` takes three times as long to ask and to
    answer, which counts where a product takes a millisecond."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._num_threads, self._starting = 0, Lock()

    def submit(self, call: Callable[[], None], num_threads: int) -> None:
        """Each of so many threads may make it, sooner or later. It must not raise."""
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
    """The process's own, like torch's threads."""
    return HelperThreads()


def parallel_for(items: Sequence[Item], function: Callable[[Item], None], num_threads: int) -> None:
    """Each is done once, on this thread or on others, which take what is left; returns when all are done. Raises what
    `act` raised first, once nobody acts any more."""
    if num_threads == 1 or len(items) == 1:
        for item in items:
            function(item)
        return
    # Each call holds what it acts on until it is made: helpers that come late then hold nothing.
    calls, answers = [partial(function, item) for item in reversed(items)], SimpleQueue[BaseException | None]()

    def make_what_is_left() -> None:
        while calls:
            try:
                call = calls.pop()
            except IndexError:  # another thread was faster
                return
            try:
                call()
                answers.put(None)
            except BaseException as error:
                answers.put(error)

    _helpers().submit(make_what_is_left, min(num_threads, len(items)) - 1)
    make_what_is_left()
    errors = [error for error in (answers.get() for _ in items) if error is not None]
    if errors:
        raise errors[0]
