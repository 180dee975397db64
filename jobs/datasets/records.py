"""Reads the fields of one record, an item of an input: id, prompt, messages, tools and sampling settings.

All functions raise BadRecord if a field cannot be used. `what` and `where` are names of a value for its message.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from string import Formatter
from typing import Any, TypeAlias

from runtime.config.settings import SamplingOverrides
from runtime.errors import DatasetError

from .fields import OVERRIDE_FIELDS, DatasetFields
from .strict_json import Json, parse_json, shorten

Fields: TypeAlias = dict[str, Json]
Message: TypeAlias = dict[str, Json]

TYPE_NAMES = {
    str: "text",
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}
NUM_FIELDS_LISTED = 8
MAX_INDEX_DIGITS = 9
SHAREGPT_ROLES = {  # the role for each value of `from` in files like ShareGPT's
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}

NO_OVERRIDES = SamplingOverrides()


class BadRecord(ValueError):
    """The reason why a record cannot be used. It becomes the error of the record's row, and is never raised to callers
    of this package."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """An item of an input: its fields, or the error if it cannot be read. `name`: `file:line`. `location`: where it is,
    the prefix of every error about the record."""

    name: str
    location: str
    fields: Fields | None = None
    error: str | None = None

    @property
    def source(self) -> str:
        """The name of the file, or of the Hub dataset."""
        return self.name.rpartition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Content:
    """The request of a record: a prompt as text or as token ids (`prompt_ids`), or the messages of a chat. `reference`:
    the correct answer. `template_kwargs`: extra arguments of the chat template. `later_turns`: the user messages after
    the first one."""

    prompt: str = ""
    prompt_ids: tuple[int, ...] | None = None
    messages: list[Message] | None = None
    reference: str | None = None
    template_kwargs: Mapping[str, Json] = field(default_factory=dict)
    later_turns: tuple[str, ...] = ()


ReadContent: TypeAlias = Callable[[Fields], Content]


def too_long_record(name: str, location: str, num_bytes: int, max_row_bytes: int) -> Record:
    error = f"{location}: the row has {num_bytes:,} bytes, above dataset.max_row_bytes={max_row_bytes:,}"
    return Record(name=name, location=location, error=error)


def num_text_bytes(value: object) -> int:
    """The number of characters in all strings of a row: a lower bound of their bytes in UTF-8."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(num_text_bytes, value.values()))
    return sum(map(num_text_bytes, value)) if isinstance(value, list | tuple) else 0


def value_at(fields: Fields, name: str) -> Json:
    """Returns the field `name`. A dotted name also leads into objects and lists: `body.messages`, `choices.0`. Raises
    KeyError."""
    if name in fields:
        return fields[name]
    value: Json = fields
    for step in name.split("."):
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and _list_index(step) < len(value):
            value = value[_list_index(step)]
        else:
            raise KeyError(name)
    return value


def has_field(fields: Fields, name: str) -> bool:
    with suppress(KeyError):
        value_at(fields, name)
        return True
    return False


def _list_index(step: str) -> int:
    is_number = step.isascii() and step.isdigit() and len(step) <= MAX_INDEX_DIGITS
    return int(step) if is_number else 10**MAX_INDEX_DIGITS


def read_field(fields: Fields, name: str, key: str) -> Json:
    """Returns the field `name`, as `value_at`. Raises BadRecord with the record's fields and the setting `key`."""
    try:
        return value_at(fields, name)
    except KeyError:
        raise BadRecord(f"there is no field {shorten(name)} (dataset.{key}); {format_field_names(fields)}") from None


def format_field_names(fields: Fields) -> str:
    return f"its fields: {', '.join(shorten(name, 30) for name in list(fields)[:NUM_FIELDS_LISTED]) or 'none'}"


