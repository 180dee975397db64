"""Workers share a run out: whoever comes, goes, dies or sleeps, it ends with the rows of one worker alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.config.settings import GenerateConfig, Workers
from jobs.files.locks import RunLock
from jobs.record.run_dir import RunDirectory
from jobs.record.run_reader import Condition, find_runs
from jobs.run.tasks.generate import generate
from jobs.workers.elastic import Worker
from runtime.batching.balance import Block
from runtime.config.settings import Admission, PolicyConfig, PolicyKind
from runtime.errors import ConfigError, Interrupted, RunInUseError
from tests.generations import read_generations
from tests.jobs.worker_loop import Case, check


def test_workers_that_are_killed_stopped_and_paused_make_the_rows_of_one(tmp_path: Path) -> None:
    check(Case(home=tmp_path, num_workers=3, num_rows=12, num_kills=3, num_new_tokens=40))


def test_workers_take_other_blocks_and_those_of_one_that_ends(tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path)
    directory.generations.mkdir()
    blocks = [Block(index=index, micro_batches=()) for index in range(2)]
    with Worker(directory, 300.0, lambda: True) as second:
        with Worker(directory, 300.0, lambda: True) as first:
            assert next(first.lease_blocks(blocks))[0].index == 0
            turns = second.lease_blocks(blocks)
            assert next(turns)[0].index == 1
            directory.generations_part(1).touch()
            with pytest.raises(Interrupted):
                next(turns)
        turns = second.lease_blocks(blocks)
        assert [block.index for block, _ in [next(turns)]] == [0]
        directory.generations_part(0).touch()
        assert list(turns) == []
    assert list(directory.leases.iterdir()) == []


def test_a_run_of_one_worker_goes_on_with_several_and_the_other_way_round(tmp_path: Path) -> None:
    case = Case(home=tmp_path, num_rows=12, num_new_tokens=4)
    whole = generate(case.config("whole", Workers.one), lambda: False)
    for first, second in ((Workers.one, Workers.elastic), (Workers.elastic, Workers.one)):
        stops = iter(range(15))
        with pytest.raises(Interrupted):
            generate(case.config(first.value, first), lambda stops=stops: next(stops, None) is None)
        outcome = generate(case.config(first.value, second), lambda: False)
        assert not outcome.was_finished
        assert generate(case.config(first.value, first), lambda: False).was_finished
        assert read_generations(RunDirectory(path=outcome.directory)).equals(
            read_generations(RunDirectory(path=whole.directory))
        )
        leases = outcome.directory / "leases"
        assert list(leases.iterdir()) == []


def test_a_worker_waits_for_a_block_that_another_has_and_is_stopped_while_it_waits(tmp_path: Path) -> None:
    case = Case(home=tmp_path, num_rows=12, num_new_tokens=4)
    config = replace(case.config("run", Workers.elastic), lease_seconds=3600.0)
    leases = tmp_path / "generate" / "run" / "leases"
    with pytest.raises(Interrupted):
        generate(config, lambda: leases.exists())
    path = leases / "block-000001.json"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    done = tmp_path / "generate" / "run" / "generations"
    with pytest.raises(Interrupted, match="other workers"):
        generate(config, lambda: len(list(done.glob("part-*"))) == 5)
    assert not (done / "part-00001.parquet").exists()
    path.unlink()
    assert generate(config, lambda: False).summary.rows["ok"] == 12


def test_one_worker_alone_and_workers_that_share_keep_each_other_out(tmp_path: Path) -> None:
    case = Case(home=tmp_path, num_rows=12, num_new_tokens=4)
    outcome = generate(case.config("run", Workers.elastic), lambda: False)
    lock = outcome.directory / ".lock"
    shared, other = RunLock(lock, is_shared=True), RunLock(lock, is_shared=True)
    with pytest.raises(RunInUseError):
        generate(case.config("run", Workers.one), lambda: False)
    assert find_runs([str(outcome.directory)], "run")[0].condition is Condition.running
    shared.release()
    other.release()
    assert find_runs([str(outcome.directory)], "run")[0].condition is Condition.done
    alone = RunLock(lock)
    with pytest.raises(RunInUseError):
        generate(case.config("run", Workers.elastic), lambda: False)
    alone.release()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"policy": PolicyConfig(kind=PolicyKind.fixed, admission=Admission.continuous)}, "policy.admission"),
        ({"lease_seconds": 1.0}, "lease_seconds"),
    ],
)
def test_what_workers_cannot_share_is_refused_by_its_key(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        GenerateConfig(workers=Workers.elastic, **changes)  # pyright: ignore[reportArgumentType]
