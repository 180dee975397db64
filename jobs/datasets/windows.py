"""Rows in windows: so many at a time, each read when its turn comes and as `read_rows` would have read it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from runtime.errors import DatasetError

from .config import KINDS, DatasetConfig
from .fields import BadRowPolicy, ShardConfig
from .records import Record
from .row_rules import Windowed
from .rows import Row, refuse_bad_rows
from .sources import Mark
from .survey import Survey, numbered_records


def windowed_kind(config: DatasetConfig) -> Windowed | None:
    """How the rows of this data set are read in windows; None where its kind holds them all."""
    return KINDS[config.kind.name].windowed


def has_more_than(config: DatasetConfig, num_rows: int) -> bool:
    """Whether the data set has more rows than this, of a kind that is read in windows. No row is parsed for it. Raises
    DatasetError."""
    windowed = windowed_kind(config)
    assert windowed is not None, "its rows can be counted"
    is_cut = config.limit is not None and config.limit <= num_rows
    return not is_cut and windowed.source.has_more_than(config, num_rows)


@dataclass(frozen=True, kw_only=True)
class RowWindows:
    """The windows of one shard, each of `num_rows_each` of its rows, but for the last."""

    config: DatasetConfig
    survey: Survey
    shard: ShardConfig
    num_rows_each: int

    def __len__(self) -> int:
        return -(-self.survey.num_rows // self._span)

    @property
    def _span(self) -> int:
        """How many rows of the whole input a window lies over."""
        return self.num_rows_each * self.shard.count

    def every(self) -> Iterator[Row]:
        """All rows of the input, one by one, of all shards; those that repeat an id among them."""
        windowed = windowed_kind(self.config)
        assert windowed is not None, "it has a survey"
        records = enumerate(windowed.source.records_from(self.config, Mark(file=0, row=0)))
        return windowed.rows(islice(records, self.survey.num_read), self.config)

    def read(self, number: int) -> list[Row]:
        """The rows of a window. Raises DatasetError."""
        first = number * self._span
        end = min(first + self._span, self.survey.num_rows)
        windowed = windowed_kind(self.config)
        assert windowed is not None, "it has a survey"
        places = range(first + (self.shard.index - first) % self.shard.count, end, self.shard.count)
        rows = list(windowed.rows(self._records(windowed, places), self.config))
        if len(rows) < len(places):
            num_gone = len(places) - len(rows)
            raise DatasetError(f"{self.config.place} was changed while it was read: {num_gone:,} rows are gone")
        if len(self.survey.dropped):
            rows = [replace(row, index=place) for row, place in zip(rows, places, strict=True)]
        refuse_bad_rows(rows, BadRowPolicy.error_row)
        return rows

    def _records(self, windowed: Windowed, places: range) -> Iterator[tuple[int, Record]]:
        """The records of the rows at these places, each with the number that it has in the input."""
        if not places:
            return
        wanted = map(self._number, places)
        number = next(wanted)
        for found, record in numbered_records(self.config, windowed, self.survey, number):
            if found == number:
                yield found, record
                if (following := next(wanted, None)) is None:
                    return
                number = following

    def _number(self, place: int) -> int:
        """The number in the input of the row that is at this place once others are dropped."""
        number = place
        while (found := place + int(np.searchsorted(self.survey.dropped, number, side="right"))) != number:
            number = found
        return number
