"""Rows of a run to read: some that succeeded, and those that failed."""

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

OURS = (
    *("id", "row_index", "status", "completion", "error", "finish_reason"),
    *("num_prompt_tokens", "num_completion_tokens"),
)
FIELDS_OF_PROMPTS = ("dataset.messages_field", "dataset.prompt_field", "dataset.article_field")


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    """`prompt`: the prompt as answered, as in the input, or the input columns by name; None if the run kept none.
    Runs that score or encode have no completion."""

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
    """Rows with status ok from all parts of the run, because a block holds rows of similar length."""
    paths = list(figures.run.parts.values())
    chosen = [paths[i * len(paths) // min(count, len(paths))] for i in range(min(count, len(paths)))]
    found: list[SampleRow] = []
    for i, path in enumerate(chosen):
        rows = [row for row in _rows(figures, path) if row.status == "ok"]
        wanted = (count * (i + 1)) // len(chosen) - len(found)
        found += [rows[k * len(rows) // wanted] for k in range(wanted)] if len(rows) > wanted else rows
    return sorted(found, key=attrgetter("row_index"))


def failed_rows(figures: RunFigures, count: int) -> list[SampleRow]:
    """The first rows with another status than ok, in input order."""
    if not figures.num_errors:
        return []
    rows = (row for path in figures.run.parts.values() for row in _rows(figures, path) if row.status != "ok")
    return nsmallest(count, rows, key=attrgetter("row_index"))


def _rows(figures: RunFigures, path: Path) -> Iterator[SampleRow]:
    try:
        with pq.ParquetFile(pa.BufferReader(read_regular_file(path)[0])) as file:
            prompts = _Prompts.from_part(file, figures.settings)
            # an input's column may have the name of one of ours that this run has not
            ours = [column.name for column in file.schema_arrow if not _is_input_column(column) and column.name in OURS]
            rows = file.read([*ours, *prompts.columns]).to_pylist()
    except PARQUET_PROBLEMS:
        return
    for row in rows:
        yield SampleRow(prompt=prompts.prompt_text(row), **{name: row[name] for name in ours})


def _is_input_column(column: pa.Field) -> bool:
    return b"column" in (column.metadata or {})


@dataclass(frozen=True, kw_only=True)
class _Prompts:
    """Finds the prompts of rows in the input columns of a part. `columns`: input name of each column, and True if it
    is JSON. `template` is filled with them, after `prefix`. Without a template: candidates, the most likely first; if
    there are none, `is_listed` and all columns are shown by name."""

    columns: Mapping[str, tuple[str, bool]]
    template: Template | None = None
    prefix: str = ""
    is_listed: bool = False

    @staticmethod
    def from_part(file: pq.ParquetFile, settings: Mapping[str, JsonValue]) -> "_Prompts":
        kept: dict[str, tuple[str, bool]] = {}
        for column in file.schema_arrow:
            if _is_input_column(column):
                name = column.metadata[b"column"].decode("utf-8", "surrogatepass")
                kept[column.name] = (name, column.metadata.get(b"encoding") == b"json")
        if isinstance(text := settings.get("dataset.template"), str):
            template = read_template(text, "template")
            needed = {
                each: value for each, value in kept.items() if any(_is_column_of(value[0], n) for n in template.names)
            }
            if all(any(_is_column_of(name, wanted) for name, _ in needed.values()) for wanted in template.names):
                front = "[examples of dataset.few_shot_path]\n\n" if settings.get("dataset.few_shot_path") else ""
                return _Prompts(columns=needed, template=template, prefix=front)
        else:
            likely = [*(settings.get(key) for key in FIELDS_OF_PROMPTS), "turns"]
            found = {each: value for wanted in likely for each, value in kept.items() if value[0] == wanted}
            if found:
                return _Prompts(columns=found)
        return _Prompts(columns=kept, is_listed=True)

    def prompt_text(self, row: Mapping[str, Any]) -> str | None:
        """The prompt of a row of the part; None if the part has no input columns."""
        if self.template is not None:
            fields = {
                name: json.loads(str(row[each])) if is_json and row[each] is not None else row[each]
                for each, (name, is_json) in self.columns.items()
            }
            with suppress(BadRecord):
                return self.prefix + self.template.fill(fields)
            return None
        there = {each: value for each, value in self.columns.items() if row[each] is not None}
        texts = {name: _text(row[each], is_json) for each, (name, is_json) in there.items()}
        if self.is_listed:
            return "\n".join(f"{name}: {text}" for name, text in texts.items()) or None
        return next(iter(texts.values()), None)


def _is_column_of(name: str, wanted: str) -> bool:
    """True if a template field is this column or nested in it."""
    return wanted == name or wanted.startswith(f"{name}.")


def _text(value: object, is_json: bool) -> str:
    """A chat as its messages, a question of several turns as the first."""
    if not is_json:
        return str(value)
    loaded = json.loads(str(value))
    if isinstance(loaded, list) and loaded and all(isinstance(each, dict) for each in loaded):
        return "\n\n".join(f"{each.get('role')}: {each.get('content')}" for each in loaded)
    if isinstance(loaded, list) and loaded and isinstance(loaded[0], str):
        return loaded[0]
    return loaded if isinstance(loaded, str) else str(value)
