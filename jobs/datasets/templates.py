"""Prompt templates such as `Question: {question}`: fills them with fields of a record, and prepends few-shot
examples."""

import json
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import TypeAlias

from runtime.config.texts import is_url
from runtime.errors import ConfigError, DatasetError

from .fields import DatasetFields
from .records import (
    BadRecord,
    Content,
    Fields,
    ReadContent,
    Record,
    check_text,
    read_field,
    read_messages,
    read_prompt,
    read_tools,
    read_turns,
    shorten,
)

BLOCK_SEPARATOR = "\n\n"  # between examples, and before the prompt

ReadRecords: TypeAlias = Callable[[DatasetFields], Iterable[Record]]


@dataclass(frozen=True, kw_only=True)
class Template:
    """A parsed format string. `key`: its setting. `parts`: pairs of a literal text and the field after it, or None."""

    key: str
    parts: tuple[tuple[str, str | None], ...]

    @property
    def names(self) -> list[str]:
        return [name for _, name in self.parts if name is not None]

    def fill(self, fields: Fields) -> str:
        """Fills in the fields of one record: strings as they are, other values as JSON. Raises BadRecord."""
        pieces: list[str] = []
        for literal, name in self.parts:
            pieces.append(literal)
            if name is not None:
                value, what = read_field(fields, name, self.key), f"the field {shorten(name)} (dataset.{self.key})"
                if value is None:
                    raise BadRecord(f"{what} is null")
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                pieces.append(check_text(text, what, may_be_empty=True))
        return "".join(pieces)


def read_template(text: str, key: str) -> Template:
    r"""Parses a format string. `{field}` is a field, `{a.b}` a field of an object. `{{` and `}}` are braces, `\n` is a
    newline, and `\\n` is a backslash and an n. Raises ConfigError with the name of the setting `key`."""
    unescaped = re.sub(r"\\(\\n|n)", lambda match: "\n" if match[1] == "n" else r"\n", text)
    try:
        parsed: list[tuple[str, str | None, str | None, str | None]] = list(Formatter().parse(unescaped))
    except ValueError as error:
        raise ConfigError(f"dataset.{key}: {error}; write literal braces as {{{{ and }}}}") from None
    for _, name, format_spec, conversion in parsed:
        if name == "" or format_spec or conversion:
            raise ConfigError(f"dataset.{key}: only a field name is allowed between braces, got {shorten(name or '')}")
    template = Template(key=key, parts=tuple((literal, name) for literal, name, _, _ in parsed))
    if not template.names:
        raise ConfigError(f"dataset.{key}={shorten(text)} has no {{field}}: all prompts would be equal")
    return template


def make_content_reader(config: DatasetFields, read: ReadRecords) -> ReadContent:
    """Returns a function that reads the request of a record from the fields that the settings name: messages, turns, a
    prompt, or the fields of a template. `read`: reads the file of few-shot examples. Raises ConfigError and
    DatasetError."""
    if config.messages_field is not None:
        name = config.messages_field
        return lambda fields: Content(
            messages=read_messages(fields, name), template_kwargs=read_tools(fields, config.tools_field)
        )
    if config.turns_field is not None:
        turns = config.turns_field
        return lambda fields: replace(read_turns(fields, turns), template_kwargs=read_tools(fields, config.tools_field))
    template = read_template(config.template, "template") if config.template is not None else None
    prefix = _few_shot_prefix(config, read)

    def read_content(fields: Fields) -> Content:
        prompt = template.fill(fields) if template is not None else read_prompt(fields, config.prompt_field)
        checked = check_text(prompt, "the prompt")
        return Content(prompt=prefix + checked, template_kwargs=read_tools(fields, config.tools_field))

    return read_content


def _few_shot_prefix(config: DatasetFields, read: ReadRecords) -> str:
    """The few-shot examples that precede every prompt. They are sampled with the seed `trial`, and are in the order of
    their file."""
    if config.few_shot_path is None or config.few_shot_template is None:
        return ""
    where, count = f"dataset.few_shot_path={config.few_shot_path}", config.num_examples
    path = Path(config.few_shot_path).expanduser()
    if not is_url(config.few_shot_path) and not path.exists():
        raise DatasetError(f"{where} does not exist (looked for {path.absolute()})")
    records = list(read(few_shot_config(config)))
    if len(records) < count:
        raise DatasetError(f"{where} has {len(records):,} rows, fewer than dataset.num_examples={count}")
    template = read_template(config.few_shot_template, "few_shot_template")
    indices = sorted(random.Random(config.trial).sample(range(len(records)), count))
    prefix = ""
    for record in (records[index] for index in indices):
        if record.fields is None:
            raise DatasetError(f"{where}: {record.error}")
        try:
            prefix += template.fill(record.fields) + BLOCK_SEPARATOR
        except BadRecord as error:
            raise DatasetError(f"{where}: {record.location}: {error}") from error
    return prefix


def few_shot_config(config: DatasetFields) -> DatasetFields:
    """The settings that read the file of few-shot examples: those of the input, with `few_shot_path` as path."""
    shared_keys = ("json_field", "csv_delimiter", "max_row_bytes", "hub_config", "hub_split", "hub_revision")
    shared_values = {key: getattr(config, key) for key in shared_keys}
    return DatasetFields(path=config.few_shot_path, template=config.few_shot_template, **shared_values)
