"""Output rows: their schemas, and the columns that are passed through (copied) from the input.

The types of passed-through columns are inferred from all rows of a run on each start, so that all parts have the same
schema.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import pyarrow as pa

from runtime.library.columns import BEAM_FIELD, LOGPROB_FIELDS, REASONING_FIELD, RESULT_FIELDS, clean_text

from ..datasets.rows import ColumnKinds, add_column_kinds
from .passes import Status
from .plan_file import PlannedRequest

FinishReason: TypeAlias = Literal["stop", "eos", "length"]

COMPLETION_FIELDS = (
    pa.field("id", pa.string(), nullable=False),
    pa.field("sample_index", pa.int32(), nullable=False),
    *RESULT_FIELDS[:3],
)
SOURCE_FIELDS = (
    pa.field("row_index", pa.int64(), nullable=False),  # in the whole input, as in `plan.parquet`
    pa.field("source_file", pa.string()),
)
GENERATION_SCHEMA = pa.schema(
    [
        *COMPLETION_FIELDS,
        *RESULT_FIELDS[3:],
        pa.field("block", pa.int32(), nullable=False),
        pa.field("micro_batch", pa.int32(), nullable=False),
        *SOURCE_FIELDS,
    ]
)


# `num_prompt_tokens` counts computed tokens: all tokens of prompt and target except the last.
SCORE_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),  # equals `target_index`; all runs have the column
        pa.field("target_index", pa.int32(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("logprob", pa.float64()),
        pa.field("is_greedy", pa.bool_()),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("token_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("num_prompt_tokens", pa.int32(), nullable=False),
        pa.field("num_target_tokens", pa.int32(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("block", pa.int32(), nullable=False),
        pa.field("micro_batch", pa.int32(), nullable=False),
        *SOURCE_FIELDS,
    ]
)


def score_schema(*, has_top: bool) -> pa.Schema:
    """The columns of a scoring run. `has_top`: with the most likely tokens of each position."""
    return pa.schema([*SCORE_SCHEMA, *(LOGPROB_FIELDS[1:] if has_top else ())])


def generation_schema(*, has_logprobs: bool, has_reasoning: bool = False, has_beams: bool = False) -> pa.Schema:
    """The columns of a generation run, without passed-through columns."""
    reasoning = [REASONING_FIELD] if has_reasoning else []
    beams = [BEAM_FIELD] if has_beams else []
    return pa.schema([*GENERATION_SCHEMA, *(LOGPROB_FIELDS if has_logprobs else ()), *reasoning, *beams])


@dataclass(frozen=True, kw_only=True)
class GenerationRow:
    """The result of a request, without the columns that come from the plan.

    - `logprobs`, `top_token_ids`, `top_logprobs`: by token; empty unless requested
    - `reasoning`: the text before the answer, of a reasoning model
    - `beam_score`: as in `Completion`
    - `error`: the reason if `status` is not `ok`
    - `columns`: columns of the input row
    - `source_file`: the file that the input row is from
    - `encoding`: columns with an embedding, classes or tokens for masks
    """

    id: str
    sample_index: int
    status: Status
    completion: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    top_token_ids: Sequence[Sequence[int]] = ()
    top_logprobs: Sequence[Sequence[float]] = ()
    reasoning: str | None = None
    beam_score: float | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    columns: Mapping[str, object] = field(default_factory=dict)
    source_file: str | None = None
    encoding: Mapping[str, object] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        return self.id, self.sample_index

    def values(self, request: PlannedRequest, columns: pa.Schema) -> dict[str, object]:
        """The values of all columns of any output schema. `columns`: schema of passed-through columns."""
        is_ok, most_likely = self.status == "ok", [ids[0] for ids in self.top_token_ids if ids]
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
            "row_index": request.row_index,
            "source_file": None if self.source_file is None else clean_text(self.source_file),
            "logprobs": list(self.logprobs),
            "top_token_ids": list(self.top_token_ids),
            "top_logprobs": list(self.top_logprobs),
            "beam_score": self.beam_score,
            "reasoning": None if self.reasoning is None else clean_text(self.reasoning),
            # For SCORE_SCHEMA. Scoring always computes the most likely token of each position.
            "target_index": self.sample_index,
            "logprob": sum(self.logprobs) if is_ok else None,
            "is_greedy": most_likely == list(self.token_ids) if is_ok else None,
            "token_logprobs": list(self.logprobs),
            "num_target_tokens": len(self.token_ids),
            **self.encoding,
            **encode_columns(columns, self.columns),
        }


def infer_column_schema(rows: Iterable[Mapping[str, object]], fixed_schema: pa.Schema = GENERATION_SCHEMA) -> pa.Schema:
    """The schema of passed-through columns, from all rows of a run. The type of a column is string, int64, float64 or
    bool if it fits all values, otherwise a string of JSON. Names that are in `fixed_schema`, too, get the prefix
    `row_`. The metadata of a field has the column's name in the input, and the encoding of its values."""
    kinds = ColumnKinds()
    add_column_kinds(kinds, rows)
    return column_schema(kinds, fixed_schema)


def column_schema(kinds: Mapping[str, AbstractSet[str]], fixed_schema: pa.Schema) -> pa.Schema:
    """The schema of `infer_column_schema`, from the kinds of values in each column."""
    used_names = {*fixed_schema.names, *kinds}
    columns: list[pa.Field] = []
    simple_types = (
        ({"string"}, pa.string()),
        ({"bool"}, pa.bool_()),
        ({"int", "wide int"}, pa.int64()),
        ({"int", "float"}, pa.float64()),
    )
    for name, value_kinds in kinds.items():
        column_type = next((column_type for allowed, column_type in simple_types if value_kinds <= allowed), None)
        encoding = b"json" if column_type is None else b"plain"
        metadata = {b"column": name.encode("utf-8", "surrogatepass"), b"encoding": encoding}
        output_name = name
        while name in fixed_schema.names and output_name in used_names:
            output_name = f"row_{output_name}"
        used_names.add(output_name)
        columns.append(pa.field(clean_text(output_name), column_type or pa.string(), metadata=metadata))
    return pa.schema(columns)


def encode_columns(schema: pa.Schema, columns: Mapping[str, object]) -> dict[str, object]:
    """Converts the columns of an input row to values of `schema`. Missing columns are null."""
    return {column.name: _encode_value(column.metadata, columns) for column in schema}


def _encode_value(metadata: Mapping[bytes, bytes], columns: Mapping[str, object]) -> object:
    value = columns.get(metadata[b"column"].decode("utf-8", "surrogatepass"))
    if value is None:
        return None
    if metadata[b"encoding"] == b"plain":
        return clean_text(value) if isinstance(value, str) else value
    try:
        return clean_text(json.dumps(value, ensure_ascii=False, allow_nan=False, default=str))
    except (TypeError, ValueError):
        return clean_text(json.dumps(_to_json_value(value), ensure_ascii=False, default=str))


def _to_json_value(value: object) -> object:
    """Converts to JSON values: NaN and infinities become null, keys become strings."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(item) for key, item in value.items()}
    return [_to_json_value(item) for item in value] if isinstance(value, list | tuple) else value
