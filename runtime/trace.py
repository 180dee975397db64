"""Trace of a run: time spans of actions and passes, which the caller writes to a file."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from .resources import Resource


class Span(NamedTuple):
    """One action, or its part on one resource. `begin` and `end` are `time.monotonic()` in seconds. `num_bytes` of a
    transfer and `num_rows`, the sequences of a lane, are 0 if not known."""

    resource: Resource
    name: str
    begin: float
    end: float
    num_bytes: int = 0
    num_rows: int = 0


class TracedPass(NamedTuple):
    """One pass over the model, named by its phase."""

    name: str
    begin: float
    end: float
    num_rows: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Trace:
    """The spans of a run. `span` is thread-safe; only one thread may call the other methods. `stage_names`: by the
    index of a stage, which the names of actions contain."""

    def __init__(self) -> None:
        self.stage_names: Sequence[str] = ()
        self._spans: deque[Span] = deque()  # append and popleft are atomic: no span of another thread is lost
        self._passes: list[TracedPass] = []

    def span(
        self, resource: Resource, name: str, begin: float, end: float, *, num_bytes: int = 0, num_rows: int = 0
    ) -> None:
        self._spans.append(Span(resource, name, begin, end, num_bytes, num_rows))

    def add_pass(self, traced: TracedPass) -> None:
        self._passes.append(traced)

    def take(self) -> list[Span]:
        """Returns and removes the spans that were added since the last call, in the order of adding."""
        return [self._spans.popleft() for _ in range(len(self._spans))]

    def take_passes(self) -> list[TracedPass]:
        """Returns and removes the passes ended since the last call."""
        passes, self._passes = self._passes, []
        return passes

    def discard(self) -> None:
        """Removes what a trial pass has reported."""
        self.take()
        self.take_passes()
