"""Pieces of a product, done by this thread and by others beside it."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Spares(Generic[Item]):
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


def share(items: Sequence[Item], act: Callable[[Item], None], num_threads: int) -> None:
    """Each is done once, on this thread or on others, which take what is left; returns when all are done."""
    left = list(reversed(items))

    def do_what_is_left() -> None:
        while left:
            try:
                item = left.pop()
            except IndexError:  # another thread was faster
                return
            act(item)

    num_helpers = min(num_threads, len(items)) - 1
    helpers = [_helpers(num_helpers).submit(do_what_is_left) for _ in range(num_helpers)]
    do_what_is_left()
    for helper in helpers:
        if not helper.cancel():  # one that has not begun has nothing to do
            helper.result()


@cache
def _helpers(num_threads: int) -> ThreadPoolExecutor:
    """The process's own, like torch's: made at their first use, idle between uses, ended by the interpreter."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="products")
