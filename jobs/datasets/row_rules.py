"""Converts records (items of an input) to rows (prompts with ids), for all kinds of datasets.

Rows are numbered from 0 in the order of the input. The error of a record becomes the error of its row. Large inputs are
read in windows, parts that fit into memory; a seek point is a position from which a window can be read.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from runtime.config.settings import SamplingOverrides
from runtime.errors import DatasetError
from runtime.units import format_count

from .fields import OVERRIDE_FIELDS, DatasetFields
from .records import (
    NO_OVERRIDES,
    BadRecord,
    Content,
    Fields,
    ReadContent,
    Record,
    configured_fields,
    format_field_names,
    has_field,
    read_id,
    read_overrides,
    to_chat_content,
)
from .rows import Row
from .strict_json import shorten
from .templates import make_content_reader

MAX_RANGE_ROWS = 8192  # in a RowRange


@dataclass(frozen=True, kw_only=True)
class SeekPoint:
    """The position of a row: the number of its file, and the rows, lines and bytes before it in this file."""

    file: int
    row: int
    line: int = 0
    offset_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class RowRange:
    """The fields of consecutive rows of one file, beginning at `start`. They are None for a row that cannot be read."""

    start: SeekPoint
    rows: list[Fields | None]


NumberedFile: TypeAlias = tuple[int, Path]  # number of the file in the input, and its path


@dataclass(frozen=True, kw_only=True)
class RowSource:
    """Reads an input in windows, without holding all of it in memory (`windows.py`).

    - `files`: returns the files of the input
    - `count`: counts the rows of a file without parsing them, up to the given number
    - `scan`: yields the fields of all rows of a file
    - `read_records`: yields the records of a file from a seek point on

    `scan` and `read_records` give the same rows as `InputKind.rows`. All raise DatasetError.
    """

    files: Callable[[DatasetFields], list[Path]]
    count: Callable[[DatasetFields, Path, int], int]
    scan: Callable[[DatasetFields, NumberedFile], Iterator[RowRange]]
    read_records: Callable[[DatasetFields, Path, SeekPoint], Iterator[Record]]

    def has_more_than(self, config: DatasetFields, num_rows: int) -> bool:
        """True if the input has more than `num_rows` rows. Counts no further than needed."""
        remaining = num_rows + 1
        for path in self.files(config):
            remaining -= self.count(config, path, remaining)
            if remaining <= 0:
                return True
        return False

    def row_ranges(self, config: DatasetFields) -> Iterator[RowRange]:
        for numbered in enumerate(self.files(config)):
            yield from self.scan(config, numbered)

    def records_from(self, config: DatasetFields, start: SeekPoint) -> Iterator[Record]:
        for number, path in islice(enumerate(self.files(config)), start.file, None):
            yield from self.read_records(config, path, start if number == start.file else SeekPoint(file=number, row=0))


ReadRecords: TypeAlias = Callable[[DatasetFields], Iterator[Record]]
CountTokens: TypeAlias = Callable[[str], int]

TABLE_KEYS = frozenset(  # settings of kinds with a row for each record
    {"path", "prompt_field", "id_field", *OVERRIDE_FIELDS}
    | {"template", "few_shot_path", "few_shot_template", "num_examples", "trial"}
)
# Fields by which records of a kind are recognized, for hints in errors.
KIND_BY_FIELDS = {"openai_batch": {"custom_id", "body"}, "mtbench": {"question_id", "turns"}}
CHAT_KEYS = frozenset({"messages_field", "turns_field", "tools_field"})  # for tables with list values


@dataclass(frozen=True, kw_only=True)
class InputKind:
    """A kind of dataset.

    - `rows`: yields the rows of an input
    - `keys`: the settings that it uses, besides those that all kinds use
    - `needs`: shown if `path` is required and missing
    - `has_chats`: each row says whether it is a chat, instead of `dataset.chat_template`
    - `reject_wrong_endpoints`: turns rows that need another command into error rows; the second argument is True for
      commands that encode
    - `windowed`: reads the input in windows; None: all rows are in memory
    """

    rows: Callable[[DatasetFields, CountTokens | None], Iterator[Row]]
    keys: frozenset[str] = frozenset()
    needs: str = "dataset.path=<file or directory>"
    has_chats: bool = False
    reject_wrong_endpoints: Callable[[Sequence[Row], bool], list[Row]] = lambda rows, _: [*rows]
    windowed: "WindowedReader | None" = None


@dataclass(frozen=True, kw_only=True)
class WindowedReader:
    """Reads the inputs of a kind in windows. `rows`: converts records, with their numbers in the input, to rows."""

    source: RowSource
    rows: Callable[[Iterable[tuple[int, Record]], DatasetFields], Iterator[Row]]

    def all_rows(self, config: DatasetFields) -> Iterator[Row]:
        """Yields the rows of the input, including those with a duplicate id."""
        return self.rows(enumerate(self.source.records_from(config, SeekPoint(file=0, row=0))), config)

    def records(
        self, config: DatasetFields, seek_points: Sequence[tuple[int, SeekPoint]], first: int
    ) -> Iterator[tuple[int, Record]]:
        """Yields records with their numbers, from the last seek point that is not after row `first`. `seek_points`:
        pairs of row number and position, sorted."""
        number, start = seek_points[bisect_right([number for number, _ in seek_points], first) - 1]
        yield from enumerate(self.source.records_from(config, start), start=number)


class ConfiguredFieldCheck:
    """Checks that each field that the settings name occurs in some record. If it does not, a setting is misspelled."""

    def __init__(self, config: DatasetFields):
        self._unseen, self._num_records = configured_fields(config), 0
        self._first: tuple[str, Fields] | None = None  # location and fields of the first readable record

    def observe_record(self, record: Record) -> Record:
        self.observe_fields(record.fields, record.location)
        return record

    def observe_fields(self, fields: Fields | None, location: str) -> None:
        """Takes note of the fields of one record; None if it cannot be read."""
        self._num_records += 1
        if fields is None or not self._unseen:
            return
        self._first = self._first or (location, fields)
        self._unseen = [(key, name) for key, name in self._unseen if not has_field(fields, name)]

    def require_all(self) -> None:
        """Raises DatasetError if no record has one of the fields. Does nothing if no record could be read."""
        if self._unseen and self._first is not None:
            (key, name), (location, fields) = self._unseen[0], self._first
            count = format_count(self._num_records, "row")
            kind = next((kind for kind, names in KIND_BY_FIELDS.items() if names <= fields.keys()), None)
            hint = f"; they look like dataset={kind}" if kind is not None else ""
            raise DatasetError(
                f"no row has the field {shorten(name)} ({count}); the first: {location}: there is no field "
                f"{shorten(name)} (dataset.{key}); {format_field_names(fields)}{hint}"
            )


def prompt_kind(
    read: ReadRecords, keys: frozenset[str] = frozenset(), needs: str = InputKind.needs, source: RowSource | None = None
) -> InputKind:
    """Makes a kind with one row for each record of `read`. The settings name the fields of prompt, messages and
    sampling settings. `keys`: settings that the kind uses in addition to `TABLE_KEYS`. `source`: reads rows in
    windows."""

    def make_prompt_rows(records: Iterable[tuple[int, Record]], config: DatasetFields) -> Iterator[Row]:
        return make_rows(records, config, make_content_reader(config, read), config.id_field)

    def rows(config: DatasetFields, count_tokens: CountTokens | None) -> Iterator[Row]:
        field_check, records = ConfiguredFieldCheck(config), islice(read(config), config.limit)
        yield from make_prompt_rows(enumerate(map(field_check.observe_record, records)), config)
        field_check.require_all()

    if source is None:
        return InputKind(rows=rows, keys=TABLE_KEYS | keys, needs=needs)
    keys = TABLE_KEYS | keys | {"window_rows"}
    return InputKind(rows=rows, keys=keys, needs=needs, windowed=WindowedReader(source=source, rows=make_prompt_rows))


def make_rows(
    records: Iterable[tuple[int, Record]], config: DatasetFields, read_content: ReadContent, id_field: str | None
) -> Iterator[Row]:
    """Yields a row for each record. `records`: with their numbers. `read_content`: reads the request of a record, may
    raise BadRecord. An error row has the id of its record if the id can be read."""
    for index, record in records:
        row_id = str(index) if id_field is None else bad_row_id(index)
        fields, columns, error = record.fields, Fields(), ""
        if fields is None:
            error = record.error or f"{record.location}: not readable"
        else:
            columns = output_columns(fields, config, id_field)
            try:
                row_id = row_id if id_field is None else read_id(fields, id_field)
                content, overrides = read_content(fields), read_overrides(fields, config)
                yield make_row(index, row_id, content, columns, config, overrides, record.source)
                continue
            except BadRecord as bad:
                error = f"{record.location}: {bad}"
        yield Row(
            index=index, id=row_id, prompt="", messages=None, columns=columns, error=error, source_file=record.source
        )


def make_row(
    index: int,
    row_id: str,
    content: Content,
    columns: Fields,
    config: DatasetFields,
    overrides: SamplingOverrides = NO_OVERRIDES,
    source_file: str | None = None,
) -> Row:
    """Makes a row of `content`, as a chat if `dataset.chat_template` is set."""
    chat = to_chat_content(content, config) if config.chat_template else content
    if content.reference is not None and config.keep_columns:
        columns = {**columns, "reference": content.reference}
    return Row(
        index=index,
        id=row_id,
        prompt=chat.prompt,
        messages=chat.messages,
        columns=columns,
        error=None,
        overrides=overrides,
        template_kwargs=chat.template_kwargs,
        later_turns=chat.later_turns,
        source_file=source_file,
    )


def bad_row_id(index: int) -> str:
    """The id of a row whose own id cannot be read."""
    return f"bad-row-{index}"


def output_columns(fields: Fields, config: DatasetFields, id_field: str | None) -> Fields:
    """The fields of a record that are copied to the output."""
    return {key: value for key, value in fields.items() if key != id_field} if config.keep_columns else {}
