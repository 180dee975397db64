"""Exports of runs that earlier versions began: their parts do not say where in the input a row lies."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.exporting.config import ExportConfig
from jobs.exporting.export import export
from runtime.errors import ConfigError
from tests.jobs.test_export import BEGUN, lines


@pytest.mark.parametrize("run", ["waves", "continuous"])
def test_a_run_begun_before_parts_had_places_is_ordered_by_its_plan(run: str, tmp_path: Path) -> None:
    settings = {"run": str(BEGUN / run), "out": str(tmp_path / "all.jsonl")}
    with pytest.raises(ConfigError, match="is not finished: "):
        export(ExportConfig(**settings))
    rows = lines(export(ExportConfig(**settings, partial=True)).out)
    places = [row["row_index"] for row in rows]
    plan = {row["row_id"]: row["row_index"] for row in pq.read_table(BEGUN / run / "plan.parquet").to_pylist()}
    assert places == sorted(plan[row["id"]] for row in rows)
    assert len(rows) == {"waves": 4, "continuous": 6}[run]
    assert {row["source_file"] for row in rows} == {None}


def test_without_a_plan_numbers_are_places_and_other_ids_are_refused(tmp_path: Path) -> None:
    shutil.copytree(BEGUN / "waves", tmp_path / "waves")
    (tmp_path / "waves" / "plan.parquet").unlink()
    done = export(ExportConfig(run=str(tmp_path / "waves"), out=str(tmp_path / "all.jsonl"), partial=True))
    ids = [str(row["id"]) for row in lines(done.out)]
    assert ids == sorted(ids, key=int)
    shutil.copytree(BEGUN / "continuous", tmp_path / "continuous")
    (tmp_path / "continuous" / "plan.parquet").unlink()
    with pytest.raises(ConfigError, match=r"plan\.parquet, which does, is gone.*put that file back"):
        export(ExportConfig(run=str(tmp_path / "continuous"), out=str(tmp_path / "all.jsonl"), partial=True))
