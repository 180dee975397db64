"""Threads on a clock of their own: time passes only when all of them wait, and then at once.

A thread is a greenlet here, so what they do comes out the same every time, to the last digit, and ten minutes of a disk
take none. The program's own modules are run, with their threads, queues, pools and clock exchanged for these.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Generic, TypeVar

import pytest
from greenlet import getcurrent, greenlet

T = TypeVar("T")


class VirtualTime:
    """The clock, and whose turn it is. What `run` is given may start threads, sleep and wait; nothing else may."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ready: deque[greenlet] = deque()
        self._sleeping: list[tuple[float, int, greenlet]] = []
        self._numbers = count()
        self._hub: greenlet | None = None

    def run(self, main: Callable[[], T]) -> T:
        """What `main` returns, once it does; threads that still wait then are left to wait. Raises what any of them
        raises, and RuntimeError when all wait for each other."""
        results = list[T]()
        self._hub = getcurrent()
        first = self.start(lambda: results.append(main()))
        while not first.dead:
            if not self._ready:
                if not self._sleeping:
                    raise RuntimeError(f"at {self.now:.6f} s every thread waits for another one")
                self.now, _, sleeper = heapq.heappop(self._sleeping)
                self._ready.append(sleeper)
            self._ready.popleft().switch()
        return results[0]

    def start(self, work: Callable[[], object]) -> greenlet:
        thread = greenlet(work, self._hub)
        self._ready.append(thread)
        return thread

    def sleep(self, seconds: float) -> None:
        heapq.heappush(self._sleeping, (self.now + seconds, next(self._numbers), getcurrent()))
        self._others()

    def wait_in(self, line: deque[greenlet]) -> None:
        """Until somebody takes the waiting thread from the line and wakes it."""
        line.append(getcurrent())
        self._others()

    def wake(self, thread: greenlet) -> None:
        self._ready.append(thread)

    def monotonic(self) -> float:
        return self.now

    def _others(self) -> None:
        assert self._hub is not None, "threads wait inside `run`"
        self._hub.switch()

    def take_over(self, patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """From now on these modules' threads, queues, pools and clocks are virtual."""
        stand_ins = {
            "SimpleQueue": VirtualQueue,
            "Thread": VirtualThread,
            "ThreadPoolExecutor": VirtualPool,
        }
        for module in modules:
            for name, stand_in in stand_ins.items():
                if hasattr(module, name):
                    patch.setattr(module, name, _Made(self, stand_in))
            if getattr(module, "time", None) is time:
                patch.setattr(module, "time", SimpleNamespace(monotonic=self.monotonic))


class _Made:
    """Makes a stand-in of this clock, also where its type is written with a parameter."""

    def __init__(self, clock: VirtualTime, kind: Callable[..., object]):
        self._make = partial(kind, clock)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._make(*args, **kwargs)

    def __getitem__(self, parameter: object) -> "_Made":
        return self


class Gate:
    """Closed until it is opened, for good."""

    def __init__(self, clock: VirtualTime):
        self._clock, self.is_open = clock, False
        self._line: deque[greenlet] = deque()

    def open(self) -> None:
        self.is_open = True
        while self._line:
            self._clock.wake(self._line.popleft())

    def wait(self) -> None:
        while not self.is_open:
            self._clock.wait_in(self._line)


class VirtualQueue(Generic[T]):
    def __init__(self, clock: VirtualTime):
        self._clock, self._items = clock, deque[T]()
        self._line: deque[greenlet] = deque()

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._line:
            self._clock.wake(self._line.popleft())

    def get(self) -> T:
        while not self._items:
            self._clock.wait_in(self._line)
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)


class VirtualThread:
    def __init__(self, clock: VirtualTime, *, target: Callable[[], object], name: str = "", daemon: bool = False):
        self._clock, self._target, self._over = clock, target, Gate(clock)

    def start(self) -> None:
        self._clock.start(self._run)

    def join(self) -> None:
        self._over.wait()

    def _run(self) -> None:
        self._target()
        self._over.open()


class VirtualFuture(Generic[T]):
    def __init__(self, clock: VirtualTime, work: Callable[[], T]):
        self._work, self._over = work, Gate(clock)
        self._results, self._error = list[T](), None

    def run(self) -> None:
        try:
            self._results.append(self._work())
        except Exception as error:
            self._error = error
        self._over.open()

    def done(self) -> bool:
        return self._over.is_open

    def result(self) -> T:
        self._over.wait()
        if self._error is not None:
            raise self._error
        return self._results[0]


class VirtualPool:
    """One worker."""

    def __init__(self, clock: VirtualTime, max_workers: int, thread_name_prefix: str = ""):
        assert max_workers == 1, f"{max_workers} workers: one is what is needed so far"
        self._clock, self._given = clock, VirtualQueue["VirtualFuture[object] | None"](clock)
        self._thread = VirtualThread(clock, target=self._serve)
        self._thread.start()

    def submit(self, work: Callable[..., T], *args: object) -> VirtualFuture[T]:
        future = VirtualFuture[T](self._clock, partial(work, *args))
        self._given.put(future)
        return future

    def shutdown(self, wait: bool = True) -> None:
        self._given.put(None)
        if wait:
            self._thread.join()

    def _serve(self) -> None:
        while (future := self._given.get()) is not None:
            future.run()


class Resource:
    """What does one thing at a time, for whoever comes first."""

    def __init__(self, clock: VirtualTime):
        self._clock, self.busy_seconds, self._is_taken = clock, 0.0, False
        self._line: deque[greenlet] = deque()

    def use(self, seconds: float) -> None:
        if self._is_taken:
            self._clock.wait_in(self._line)  # whoever used it before hands it on
        self._is_taken = True
        self._clock.sleep(seconds)
        self.busy_seconds += seconds
        self._is_taken = bool(self._line)
        if self._line:
            self._clock.wake(self._line.popleft())
