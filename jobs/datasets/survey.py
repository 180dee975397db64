"""A survey of an input that is read in windows: one walk in front of the run, which keeps no row.

It finds how many rows there are, which columns they bring along, ids that repeat, and places to read on from.
"""

import logging
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import DatasetError, Interrupted

from .fields import BadRowPolicy, DatasetFields
from .records import BadRecord, Fields, Record, read_id
from .row_rules import NamedFields, Windowed, bad_row_id, passed_through
from .rows import NUM_DUPLICATES_LISTED, bad_rows, refuse_repeated
from .seen_ids import SeenIds
from .sources import Mark, Stretch
from .value_kinds import ColumnKinds, add_kinds

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Survey:
    """`num_rows`: how many the run asks; `num_read`: with those that are dropped, whose numbers are `dropped`.
    `kinds`: what kinds of values the columns have, which rows bring along. `marks`: of some rows their numbers, and
    where they begin."""

    num_rows: int
    num_read: int
    kinds: Mapping[str, frozenset[str]]
    marks: Sequence[tuple[int, Mark]]
    dropped: NDArray[np.int64]

    def to_plain(self) -> dict[str, Any]:
        """What `from_plain` reads, of values that JSON has."""
        return {
            "num_rows": self.num_rows,
            "num_read": self.num_read,
            "kinds": [[name, sorted(kinds)] for name, kinds in self.kinds.items()],
            "marks": [[row, *asdict(mark).values()] for row, mark in self.marks],
            "dropped": self.dropped.tolist(),
        }

    @staticmethod
    def from_plain(values: Mapping[str, Any]) -> "Survey":
        """Raises KeyError, TypeError or ValueError where it is none."""
        return Survey(
            num_rows=int(values["num_rows"]),
            num_read=int(values["num_read"]),
            kinds={str(name): frozenset(kinds) for name, kinds in values["kinds"]},
            marks=[
                (row, Mark(file=file, row=before, line=line, offset_bytes=offset))
                for row, file, before, line, offset in values["marks"]
            ],
            dropped=np.array(values["dropped"], np.int64),
        )


def make_survey(config: DatasetFields, windowed: Windowed, folder: Path, should_stop: Callable[[], bool]) -> Survey:
    """The survey of an input. `folder` is where ids lie meanwhile. Raises DatasetError for what `read_rows` raises it
    for, and Interrupted."""
    began, kinds, marks, num_rows = time.monotonic(), ColumnKinds(), list[tuple[int, Mark]](), 0
    log.info("looking through the rows, which are more than dataset.window_rows, for columns and ids")
    if config.on_bad_row is BadRowPolicy.fail:
        _refuse_any_bad(config, windowed, should_stop)
    named = NamedFields(config)
    with SeenIds(folder) as ids:
        for stretch in _limited(windowed.source.stretches(config), config.limit):
            _heed(should_stop)
            marks.append((num_rows, stretch.mark))
            for row in stretch.rows:
                named.note_fields(row, str(config.path))
            add_kinds(kinds, (passed_through(row, config, config.id_field) for row in stretch.rows if row is not None))
            if config.id_field is not None:
                ids.add([_id_of(row, num_rows + i, config.id_field) for i, row in enumerate(stretch.rows)], num_rows)
            num_rows += len(stretch.rows)
        named.require_all()
        dropped, first_rows = ids.repeated()
    found = Survey(
        num_rows=num_rows - len(dropped),
        num_read=num_rows,
        kinds={name: frozenset(each) for name, each in kinds.items()},
        marks=marks,
        dropped=dropped,
    )
    if len(dropped):
        _refuse_repeated(config, windowed, found, first_rows)
    log.info("found %s rows in %.1f s", f"{found.num_rows:,}", time.monotonic() - began)
    return found


def numbered_records(
    config: DatasetFields, windowed: Windowed, survey: Survey, first: int
) -> Iterator[tuple[int, Record]]:
    """The records of the input with their numbers, from a mark at or before the row `first` on."""
    at = bisect_right([number for number, _ in survey.marks], first) - 1
    number, mark = survey.marks[at]
    yield from enumerate(windowed.source.records_from(config, mark), start=number)


def _heed(should_stop: Callable[[], bool]) -> None:
    if should_stop():
        raise Interrupted("stopped while the rows were looked through; the same command begins that again")


def _limited(stretches: Iterator[Stretch], limit: int | None) -> Iterator[Stretch]:
    for stretch in stretches:
        if limit is not None:
            stretch = Stretch(mark=stretch.mark, rows=stretch.rows[:limit])
            limit -= len(stretch.rows)
        if stretch.rows:
            yield stretch
        if limit == 0:
            return


def _id_of(row: Fields | None, number: int, id_field: str) -> str:
    try:
        return bad_row_id(number) if row is None else read_id(row, id_field)
    except BadRecord:
        return bad_row_id(number)


def _refuse_any_bad(config: DatasetFields, windowed: Windowed, should_stop: Callable[[], bool]) -> None:
    """Reads every row as a run reads it."""
    num_bad, num_rows, first = 0, 0, ""
    records = enumerate(windowed.source.records_from(config, Mark(file=0, row=0)))
    for row in windowed.rows(records, config):
        if num_rows == config.limit:
            break
        if num_rows % 1024 == 0:
            _heed(should_stop)
        num_rows += 1
        if row.error is not None:
            num_bad, first = num_bad + 1, first or row.error
    if num_bad:
        raise bad_rows(num_bad, num_rows, first)


def _refuse_repeated(config: DatasetFields, windowed: Windowed, survey: Survey, first_rows: NDArray[np.int64]) -> None:
    counts = Counter(first_rows.tolist())
    places = sorted(counts)[:NUM_DUPLICATES_LISTED]
    listed = [(_read_id(config, windowed, survey, place), 1 + counts[place]) for place in places]
    refuse_repeated(config.dedupe, len(survey.dropped), len(counts), listed)


def _read_id(config: DatasetFields, windowed: Windowed, survey: Survey, place: int) -> str:
    """The id of one row, read once more."""
    for number, record in numbered_records(config, windowed, survey, place):
        if number == place:
            return next(windowed.rows([(number, record)], config)).id
    raise DatasetError(f"dataset.path={config.path} was changed while it was read: row {place} is gone")
