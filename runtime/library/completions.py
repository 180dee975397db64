"""Completions as they finish, and the work behind them, which ends when nobody asks for more."""

from collections.abc import Generator, Iterator
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Generic, TypeAlias, TypeVar

from ..closing import Closing
from ..errors import ClosedError
from ..requests.prompts import Rejected
from ..sequences.sequence import Completion

Result: TypeAlias = Completion | Rejected
T = TypeVar("T")


class ResultStream(Closing, Iterator[T], Generic[T]):
    """An iterator. Whoever stops asking ends the work by `close`, by leaving its `with` block, or by letting go of it,
    as a `for` loop does that is left by `break`; memory is free then. Once another call has taken its place, the next
    item raises ClosedError, so that nobody takes half of the results for all.
    """

    def __init__(self, results: Generator[T, None, None]):
        self._results = results
        self._ended_by: str | None = None

    def __next__(self) -> T:
        if self._ended_by is not None:
            raise ClosedError(f"this stream was ended by {self._ended_by}; its other results are not made")
        return next(self._results)

    def close(self) -> None:
        self._results.close()

    def end(self, by: str) -> None:
        """Stops the work because of something else. A stream that is exhausted stays what it was."""
        if getgeneratorstate(self._results) != GEN_CLOSED:
            self._ended_by = by
            self._results.close()


CompletionStream: TypeAlias = ResultStream[Result]
