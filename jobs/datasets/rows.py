"""Rows, and functions that repeat, deduplicate, select and hash lists of rows. A row is a prompt with an id."""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from runtime.config.settings import SamplingOverrides
from runtime.errors import DatasetError
from runtime.units import format_count

from .fields import OVERRIDE_FIELDS, BadRowPolicy, DatasetFields, DuplicatePolicy, ShardConfig
from .records import Json, Message, format_field_names, has_field, shorten, value_at

logger = logging.getLogger(__name__)

NUM_DUPLICATES_LISTED = 10


@dataclass(frozen=True, kw_only=True)
class EncodeInputs:
    """The inputs of a row that is encoded. `texts`: strings or token ids; they are embedded, or scored in pairs with
    `second_texts` if there are any."""

    texts: tuple[str | tuple[int, ...], ...]
    second_texts: tuple[str, ...] = ()

    @property
    def pairs(self) -> list[tuple[str | tuple[int, ...], str]]:
        """The pairs to score. A single text is paired with every second text."""
        firsts = self.texts * len(self.second_texts) if len(self.texts) == 1 else self.texts
        return list(zip(firsts, self.second_texts, strict=True))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt with its id. Copies of a row (`dataset.repeat`) share `columns` and `messages`: do not change them.

    - `index`: number of the row in the whole input after limit, repeat and dedupe; the same in every shard
    - `messages`: the chat, with its system prompt; None if no chat template is applied
    - `columns`: fields of the record that are copied to the output
    - `error`: where and why the row cannot be used; `prompt` is then ""
    - `overrides`: sampling settings of this row
    - `source_file`: name of the file or Hub dataset; None if no input is read
    - `template_kwargs`: extra arguments of the chat template
    - `prompt_ids`: token ids, instead of `prompt`
    - `later_turns`: user messages after the first, which later runs answer
    - `inputs`: what is encoded, instead of a prompt
    """

    index: int
    id: str
    prompt: str
    messages: list[Message] | None
    columns: dict[str, Json]
    error: str | None
    overrides: SamplingOverrides = field(default_factory=SamplingOverrides)
    source_file: str | None = None
    template_kwargs: Mapping[str, Json] = field(default_factory=dict)
    prompt_ids: tuple[int, ...] | None = None
    later_turns: tuple[str, ...] = ()
    inputs: EncodeInputs | None = None


def reject_bad_rows(rows: Sequence[Row], policy: BadRowPolicy) -> None:
    """Raises DatasetError (`fail`) or logs a warning (`error_row`) if there are rows with an error."""
    errors = [row.error for row in rows if row.error is not None]
    if errors and policy is BadRowPolicy.fail:
        raise bad_rows_error(len(errors), len(rows), errors[0])
    if errors:
        logger.warning("%s", _format_bad_rows(len(errors), len(rows), errors[0]))


def bad_rows_error(num_bad: int, num_rows: int, first: str) -> DatasetError:
    """The error for `on_bad_row=fail`. `first`: the error of the first bad row."""
    report = _format_bad_rows(num_bad, num_rows, first)
    return DatasetError(f"{report}. Set dataset.on_bad_row=error_row to get error rows in the output instead")


def _format_bad_rows(num_bad: int, num_rows: int, first: str) -> str:
    return f"{num_bad} of {format_count(num_rows, 'row')} cannot be used; the first: {first}"


def warn_about_empty_fields(rows: Sequence[Row], config: DatasetFields) -> None:
    """Warns about each field for a sampling setting that is null in all rows."""
    for key in OVERRIDE_FIELDS:
        name = getattr(config, key)
        if name is not None and all(getattr(row.overrides, key.removesuffix("_field")) is None for row in rows):
            logger.warning("dataset.%s=%s has no effect: no row has a value there", key, name)


def repeat_rows(rows: Sequence[Row], times: int) -> list[Row]:
    """Repeats the whole list `times` times. The first copy of id `a` has id `a`, later ones `a#1`, `a#2` ..."""
    return [*rows, *(replace(row, id=f"{row.id}#{replica}") for replica in range(1, times) for row in rows)]


def resolve_duplicates(rows: Sequence[Row], policy: DuplicatePolicy) -> list[Row]:
    """Returns rows with unique ids. For duplicate ids, `refuse` raises DatasetError, and `first` keeps the first row
    and logs how many were dropped."""
    rows_by_id: dict[str, Row] = {}
    counts: dict[str, int] = {}
    for row in rows:
        rows_by_id.setdefault(row.id, row)
        counts[row.id] = counts.get(row.id, 0) + 1
    if len(rows_by_id) == len(rows):
        return list(rows)
    num_dropped = len(rows) - len(rows_by_id)
    repeated = [(row_id, count) for row_id, count in counts.items() if count > 1]
    reject_duplicates(policy, num_dropped, len(repeated), repeated[:NUM_DUPLICATES_LISTED])
    return list(rows_by_id.values())


def reject_duplicates(
    policy: DuplicatePolicy, num_dropped: int, num_ids: int, listed: Sequence[tuple[str, int]]
) -> None:
    """Raises DatasetError (`refuse`) or logs the number of dropped rows (`first`). `num_ids`: the number of ids with
    several rows. `listed`: some of these ids, with their numbers of rows."""
    if policy is DuplicatePolicy.first:
        dropped = format_count(num_dropped, "row")
        logger.warning("%s dropped: an earlier row has the same id (dataset.dedupe=first)", dropped)
        return
    texts = ", ".join(f"{shorten(row_id)} x{count}" for row_id, count in listed)
    raise DatasetError(
        f"{format_count(num_ids, 'id')} {'is' if num_ids == 1 else 'are'} used by more than one row "
        f"({format_count(num_dropped, 'row')} too many): {texts}{' ...' if num_ids > len(listed) else ''}. "
        "Set dataset.id_field to a unique field, or set dataset.dedupe=first to keep the first row of each id"
    )


def number_rows(rows: Sequence[Row]) -> list[Row]:
    return [row if row.index == index else replace(row, index=index) for index, row in enumerate(rows)]


def shard_rows(rows: Sequence[Row], shard: ShardConfig) -> list[Row]:
    """The rows of one shard: every `count`-th row of the whole input. Sizes of shards differ by at most one row."""
    return [row for row in rows if row.index % shard.count == shard.index]


def input_digest(rows: Sequence[Row]) -> str:
    """SHA-256 of everything in rows that can change their output: id, prompt, messages, inputs, sampling settings, and
    whether there is an error. Excludes the text of errors, which depends on the version of Python."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row_digest_bytes(row))
    return digest.hexdigest()