def check_text(value: Json, what: str, may_be_empty: bool = False) -> str:
    """Returns `value` if it is a nonempty string without NUL or lone surrogates, else raises BadRecord."""
    if not isinstance(value, str):
        raise BadRecord(f"{what} is {TYPE_NAMES[type(value)]}, not text")
    if not value and not may_be_empty:
        raise BadRecord(f"{what} is empty")
    if "\0" in value:
        raise BadRecord(f"{what} has a NUL character at position {value.index(chr(0))}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecord(f"{what} has a lone surrogate, which UTF-8 cannot encode") from None
    return value


def read_id(fields: Fields, name: str) -> str:
    value = read_field(fields, name, "id_field")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return check_text(value, f"the id {shorten(name)}")


def read_messages(fields: Fields, name: str) -> list[Message]:
    """Reads the chat in the field `name`: a list of messages or its JSON, or ShareGPT's format. Raises BadRecord."""
    value, what = read_field(fields, name, "messages_field"), f"the field {shorten(name)} (dataset.messages_field)"
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise BadRecord(f"{what} is text, but not a JSON list of messages: {error}") from None
    if not isinstance(value, list) or not value:
        raise BadRecord(f"{what} is not a list of messages")
    where = shorten(name)
    messages = [_from_sharegpt(message, f"message {i} of {where}") for i, message in enumerate(value)]
    return check_messages(messages, where)


def _from_sharegpt(message: Json, what: str) -> Json:
    """Converts a message in ShareGPT's format, {from, value}, to {role, content}. Returns any other message
    unchanged."""
    if not isinstance(message, dict) or "role" in message or not {"from", "value"} <= message.keys():
        return message
    role, more = message["from"], {key: value for key, value in message.items() if key not in ("from", "value")}
    if not isinstance(role, str) or role not in SHAREGPT_ROLES:
        raise BadRecord(f"{what} is from {shorten(str(role))}; known: {', '.join(SHAREGPT_ROLES)}")
    return {**more, "role": SHAREGPT_ROLES[role], "content": message["value"]}


def check_messages(value: list[Json], where: str) -> list[Message]:
    """Returns the messages of a chat, each with a role and a content.

    A content is a string, or a list of parts of type text, which are joined by newlines. It may be missing in a message
    with `tool_calls`. Other keys are passed to the chat template. Keys that are null are left out, because tables have
    null for missing keys.
    """
    return [_check_message(message, f"message {number} of {where}") for number, message in enumerate(value)]


def _check_message(message: Json, what: str) -> Message:
    """Returns one message of a chat, as in `check_messages`."""
    if not isinstance(message, dict) or "role" not in message:
        raise BadRecord(f"{what} is not an object with a role and a content")
    calls = message.get("tool_calls")
    if "content" not in message and not calls:
        raise BadRecord(f"{what} is not an object with a role and a content")
    checked: Message = {}
    for key, value in message.items():
        if key == "content":
            checked[key] = "" if value is None and calls else _join_content_parts(value, f"{shorten(key)} of {what}")
        elif key == "role":
            checked[key] = check_text(value, f"{shorten(key)} of {what}", True)
        elif value is not None:
            checked[key] = _parse_tool_calls(value, f"{key} of {what}") if key == "tool_calls" else value
            _check_texts(checked[key], f"{shorten(key)} of {what}")
    return checked


def _join_content_parts(value: Json, what: str) -> str:
    if not isinstance(value, list):
        return check_text(value, what, True)
    texts: list[str] = []
    for number, part in enumerate(value):
        where = f"part {number} of {what}"
        if not isinstance(part, dict):
            raise BadRecord(f"{where} is {TYPE_NAMES[type(part)]}, not an object of type 'text'")
        if part.get("type") != "text":
            raise BadRecord(f"{where} is of type {shorten(str(part.get('type')))}; only 'text' is supported")
        texts.append(check_text(part.get("text"), f"the text of {where}", True))
    return "\n".join(texts)


def _parse_tool_calls(value: Json, what: str) -> list[Json]:
    """Decodes the arguments of tool calls from JSON to objects, as chat templates expect them. Missing arguments become
    {}. JSON values that are not objects are decoded, too, as inference servers do."""
    calls: list[Json] = []
    for call in check_objects(value, what):
        function = call.get("function")
        if isinstance(function, dict):
            arguments = function.get("arguments")
            try:
                arguments = parse_json(arguments) if isinstance(arguments, str) and arguments.strip() else arguments
            except ValueError as error:
                raise BadRecord(f"the arguments of {what}: {error}") from None
            is_empty = arguments is None or (isinstance(arguments, str) and not arguments.strip())
            call = {**call, "function": {**function, "arguments": {} if is_empty else arguments}}
        calls.append(call)
    return calls


def check_objects(value: Json, what: str) -> list[dict[str, Json]]:
    """Returns a list of objects, after checking the strings in them. Raises BadRecord."""
    if not isinstance(value, list):
        raise BadRecord(f"{what} is {TYPE_NAMES[type(value)]}, not a list of objects")
    objects = [item for item in value if isinstance(item, dict)]
    if len(objects) < len(value):
        raise BadRecord(f"{what} has items that are not objects")
    _check_texts(value, what)
    return objects


def _check_texts(value: Json, what: str) -> None:
    """Raises BadRecord if a string in a nested value cannot be tokenized."""
    if isinstance(value, str):
        check_text(value, what, True)
    elif isinstance(value, dict | list):
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_texts(item, what)


def read_tools(fields: Fields, name: str | None) -> dict[str, Json]:
    """Reads `tools` for the chat template from the field `name`; {} if it is missing or null. Raises BadRecord."""
    value = None
    if name is not None:
        with suppress(KeyError):
            value = value_at(fields, name)
    if value is None:
        return {}
    return {"tools": [*check_objects(value, f"the field {shorten(name or '')} (dataset.tools_field)")]}


def read_prompt(fields: Fields, name: str) -> str:
    return check_text(read_field(fields, name, "prompt_field"), f"the prompt {shorten(name)}")


def read_turns(fields: Fields, name: str) -> Content:
    """Reads the user messages in the field `name`, one per turn. Raises BadRecord."""
    turns = read_field(fields, name, "turns_field")
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f"the field {shorten(name)} (dataset.turns_field) is not a list of texts")
    return make_turns_content(turns, f"the field {shorten(name)}, turn")


