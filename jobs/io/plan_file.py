"""What is fixed before the first token: each request's block, micro-batch and position, and the columns of the output.

`plan.parquet` is written once and never changed. The columns follow from the input rows and are inferred on each start.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

import pyarrow as pa

from runtime.errors import DamagedRunError, RunMismatchError

from .files import PARQUET_PROBLEMS, canonical_json, parse_parquet, publish, write_parquet
from .summary import Status

PlanStatus: TypeAlias = Literal["planned", "rejected"]
FinishReason: TypeAlias = Literal["stop", "eos", "length"]
INT64_RANGE = range(-(2**63), 2**63)
EXACT_FLOAT_RANGE = range(-(2**53), 2**53 + 1)  # integers that a float64 holds exactly

PLAN_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.string(), nullable=False),
        pa.field("row_index", pa.int64(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("block", pa.int32(), nullable=False),
        pa.field("micro_batch", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("num_prompt_tokens", pa.int32(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
    ]
)


GENERATION_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("completion", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("finish_reason", pa.string()),
        pa.field("num_prompt_tokens", pa.int32(), nullable=False),
        pa.field("num_completion_tokens", pa.int32(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("block", pa.int32(), nullable=False),
        pa.field("micro_batch", pa.int32(), nullable=False),
    ]
)


@dataclass(frozen=True, kw_only=True)
class PlannedRequest:
    """A row of the output to be. A rejected one has its seat in a block too, since each row comes out exactly once."""

    row_id: str
    row_index: int
    sample_index: int
    block: int
    micro_batch: int
    position: int
    num_prompt_tokens: int
    status: PlanStatus = "planned"

    @property
    def key(self) -> tuple[str, int]:
        return self.row_id, self.sample_index


@dataclass(frozen=True, kw_only=True)
class GenerationRow:
    """What became of one planned request; its block, micro-batch and prompt length come from the plan.

    `columns`: the input row's own. `error` says what went wrong where the status is not `ok`.
    """

    id: str
    sample_index: int
    status: Status
    completion: str = ""
    token_ids: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    columns: Mapping[str, object] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        return self.id, self.sample_index

    def values(self, request: PlannedRequest, columns: pa.Schema) -> dict[str, object]:
        """The row as it is published: by the names of GENERATION_SCHEMA and of `columns`."""
        return {
            "id": self.id,
            "sample_index": self.sample_index,
            "status": self.status,
            "completion": clean_text(self.completion),
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_completion_tokens": len(self.token_ids),
            "error": None if self.error is None else clean_text(self.error),
            "block": request.block,
            "micro_batch": request.micro_batch,
            **encode_columns(columns, self.columns),
        }


def plan_digest(requests: Sequence[PlannedRequest]) -> str:
    """SHA-256 in hex over all fields of all requests, in order."""
    digest = hashlib.sha256()
    for request in requests:
        digest.update(canonical_json(vars(request)).encode() + b"\n")
    return digest.hexdigest()


def fix_plan(path: Path, requests: Sequence[PlannedRequest]) -> None:
    """Publish the plan at `path`, or check that the one already there is the same.

    Raises RunMismatchError when it is another plan, DamagedRunError when it cannot be read, OutputError.
    """
    if path.exists() or not publish(path, lambda file: _write(requests, file), exclusive=True):
        _compare(path, read_plan(path), requests)


def read_plan(path: Path) -> list[PlannedRequest]:
    """The stored plan in its order. Raises DamagedRunError when the file is not one, OSError when it cannot be read."""
    data = path.read_bytes()
    try:
        return [PlannedRequest(**row) for row in parse_parquet(data).cast(PLAN_SCHEMA).to_pylist()]
    except PARQUET_PROBLEMS as error:
        raise DamagedRunError(
            f"{path} ({len(data)} bytes) is no readable plan: {error}. Move it away to have it computed again"
        ) from error


def _write(requests: Sequence[PlannedRequest], file: BinaryIO) -> None:
    columns = {name: [getattr(request, name) for request in requests] for name in PLAN_SCHEMA.names}
    write_parquet(pa.table(columns, schema=PLAN_SCHEMA), file)


def _compare(path: Path, stored: Sequence[PlannedRequest], requests: Sequence[PlannedRequest]) -> None:
    if plan_digest(stored) == plan_digest(requests):
        return
    if len(stored) != len(requests):
        difference = f"{len(stored)} requests -> {len(requests)}"
    else:
        index, was, now = next((i, a, b) for i, (a, b) in enumerate(zip(stored, requests, strict=True)) if a != b)
        changed = [key for key, value in vars(was).items() if value != vars(now)[key]]
        difference = f"request {index}: " + ", ".join(
            f"{key} {vars(was)[key]!r} -> {vars(now)[key]!r}" for key in changed
        )
    raise RunMismatchError(
        f"{path} is the plan of another run ({difference}). "
        f"Nothing was written; put the settings back, or choose another directory with run="
    )


def infer_column_schema(rows: Iterable[Mapping[str, object]]) -> pa.Schema:
    """The schema of the passed-through columns, over all rows of a run so that every part has the same.

    A column becomes string, int64, float64 or bool where all its values agree, and a string of JSON otherwise. A name
    of GENERATION_SCHEMA gets the prefix `row_`. Each field's metadata holds the input's own name and the encoding.
    """
    kinds: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.items():
            kinds.setdefault(name, set()).update(() if value is None else (_kind(value),))
    taken = {*GENERATION_SCHEMA.names, *kinds}
    columns: list[pa.Field] = []
    for name, kind in kinds.items():
        column_type = _column_type(kind)
        encoding = b"json" if column_type is None else b"plain"
        metadata = {b"column": name.encode("utf-8", "surrogatepass"), b"encoding": encoding}
        final = _free_name(name, taken)
        taken.add(final)
        columns.append(pa.field(clean_text(final), column_type or pa.string(), metadata=metadata))
    return pa.schema(columns)


def encode_columns(schema: pa.Schema, columns: Mapping[str, object]) -> dict[str, object]:
    """One row's own columns as values of `schema`; a column that the row lacks is null."""
    return {column.name: _encode(column.metadata, columns) for column in schema}


