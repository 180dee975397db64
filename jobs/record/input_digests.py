"""What the input of a run comes to: one digest of what is asked, one of each column that is passed through, and, in a
file, two of each row, so that a refusal can name the first row that was changed."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ..datasets import Row, input_digest, prompt_bytes
from ..files.publishing import (
    PARQUET_PROBLEMS,
    JsonValue,
    json_digest,
    parse_parquet,
    publish,
    read_regular,
    write_parquet,
)
from .output_rows import encode_columns

LOG = logging.getLogger(__name__)
MAX_FILES_SHOWN = 1000  # one by one, in run.json
ROW_SCHEMA = pa.schema(
    [pa.field("asked", pa.uint64(), nullable=False), pa.field("columns", pa.uint64(), nullable=False)]
)


@dataclass(frozen=True, kw_only=True)
class InputDigests:
    """`asked`: of what can change the text. `facts`: the columns in their order, and the type and digest of each.
    `rows`: by ROW_SCHEMA, in the order of the input; None of one that is read in windows, whose files are digested."""

    asked: str
    facts: Mapping[str, JsonValue]
    rows: pa.Table | None = None


def digest_input(rows: Sequence[Row], columns: pa.Schema) -> InputDigests:
    """Columns are digested as they will be published, by their schema."""
    of_column = {column.name: hashlib.sha256() for column in columns}
    of_rows: list[int] = []
    for row in rows:
        of_row = hashlib.sha256()
        for name, value in encode_columns(columns, row.columns).items():
            line = json.dumps(value).encode("ascii") + b"\n"
            of_column[name].update(line)
            of_row.update(line)
        of_rows.append(_short(of_row.digest()))
    names = _names(columns)
    facts: dict[str, JsonValue] = {
        f"input column {names[column.name]}": f"{column.type} {of_column[column.name].hexdigest()[:32]}"
        for column in columns
    }
    asked = [_short(hashlib.sha256(prompt_bytes(row)).digest()) for row in rows]
    return InputDigests(
        asked=input_digest(rows),
        facts=facts | {"input columns": list(names.values())},
        rows=pa.table({"asked": asked, "columns": of_rows}, schema=ROW_SCHEMA),
    )


def _names(columns: pa.Schema) -> dict[str, str]:
    """What the input calls the columns, as JSON."""
    return {column.name: json.dumps(column.metadata[b"column"].decode("utf-8", "surrogatepass")) for column in columns}


def digest_files_of_input(
    files: Mapping[str, str], settings: Mapping[str, JsonValue], columns: pa.Schema
) -> InputDigests:
    """The digests of an input whose rows are not held: of its files, by name and SHA-256 in their order, and what else
    decides which rows they hold."""
    names = _names(columns)
    facts: dict[str, JsonValue] = {f"input column {names[column.name]}": str(column.type) for column in columns}
    if len(files) <= MAX_FILES_SHOWN:
        facts |= {f"input file {name}": sha256 for name, sha256 in files.items()}
    asked = json_digest([[*files.items()], {**settings}])
    return InputDigests(asked=asked, facts=facts | {"input columns": list(names.values())})


def _short(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")


def keep_rows(path: Path, digests: InputDigests) -> None:
    """Once per run. Raises OutputError."""
    rows = digests.rows
    if rows is not None and not path.exists():
        publish(path, lambda file: write_parquet(rows, file), exclusive=True, expected_bytes=rows.nbytes)


def first_changed(path: Path, digests: InputDigests, rows: Sequence[Row]) -> str | None:
    """A sentence about the first row that is not as it was when `path` was written. None where there is none, or no
    such file that can be read."""
    if digests.rows is None:
        return None
    try:
        table = parse_parquet(read_regular(path)[0])
        was = [table.column(name).to_pylist() for name in ROW_SCHEMA.names]
    except FileNotFoundError:
        return None
    except (*PARQUET_PROBLEMS, KeyError) as error:
        LOG.warning("%s cannot be read (%s): the row that was changed cannot be named", path, error)
        return None
    now = [digests.rows.column(name).to_pylist() for name in ROW_SCHEMA.names]
    pairs = zip(zip(*was, strict=True), zip(*now, strict=True), strict=False)
    place = next((place for place, (old, new) in enumerate(pairs) if old != new), None)
    if place is not None:
        what = "what it asks" if was[0][place] != now[0][place] else "a column that is passed through"
        row_id = rows[place].id if len(rows[place].id) <= 60 else f"{rows[place].id[:60]}..."
        return f"The first row that differs is number {place}, id {json.dumps(row_id)}: {what}"
    if len(was[0]) == len(rows):
        return None
    return f"There were {len(was[0])} rows and are {len(rows)}: the first {min(len(was[0]), len(rows))} are the same"
