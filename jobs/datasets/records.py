"""One record of an input: its id, text, columns and own settings are read here, or the reason why it has none."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from runtime.config import SamplingOverrides
from runtime.errors import DatasetError

from .fields import OVERRIDE_FIELDS, DatasetFields

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Fields: TypeAlias = dict[str, Json]
Message: TypeAlias = dict[str, str]

TYPE_NAMES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}
NUM_FIELDS_LISTED = 8

AS_THE_RUN = SamplingOverrides()


class BadRecord(ValueError):
    """Why this one record cannot be used; becomes the error of its row and never leaves this package. `missing_field`
    is not None where it lacks that field."""

    missing_field: str | None = None


@dataclass(frozen=True, kw_only=True)
class Record:
    """One item of an input: its fields, or the error that kept them from being read.

    `name` (`file:line`) stood in for an id that cannot be read in older versions; `place` is the start of every error
    about the record.
    """

    name: str
    place: str
    fields: Fields | None = None
    error: str | None = None

    @property
    def source(self) -> str:
        """The name of its file, or of a data set of the hub."""
        return self.name.rpartition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a record asks: a prompt, or messages with an empty prompt; `reference` is an answer that came with it."""

    prompt: str = ""
    messages: list[Message] | None = None
    reference: str | None = None


ReadContent: TypeAlias = Callable[[Fields], Content]


def too_long(name: str, place: str, num_bytes: int, max_row_bytes: int) -> Record:
    error = f"{place}: the row has {num_bytes:,} bytes, dataset.max_row_bytes={max_row_bytes:,} are the most"
    return Record(name=name, place=place, error=error)


def num_text_bytes(value: object) -> int:
    """The bytes of all texts in a row of a table, at least: characters are counted as one byte."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(num_text_bytes, value.values()))
    return sum(map(num_text_bytes, value)) if isinstance(value, list | tuple) else 0


def shorten(text: str, limit: int = 60) -> str:
    """`text` quoted for a message: control characters escaped, at most `limit` characters of it."""
    return ascii(text if len(text) <= limit else f"{text[:limit]}...")


def read_field(fields: Fields, name: str, key: str) -> Json:
    """The value of `name`; BadRecord lists the fields there are and names the config key that chose this one."""
    if name in fields:
        return fields[name]
    listed = ", ".join(shorten(field, 30) for field in list(fields)[:NUM_FIELDS_LISTED]) or "none"
    error = BadRecord(f"there is no field {shorten(name)} (dataset.{key}); its fields: {listed}")
    error.missing_field = name
    raise error


def check_text(value: Json, what: str, may_be_empty: bool = False) -> str:
    """`value` if a tokenizer can take it: text, not empty, no NUL, no lone surrogate. Raises BadRecord."""
    if not isinstance(value, str):
        raise BadRecord(f"{what} is {TYPE_NAMES[type(value)]}, not text")
    if not value and not may_be_empty:
        raise BadRecord(f"{what} is empty")
    if "\0" in value:
        raise BadRecord(f"{what} holds a NUL character at position {value.index(chr(0))}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecord(f"{what} holds a lone surrogate, which UTF-8 cannot encode") from None
    return value


def read_id(fields: Fields, name: str) -> str:
    value = read_field(fields, name, "id_field")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return check_text(value, f"the id {shorten(name)}")


def read_messages(fields: Fields, name: str) -> list[Message]:
    """A chat as templates take it: at least one message, each with a role and a content, both text.

    Further keys must be text too; a null one counts as absent, since tables have every key in every message.
    """
    value = read_field(fields, name, "messages_field")
    if not isinstance(value, list) or not value:
        raise BadRecord(f"the field {shorten(name)} (dataset.messages_field) is not a list of messages")
    messages: list[Message] = []
    for number, message in enumerate(value):
        what = f"message {number} of {shorten(name)}"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise BadRecord(f"{what} is not an object with a role and a content")
        given = {key: text for key, text in message.items() if text is not None or key in ("role", "content")}
        messages.append({key: check_text(text, f"{shorten(key)} of {what}", True) for key, text in given.items()})
    return messages


def read_content(fields: Fields, config: DatasetFields) -> Content:
    """The prompt or the messages in the fields that the config names."""
    if config.messages_field is not None:
        return Content(messages=read_messages(fields, config.messages_field))
    prompt = read_field(fields, config.prompt_field, "prompt_field")
    return Content(prompt=check_text(prompt, f"the prompt {shorten(config.prompt_field)}"))


def read_first_turn(fields: Fields) -> Content:
    """MT-Bench's schema, turn 1 only and as raw text, as MoE-Lightning runs it."""
    turns = fields.get("turns")
    if not isinstance(turns, list) or not turns:
        raise BadRecord("the field 'turns' is not a list of texts: not a question in MT-Bench's schema")
    return Content(prompt=check_text(turns[0], "turn 1"))


