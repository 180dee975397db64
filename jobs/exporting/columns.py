"""Columns of an export, and the JSON lines, CSV and Parquet writers. Drops internal columns and decodes lists and
objects of the input, which parts store as JSON. Rows are streamed."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from runtime.errors import ConfigError, DatasetError

from ..record.output_rows import SOURCE_FIELDS
from .config import ErrorRows, ExportFormat

INTERNAL_COLUMNS = ("block", "micro_batch")
MAX_FIELDS = 1000  # of a struct that covers all rows; larger objects remain JSON text
BATCH_ROWS = 4096
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
TYPE_ERRORS = (pa.ArrowException, OverflowError)  # raised if no Arrow type fits the values

RowValues: TypeAlias = Mapping[str, Any]  # a row of an Arrow table
JsonObject: TypeAlias = dict[str, Any]
Write: TypeAlias = Callable[[Iterable[pa.Table], pa.Schema, BinaryIO], None]


def merge_schemas(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """Merges the columns of all shards, source columns first. Raises ConfigError if shards disagree on a type."""
    fields: dict[str, pa.Field] = {column.name: column for column in SOURCE_FIELDS}
    for schema in schemas:
        for column in schema:
            known = fields.setdefault(column.name, column)
            if known.type != column.type:
                raise ConfigError(f"column {column.name} is {known.type} in one shard and {column.type} in another")
    return pa.schema([column for name, column in fields.items() if name not in INTERNAL_COLUMNS])


def align_columns(table: pa.Table, row_indices: np.ndarray, schema: pa.Schema) -> pa.Table:
    """Converts a part's table to `schema`; missing columns are null."""
    columns_by_name = {name: table[name] for name in table.column_names}
    columns_by_name["row_index"] = pa.array(row_indices, pa.int64())
    columns = [columns_by_name.get(column.name, pa.nulls(table.num_rows, column.type)) for column in schema]
    return pa.Table.from_arrays(columns, schema=pa.schema([column.with_nullable(True) for column in schema]))


def is_json_column(column: pa.Field) -> bool:
    return (column.metadata or {}).get(b"encoding") == b"json"


def decode_json(text: str | None) -> object:
    return None if text is None else json.loads(text)


def iter_rows(tables: Iterable[pa.Table]) -> Iterator[RowValues]:
    """Yields rows as dicts with JSON columns decoded."""
    for table in tables:
        json_columns = [column.name for column in table.schema if is_json_column(column)]
        for batch in table.to_batches(BATCH_ROWS):
            for row in batch.to_pylist():
                yield row | {name: decode_json(row[name]) for name in json_columns}


@dataclass(kw_only=True)
class JsonTypeInference:
    """Infers the Arrow types of JSON columns, table by table; string if the values have no common type."""

    schema: pa.Schema
    _types: dict[str, pa.DataType | None] = field(default_factory=dict)

    def update(self, table: pa.Table) -> None:
        for column in filter(is_json_column, self.schema):
            known = self._types.get(column.name, pa.null())
            if known is None:
                continue
            try:
                inferred = pa.array([decode_json(text) for text in table[column.name].to_pylist()]).type
                schemas = [pa.schema([("", data_type)]) for data_type in (known, inferred)]
                self._types[column.name] = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
            except TYPE_ERRORS:
                self._types[column.name] = None

    def inferred_schema(self) -> pa.Schema:
        """The schema with the inferred types, without the metadata of parts."""
        return pa.schema([pa.field(column.name, self._storage_type(column)) for column in self.schema])

    def text_columns(self) -> list[str]:
        """JSON columns that are stored as text because their values have no common type."""
        columns = filter(is_json_column, self.schema)
        return [column.name for column in columns if self._storage_type(column) == pa.string()]

    def _storage_type(self, column: pa.Field) -> pa.DataType:
        """The inferred type, or string if Parquet cannot store it: a struct without fields, or one with more than
        `MAX_FIELDS` leaves."""
        inferred = self._types.get(column.name) if is_json_column(column) else column.type
        num_leaves, pending = 0, [pa.null() if inferred is None else inferred]
        while pending:
            data_type = pending.pop()
            children = [data_type.field(i).type for i in range(data_type.num_fields)]
            if (pa.types.is_struct(data_type) and not children) or num_leaves > MAX_FIELDS:
                return pa.string()
            num_leaves += not children
            pending += children
        return pa.string() if inferred is None else inferred


