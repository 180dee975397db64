"""Trace of a run: time spans of actions, which the caller writes to a file."""

import time
from collections import deque
from typing import NamedTuple

from .resources import Resource


class Span(NamedTuple):
    """One action, or its part on one resource. `begin` and `end` are `time.monotonic()` in seconds."""

    resource: Resource
    name: str
    begin: float
    end: float


class Trace:
    """The spans of a run. `span` is thread-safe; only one thread may call `take`. `begin` is the creation time."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self._spans: deque[Span] = deque()  # append and popleft are atomic: no span of another thread is lost

    def span(self, resource: Resource, name: str, begin: float, end: float) -> None:
        self._spans.append(Span(resource, name, begin, end))

    def take(self) -> list[Span]:
        """Returns and removes the spans reported since the last call, in report order, not start order."""
        return [self._spans.popleft() for _ in range(len(self._spans))]
