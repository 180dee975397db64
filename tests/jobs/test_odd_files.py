"""A run whose files were replaced by what is no file is read, or refused by name: nothing waits for them."""

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import pytest

from jobs.exporting.config import ExportConfig
from jobs.exporting.export import export
from jobs.record.run_reader import find_runs
from jobs.record.success import is_finished
from jobs.reporting.figures import RunFigures
from jobs.reporting.overview import make_overview
from jobs.reporting.page import write_page
from jobs.reporting.status import read_status
from runtime.errors import WeightstreamError
from tests.jobs.sharded_run import ShardedRun
from tests.odd_files import ODD_FILES

MOST_SECONDS = 30
FILES: Mapping[str, int | None] = {
    "run.json": None,
    "plan.parquet": None,
    "_SUCCESS.json": None,
    "generations/part-00001.parquet": 12,
    "throughput/part-00001.parquet": 16,
    "summary.json": 16,
    "trace/start-00000.json": 16,
    "leases/block-00001.json": 16,
    ".lock": 16,
}  # rows that can still be had; None: all, or a refusal


def rung(number: int, frame: FrameType | None) -> None:
    raise AssertionError("it waits for what never comes")


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, rung)
    signal.alarm(MOST_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def exported(folder: Path, out: Path) -> int | str:
    """How many rows of the run can be had, or why none."""
    try:
        (run,) = find_runs([str(folder)], "run")
        read_status(run)
        make_overview([RunFigures(run=run)]).text()
        write_page(RunFigures(run=run), 3, out)
        return export(ExportConfig(run=str(folder), out=str(out / "all.jsonl"), partial=True)).num_rows
    except WeightstreamError as error:
        return str(error)


@pytest.mark.dealt(most=5)
@pytest.mark.parametrize("kind", ["a pipe", "a link to a device", "a link to nothing"])
@pytest.mark.parametrize("name", FILES)
def test_a_run_is_read_or_refused_by_name(name: str, kind: str, tmp_path: Path) -> None:
    case = ShardedRun(folder=tmp_path / "runs").finish(0)
    path = case.directory(0).path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    ODD_FILES[kind](path)
    assert is_finished(case.directory(0)) == (name not in ("_SUCCESS.json", "generations/part-00001.parquet"))
    found = exported(case.directory(0).path, tmp_path)
    if isinstance(found, str):
        assert FILES[name] is None
        assert path.name in found
    else:
        assert found == (FILES[name] or 16)
