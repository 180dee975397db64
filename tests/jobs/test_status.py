"""What is said of a run's progress is what its parts, its plan and its leases are."""

import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from jobs.files.locks import Holder, Leases, RunLock, this_process
from jobs.files.publishing import canonical_json
from jobs.record.passes import PassRow
from jobs.record.run_dir import RunDirectory
from jobs.record.run_reader import find_runs
from jobs.record.unfinished import lease_name
from jobs.reporting.config import StatusConfig
from jobs.reporting.status import RunStatus, format_json, format_text, read_status
from runtime.errors import ConfigError, DamagedRunError
from tests.jobs.sharded_run import ShardedRun, row_of

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
    return read_status(find_runs([str(run.path)], "run")[0])


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
    assert "blocks  3 of 4 done, 0 leased, 1 left" in format_text([found])


def test_a_running_one_says_who_has_which_block_and_how_long_the_rest_takes(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    interrupt(run, 2)
    run.leases.mkdir()
    lock = RunLock(run.lock, is_shared=True)
    with Leases(run.leases, 300.0) as leases:
        assert leases.acquire(lease_name(2))
        found = status(run)
    lock.release()
    assert (found.state, found.rows_per_second, found.seconds_left) == ("running", 2.0, 4.0)
    assert "blocks  2 of 4 done, 1 leased, 1 left" in format_text([found])
    line = rf"pid {os.getpid()} on host .*, Slurm job 4711: no part yet, on block 2 for 1 s, last heartbeat"
    assert re.search(line, format_text([found]))
    values = json.loads(format_json([found]))[0]
    assert (values["leased"][0]["block"], values["workers"][0]["block"]) == (2, 2)
    assert values["seconds_left"] == 4.0


def test_each_worker_has_the_rate_of_its_passes_and_the_rest_takes_those_who_are_there(tmp_path: Path) -> None:
    here, gone = this_process(), replace(this_process(), host="n2", pid=7, slurm={"SLURM_JOB_ID": "5"})
    case = ShardedRun(folder=tmp_path)
    store, directory = case.store(0), case.directory(0)
    for block, passes in enumerate([[(here, 4.0)], [(gone, 1.0)], [(here, 1.0), (gone, 3.0)]]):
        rows = [pass_of(holder, seconds) for holder, seconds in passes]
        store.commit(block, [row_of(request) for request in store.blocks[block]], rows)
    directory.leases.mkdir()
    lock = RunLock(directory.lock, is_shared=True)
    with Leases(directory.leases, 300.0) as leases:
        assert leases.acquire(lease_name(3))
        found = status(directory)
    lock.release()
    [first, second] = found.workers
    assert (first.holder["pid"], first.leased is not None, second.leased) == (os.getpid(), True, None)
    rates = [(each.rate.num_rows, each.rate.seconds, each.rate.num_parts) for each in found.workers if each.rate]
    assert rates == [(4 + 1, 5.0, 2), (4 + 3, 4.0, 2)], "four rows a block, shared by the seconds"
    assert (found.rows_per_second, found.seconds_left) == (1.0, 4.0), "only one of the two is at work"
    text = format_text([found])
    assert "about 4 s left with 1 worker" in text
    assert 'pid 7 on host "n2", Slurm job 5: 2 parts, 1.75 rows/s, 10 tokens/s' in text


def pass_of(holder: Holder, seconds: float) -> PassRow:
    counts = dict.fromkeys(("pass_index", "num_sequences", "real_tokens", "padded_tokens", "prompt_tokens"), 0)
    worker = canonical_json(asdict(holder))
    tokens = int(10 * seconds)
    return PassRow(**counts, issued_tokens=tokens, useful_tokens=tokens, phase="decode", seconds=seconds, worker=worker)


def test_a_run_without_a_plan_says_so_and_a_damaged_plan_is_an_error(run: RunDirectory) -> None:
    data = run.plan.read_bytes()
    run.plan.write_bytes(data[:-10])
    with pytest.raises(DamagedRunError, match=r"plan\.parquet is damaged"):
        status(run)
    run.plan.unlink()
    assert format_text([status(run)]).endswith("no plan yet")


def test_no_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="run is not set"):
        StatusConfig()
