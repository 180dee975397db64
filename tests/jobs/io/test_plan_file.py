"""The plan is fixed once; the columns of the output follow from the rows."""

import math
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from jobs.io.plan_file import (
    GENERATION_SCHEMA,
    PlannedRequest,
    encode_columns,
    fix_plan,
    infer_column_schema,
    plan_digest,
    read_plan,
)
from runtime.errors import DamagedRunError, MillraceError, RunMismatchError
from tests.jobs.io.part_support import (
    PLAN,
)


def test_plan_is_written_once_and_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.parquet"
    fix_plan(path, PLAN)
    before = path.read_bytes()
    fix_plan(path, list(PLAN))
    assert read_plan(path) == PLAN
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (PLAN[:-1], "12 requests -> 11"),
        ([*PLAN[:3], replace(PLAN[3], micro_batch=7), *PLAN[4:]], "request 3: micro_batch 1 -> 7"),
        ([*PLAN[1::-1], *PLAN[2:]], "request 0: sample_index 0 -> 1"),
        ([], "12 requests -> 0"),
    ],
)
def test_another_plan_is_refused_and_the_first_one_kept(
    tmp_path: Path, plan: list[PlannedRequest], message: str
) -> None:
    path = tmp_path / "plan.parquet"
    fix_plan(path, PLAN)
    before = path.read_bytes()
    with pytest.raises(RunMismatchError, match=message):
        fix_plan(path, plan)
    assert path.read_bytes() == before
    assert plan_digest(plan) != plan_digest(PLAN)


@pytest.mark.parametrize("damage", [b"", b"text", "flip"])
def test_a_damaged_plan_needs_a_person(tmp_path: Path, damage: bytes | str) -> None:
    path = tmp_path / "plan.parquet"
    fix_plan(path, PLAN)
    whole = path.read_bytes()
    at = whole.index(b"row 2")
    path.write_bytes(damage if isinstance(damage, bytes) else whole[:at] + b"Row 2" + whole[at + 5 :])
    with pytest.raises(MillraceError) as caught:
        fix_plan(path, PLAN)
    assert isinstance(caught.value, DamagedRunError)


# --- the columns passed through


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
