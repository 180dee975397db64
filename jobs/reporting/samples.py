"""The rows on the page of a run: a sample of successful rows, and failed rows."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from heapq import nsmallest
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..datasets.records import BadRecord
from ..datasets.templates import Template, read_template
from ..files.publishing import PARQUET_PROBLEMS, JsonValue, read_regular_file
from .figures import RunFigures

OUTPUT_COLUMNS = (
    *("id", "row_index", "status", "completion", "error", "finish_reason"),
    *("num_prompt_tokens", "num_completion_tokens"),
)
PROMPT_SETTINGS = ("dataset.messages_field", "dataset.prompt_field", "dataset.article_field")


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    """An output row. `prompt`: the prompt or, if its column is unknown, all input columns by name; None without input
    columns. Runs that score or encode have no completion."""

    id: str
    row_index: int
    status: str
    prompt: str | None
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
        number = (count * (i + 1)) // num_parts - len(samples)  # also those that earlier parts did not have
        samples += [rows[k * len(rows) // number] for k in range(number)] if len(rows) > number else rows
    return sorted(samples, key=attrgetter("row_index"))


def failed_rows(figures: RunFigures, count: int) -> list[SampleRow]:
    """The first `count` rows with another status than ok, in input order."""
    if not figures.num_errors:
        return []
    rows = (row for path in figures.run.parts.values() for row in _read_rows(figures, path) if row.status != "ok")
    return nsmallest(count, rows, key=attrgetter("row_index"))


def _read_rows(figures: RunFigures, path: Path) -> Iterator[SampleRow]:
    try:
        with pq.ParquetFile(pa.BufferReader(read_regular_file(path)[0])) as file:
            prompts = _Prompts.from_part(file, figures.settings)
            # An input column may have the name of an output column that this run does not have.
            names = [column.name for column in file.schema_arrow if not _is_input_column(column)]
            names = [name for name in names if name in OUTPUT_COLUMNS]
            rows = file.read([*names, *prompts.columns]).to_pylist()
    except PARQUET_PROBLEMS:
        return
    for row in rows:
        yield SampleRow(prompt=prompts.prompt_text(row), **{name: row[name] for name in names})


def _is_input_column(column: pa.Field) -> bool:
    return b"column" in (column.metadata or {})


@dataclass(frozen=True, kw_only=True)
class _Prompts:
    """Finds the prompts of rows in the input columns of a part.

    - `columns`: by column name, its name in the input, and True if its values are JSON
    - `template`: is filled with the columns, after `prefix`; None: the first column with a value is the prompt
    - `is_listed`: no column is known to be the prompt, so all columns are listed by name
    """

    columns: Mapping[str, tuple[str, bool]]
    template: Template | None = None
    prefix: str = ""
    is_listed: bool = False

    @staticmethod
    def from_part(file: pq.ParquetFile, settings: Mapping[str, JsonValue]) -> "_Prompts":
        """Finds the columns that the settings of the run name as prompt, or that its template uses."""
        inputs: dict[str, tuple[str, bool]] = {}
        for column in file.schema_arrow:
            if _is_input_column(column):
                name = column.metadata[b"column"].decode("utf-8", "surrogatepass")
                inputs[column.name] = (name, column.metadata.get(b"encoding") == b"json")
        if isinstance(text := settings.get("dataset.template"), str):
            template = read_template(text, "template")
            used = {
                key: value for key, value in inputs.items() if any(_is_column_of(value[0], n) for n in template.names)
            }
            if all(any(_is_column_of(name, field) for name, _ in used.values()) for field in template.names):
                prefix = "[examples of dataset.few_shot_path]\n\n" if settings.get("dataset.few_shot_path") else ""
                return _Prompts(columns=used, template=template, prefix=prefix)
        else:
            likely = [*(settings.get(key) for key in PROMPT_SETTINGS), "turns"]
            candidates = {key: value for field in likely for key, value in inputs.items() if value[0] == field}
            if candidates:
                return _Prompts(columns=candidates)
        return _Prompts(columns=inputs, is_listed=True)

    def prompt_text(self, row: Mapping[str, Any]) -> str | None:
        """The prompt of a row; None if there is none."""
        if self.template is not None:
            fields = {
                name: json.loads(str(row[key])) if is_json and row[key] is not None else row[key]
                for key, (name, is_json) in self.columns.items()
            }
            with suppress(BadRecord):
                return self.prefix + self.template.fill(fields)
            return None
        columns = self.columns.items()
        texts = {name: _format_value(row[key], is_json) for key, (name, is_json) in columns if row[key] is not None}
        if self.is_listed:
            return "\n".join(f"{name}: {text}" for name, text in texts.items()) or None
        return next(iter(texts.values()), None)


def _is_column_of(name: str, field: str) -> bool:
    """True if a field of a template is this column, or is nested in its values."""
    return field == name or field.startswith(f"{name}.")


def _format_value(value: object, is_json: bool) -> str:
    """Formats a prompt: all messages of a chat, the first of several turns."""
    if not is_json:
        return str(value)
    loaded = json.loads(str(value))
    if isinstance(loaded, list) and loaded and all(isinstance(message, dict) for message in loaded):
        return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in loaded)
    if isinstance(loaded, list) and loaded and isinstance(loaded[0], str):
        return loaded[0]
    return loaded if isinstance(loaded, str) else str(value)
