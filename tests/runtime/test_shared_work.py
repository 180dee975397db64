"""Pieces are done once each, by whichever thread comes, and what goes wrong in one is told."""

import gc
import threading
import weakref
from collections import Counter

import pytest

from runtime.shared_work import parallel_for


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_each_is_done_once(num_threads: int) -> None:
    done: Counter[int] = Counter()
    for turn in range(200):
        parallel_for(range(turn % 9), lambda item: done.update([item]), num_threads)
    assert done == Counter(item for turn in range(200) for item in range(turn % 9))


def test_it_returns_when_others_are_done_too() -> None:
    has_begun, may_end, has_returned = threading.Event(), threading.Event(), threading.Event()

    def act(_: int) -> None:
        if threading.current_thread() is caller:
            assert has_begun.wait(60), "a helper takes the other"
        else:
            has_begun.set()
            assert may_end.wait(60)

    def call() -> None:
        parallel_for(range(2), act, 2)
        has_returned.set()

    caller = threading.Thread(target=call)
    caller.start()
    assert has_begun.wait(60)
    assert not has_returned.wait(0.1)
    may_end.set()
    caller.join(60)
    assert has_returned.is_set()


def test_others_take_part() -> None:
    met = threading.Barrier(3, timeout=60)
    names: set[str] = set()

    def meet(item: int) -> None:
        met.wait()
        names.add(threading.current_thread().name)

    parallel_for(range(3), meet, 3)
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
        parallel_for(range(20), act, num_threads)
    assert not acting
    parallel_for(range(2), acting.append, num_threads)  # the threads are still there
    assert sorted(acting) == [0, 1]


def test_helpers_that_come_late_hold_nothing() -> None:
    """What a product made must not stay in memory until they do."""
    may_end, num_waiting = threading.Event(), threading.Semaphore(0)

    def wait(_: int) -> None:
        num_waiting.release()
        may_end.wait()

    num_threads = 1 + max(1, sum(thread.name.startswith("helper-") for thread in threading.enumerate()))
    waiting = threading.Thread(target=parallel_for, args=(range(num_threads), wait, num_threads))
    waiting.start()
    for _ in range(num_threads):
        num_waiting.acquire()  # all helpers are busy
    made: set[int] = set()
    parallel_for(range(2), made.add, 2)
    assert made == {0, 1}
    reference = weakref.ref(made)
    del made
    gc.collect()
    is_held = reference() is not None
    may_end.set()
    waiting.join()
    assert not is_held
