"""Digests of a run's input: of all prompts, of each column that is copied to the output, and of each row.

The digests of rows let an error message name the first row that has changed.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ..datasets import Row, input_digest, row_digest_bytes
from ..files.publishing import (
    PARQUET_PROBLEMS,
    JsonValue,
    json_digest,
    parse_parquet,
    publish,
    read_regular_file,
    write_parquet,
)
from .output_rows import encode_columns

LOG = logging.getLogger(__name__)
MAX_FILES_SHOWN = 1000  # with a digest each in run.json; more files have only a common digest
# The first 8 bytes of two digests of a row: of everything that can change its output (`asked`), and of its columns.
ROW_SCHEMA = pa.schema(
    [pa.field("asked", pa.uint64(), nullable=False), pa.field("columns", pa.uint64(), nullable=False)]
)


@dataclass(frozen=True, kw_only=True)
class InputDigests:
    """The digests of an input. `prompts_digest`: of everything that can change the output. `facts`: type and digest of
    each column, and their order. `rows`: a table with a row of ROW_SCHEMA for each row; None for input in windows."""

    prompts_digest: str
    facts: Mapping[str, JsonValue]
    rows: pa.Table | None = None


def digest_input(rows: Sequence[Row], columns: pa.Schema) -> InputDigests:
    """The digests of rows in memory. `columns`: schema of the columns that are copied to the output."""
    column_hashers = {column.name: hashlib.sha256() for column in columns}
    row_digests: list[int] = []
    for row in rows:
        row_hasher = hashlib.sha256()
        for name, value in encode_columns(columns, row.columns).items():
            line = json.dumps(value).encode("ascii") + b"\n"
            column_hashers[name].update(line)
            row_hasher.update(line)
        row_digests.append(_to_uint64(row_hasher.digest()))
    names = _column_names(columns)
    facts: dict[str, JsonValue] = {
        f"input column {names[column.name]}": f"{column.type} {column_hashers[column.name].hexdigest()[:32]}"
        for column in columns
    }
    prompt_digests = [_to_uint64(hashlib.sha256(row_digest_bytes(row)).digest()) for row in rows]
    return InputDigests(
        prompts_digest=input_digest(rows),
        facts=facts | {"input columns": list(names.values())},
        rows=pa.table({"asked": prompt_digests, "columns": row_digests}, schema=ROW_SCHEMA),
    )


def _column_names(columns: pa.Schema) -> dict[str, str]:
    """The name of each column in the input, as JSON, by its name in the output."""
    return {column.name: json.dumps(column.metadata[b"column"].decode("utf-8", "surrogatepass")) for column in columns}


def digest_input_files(files: Mapping[str, str], settings: Mapping[str, JsonValue], columns: pa.Schema) -> InputDigests:
    """The digests of an input that is read in windows. `files`: SHA-256 by file name. `settings`: those that select
    rows."""
    names = _column_names(columns)
    facts: dict[str, JsonValue] = {f"input column {names[column.name]}": str(column.type) for column in columns}
    if len(files) <= MAX_FILES_SHOWN:
        facts |= {f"input file {name}": sha256 for name, sha256 in files.items()}
    prompts_digest = json_digest([[*files.items()], {**settings}])
    return InputDigests(prompts_digest=prompts_digest, facts=facts | {"input columns": list(names.values())})


def _to_uint64(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


def write_row_digests(path: Path, digests: InputDigests) -> None:
    """Writes the digests of rows to `path`, unless the file exists. Raises OutputError."""
    rows = digests.rows
    if rows is not None and not path.exists():
        publish(path, lambda file: write_parquet(rows, file), exclusive=True, expected_bytes=rows.nbytes)


def describe_first_change(path: Path, digests: InputDigests, rows: Sequence[Row]) -> str | None:
    """A sentence about the first row that differs from the digests in the file `path`. None if no row differs, or if
    the file is missing or unreadable."""
    if digests.rows is None:
        return None
    try:
        table = parse_parquet(read_regular_file(path)[0])
        stored = [table.column(name).to_pylist() for name in ROW_SCHEMA.names]
    except FileNotFoundError:
        return None
    except (*PARQUET_PROBLEMS, KeyError) as error:
        LOG.warning("%s cannot be read (%s): the changed row is unknown", path, error)
        return None
    current = [digests.rows.column(name).to_pylist() for name in ROW_SCHEMA.names]
    pairs = zip(zip(*stored, strict=True), zip(*current, strict=True), strict=False)
    index = next((i for i, (old, new) in enumerate(pairs) if old != new), None)
    if index is not None:
        change = "its prompt or settings" if stored[0][index] != current[0][index] else "a passed-through column"
        row_id = rows[index].id if len(rows[index].id) <= 60 else f"{rows[index].id[:60]}..."
        return f"The first row that differs is number {index}, id {json.dumps(row_id)}: {change}"
    if len(stored[0]) == len(rows):
        return None
    num_equal = min(len(stored[0]), len(rows))
    return f"The run has {len(stored[0])} rows, the input {len(rows)}; the first {num_equal} are equal"
