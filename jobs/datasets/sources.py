"""Inputs that need not be held: their rows can be looked at one after another, and read again from any of them on.

A kind of data set that has a `Source` can be read in windows (`windows.py`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from .fields import DatasetFields
from .records import Fields, Record

STRETCH_ROWS = 8192  # of a stretch, at most


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where a row begins: the number of its file among the input's, and how many rows, lines and bytes of that file lie
    before it."""

    file: int
    row: int
    line: int = 0
    offset_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Rows that follow one another from `mark` on, in one file: the fields of each, None where they cannot be read."""

    mark: Mark
    rows: list[Fields | None]


Numbered: TypeAlias = tuple[int, Path]


@dataclass(frozen=True, kw_only=True)
class Source:
    """How one kind of input is read. `count` parses nothing and stops behind the number that is asked for. `look` is
    for a file and `records` for one from a mark on; both give the rows that the kind's own reader gives. All raise
    DatasetError."""

    files: Callable[[DatasetFields], list[Path]]
    count: Callable[[DatasetFields, Path, int], int]
    look: Callable[[DatasetFields, Numbered], Iterator[Stretch]]
    records: Callable[[DatasetFields, Path, Mark], Iterator[Record]]

    def has_more_than(self, config: DatasetFields, num_rows: int) -> bool:
        """Whether the input has more rows than this."""
        left = num_rows + 1
        for path in self.files(config):
            left -= self.count(config, path, left)
            if left <= 0:
                return True
        return False

    def stretches(self, config: DatasetFields) -> Iterator[Stretch]:
        """All rows of the input, in order."""
        for numbered in enumerate(self.files(config)):
            yield from self.look(config, numbered)

    def records_from(self, config: DatasetFields, mark: Mark) -> Iterator[Record]:
        """The records from `mark` to the end of the input."""
        for number, path in islice(enumerate(self.files(config)), mark.file, None):
            yield from self.records(config, path, mark if number == mark.file else Mark(file=number, row=0))


def stretched(rows: Iterable[Fields | None], file: int) -> Iterator[Stretch]:
    """Stretches of the rows of a file whose places are their numbers."""
    rows, first = iter(rows), 0
    while found := list(islice(rows, STRETCH_ROWS)):
        yield Stretch(mark=Mark(file=file, row=first), rows=found)
        first += len(found)
