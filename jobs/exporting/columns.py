"""The columns of an export: those of the parts without what only the run is interested in, and lists and objects of the
input, which parts hold as JSON, as what they are."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from runtime.errors import ConfigError, DatasetError

from ..record.output_rows import SOURCE_FIELDS

OF_THE_RUN = ("block", "micro_batch")
MAX_FIELDS = 1000  # of an object, in all rows together: one with more is a table of its own, and stays JSON
NO_ONE_TYPE = (pa.ArrowException, OverflowError)  # of values that no type of Arrow's fits


def exported_schema(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """The columns of all shards: where a row comes from first. Raises ConfigError where shards do not agree."""
    fields: dict[str, pa.Field] = {column.name: column for column in SOURCE_FIELDS}
    for schema in schemas:
        for column in schema:
            known = fields.setdefault(column.name, column)
            if known.type != column.type:
                raise ConfigError(f"{column.name} is {known.type} in one shard and {column.type} in another")
    return pa.schema([column for name, column in fields.items() if name not in OF_THE_RUN])


def with_columns(table: pa.Table, places: np.ndarray, schema: pa.Schema) -> pa.Table:
    """A part's rows by `schema`; a column that the part lacks is null."""
    given = {name: table[name] for name in table.column_names} | {"row_index": pa.array(places, pa.int64())}
    columns = [given.get(column.name, pa.nulls(table.num_rows, column.type)) for column in schema]
    return pa.Table.from_arrays(columns, schema=pa.schema([column.with_nullable(True) for column in schema]))


def is_json(column: pa.Field) -> bool:
    return (column.metadata or {}).get(b"encoding") == b"json"


def from_json(text: str | None) -> object:
    return None if text is None else json.loads(text)


@dataclass(kw_only=True)
class JsonTypes:
    """The types that columns of JSON turn out to have, table by table; text where values have none in common."""

    schema: pa.Schema
    _found: dict[str, pa.DataType | None] = field(default_factory=dict)

    def see(self, table: pa.Table) -> None:
        for column in filter(is_json, self.schema):
            if self._found.get(column.name, pa.null()) is not None:
                self._found[column.name] = self._widened(column.name, table[column.name])

    def result(self) -> pa.Schema:
        """The schema with these types, without what parts note down of a column."""
        columns = [pa.field(column.name, self._type(column)) for column in self.schema]
        return pa.schema(columns)

    def as_text(self) -> list[str]:
        """Columns whose values have no type in common."""
        return [column.name for column in self.schema if is_json(column) and self._type(column) == pa.string()]

    def _type(self, column: pa.Field) -> pa.DataType:
        found = self._found.get(column.name) if is_json(column) else column.type
        return found if found is not None and _can_be_stored(found) else pa.string()

    def _widened(self, name: str, texts: pa.ChunkedArray) -> pa.DataType | None:
        known = self._found.get(name, pa.null())
        try:
            now = pa.array([from_json(text) for text in texts.to_pylist()]).type
            schemas = [pa.schema([("", known)]), pa.schema([("", now)])]
            return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        except NO_ONE_TYPE:
            return None


def _can_be_stored(found: pa.DataType) -> bool:
    """Parquet has no objects without fields, and a column for each field of the others."""
    leaves, widest = 0, [found]
    while widest:
        one = widest.pop()
        inside = [one.field(i).type for i in range(one.num_fields)]
        if (pa.types.is_struct(one) and not inside) or leaves > MAX_FIELDS:
            return False
        leaves += not inside
        widest += inside
    return True


def typed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table by `schema`, JSON read where that has another type than text. Raises DatasetError."""
    columns = [_typed(table.field(column.name), table[column.name], column.type) for column in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _typed(column: pa.Field, values: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray | pa.Array:
    if not is_json(column):
        return values
    if wanted == pa.string():
        return pa.array([readable(text) for text in values.to_pylist()], pa.string())
    try:
        return pa.array([from_json(text) for text in values.to_pylist()], wanted)
    except NO_ONE_TYPE as error:
        raise DatasetError(f"column {column.name} does not fit {wanted} ({error}): out=FILE.jsonl takes it") from error


def readable(text: str | None) -> str | None:
    """A text as itself, anything else as its JSON."""
    value = from_json(text)
    return value if isinstance(value, str) else text


def chosen(schema: pa.Schema, columns: Sequence[str] | None, *, has_input: bool) -> list[str]:
    """The names of the columns to write, in their order. Raises ConfigError for one that is not there. `has_input`: the
    run kept the columns of its input."""
    unknown = [name for name in columns or () if name not in schema.names]
    if unknown:
        why = "" if has_input else "; it was made with dataset.keep_columns=false, without those of its input"
        raise ConfigError(f"columns={unknown[0]} is not there: the run has {', '.join(schema.names)}{why}")
    return list(columns or schema.names)
