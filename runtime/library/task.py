"""Tasks of the library: convert inputs to requests, window by window, and yield results as they finish."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import islice
from typing import ClassVar, Generic, TypeAlias, TypeVar

from ..closing import Closing
from ..errors import ClosedError, require
from ..model.loading import LoadedModel
from ..sequences.sequence import Completion, Request
from .prompt import Prompt

T = TypeVar("T")
V = TypeVar("V")
L = TypeVar("L")
Complete: TypeAlias = Callable[[Sequence[Request]], Generator[tuple[int, Completion]]]


class RuntimeTask(ABC, Generic[L, V, T]):
    """Converts inputs to requests and completions to results. `sort_keys` are the attributes that order results."""

    sort_keys: ClassVar[tuple[str, ...]] = ("prompt_index",)

    @abstractmethod
    def require_supported(self, model: LoadedModel) -> None:
        """Raises ConfigError if the model does not support this task."""

    @abstractmethod
    def parse(self, value: L, index: int) -> V:
        """Converts a caller's value. Raises ConfigError with its position."""

    @abstractmethod
    def results(self, model: LoadedModel, inputs: Sequence[tuple[int, V]], complete: Complete) -> Generator[T]:
        """Yields the results of one window of (position, input): rejected ones first, then as they finish. `complete`
        yields completions with positions in its requests."""

    def windows(self, values: Iterable[L], size: int | None) -> Iterator[list[tuple[int, V]]]:
        """Yields windows of up to `size` inputs with their positions; None: one window."""
        numbered = ((index, self.parse(value, index)) for index, value in enumerate(values))
        while window := list(islice(numbered, size)):
            yield window


def require_iterable(values: object, window: int | None) -> None:
    """Raises ConfigError for a single prompt where an iterable is expected, and for an invalid window."""
    is_many = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping | Prompt)
    require(is_many, f"prompts must be an iterable of prompts, got one {type(values).__name__}: put it in a list")
    require(window is None or window >= 1, f"window must be 1 or more, got {window}")


class ResultStream(Closing, Iterator[T], Generic[T]):
    """An iterator of results. The work stops, and its memory is freed, on `close`, at the end of a `with` block, or
    with the last reference. After another call of the runtime, `next` raises ClosedError."""

    def __init__(self, results: Generator[T, None, None]):
        self._results = results
        self._ended_by: str | None = None

    def __next__(self) -> T:
        if self._ended_by is not None:
            raise ClosedError(f"this stream was ended by {self._ended_by} before it yielded all results")
        return next(self._results)

    def close(self) -> None:
        self._results.close()

    def end(self, by: str) -> None:
        """Stops the work, with the reason `by`. No effect on an exhausted stream."""
        if getgeneratorstate(self._results) != GEN_CLOSED:
            self._ended_by = by
            self._results.close()
