"""What the library asks of a model: inputs become requests, a window after the other, and results come as they finish.
The work behind them ends when nobody asks for more.
"""

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
    """What is asked of each of many inputs; `places` are what a result's place among the others is by."""

    sort_keys: ClassVar[tuple[str, ...]] = ("prompt_index",)

    @abstractmethod
    def require_supported(self, model: LoadedModel) -> None:
        """Raises ConfigError where the model can be asked nothing of the kind."""

    @abstractmethod
    def parse(self, value: L, index: int) -> V:
        """An input of what stands for it. Raises ConfigError naming its place."""

    @abstractmethod
    def results(self, model: LoadedModel, inputs: Sequence[tuple[int, V]], complete: Complete) -> Generator[T]:
        """The results of one window, inputs with their places: of those that cannot be asked, then as they finish.
        `complete` says what requests come to, with their places."""

    def windows(self, values: Iterable[L], size: int | None) -> Iterator[list[tuple[int, V]]]:
        """The inputs with their places, so many at once; None: all of them."""
        numbered = ((index, self.parse(value, index)) for index, value in enumerate(values))
        while window := list(islice(numbered, size)):
            yield window


def require_iterable(values: object, window: int | None) -> None:
    """Raises ConfigError for one prompt where many are expected."""
    is_many = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping | Prompt)
    require(is_many, f"prompts must be an iterable of prompts, got one {type(values).__name__}: put it into a list")
    require(window is None or window >= 1, f"window must be 1 or more prompts, got {window}")


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
