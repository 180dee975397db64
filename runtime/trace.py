"""What ran when, span by span: collected here while a run goes on, written by whoever asked for it.

A run without a trace has None in its place: whoever could report a span asks for that first, before it makes a name.
"""

import time
from collections import deque
from typing import NamedTuple

from .resources import Resource


class Span(NamedTuple):
    """One action, or its part on one resource. `begin` and `end` are `time.monotonic()`, in seconds.

    A tuple, not a dataclass: one is made for every action of a run.
    """

    resource: Resource
    name: str
    begin: float
    end: float


class Trace:
    """The spans of a run. `span` may be called on any thread, `take` on one; `begin` is when the trace was made."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self._spans: deque[Span] = deque()  # appending and popping are atomic; exchanging a list would lose spans

    def span(self, resource: Resource, name: str, begin: float, end: float) -> None:
        self._spans.append(Span(resource, name, begin, end))

    def take(self) -> list[Span]:
        """What came in since the last call, in the order in which it was reported, not in which it began."""
        return [self._spans.popleft() for _ in range(len(self._spans))]
