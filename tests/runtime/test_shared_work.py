"""Pieces are done once each, by whichever thread comes, and what goes wrong in one is told."""

import threading
from collections import Counter

import pytest

from runtime.shared_work import share


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_each_is_done_once(num_threads: int) -> None:
    done: Counter[int] = Counter()
    for turn in range(200):
        share(range(turn % 9), lambda item: done.update([item]), num_threads)
    assert done == Counter(item for turn in range(200) for item in range(turn % 9))


def test_others_take_part() -> None:
    met = threading.Barrier(3, timeout=60)
    names: set[str] = set()

    def meet(item: int) -> None:
        met.wait()
        names.add(threading.current_thread().name)

    share(range(3), meet, 3)
    assert len(names) == 3


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_error_is_raised_once_nobody_acts_any_more(num_threads: int) -> None:
    acting: list[int] = []

    def act(item: int) -> None:
        acting.append(item)
        try:
            if item == 2:
                raise ValueError("the third")
        finally:
            acting.remove(item)

    with pytest.raises(ValueError, match="the third"):
        share(range(20), act, num_threads)
    assert not acting
    share(range(2), acting.append, num_threads)  # the threads are still there
    assert sorted(acting) == [0, 1]
