"""What is said of a run's progress is what its parts, its plan and its leases are."""

import json
import os
import re
from pathlib import Path

import pytest

from jobs.files.lease import Leases
from jobs.files.lock import RunLock
from jobs.reporting.config import StatusConfig
from jobs.reporting.status import RunStatus, as_json, as_text, status_of
from jobs.run.found import find_runs
from jobs.run.run_dir import RunDirectory
from jobs.run.workers import lease_name
from runtime.errors import ConfigError, DamagedRunError
from tests.jobs.sharded_run import ShardedRun

NUM_ROWS, NUM_BLOCKS = 16, 4


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A finished run of 16 rows in 4 blocks, a part every 2 seconds."""
    case = ShardedRun(folder=tmp_path / "generate").finish(0)
    directory = RunDirectory(path=case.directory(0).path)
    for number, path in enumerate(sorted(directory.generations.iterdir())):
        os.utime(path, (1000 + 2 * number, 1000 + 2 * number))
    return directory


def status(run: RunDirectory) -> RunStatus:
    return status_of(find_runs([str(run.path)], "run")[0])


def interrupt(run: RunDirectory, num_blocks: int) -> None:
    run.success.unlink()
    for path in sorted(run.generations.iterdir())[-num_blocks:]:
        path.unlink()


def test_a_finished_run_is_done_with_all_its_rows(run: RunDirectory) -> None:
    found = status(run)
    assert (found.state, found.num_rows, found.num_rows_done) == ("done", NUM_ROWS, NUM_ROWS)
    assert (found.num_blocks, found.num_blocks_done, found.seconds_left) == (NUM_BLOCKS, NUM_BLOCKS, None)


def test_an_interrupted_run_lacks_what_its_parts_lack(run: RunDirectory) -> None:
    interrupt(run, 1)
    found = status(run)
    assert (found.state, found.num_rows_done, found.seconds_left) == ("interrupted", NUM_ROWS - 4, None)
    assert "blocks  3 of 4 done, 0 leased, 1 left" in as_text([found])


def test_a_running_one_says_who_has_which_block_and_how_long_the_rest_takes(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    interrupt(run, 2)
    run.leases.mkdir()
    lock = RunLock(run.lock, is_shared=True)
    with Leases(run.leases, 300.0) as leases:
        assert leases.take(lease_name(2))
        found = status(run)
    lock.release()
    assert (found.state, found.rows_per_second, found.seconds_left) == ("running", 2.0, 4.0)
    assert "blocks  2 of 4 done, 1 leased, 1 left" in as_text([found])
    assert re.search(rf"block 2: pid {os.getpid()} on host .*, SLURM_JOB_ID 4711, for 1 s, last sign", as_text([found]))
    values = json.loads(as_json([found]))[0]
    assert values["leased"][0]["block"] == 2
    assert values["seconds_left"] == 4.0


def test_a_run_without_a_plan_says_so_and_a_damaged_plan_is_an_error(run: RunDirectory) -> None:
    data = run.plan.read_bytes()
    run.plan.write_bytes(data[:-10])
    with pytest.raises(DamagedRunError, match=r"plan\.parquet is damaged"):
        status(run)
    run.plan.unlink()
    assert as_text([status(run)]).endswith("no plan yet")


def test_no_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="run is not set"):
        StatusConfig()
