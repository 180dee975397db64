"""Rows of a run for a person to read: some that went well, and those that failed."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path

import pyarrow.parquet as pq

from ..files.publishing import PARQUET_PROBLEMS
from ..run.output_rows import SOURCE_FIELDS
from .figures import RunFigures

OURS = ("id", "status", "completion", "error", "finish_reason", "num_prompt_tokens", "num_completion_tokens")
FIELDS_OF_PROMPTS = ("dataset.messages_field", "dataset.prompt_field", "dataset.article_field")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """`prompt`: as the input has it; None where the run did not keep it."""

    id: str
    row_index: int | None
    status: str
    prompt: str | None
    completion: str
    error: str | None
    finish_reason: str | None
    num_prompt_tokens: int
    num_completion_tokens: int


def good_rows(figures: RunFigures, count: int) -> list[Sample]:
    """Rows that are ok, from all over the run: blocks hold rows of like length."""
    paths = list(figures.run.parts.values())
    chosen = [paths[i * len(paths) // min(count, len(paths))] for i in range(min(count, len(paths)))]
    found: list[Sample] = []
    for i, path in enumerate(chosen):
        rows = [row for row in _rows(figures, path) if row.status == "ok"]
        wanted = (count * (i + 1)) // len(chosen) - len(found)
        found += [rows[k * len(rows) // wanted] for k in range(wanted)] if len(rows) > wanted else rows
    return sorted(found, key=_place)


def failed_rows(figures: RunFigures, count: int) -> list[Sample]:
    """The first of the rows that are not ok, by their places in the input."""
    if not figures.num_errors:
        return []
    rows = (row for path in figures.run.parts.values() for row in _rows(figures, path) if row.status != "ok")
    return nsmallest(count, rows, key=_place)


def _place(row: Sample) -> int:
    return -1 if row.row_index is None else row.row_index


def _rows(figures: RunFigures, path: Path) -> Iterator[Sample]:
    try:
        with pq.ParquetFile(path) as file:
            prompts = _prompt_columns(file, figures.settings)
            # an input may have a column of that name, where a run was begun before rows had a place
            places = [column.name for column in file.schema_arrow if column.equals(SOURCE_FIELDS[0])]
            rows = file.read([*OURS, *places, *(name for name, _ in prompts)]).to_pylist()
    except PARQUET_PROBLEMS:
        return
    for row in rows:
        texts = [_text(row[name], is_json) for name, is_json in prompts if row[name] is not None]
        place = row["row_index"] if places else None
        yield Sample(prompt=texts[0] if texts else None, row_index=place, **{name: row[name] for name in OURS})


def _prompt_columns(file: pq.ParquetFile, settings: Mapping[str, object]) -> list[tuple[str, bool]]:
    """The columns that may hold what was asked, the likeliest first, and whether they are JSON."""
    wanted = [*(settings.get(key) for key in FIELDS_OF_PROMPTS), "turns"]
    found: list[tuple[str, bool]] = []
    for name in wanted:
        for column in file.schema_arrow:
            metadata = column.metadata or {}
            if name is not None and metadata.get(b"column") == str(name).encode("utf-8", "surrogatepass"):
                found.append((column.name, metadata.get(b"encoding") == b"json"))
    return found


def _text(value: object, is_json: bool) -> str:
    """A chat as its messages, questions of several turns as the first."""
    if not is_json:
        return str(value)
    loaded = json.loads(str(value))
    if isinstance(loaded, list) and loaded and all(isinstance(each, dict) for each in loaded):
        return "\n\n".join(f"{each.get('role')}: {each.get('content')}" for each in loaded)
    if isinstance(loaded, list) and loaded and isinstance(loaded[0], str):
        return loaded[0]
    return loaded if isinstance(loaded, str) else str(value)