def cast_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Casts a table to `schema`; JSON columns are decoded unless the target is text. Raises DatasetError."""
    columns: list[pa.ChunkedArray | pa.Array] = []
    for name, target in zip(schema.names, schema.types, strict=True):
        values = table[name]
        if is_json_column(table.field(name)):
            convert = display_text if target == pa.string() else decode_json
            try:
                values = pa.array([convert(text) for text in values.to_pylist()], target)
            except TYPE_ERRORS as error:
                raise DatasetError(f"column {name} does not fit {target} ({error}): write out=FILE.jsonl") from error
        columns.append(values)
    return pa.Table.from_arrays(columns, schema=schema)


def display_text(text: str | None) -> str | None:
    """Decodes a JSON string; returns other values as JSON."""
    value = decode_json(text)
    return value if isinstance(value, str) else text


def select_columns(schema: pa.Schema, columns: Sequence[str] | None, *, has_input: bool) -> list[str]:
    """Names of the columns to write, in order. Raises ConfigError for unknown ones. `has_input`: the run has the
    columns of its input."""
    unknown = [name for name in columns or () if name not in schema.names]
    if unknown:
        reason = "" if has_input else "; those of its input are missing because of dataset.keep_columns=false"
        raise ConfigError(f"columns: the run has no {unknown[0]}, but {', '.join(schema.names)}{reason}")
    return list(columns or schema.names)


def write_jsonl(tables: Iterable[pa.Table], schema: pa.Schema, file: BinaryIO) -> None:
    """Writes one UTF-8 JSON object per line; infinities and NaN become null."""
    for row in iter_rows(tables):
        file.write(_dump_json(row).encode() + b"\n")


def write_csv(tables: Iterable[pa.Table], schema: pa.Schema, file: BinaryIO, *, is_safe: bool = False) -> None:
    """Writes CSV: quoted text, empty for null, JSON for lists and objects. `is_safe`: prefixes cells that look like
    formulas with a single quote, so that spreadsheets do not run them."""

    def escape_formulas(texts: list[str | None]) -> list[str | None]:
        if not is_safe:
            return texts
        return [f"'{text}" if (text or "").startswith(FORMULA_STARTS) else text for text in texts]  # OWASP's advice

    types = [pa.string() if column.type.num_fields else column.type for column in schema]
    flat = pa.schema(zip(escape_formulas(schema.names), types, strict=True))
    with pa_csv.CSVWriter(file, flat) as writer:
        for table in tables:
            columns: list[pa.ChunkedArray | pa.Array] = []
            for name in schema.names:
                column, values = table.field(name), table[name]
                if is_json_column(column):
                    values = pa.array(escape_formulas([display_text(text) for text in values.to_pylist()]), pa.string())
                elif column.type.num_fields:
                    texts = [None if value is None else _dump_json(value) for value in values.to_pylist()]
                    values = pa.array(escape_formulas(texts), pa.string())
                elif is_safe and pa.types.is_string(column.type):
                    values = pa.array(escape_formulas(values.to_pylist()), pa.string())
                columns.append(values)
            writer.write_table(pa.Table.from_arrays(columns, schema=flat))


def write_parquet(tables: Iterable[pa.Table], schema: pa.Schema, file: BinaryIO) -> None:
    """Writes lists and objects natively; one row group per table."""
    with pq.ParquetWriter(file, schema, write_page_checksum=True) as writer:
        for table in tables:
            writer.write_table(cast_columns(table, schema))


@dataclass(kw_only=True)
class ResultWriter(ABC):
    """Base of writers for JSON lines in formats of other tools. Writes the results selected by `error_rows`. Counts the
    written lines and all errors, written or not."""

    error_rows: ErrorRows
    num_lines: int = 0
    num_errors: int = 0

    def write(self, tables: Iterable[pa.Table], schema: pa.Schema, file: BinaryIO) -> None:
        for is_error, line in self.format_results(iter_rows(tables)):
            self.num_errors += is_error
            if self.error_rows is ErrorRows.keep or (self.error_rows is ErrorRows.only) == is_error:
                self.num_lines += 1
                file.write(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")

    @abstractmethod
    def format_results(self, rows: Iterator[RowValues]) -> Iterator[tuple[bool, JsonObject]]:
        """Yields (is an error, JSON line) pairs."""


WRITERS: Mapping[ExportFormat, Write] = {
    ExportFormat.jsonl: write_jsonl,
    ExportFormat.csv: write_csv,
    ExportFormat.parquet: write_parquet,
}


def _dump_json(row: Mapping[str, object]) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:  # impossible tokens have a log-probability of minus infinity
        return json.dumps(_replace_non_finite(row), ensure_ascii=False)


def _replace_non_finite(value: object) -> object:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    return [_replace_non_finite(item) for item in value] if isinstance(value, list) else value
