"""Files at paths that the user names are replaced only if Weightstream wrote them and nobody changed them since."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from jobs.files.named import is_replaceable, publish_named, require_replaceable
from jobs.files.publishing import write_all
from jobs.grading.config import MetricsConfig
from jobs.grading.grading import grade
from jobs.planning.config import PlanConfig, PlanOutputConfig, Sweep, WorkloadConfig
from jobs.planning.plan_files import run_sweep, write_timeline
from jobs.record.run_reader import find_runs
from jobs.reporting.figures import RunFigures
from jobs.reporting.overview import make_overview, write_overview
from jobs.reporting.page import write_page
from runtime.errors import ConfigError
from tests.jobs.sharded_run import ShardedRun

MINE = b"mine\n"
ONE = WorkloadConfig(num_requests=1, mean_prompt_tokens=8, max_prompt_tokens=8)


def published(path: Path, data: bytes = b"rows\n") -> Path:
    publish_named(path, lambda file: write_all(file, data))
    return path


def rewritten(path: Path) -> None:
    path.write_bytes(b"ROWS\n")


def touched(path: Path) -> None:
    os.utime(path, ns=(0, 0))


def replaced(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"another\n")


def test_a_file_of_ours_is_replaced_and_one_that_is_not_there_is_made(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert is_replaceable(path)
    assert is_replaceable(published(path))
    assert is_replaceable(published(path, b"more rows\n"))
    assert path.read_bytes() == b"more rows\n"


@pytest.mark.parametrize("change", [rewritten, touched, replaced])
def test_a_file_of_ours_that_was_changed_since_is_the_users_own(change: Callable[[Path], None], tmp_path: Path) -> None:
    path = published(tmp_path / "a.jsonl")
    change(path)
    with pytest.raises(ConfigError, match=r"^out=x: .*a\.jsonl exists, and was not written by Weightstream"):
        require_replaceable([tmp_path / "b.jsonl", path], "out=x")


def test_nothing_is_taken_for_ours_where_nothing_can_be_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").touch()
    monkeypatch.setattr("jobs.files.named.cache_root", lambda: tmp_path / "cache")
    assert not is_replaceable(published(tmp_path / "a.jsonl"))


@pytest.fixture
def case(tmp_path: Path) -> ShardedRun:
    return ShardedRun(folder=tmp_path / "runs").finish(0)


def reports(case: ShardedRun, folder: Path) -> object:
    return write_overview(make_overview(figures(case)), folder)


def pages(case: ShardedRun, folder: Path) -> object:
    return write_page(figures(case)[0], 1, folder)


def sweeps(_: ShardedRun, folder: Path) -> object:
    config = PlanConfig(plan=PlanOutputConfig(sweep=Sweep.batch), workload=ONE)
    return next(run_sweep(config, never(), folder))


def timelines(_: ShardedRun, folder: Path) -> object:
    return write_timeline(never(), folder)


def metrics(case: ShardedRun, folder: Path) -> object:
    return grade(MetricsConfig(run=str(case.directory(0).path), out=str(folder / "metrics.parquet"), partial=True))


def never() -> Any:
    """A plan that nobody looks at."""
    return object()


def figures(case: ShardedRun) -> list[RunFigures]:
    return [RunFigures(run=run) for run in find_runs([str(case.directory(0).path)], "run")]


WRITES: Mapping[str, Callable[[ShardedRun, Path], object]] = {
    "table.md": reports,
    "rates.png": reports,
    "report.html": pages,
    "batch.csv": sweeps,
    "timeline.json": timelines,
    "metrics.parquet": metrics,
}


@pytest.mark.parametrize("name", WRITES)
def test_no_job_replaces_a_file_that_it_did_not_write(name: str, case: ShardedRun, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(MINE)
    with pytest.raises(ConfigError, match="was not written by Weightstream or was changed since"):
        WRITES[name](case, tmp_path)
    assert path.read_bytes() == MINE
    assert {each.name for each in tmp_path.iterdir()} == {name, "runs"}