def row_digest_bytes(row: Row) -> bytes:
    """The bytes of one row that `input_digest` hashes."""
    content = [row.id, row.prompt, row.messages, row.error is not None]
    content += [row.overrides.given] if row.overrides.given else []
    content += [{"template_kwargs": row.template_kwargs}] if row.template_kwargs else []
    content += [row.prompt_ids] if row.prompt_ids is not None else []
    content += [{"texts": row.inputs.texts, "others": row.inputs.second_texts}] if row.inputs is not None else []
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"


INT64_RANGE = range(-(2**63), 2**63)
EXACT_FLOAT_RANGE = range(-(2**53), 2**53 + 1)  # integers that float64 represents exactly

ColumnKinds: TypeAlias = dict[str, set[str]]  # kinds of values, such as "int", by column in order of appearance


def add_column_kinds(kinds: ColumnKinds, rows: Iterable[Mapping[str, object]]) -> None:
    """Adds the kinds of values in these rows to `kinds`, in place. Null values are ignored."""
    for row in rows:
        for name, value in row.items():
            column = kinds.get(name)
            if column is None:
                column = kinds[name] = set()
            if type(value) is str:  # fast path for nearly all values
                column.add("string")
            elif value is not None:
                column.add(_value_kind(value))


def _value_kind(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if value in EXACT_FLOAT_RANGE else "wide int" if value in INT64_RANGE else "other"
    return "float" if isinstance(value, float) else "string" if isinstance(value, str) else "other"


def read_targets(row: Row, name: str) -> list[str] | str:
    """The targets to score in the field `name` of a row (score.target_field), or an error message."""
    value = None
    with suppress(KeyError):
        value = value_at(row.columns, name)
    targets = [value] if isinstance(value, str) else value
    texts = [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []
    if texts and isinstance(targets, list) and len(texts) == len(targets):
        return texts
    if value is not None:
        return f"the field {name!r} (score.target_field) is neither a text nor a list of texts"
    listed = "" if has_field(row.columns, name) else f"; {format_field_names(row.columns)}"
    return f"there is no field {name!r} (score.target_field){listed}"


def target_problem(row: Row, name: str) -> str | None:
    """The reason why the targets in the field `name` of a row cannot be scored; None if they can."""
    if row.error is not None:
        return row.error
    targets = read_targets(row, name)
    return targets if isinstance(targets, str) else None