def clean_text(text: str) -> str:
    """A lone surrogate has no UTF-8 form: it is written as its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int" if value in EXACT_FLOAT_RANGE else "wide int" if value in INT64_RANGE else "other"
    return "float" if isinstance(value, float) else "string" if isinstance(value, str) else "other"


def _column_type(kinds: set[str]) -> pa.DataType | None:
    """None where the values agree on no simple type."""
    agreements = (
        ({"string"}, pa.string()),
        ({"bool"}, pa.bool_()),
        ({"int", "wide int"}, pa.int64()),
        ({"int", "float"}, pa.float64()),
    )
    return next((column_type for allowed, column_type in agreements if kinds <= allowed), None)


def _free_name(name: str, taken: AbstractSet[str]) -> str:
    if name not in GENERATION_SCHEMA.names:
        return name
    final = f"row_{name}"
    while final in taken:
        final = f"row_{final}"
    return final


def _encode(metadata: Mapping[bytes, bytes], columns: Mapping[str, object]) -> object:
    value = columns.get(metadata[b"column"].decode("utf-8", "surrogatepass"))
    if value is None:
        return None
    if metadata[b"encoding"] == b"plain":
        return clean_text(value) if isinstance(value, str) else value
    try:
        return clean_text(json.dumps(value, ensure_ascii=False, allow_nan=False, default=str))
    except (TypeError, ValueError):
        return clean_text(json.dumps(_plain(value), ensure_ascii=False, default=str))


def _plain(value: object) -> object:
    """What JSON can hold: NaN and infinities become null, keys become strings."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
