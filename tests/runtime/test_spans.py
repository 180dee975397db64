"""Spans arrive once each, from any thread; a device's events become the host's seconds."""

import threading
from typing import cast

import pytest
import torch

from runtime.resources import Resource
from runtime.stream.clock import DeviceClock, Moment
from runtime.trace import Span, Trace

NUM_THREADS, NUM_SPANS = 4, 2000


def test_spans_of_all_threads_are_taken_once_each() -> None:
    collected, taken = Trace(), list[Span]()

    def report(thread: int) -> None:
        for number in range(NUM_SPANS):
            collected.span(Resource.disk, f"{thread}.{number}", number, number + 1)

    threads = [threading.Thread(target=report, args=(thread,)) for thread in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += collected.take()
    taken += collected.take()
    assert len(taken) == NUM_THREADS * NUM_SPANS
    assert {span.name for span in taken} == {f"{t}.{n}" for t in range(NUM_THREADS) for n in range(NUM_SPANS)}
    assert collected.take() == []


class FakeEvent:
    """An event of a device whose work is done when the test says so; `happens` in milliseconds of its own clock."""

    def __init__(self, happens: float, is_done: bool = True):
        self.happens, self.is_done = happens, is_done

    def record(self, stream: torch.Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return self.is_done

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.happens - self.happens


def test_a_devices_work_is_told_of_in_host_seconds_once_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it outlasts the pass, and so the reference that it began under."""
    now = iter([50.0, 60.0, 70.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    first, begin, end = FakeEvent(1_000.0), FakeEvent(1_500.0), FakeEvent(13_000.0, is_done=False)
    events = iter([first, begin, end, FakeEvent(11_000.0), FakeEvent(21_000.0)])
    clock, told = DeviceClock(lambda: cast(torch.Event, next(events))), list[tuple[float, float]]()
    clock.end(clock.begin(), lambda began, ended: told.append((began, ended)))
    clock.resolve()
    assert told == []
    end.is_done = True
    clock.resolve()
    assert told == [(50.5, 62.0)]


def test_a_cpus_work_is_told_of_at_once() -> None:
    clock, told = DeviceClock(), list[float]()
    begin: Moment = clock.begin()
    clock.end(begin, lambda began, ended: told.extend((began, ended)))
    assert told[0] == begin
    assert told[1] >= told[0]
    clock.resolve()
    assert len(told) == 2


def test_work_that_ends_on_another_thread_while_it_is_resolved_is_told_of_once() -> None:
    """A disk's threads and those that attend queue copies too."""
    clock, told = DeviceClock(lambda: cast(torch.Event, FakeEvent(0.0))), list[int]()

    def work(thread: int) -> None:
        for number in range(NUM_SPANS):
            clock.end(clock.begin(), lambda began, ended, n=thread * NUM_SPANS + number: told.append(n))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        clock.resolve()
    clock.resolve()
    assert sorted(told) == list(range(NUM_THREADS * NUM_SPANS))
