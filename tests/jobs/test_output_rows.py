"""The columns of the output: ours, those asked for, and those that the rows brought along."""

import math

import pyarrow as pa
import pytest

from jobs.record.output_rows import GENERATION_SCHEMA, encode_columns, generation_schema, infer_column_schema
from runtime.library.columns import LOGPROB_FIELDS


def test_log_probabilities_have_columns_only_where_they_are_asked_for() -> None:
    asked, plain = generation_schema(has_logprobs=True), generation_schema(has_logprobs=False)
    assert plain == GENERATION_SCHEMA
    assert asked.names == [*GENERATION_SCHEMA.names, *(field.name for field in LOGPROB_FIELDS)]
    row = {"logprobs": 1.5}
    assert infer_column_schema([row], plain).names == ["logprobs"]
    assert infer_column_schema([row], asked).names == ["row_logprobs"]


@pytest.mark.parametrize(
    ("values", "column_type", "stored"),
    [
        (["a", None, "b"], pa.string(), ["a", None, "b"]),
        ([1, None, 2], pa.int64(), [1, None, 2]),
        ([True, False, None], pa.bool_(), [True, False, None]),
        ([1, 2.5, None], pa.float64(), [1.0, 2.5, None]),
        ([2**62, 1, None], pa.int64(), [2**62, 1, None]),
        ([2**62, 0.5, None], pa.string(), [str(2**62), "0.5", None]),
        ([2**70, 1, None], pa.string(), [str(2**70), "1", None]),
        ([True, 1, None], pa.string(), ["true", "1", None]),
        (["a", 1, None], pa.string(), ['"a"', "1", None]),
        ([None, None, None], pa.string(), [None, None, None]),
        ([["a"], {"b": math.nan}, {1: math.inf}], pa.string(), ['["a"]', '{"b": null}', '{"1": null}']),
        (["\ud800", "\0", "\u2028"], pa.string(), ["\\ud800", "\0", "\u2028"]),
    ],
)
def test_a_column_is_typed_where_all_rows_agree_and_json_otherwise(
    values: list[object], column_type: pa.DataType, stored: list[object]
) -> None:
    rows = [{"value": value} for value in values]
    schema = infer_column_schema(rows)
    assert schema.field("value").type == column_type
    table = pa.Table.from_pylist([encode_columns(schema, row) for row in rows], schema=schema)
    assert table["value"].to_pylist() == stored


def test_a_column_that_some_rows_lack_is_null_there() -> None:
    schema = infer_column_schema([{"a": 1}, {"b": "x"}])
    assert schema.names == ["a", "b"]
    assert [encode_columns(schema, row) for row in ({"a": 1}, {})] == [{"a": 1, "b": None}, {"a": None, "b": None}]


def test_names_never_collide_with_ours_nor_with_each_other() -> None:
    row = {"row_id": 1, "id": 2, "row_row_id": 3, "block": 4, "row_status": 5, "status": 6}
    schema = infer_column_schema([row])
    assert len({*schema.names, *GENERATION_SCHEMA.names}) == len(row) + len(GENERATION_SCHEMA)
    assert encode_columns(schema, row) == {
        "row_id": 1, "row_row_row_id": 2, "row_row_id": 3, "row_block": 4, "row_status": 5, "row_row_status": 6
    }  # fmt: skip