def add_chat(content: Content, config: DatasetFields) -> Content:
    """The content as a chat where there is a chat template: system prompt first, unless the chat has its own."""
    if not config.chat_template:
        return content
    messages = content.messages or [{"role": "user", "content": content.prompt}]
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return Content(prompt=content.prompt, messages=messages, reference=content.reference)


def named_fields(config: DatasetFields) -> dict[str, str]:
    """The fields that the config names, by key: text, id and what a row asks otherwise than the run."""
    text = "prompt_field" if config.messages_field is None else "messages_field"
    keys = ("id_field", text, *OVERRIDE_FIELDS)
    return {key: name for key in keys if (name := getattr(config, key)) is not None}


def check_columns(names: list[str], config: DatasetFields, place: str) -> None:
    """Refuse a table that lacks a column the config names, or has a name twice. Raises DatasetError."""
    if len(set(names)) != len(names):
        raise DatasetError(f"{place} has two columns of the same name: {', '.join(map(shorten, names))}")
    for key, name in named_fields(config).items():
        if name not in names:
            listed = ", ".join(map(shorten, names))
            raise DatasetError(f"{place} has no column {shorten(name)} (dataset.{key}); its columns: {listed}")


def read_overrides(fields: Fields, config: DatasetFields) -> SamplingOverrides:
    """What a record asks otherwise than the run, in the columns that `dataset.*_field` names, read strictly.

    A column that is absent, null or empty text (which is what a CSV file has for nothing) leaves the run's own setting.
    Numbers may be text, as all of a CSV file is; a whole number may be stored as 12.0, as pandas does beside a null.
    Raises BadRecord naming the column and its key.
    """
    given: dict[str, Any] = {}
    for key, read in zip(OVERRIDE_FIELDS, (_whole_number, _number, _texts), strict=True):
        name: str = getattr(config, key) or ""
        value = fields.get(name) if name else None
        if value is not None and value != "":
            given[key.removesuffix("_field")] = read(value, f"the field {shorten(name)} (dataset.{key})")
    return SamplingOverrides(**given) if given else AS_THE_RUN


def _whole_number(value: Json, what: str) -> int:
    number = _number(value, what)
    if number != int(number):
        raise BadRecord(f"{what} is {number}, not a whole number")
    return int(number)


def _number(value: Json, what: str) -> float:
    """A number that is finite, and 0 or above."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadRecord(f"{what} is {TYPE_NAMES[type(value)]}, not a number")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise BadRecord(f"{what} is {shorten(str(value))}, not a number") from None
    if not (math.isfinite(number) and number >= 0):
        raise BadRecord(f"{what} must be 0 or more, got {number}")
    return number


def _texts(value: Json, what: str) -> list[str]:
    """One stop string or a list of them."""
    items = value if isinstance(value, list) else [value]
    return [check_text(item, f"a stop string of {what}") for item in items]
