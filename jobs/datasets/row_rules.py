"""How records become rows, which every kind of data set goes by: numbered from 0 in the input's order, and what is
wrong with one record becomes the error of its row.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from runtime.config import SamplingOverrides

from .fields import OVERRIDE_FIELDS, DatasetFields
from .records import (
    AS_THE_RUN,
    BadRecord,
    Content,
    Fields,
    ReadContent,
    Record,
    add_chat,
    read_id,
    read_overrides,
)
from .rows import Row
from .templates import content_reader

ReadRecords: TypeAlias = Callable[[DatasetFields], Iterator[Record]]
CountTokens: TypeAlias = Callable[[str], int]

TABLE_KEYS = frozenset(
    {"path", "prompt_field", "id_field", *OVERRIDE_FIELDS}
    | {"template", "few_shot_path", "few_shot_template", "num_examples", "trial"}
)
CHAT_KEYS = frozenset({"messages_field", "turns_field", "tools_field"})  # of tables whose values may be lists


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How one kind of data set becomes rows. `keys` are those that it knows of the keys which not every kind knows;
    `has_chats`: its rows say themselves whether they are chats, whatever `chat_template` says. `for_job`: the rows with
    an error in place of each that is for another job, where the second argument says whether this one encodes."""

    rows: Callable[[DatasetFields, CountTokens | None], Iterator[Row]]
    keys: frozenset[str] = frozenset()
    needs: str = "dataset.path=<file or directory>"  # what is said where `path` is known and missing
    has_chats: bool = False
    for_job: Callable[[Sequence[Row], bool], list[Row]] = lambda rows, _: [*rows]


def prompts(read: ReadRecords, keys: frozenset[str] = frozenset(), needs: str = Kind.needs) -> Kind:
    """A kind with a row for each record that `read` yields: the prompt or the messages, and what the row asks for
    itself, in the fields that the config names. `keys`: what it knows beside `TABLE_KEYS`."""

    def rows(config: DatasetFields, count_tokens: CountTokens | None) -> Iterator[Row]:
        return make_rows(enumerate(read(config)), config, content_reader(config, read), config.id_field)

    return Kind(rows=rows, keys=TABLE_KEYS | keys, needs=needs)


def make_rows(
    records: Iterable[tuple[int, Record]], config: DatasetFields, content_of: ReadContent, id_field: str | None
) -> Iterator[Row]:
    """A row for each record with its number; `content_of` reads what it asks, and raises BadRecord."""
    for index, record in records:
        yield replace(_row_of(record, index, config, content_of, id_field), source_file=record.source)


def make_row(
    index: int,
    row_id: str,
    content: Content,
    columns: Fields,
    config: DatasetFields,
    overrides: SamplingOverrides = AS_THE_RUN,
) -> Row:
    """The row that asks `content`, as a chat where the config says so."""
    chat = add_chat(content, config)
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
    )


def _row_of(record: Record, index: int, config: DatasetFields, content_of: ReadContent, id_field: str | None) -> Row:
    """A record's row; whatever is wrong with the record, the row has the best id there is."""
    row_id, former_id = (str(index), None) if id_field is None else (f"bad-row-{index}", record.name)
    fields = record.fields
    if fields is None:
        return _error_row(index, row_id, former_id, {}, record.error or f"{record.place}: not readable")
    passed = {key: value for key, value in fields.items() if key != id_field} if config.keep_columns else {}
    try:
        row_id, former_id = (row_id if id_field is None else read_id(fields, id_field)), None
        return make_row(index, row_id, content_of(fields), passed, config, read_overrides(fields, config))
    except BadRecord as error:
        row = _error_row(index, row_id, former_id, passed, f"{record.place}: {error}")
        return replace(row, missing_field=error.missing_field)


def _error_row(index: int, row_id: str, former_id: str | None, columns: Fields, error: str) -> Row:
    return Row(index=index, id=row_id, prompt="", messages=None, columns=columns, error=error, former_id=former_id)
