"""Reads prompts from the rows of an Arrow table, and appends columns of results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa
import pyarrow.types as kinds

from ..config.settings import SamplingConfig
from ..config.texts import did_you_mean
from ..errors import ConfigError, require
from ..requests.prompts import Rejected
from .columns import result_schema, result_values
from .generation import Result
from .prompt import Prompt

PromptOrRejected: TypeAlias = Prompt | Rejected
MAX_LISTED = 8  # columns, in a message


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if kinds.is_dictionary(kind) else kind
    return kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)


def _is_list_of(kind: pa.DataType, of: Callable[[pa.DataType], bool]) -> bool:
    is_list = kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind)
    return (is_list or kinds.is_list_view(kind)) and of(kind.value_type)


def _are_texts(kind: pa.DataType) -> bool:
    return _is_list_of(kind, _is_text)


# Tests of the types that a column of prompts may have: texts, lists of token ids, lists of messages.
PROMPTS = (_is_text, lambda kind: _is_list_of(kind, kinds.is_integer), lambda kind: _is_list_of(kind, kinds.is_struct))
# Per-row settings: field of `Prompt` -> (name of the column's type in messages, test of the type).
OVERRIDES: Mapping[str, tuple[str, Callable[[pa.DataType], bool]]] = {
    "max_new_tokens": ("whole numbers", kinds.is_integer),
    "temperature": ("numbers", lambda kind: kinds.is_integer(kind) or kinds.is_floating(kind)),
    "stop": ("texts or lists of texts", lambda kind: _is_text(kind) or _are_texts(kind)),
    "seed": ("whole numbers", kinds.is_integer),
    "json_schema": ("texts", _is_text),
    "regex": ("texts", _is_text),
    "choice": ("lists of texts", _are_texts),
    "grammar": ("texts", _is_text),
}


@dataclass(frozen=True, kw_only=True)
class TableColumns:
    """The names of a table's input columns, and the prefix of its result columns.

    `prompt`: the column of texts, lists of token ids, or lists of messages. `id`: the column of texts or integers;
    None uses row numbers. `overrides`: field of `Prompt` -> column with its values; null is the runtime's setting.
    `prefix` is prepended to the names of result columns."""

    prompt: str = "prompt"
    id: str | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""

    def __post_init__(self) -> None:
        for key in self.overrides:
            near = did_you_mean(key, OVERRIDES)
            require(key in OVERRIDES, f"overrides has unknown key {key!r}; allowed: {', '.join(OVERRIDES)}{near}")

    @property
    def input_columns(self) -> list[str]:
        """The names of the columns to read, without duplicates."""
        return list(dict.fromkeys([self.prompt, *([self.id] if self.id is not None else []), *self.overrides.values()]))

    def output_schema(self, schema: pa.Schema, sampling: SamplingConfig) -> pa.Schema:
        """The table's columns, then the result columns. Raises ConfigError for a missing, duplicate or wrongly typed
        input column, for a result column that exists already, or if `sampling.n` is not 1."""
        for name in self.input_columns:
            count = schema.names.count(name)
            listed = ", ".join(map(repr, schema.names[:MAX_LISTED])) or "none"
            suggestion = did_you_mean(name, schema.names)
            require(count > 0, f"the table has no column {name!r}; its columns: {listed}{suggestion}")
            require(count == 1, f"the table has {count} columns {name!r}: names of input columns must be unique")
        kind = schema.field(self.prompt).type
        is_prompt = kinds.is_null(kind) or any(test(kind) for test in PROMPTS)
        expected = "a prompt is a text, a list of token ids, or a list of messages"
        require(is_prompt, f"the column {self.prompt!r} holds {kind}: {expected}")
        if self.id is not None:
            kind = schema.field(self.id).type
            is_id = _is_text(kind) or kinds.is_integer(kind)
            require(is_id, f"the column {self.id!r} holds {kind}: ids are texts or whole numbers")
        for key, name in self.overrides.items():
            (expected, test), kind = OVERRIDES[key], schema.field(name).type
            is_valid = kinds.is_null(kind) or test(kind)
            require(is_valid, f"the column {name!r} holds {kind}: {key} must be {expected}")
        require(sampling.n == 1, f"sampling.n={sampling.n}: a table gets one result per row; set 1, or repeat its rows")
        added = [each.with_name(f"{self.prefix}{each.name}") for each in result_schema(sampling)]
        duplicates = [each.name for each in added if each.name in schema.names]
        require(
            not duplicates,
            f"the table already has result columns {', '.join(map(repr, duplicates))}: rename them, or set prefix",
        )
        return pa.schema([*schema, *added], metadata=schema.metadata)

    def read_prompts(self, table: pa.Table) -> list[PromptOrRejected]:
        """The prompt of each row, or a `Rejected` with the error. Without an id column the id is the row number."""
        prompts = list[PromptOrRejected]()
        for number, row in enumerate(table.select(self.input_columns).to_pylist()):
            id = str(number) if self.id is None else str(row[self.id])
            try:
                if self.id is not None and row[self.id] is None:
                    raise ConfigError(f"its id, in column {self.id!r}, is null")
                own = {key: row[column] for key, column in self.overrides.items() if row[column] is not None}
                prompts.append(Prompt(id=id, **_prompt_fields(row[self.prompt]), **own))
            except ConfigError as error:
                prompts.append(Rejected(id=f"row {number}", error=str(error)))
        return prompts

    def generate_results(
        self, table: pa.Table, sampling: SamplingConfig, generate: Callable[[Sequence[Prompt]], Sequence[Result]]
    ) -> pa.Table:
        """Calls `generate` with the table's prompts. Returns `table` with result columns. Raises ConfigError like
        `output_schema`."""
        self.output_schema(table.schema, sampling)  # checks the columns
        items: list[Prompt | Result] = [*self.read_prompts(table)]
        rows_of_prompts = [row for row, item in enumerate(items) if isinstance(item, Prompt)]
        for result in generate([item for item in items if isinstance(item, Prompt)]):
            items[rows_of_prompts[result.prompt_index]] = result
        schema = result_schema(sampling)
        all_values = [result_values(item) for item in items if not isinstance(item, Prompt)]
        values = [{name: row[name] for name in schema.names} for row in all_values]
        return self.append_results(table, pa.Table.from_pylist(values, schema=schema), sampling)

    def append_results(self, table: pa.Table, results: pa.Table, sampling: SamplingConfig) -> pa.Table:
        """Returns `table` with the columns of `results` appended, renamed with the prefix."""
        schema = self.output_schema(table.schema, sampling)
        added = [results.column(name) for name in result_schema(sampling).names]
        return pa.Table.from_arrays([*table.columns, *added], schema=schema)


def _prompt_fields(value: object) -> dict[str, object]:
    if value is None:
        raise ConfigError("the prompt is null")
    if isinstance(value, str):
        return {"text": value}
    assert isinstance(value, list), "the column's type was checked"
    if value and isinstance(value[0], Mapping):
        return {"messages": [_parse_message(number, message) for number, message in enumerate(value)]}
    if None in value:
        raise ConfigError(f"token id {value.index(None)} of the prompt is null")
    return {"token_ids": value}


def _parse_message(number: int, message: object) -> dict[str, str]:
    """Removes a chat message's null keys: Arrow adds them if other messages in the column have the keys."""
    own = {key: value for key, value in message.items() if value is not None} if isinstance(message, Mapping) else {}
    for key in ("role", "content"):
        if not isinstance(own.get(key), str):
            raise ConfigError(f"message {number} of the prompt has no text {key!r}")
    return own
