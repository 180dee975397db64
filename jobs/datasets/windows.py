"""Reads large inputs in windows, with the same rows as `read_rows`. A window is a part of the rows that fits into
memory.

A survey scans the input once before the run. It counts rows, collects the kinds of values in columns, finds duplicate
ids, and stores seek points, positions from which a window can be read without reading the input from its start.
"""

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from runtime.closing import Closing
from runtime.errors import DatasetError, Interrupted

from .config import KINDS, DatasetConfig
from .fields import BadRowPolicy, DatasetFields, ShardConfig
from .records import BadRecord, Fields, Record, read_id
from .row_rules import ConfiguredFieldCheck, RowRange, SeekPoint, WindowedReader, bad_row_id, output_columns
from .rows import (
    NUM_DUPLICATES_LISTED,
    ColumnKinds,
    Row,
    add_column_kinds,
    bad_rows_error,
    reject_bad_rows,
    reject_duplicates,
)

log = logging.getLogger(__name__)
NUM_FILES = 64  # with hashes of ids; one file at a time is sorted in memory
ENTRY = np.dtype([("high", np.int64), ("low", np.int64), ("row", np.int64)])  # both halves of a hash, row number


class DuplicateFinder(Closing):
    """Finds duplicate ids by hashes of 128 bits in temporary files, 24 bytes for each row.

    Python's string hash has a random key, so collisions are negligible. Equal ids are in the same file. Files have no
    name, so a killed process leaves none. A context manager. Raises OSError if the disk is full.
    """

    def __init__(self, folder: Path):
        self._stack = ExitStack()
        files = (tempfile.TemporaryFile(dir=folder) for _ in range(NUM_FILES))  # noqa: SIM115 - the stack closes them
        self._files: list[BinaryIO] = [self._stack.enter_context(file) for file in files]

    def close(self) -> None:
        with suppress(OSError):  # flushing buffers fails again on a full disk
            self._stack.close()

    def add(self, ids: Sequence[str], first: int) -> None:
        """Adds the ids of consecutive rows, numbered from `first`."""
        entries = np.empty(len(ids), ENTRY)
        entries["high"] = [hash(id) for id in ids]
        entries["low"] = [hash("\0" + id) for id in ids]
        entries["row"] = np.arange(first, first + len(ids))
        # Sorts the entries by file, then writes the entries of each file.
        file_indices = entries["high"] % NUM_FILES
        order = np.argsort(file_indices, kind="stable")
        begins = np.searchsorted(file_indices[order], np.arange(NUM_FILES + 1))
        for file, begin, end in zip(self._files, begins[:-1], begins[1:], strict=True):
            file.write(entries[order[begin:end]].tobytes())

    def find_duplicates(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the row numbers of duplicates, sorted, and for each the number of the first row with the same id."""
        rows, firsts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for file in self._files:
            file.seek(0)
            entries = np.frombuffer(file.read(), ENTRY)
            entries = entries[np.lexsort((entries["row"], entries["low"], entries["high"]))]
            has_same_id = (np.diff(entries["high"]) == 0) & (np.diff(entries["low"]) == 0)
            is_first = np.concatenate([[True], ~has_same_id])[: len(entries)]
            # For each entry: the row number of the first entry with its id.
            first_row = entries["row"][np.flatnonzero(is_first)][np.cumsum(is_first) - 1]
            rows.append(entries["row"][~is_first])
            firsts.append(first_row[~is_first])
        duplicates, first_rows = np.concatenate(rows), np.concatenate(firsts)
        order = np.argsort(duplicates)
        return duplicates[order], first_rows[order]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The result of scanning an input. `num_rows`: the number of rows without duplicates; `num_read`: with duplicates.
    `kinds`: the kinds of values in each column. `seek_points`: pairs of row number and position. `dropped`: the row
    numbers of duplicates."""

    num_rows: int
    num_read: int
    kinds: Mapping[str, frozenset[str]]
    seek_points: Sequence[tuple[int, SeekPoint]]
    dropped: NDArray[np.int64]

    def to_plain(self) -> dict[str, Any]:
        """JSON-compatible values for `from_plain`."""
        return {
            "num_rows": self.num_rows,
            "num_read": self.num_read,
            "kinds": [[name, sorted(kinds)] for name, kinds in self.kinds.items()],
            "marks": [[row, *asdict(point).values()] for row, point in self.seek_points],
            "dropped": self.dropped.tolist(),
        }

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> "Survey":
        """Raises KeyError, TypeError or ValueError if `values` is not a survey."""
        return Survey(
            num_rows=int(values["num_rows"]),
            num_read=int(values["num_read"]),
            kinds={str(name): frozenset(kinds) for name, kinds in values["kinds"]},
            seek_points=[
                (row, SeekPoint(file=file, row=before, line=line, offset_bytes=offset))
                for row, file, before, line, offset in values["marks"]
            ],
            dropped=np.array(values["dropped"], np.int64),
        )


def make_survey(
    config: DatasetFields, windowed: WindowedReader, folder: Path, should_stop: Callable[[], bool]
) -> Survey:
    """Scans an input. `folder`: for temporary files. Raises DatasetError in the same cases as `read_rows`, and
    Interrupted."""
    began, kinds, seek_points, num_rows = time.monotonic(), ColumnKinds(), list[tuple[int, SeekPoint]](), 0
    log.info("scanning the input for columns and ids: it has more rows than dataset.window_rows")
    if config.on_bad_row is BadRowPolicy.fail:
        _reject_any_bad_row(config, windowed, should_stop)
    field_check = ConfiguredFieldCheck(config)
    with DuplicateFinder(folder) as ids:
        for row_range in _limit_ranges(windowed.source.row_ranges(config), config.limit):
            _raise_if_stopped(should_stop)
            seek_points.append((num_rows, row_range.start))
            for row in row_range.rows:
                field_check.observe_fields(row, str(config.path))
            columns = (output_columns(row, config, config.id_field) for row in row_range.rows if row is not None)
            add_column_kinds(kinds, columns)
            if (id_field := config.id_field) is not None:
                numbered = enumerate(row_range.rows, start=num_rows)
                ids.add([_id_or_fallback(row, number, id_field) for number, row in numbered], num_rows)
            num_rows += len(row_range.rows)
        field_check.require_all()
        dropped, first_rows = ids.find_duplicates()
    survey = Survey(
        num_rows=num_rows - len(dropped),
        num_read=num_rows,
        kinds={name: frozenset(values) for name, values in kinds.items()},
        seek_points=seek_points,
        dropped=dropped,
    )
    if len(dropped):
        counts = Counter(first_rows.tolist())
        indices = sorted(counts)[:NUM_DUPLICATES_LISTED]
        listed = [(_reread_id(config, windowed, seek_points, index), 1 + counts[index]) for index in indices]
        reject_duplicates(config.dedupe, len(survey.dropped), len(counts), listed)
    log.info("found %s rows in %.1f s", f"{survey.num_rows:,}", time.monotonic() - began)
    return survey


def _raise_if_stopped(should_stop: Callable[[], bool]) -> None:
    if should_stop():
        raise Interrupted("stopped while scanning the input; start the same command again to repeat the scan")


def _limit_ranges(row_ranges: Iterator[RowRange], limit: int | None) -> Iterator[RowRange]:
    for row_range in row_ranges:
        if limit is not None:
            row_range = RowRange(start=row_range.start, rows=row_range.rows[:limit])
            limit -= len(row_range.rows)
        if row_range.rows:
            yield row_range
        if limit == 0:
            return


def _id_or_fallback(row: Fields | None, number: int, id_field: str) -> str:
    """The id of a row; if it cannot be read, the id that `make_rows` gives an error row."""
    try:
        return bad_row_id(number) if row is None else read_id(row, id_field)
    except BadRecord:
        return bad_row_id(number)


def _reject_any_bad_row(config: DatasetFields, windowed: WindowedReader, should_stop: Callable[[], bool]) -> None:
    """Reads every row with the same checks as the run. Raises DatasetError if there is a bad row."""
    num_bad, num_rows, first = 0, 0, ""
    for row in windowed.all_rows(config):
        if num_rows == config.limit:
            break
        if num_rows % 1024 == 0:
            _raise_if_stopped(should_stop)
        num_rows += 1
        if row.error is not None:
            num_bad, first = num_bad + 1, first or row.error
    if num_bad:
        raise bad_rows_error(num_bad, num_rows, first)


def _reread_id(
    config: DatasetFields, windowed: WindowedReader, seek_points: Sequence[tuple[int, SeekPoint]], index: int
) -> str:
    for number, record in windowed.records(config, seek_points, index):
        if number == index:
            return next(windowed.rows([(number, record)], config)).id
    raise DatasetError(f"dataset.path={config.path} changed while it was read: row {index} is missing")


def windowed_input(config: DatasetConfig) -> WindowedReader | None:
    """Returns the reader for windows of this dataset. None if its kind always has all rows in memory."""
    return KINDS[config.kind.name].windowed


def has_more_than(config: DatasetConfig, num_rows: int) -> bool:
    """True if the dataset has more than `num_rows` rows; its kind must support windows. Raises DatasetError."""
    windowed = windowed_input(config)
    assert windowed is not None, "the kind can be read in windows"
    is_limited = config.limit is not None and config.limit <= num_rows
    return not is_limited and windowed.source.has_more_than(config, num_rows)


@dataclass(frozen=True, kw_only=True)
class RowWindows:
    """The windows of one shard. Each has `rows_per_window` rows of the shard, the last one may have fewer."""

    config: DatasetConfig
    survey: Survey
    shard: ShardConfig
    rows_per_window: int

    def __len__(self) -> int:
        return -(-self.survey.num_rows // self._window_span)

    @property
    def _window_span(self) -> int:
        """The number of rows of the whole input, without duplicates, that one window extends over."""
        return self.rows_per_window * self.shard.count

    @property
    def _windowed(self) -> WindowedReader:
        windowed = windowed_input(self.config)
        assert windowed is not None, "it has a survey"
        return windowed

    def all_rows(self) -> Iterator[Row]:
        """Yields all rows of the input: of all shards, and with duplicates."""
        return islice(self._windowed.all_rows(self.config), self.survey.num_read)

    def read(self, number: int) -> list[Row]:
        """Reads the rows of window `number`. Raises DatasetError."""
        first = number * self._window_span
        end = min(first + self._window_span, self.survey.num_rows)
        indices = range(first + (self.shard.index - first) % self.shard.count, end, self.shard.count)
        rows = list(self._windowed.rows(self._records(indices), self.config))
        if len(rows) < len(indices):
            num_missing = len(indices) - len(rows)
            raise DatasetError(f"{self.config.source_name} changed while it was read: {num_missing:,} rows are missing")
        if len(self.survey.dropped):  # row numbers without the dropped rows
            rows = [replace(row, index=index) for row, index in zip(rows, indices, strict=True)]
        reject_bad_rows(rows, BadRowPolicy.error_row)
        return rows

    def _records(self, indices: range) -> Iterator[tuple[int, Record]]:
        """Yields the records of these rows, with their numbers in the input."""
        if not indices:
            return
        input_indices = map(self._input_index, indices)
        wanted_index = next(input_indices)
        for index, record in self._windowed.records(self.config, self.survey.seek_points, wanted_index):
            if index == wanted_index:
                yield index, record
                if (next_index := next(input_indices, None)) is None:
                    return
                wanted_index = next_index

    def _input_index(self, index: int) -> int:
        """The number in the input of row `index`, which counts only rows that are not dropped."""
        number = index  # increased by the dropped rows up to `number`, until it no longer changes
        while (shifted := index + int(np.searchsorted(self.survey.dropped, number, side="right"))) != number:
            number = shifted
        return number
