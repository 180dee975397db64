"""Trace of a run: time spans of actions, such as reading weights. The caller writes them to a file."""

import time
from collections import deque
from typing import NamedTuple

from .resources import Resource


class Span(NamedTuple):
    """The time of one action on one resource. `begin` and `end` are `time.monotonic()` in seconds."""

    resource: Resource
    name: str
    begin: float
    end: float


class Trace:
    """The spans of a run. `span` is thread-safe; only one thread may call `take`. `begin` is the creation time."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self._spans: deque[Span] = deque()  # append and popleft are atomic, so other threads may add spans

    def span(self, resource: Resource, name: str, begin: float, end: float) -> None:
        self._spans.append(Span(resource, name, begin, end))

    def take(self) -> list[Span]:
        """Returns and removes the spans that were added since the last call, in the order of adding."""
        return [self._spans.popleft() for _ in range(len(self._spans))]
