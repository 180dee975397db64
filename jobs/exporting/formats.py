"""Rows as JSON lines, CSV or Parquet, written as they come."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import BinaryIO, TypeAlias

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from .columns import from_json, is_json, readable, typed
from .config import ExportFormat

ROWS_AT_ONCE = 4096
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")

Write: TypeAlias = Callable[[Iterable[pa.Table], pa.Schema, BinaryIO], None]


def write_jsonl(tables: Iterable[pa.Table], schema: pa.Schema, file: BinaryIO) -> None:
    """An object a line, in UTF-8; every value of the input as it was there, infinities and NaN as null."""
    for table in tables:
        json_columns = [column.name for column in table.schema if is_json(column)]
        for batch in table.to_batches(ROWS_AT_ONCE):
            for row in batch.to_pylist():
                row |= {name: from_json(row[name]) for name in json_columns}
                file.write(_line(row).encode() + b"\n")


def write_csv(tables: Iterable[pa.Table], schema: pa.Schema, file: BinaryIO, *, is_safe: bool = False) -> None:
    """Text in quotes, null as nothing at all; lists and objects as JSON. `is_safe`: no spreadsheet runs a cell, as
    those that begin like a formula have a single quote in front."""
    defused = _no_formulas if is_safe else lambda values: values
    types = [pa.string() if _is_nested(column.type) else column.type for column in schema]
    flat = pa.schema(zip(defused(pa.array(schema.names)).to_pylist(), types, strict=True))
    with pa_csv.CSVWriter(file, flat) as writer:
        for table in tables:
            columns = [_flat(table.field(column.name), table[column.name]) for column in schema]
            columns = [defused(each) if pa.types.is_string(each.type) else each for each in columns]
            writer.write_table(pa.Table.from_arrays(columns, schema=flat))


def _no_formulas(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The texts with a single quote in front of those that begin like a formula, as OWASP advises."""
    texts = values.to_pylist()
    return pa.array([f"'{each}" if (each or "").startswith(FORMULA_STARTS) else each for each in texts], pa.string())


def write_parquet(tables: Iterable[pa.Table], schema: pa.Schema, file: BinaryIO) -> None:
    """Lists and objects as such; a group of rows for each table."""
    with pq.ParquetWriter(file, schema, write_page_checksum=True) as writer:
        for table in tables:
            writer.write_table(typed(table, schema))


WRITERS: Mapping[ExportFormat, Write] = {
    ExportFormat.jsonl: write_jsonl,
    ExportFormat.csv: write_csv,
    ExportFormat.parquet: write_parquet,
}


def _line(row: Mapping[str, object]) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:  # a log-probability of what cannot come is minus infinity
        return json.dumps(_finite(row), ensure_ascii=False)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _is_nested(found: pa.DataType) -> bool:
    return found.num_fields > 0


def _flat(column: pa.Field, values: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    if is_json(column):
        return pa.array([readable(text) for text in values.to_pylist()], pa.string())
    if _is_nested(column.type):
        lists = values.to_pylist()
        return pa.array([None if value is None else _line(value) for value in lists], pa.string())
    return values
