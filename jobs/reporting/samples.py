"""Rows of a run for its page: a sample of successful ones, and failed ones, with their prompts as they were sent."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import nsmallest
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from runtime.errors import ConfigError

from ..datasets.fields import DatasetFields
from ..datasets.openai_body import ENDPOINTS, parse_endpoint
from ..datasets.records import BadRecord, Content, Fields, Message, make_turns_content, read_prompt, to_chat_content
from ..datasets.templates import make_content_reader
from ..files.publishing import PARQUET_PROBLEMS, JsonValue, read_regular_file
from .figures import RunFigures

OUTPUT_COLUMNS = (
    *("id", "row_index", "status", "completion", "error", "finish_reason"),
    *("num_prompt_tokens", "num_completion_tokens"),
)
CONTENT_SETTINGS = (
    *("prompt_field", "messages_field", "turns_field", "tools_field"),
    *("template", "system_prompt", "chat_template"),
)
FILE_KINDS = ("jsonl", "csv", "parquet", "hub", "tasks")  # their prompts are made of fields of a row
QUESTION_KINDS = ("mtbench", "sample")


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    """A row. `prompt`: the prompt as it was sent, or the kept input columns; None without any. `note`: what the prompt
    lacks, or the reason why there is none. Runs that score or encode have no completion."""

    id: str
    row_index: int
    status: str
    prompt: str | None
    note: str | None
    error: str | None
    num_prompt_tokens: int
    completion: str | None = None
    finish_reason: str | None = None
    num_completion_tokens: int | None = None


def good_rows(figures: RunFigures, count: int) -> list[SampleRow]:
    """A sample of `count` rows with status ok. They are from parts all over the run, because the rows of one part have
    similar lengths."""
    paths = list(figures.run.parts.values())
    num_parts = min(count, len(paths))
    selected = [paths[i * len(paths) // num_parts] for i in range(num_parts)]  # evenly spaced
    samples: list[SampleRow] = []
    for i, path in enumerate(selected):
        rows = [row for row in _read_rows(figures, path) if row.status == "ok"]
        target = (count * (i + 1)) // num_parts  # rows of this part and earlier ones
        number = target - len(samples)  # makes up for earlier parts with too few rows
        samples += [rows[k * len(rows) // number] for k in range(number)] if len(rows) > number else rows
    return sorted(samples, key=attrgetter("row_index"))


def failed_rows(figures: RunFigures, count: int) -> list[SampleRow]:
    """The first `count` rows with another status than ok, in input order."""
    if not figures.num_errors:
        return []
    rows = (row for path in figures.run.parts.values() for row in _read_rows(figures, path) if row.status != "ok")
    return nsmallest(count, rows, key=attrgetter("row_index"))


def _read_rows(figures: RunFigures, path: Path) -> Iterator[SampleRow]:
    prompts = _Prompts(settings=figures.settings, turn=figures.run.turn)
    try:
        with pq.ParquetFile(pa.BufferReader(read_regular_file(path)[0])) as file:
            schema = file.schema_arrow
            inputs = {column.name: column for column in schema if _is_input_column(column)}
            # If a run has no completions, its parts may have an input column named `completion`: that is no output.
            names = [name for name in schema.names if name in OUTPUT_COLUMNS and name not in inputs]
            rows = file.read([*names, *inputs]).to_pylist()
    except PARQUET_PROBLEMS:
        return
    for row in rows:
        fields = dict(_read_field(column, row[name]) for name, column in inputs.items())
        prompt, note = prompts.read(fields, str(row["id"]))
        yield SampleRow(prompt=prompt, note=note, **{name: row[name] for name in names})


def _is_input_column(column: pa.Field) -> bool:
    return b"column" in (column.metadata or {})


def _read_field(column: pa.Field, value: Any) -> tuple[str, Any]:
    """The name and the value of an input column, as in the input."""
    name = column.metadata[b"column"].decode("utf-8", "surrogatepass")
    is_json = column.metadata.get(b"encoding") == b"json" and value is not None
    return name, json.loads(str(value)) if is_json else value


@dataclass(frozen=True, kw_only=True)
class _Prompts:
    """Rebuilds the prompts of a run from the columns that it kept, as its data set made them. `turn`: of the chat that
    the run answers."""

    settings: Mapping[str, JsonValue]
    turn: int = 1

    def read(self, fields: Fields, row_id: str) -> tuple[str | None, str | None]:
        """Returns the prompt of a row, or else the columns of its input, and a note."""
        kind = self.settings.get("dataset.kind")
        if not fields and kind != "prompt":
            if self.settings.get("dataset.keep_columns") is False:
                return None, "The prompt is not in the run: dataset.keep_columns=false."
            return None, "The prompt is not in the run: it was given as tokens, not as a row of a file."
        try:
            content = self._content(fields, row_id)
            if content is None:
                return _list_fields(fields), f"dataset={kind} makes a prompt of these columns and others."
            return self._format(content)
        except (BadRecord, ConfigError) as error:
            return _list_fields(fields), f"The prompt cannot be rebuilt from the columns that the run kept: {error}."

    def _content(self, fields: Fields, row_id: str) -> Content | None:
        """The request that the data set made of a row; None for a kind with prompts made of more than its fields.
        Raises BadRecord, and ConfigError if the settings in run.json are damaged."""
        settings = {name: self.settings.get(f"dataset.{name}") for name in CONTENT_SETTINGS}
        kind, id_field = self.settings.get("dataset.kind"), self.settings.get("dataset.id_field")
        config = DatasetFields(**{name: value for name, value in settings.items() if value is not None})  # pyright: ignore
        content = None
        if kind == "prompt":
            content = Content(prompt=str(self.settings.get("dataset.prompt")))
        elif kind in QUESTION_KINDS and isinstance(turns := fields.get("turns"), list) and turns:
            content = make_turns_content(turns if self.settings.get("dataset.turns") == "all" else turns[:1], "turn")
        elif kind == "openai_batch":
            read, body = ENDPOINTS.get(parse_endpoint(fields.get("url")) or ""), fields.get("body")
            content = read(body)[0] if read is not None and isinstance(body, dict) else None
        elif kind == "tasks":
            content = Content(prompt=read_prompt(fields, "prompt"))
        elif kind in FILE_KINDS:
            known = {**fields, id_field: row_id} if isinstance(id_field, str) else fields
            content = make_content_reader(config, lambda _: ())(known)
            if self._examples is not None:
                content = replace(content, prompt=f"[{self._examples}]\n\n{content.prompt}")
        is_chat = content is not None and (config.chat_template or content.messages is not None)
        return to_chat_content(content, config) if is_chat and content is not None else content

    def _format(self, content: Content) -> tuple[str, str | None]:
        """Formats a request as text, with a note about what is around it."""
        notes = list[str]()
        if self._examples is not None:
            notes.append(f"It begins with {self._examples}, which the run did not keep.")
        if content.prompt_ids is not None:
            text = f"[{len(content.prompt_ids):,} token ids]"
        elif content.messages is None:
            text = content.prompt
        else:
            notes.append("A chat: the model's chat template was applied to these messages.")
            messages = [_format_message(message) for message in content.messages]
            if tools := content.template_kwargs.get("tools"):
                messages.insert(0, f"tools: {json.dumps(tools, ensure_ascii=False)}")
            if self.turn > 1:
                messages.append(f"[the answers and questions before turn {self.turn}, in the runs of these turns]")
                messages += [f"user: {text}" for text in content.later_turns[self.turn - 2 : self.turn - 1]]
            text = "\n\n".join(messages)
        return text, " ".join(notes) or None

    @property
    def _examples(self) -> str | None:
        """The few-shot examples in words; None without any."""
        path = self.settings.get("dataset.few_shot_path")
        return None if path is None else f"{self.settings.get('dataset.num_examples')} examples from {path}"


def _format_message(message: Message) -> str:
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    text = f"{message.get('role')}: {message.get('content')}"
    return f"{text}\n{json.dumps(rest, ensure_ascii=False)}" if rest else text


def _list_fields(fields: Fields) -> str:
    return "\n".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in fields.items()
        if value is not None
    )
