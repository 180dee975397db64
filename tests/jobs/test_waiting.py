"""Who waits for a run that others work on, or does not, is told what is missing and who has it."""

import re
from pathlib import Path

import pytest

from jobs.exporting.config import ExportConfig
from jobs.exporting.export import export
from jobs.exporting.shards import wait_until_finished
from jobs.files.locks import Leases, RunLock
from jobs.record.run_reader import find_runs
from jobs.record.unfinished import describe_unfinished, lease_name
from runtime.errors import ConfigError, Interrupted
from tests.jobs.sharded_run import NUM_SHARDS, ShardedRun


@pytest.fixture
def case(tmp_path: Path) -> ShardedRun:
    """A run of three shards, the first of which lacks a block."""
    case = ShardedRun(folder=tmp_path).finish(*range(NUM_SHARDS))
    directory = case.directory(0)
    directory.success.unlink()
    directory.generations_part(2).unlink()
    return case


def exported(case: ShardedRun) -> int:
    return export(ExportConfig(run=f"{case.folder}/x-*", out=f"{case.folder}/all.jsonl")).num_rows


def test_an_export_of_a_run_in_work_names_blocks_rows_and_who_has_leased_what(case: ShardedRun) -> None:
    directory = case.directory(0)
    directory.leases.mkdir()
    lock = RunLock(directory.lock, is_shared=True)
    with Leases(directory.leases, 300.0) as leases:
        assert leases.acquire(lease_name(2))
        with pytest.raises(ConfigError) as refused:
            exported(case)
        said = describe_unfinished(find_runs([f"{case.folder}/x-*"], "run"))
    lock.release()
    assert len(said) == 1
    assert said[0] in str(refused.value), "a report says the same"
    assert re.search(
        r"missing: rows [\d, ]+, in 1 of 4 blocks \(2\); leased: block 2: pid \d+ on host", str(refused.value)
    )


def test_waiting_says_what_is_missing_and_ends_with_the_run(case: ShardedRun) -> None:
    gone = case.directory(1).path.rename(case.folder / "elsewhere")
    lock, said, times = RunLock(case.directory(0).lock), list[str](), iter(range(0, 1000, 10))

    steps = iter((lambda: gone.rename(case.directory(1).path), lambda: case.finish(0), lock.release))
    wait_until_finished(
        [str(case.folder / "x-*")], lambda: False, said.append, sleep=lambda _: next(steps)(), clock=lambda: next(times)
    )
    name = case.directory(0).path
    assert said == [
        f"waiting: shard 1 of 3 is missing; {name} lacks 1 of 4 blocks, running",
        f"waiting: {name} lacks 1 of 4 blocks, running",
        f"waiting: {name} lacks 0 of 4 blocks, running",
    ]
    assert exported(case) == 48


def test_who_waits_can_be_stopped_and_partial_has_no_meaning_then(case: ShardedRun) -> None:
    with pytest.raises(Interrupted, match="lacks 1 of 4 blocks, no process is running"):
        wait_until_finished([str(case.folder / "x-*")], lambda: True, print)
    with pytest.raises(ConfigError, match="partial"):
        ExportConfig(run="x", out="x.csv", wait=True, partial=True)
