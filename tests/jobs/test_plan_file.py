"""The plan is fixed once."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.record.plan_file import (
    PLAN_SCHEMA,
    PlannedRequest,
    plan_digest,
    publish_plan,
    read_backends,
    read_chunk_tokens,
    read_plan,
)
from runtime.config.profiles import DEFAULT_BACKENDS, BackendTable, LinearBackend
from runtime.errors import DamagedRunError, RunMismatchError, WeightstreamError
from runtime.measure.machine_cache import current_host
from tests.jobs.part_support import PLAN


def test_plan_is_written_once_and_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "plan.parquet"
    publish_plan(path, PLAN)
    before = path.read_bytes()
    publish_plan(path, list(PLAN))
    assert read_plan(path) == PLAN
    assert path.read_bytes() == before


def test_a_plan_without_its_digest_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "plan.parquet"
    publish_plan(path, PLAN)
    pq.write_table(pq.ParquetFile(path).read().replace_schema_metadata(), path)
    with pytest.raises(DamagedRunError, match="has no digest"):
        publish_plan(path, PLAN)


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
    publish_plan(path, PLAN)
    before = path.read_bytes()
    with pytest.raises(RunMismatchError, match=message):
        publish_plan(path, plan)
    assert path.read_bytes() == before
    assert plan_digest(plan) != plan_digest(PLAN)


@pytest.mark.parametrize("damage", [b"", b"text", "flip"])
def test_a_damaged_plan_needs_a_person(tmp_path: Path, damage: bytes | str) -> None:
    path = tmp_path / "plan.parquet"
    publish_plan(path, PLAN)
    whole = path.read_bytes()
    at = whole.index(b"row 2")
    path.write_bytes(damage if isinstance(damage, bytes) else whole[:at] + b"Row 2" + whole[at + 5 :])
    with pytest.raises(WeightstreamError) as caught:
        publish_plan(path, PLAN)
    assert isinstance(caught.value, DamagedRunError)


def _edited(path: Path, *, keeps_metadata: bool) -> None:
    table = pq.ParquetFile(path).read()
    rows = [row | {"num_prompt_tokens": 1} for row in table.to_pylist()]
    metadata = table.schema.metadata if keeps_metadata else None
    pq.write_table(pa.Table.from_pylist(rows, schema=PLAN_SCHEMA.with_metadata(metadata)), path)


@pytest.mark.parametrize("keeps_metadata", [True, False])
def test_an_edited_plan_is_said_to_be_edited(tmp_path: Path, keeps_metadata: bool) -> None:
    path = tmp_path / "plan.parquet"
    publish_plan(path, PLAN)
    _edited(path, keeps_metadata=keeps_metadata)
    with pytest.raises(DamagedRunError, match="was changed after it was written"):
        publish_plan(path, PLAN)


@pytest.mark.parametrize(
    "table", [DEFAULT_BACKENDS, BackendTable(rows=[4, 64], multipliers={"float16, tall": [LinearBackend.onednn] * 2})]
)
def test_a_plan_knows_the_linear_backends_of_the_host_that_it_was_made_on(tmp_path: Path, table: BackendTable) -> None:
    path, host = tmp_path / "plan.parquet", current_host("cpu", 2)
    assert read_backends(path, host) is None
    publish_plan(path, PLAN, chunk_tokens=24, backends=(host, table))
    assert read_backends(path, host) == table
    assert read_backends(path, replace(host, isa="another")) is None
    assert read_chunk_tokens(path) == 24
    path.unlink()
    publish_plan(path, PLAN)
    assert read_backends(path, host) is None
