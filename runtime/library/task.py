"""Base classes of the library's tasks, such as generation or scoring, and of the streams of their results.

A task converts inputs to requests and yields results as they finish. It works through one window, a group of inputs
that are planned and computed together, at a time."""

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

L = TypeVar("L")  # a value from the caller, such as a str
V = TypeVar("V")  # the value parsed, such as a Prompt
T = TypeVar("T")  # a result
# Computes requests; yields each completion with the index of its request.
Complete: TypeAlias = Callable[[Sequence[Request]], Generator[tuple[int, Completion]]]


class RuntimeTask(ABC, Generic[L, V, T]):
    """Converts callers' values to requests, and completions to results. `sort_keys`: attributes of a result that give
    the order of a list of results."""

    sort_keys: ClassVar[tuple[str, ...]] = ("prompt_index",)

    @abstractmethod
    def require_supported(self, model: LoadedModel) -> None:
        """Raises ConfigError if the model does not support this task."""

    @abstractmethod
    def parse(self, value: L, index: int) -> V:
        """Converts the caller's value at position `index`. Raises ConfigError with the position."""

    @abstractmethod
    def results(self, model: LoadedModel, inputs: Sequence[tuple[int, V]], complete: Complete) -> Generator[T]:
        """Yields the results of one window: first those of invalid inputs, then the others as they finish. `inputs`:
        (position among all inputs, parsed value)."""

    def windows(self, values: Iterable[L], size: int | None) -> Iterator[list[tuple[int, V]]]:
        """Parses inputs and yields them in windows of up to `size` pairs (position, parsed value). None: one window."""
        numbered = ((index, self.parse(value, index)) for index, value in enumerate(values))
        while window := list(islice(numbered, size)):
            yield window


def require_iterable(values: object, window: int | None) -> None:
    """Raises ConfigError if `values` is a single prompt instead of an iterable of prompts, or if `window` is 0 or
    less."""
    is_many = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping | Prompt)
    require(is_many, f"prompts must be an iterable of prompts, got one {type(values).__name__}: put it in a list")
    require(window is None or window >= 1, f"window must be 1 or more, got {window}")


class ResultStream(Closing, Iterator[T], Generic[T]):
    """An iterator of results, computed during iteration. Computation stops, and its memory is freed, on `close`, at the
    end of a `with` block, or when the last reference is deleted. After another call of the runtime, `next` raises
    ClosedError."""

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
        """Stops the computation; `by` is the reason in the error of a later `next`. No effect on an exhausted
        stream."""
        if getgeneratorstate(self._results) != GEN_CLOSED:
            self._ended_by = by
            self._results.close()