def make_turns_content(turns: list[Json], what: str) -> Content:
    """The content of a chat with several turns: the first user message is the prompt. Raises BadRecord."""
    first, *later = [check_text(turn, f"{what} {number}") for number, turn in enumerate(turns, start=1)]
    return Content(prompt=first, later_turns=tuple(later))


def to_chat_content(content: Content, config: DatasetFields) -> Content:
    """Converts content to a chat. Adds the system prompt of the settings unless the chat has one. Template arguments of
    the record override those of the settings."""
    messages: list[Message] = content.messages or [{"role": "user", "content": content.prompt}]
    if config.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    run_kwargs: Mapping[str, Any] = config.chat_template_kwargs or {}
    return replace(content, messages=messages, template_kwargs={**run_kwargs, **content.template_kwargs})


def configured_fields(config: DatasetFields) -> list[tuple[str, str]]:
    """The fields of the input that the settings name, as pairs of setting and field name."""
    keys = ["id_field", "messages_field", "turns_field", "tools_field", *OVERRIDE_FIELDS]
    if config.messages_field is None and config.turns_field is None and config.template is None:
        keys.append("prompt_field")
    fields = [(key, name) for key in keys if (name := getattr(config, key)) is not None]
    with suppress(ValueError):  # a malformed template is reported elsewhere
        fields += [("template", name) for _, name, _, _ in list(Formatter().parse(config.template or "")) if name]
    return fields


def check_columns(names: list[str], config: DatasetFields, location: str) -> None:
    """Raises DatasetError if a table lacks a column that the settings name, or has two columns with the same name."""
    if len(set(names)) != len(names):
        raise DatasetError(f"{location} has two columns with the same name: {', '.join(map(shorten, names))}")
    for key, name in configured_fields(config):
        if not (name in names or name.partition(".")[0] in names):
            listed = ", ".join(map(shorten, names))
            raise DatasetError(f"{location} has no column {shorten(name)} (dataset.{key}); columns: {listed}")


def read_overrides(fields: Fields, config: DatasetFields) -> SamplingOverrides:
    """Reads the sampling settings of a record from the fields that `dataset.*_field` name.

    A value that is missing, null or empty (in CSV) means the setting of the run. Numbers may be text, as in CSV files.
    Integers may be written as 12.0, as pandas does in columns with nulls. Raises BadRecord with field and setting.
    """
    overrides: dict[str, Any] = {}
    for key, read_value in zip(OVERRIDE_FIELDS, OVERRIDE_READERS, strict=True):
        name: str = getattr(config, key) or ""
        value = None
        with suppress(KeyError):
            value = value_at(fields, name) if name else None
        if value is not None and value != "":
            overrides[key.removesuffix("_field")] = read_value(value, f"the field {shorten(name)} (dataset.{key})")
    return SamplingOverrides(**overrides) if overrides else NO_OVERRIDES


def _read_integer(value: Json, what: str) -> int:
    number = _read_number(value, what)
    if number != int(number):
        raise BadRecord(f"{what} is {number}, not a whole number")
    return int(number)


def _read_number(value: Json, what: str) -> float:
    """Parses a finite number of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadRecord(f"{what} is {TYPE_NAMES[type(value)]}, not a number")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise BadRecord(f"{what} is {shorten(str(value))}, not a number") from None
    if not (math.isfinite(number) and number >= 0):
        raise BadRecord(f"{what} must be 0 or more, got {number}")
    return number


def _read_stops(value: Json, what: str) -> list[str]:
    items = value if isinstance(value, list) else [value]
    return [check_text(item, f"a stop string of {what}") for item in items]


def _read_schema(value: Json, what: str) -> str:
    """Returns a JSON schema as text. `value`: an object or text."""
    if not isinstance(value, dict):
        return check_text(value, what)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _read_choices(value: Json, what: str) -> list[str]:
    if not isinstance(value, list):
        raise BadRecord(f"{what} is {TYPE_NAMES[type(value)]}, not a list of texts")
    return [check_text(item, f"a choice of {what}") for item in value]


OVERRIDE_READERS: tuple[Callable[[Json, str], object], ...] = (
    *(_read_integer, _read_number, _read_stops, _read_schema, check_text),
    _read_choices,
)  # in the order of `OVERRIDE_FIELDS`
