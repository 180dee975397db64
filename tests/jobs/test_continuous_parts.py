"""Parts that overlap: each committed with its last row, each pass recorded once, and nothing lost by a stop."""

import errno
import os
from pathlib import Path

import pytest

from jobs.record.parts import PartStore
from jobs.record.success import is_finished
from runtime.errors import Interrupted, OutputError
from tests.generations import read_generations
from tests.jobs.part_support import parts
from tests.jobs.streaming_support import FakeSession, blocks_of, made, run_at, store_at

NUM_PASSES = 17  # of a run that is not stopped
BOTH_ORDERS = pytest.mark.parametrize("reports_first", [False, True], ids=["rows first", "pass first"])


def stopped_at(path: Path, num_passes: int, *, reports_first: bool = False) -> FakeSession:
    session = FakeSession(stop_after=num_passes, reports_first=reports_first)
    with pytest.raises(Interrupted):
        run_at(path, session)
    return session


def recorded(store: PartStore) -> tuple[list[int], int]:
    """The indices of the passes in all throughput parts, and the tokens that they issued."""
    rows = store.read_passes()
    return sorted(row.pass_index for row in rows), sum(row.issued_tokens for row in rows)


@BOTH_ORDERS
def test_every_row_comes_out_once_and_every_pass_is_in_one_part(tmp_path: Path, reports_first: bool) -> None:
    session = FakeSession(reports_first=reports_first)
    store = run_at(tmp_path, session)
    table = read_generations(store.directory)
    assert sorted(table["id"].to_pylist()) == sorted(request.id for request in made().requests)
    assert [f"row {own}" for own in table["own"].to_pylist()] == table["id"].to_pylist()
    assert session.num_passes == NUM_PASSES
    assert recorded(store) == (list(range(NUM_PASSES)), session.num_sampled)
    assert sum(table["num_completion_tokens"].to_pylist()) == session.num_sampled
    assert is_finished(store.directory)
    assert not store.directory.run_checkpoint.exists()


def test_requests_are_admitted_block_after_block(tmp_path: Path) -> None:
    session = FakeSession()
    run_at(tmp_path, session)
    assert session.order == [i for block in blocks_of(made()) for i in block.members]


def test_a_part_is_committed_while_others_run(tmp_path: Path) -> None:
    stopped_at(tmp_path, 12)
    store = store_at(tmp_path, made())
    assert 0 < len(store.committed_parts()) < len(store.blocks)


@pytest.mark.dealt("reports_first", "num_passes", most=3)
@BOTH_ORDERS
@pytest.mark.parametrize("num_passes", range(NUM_PASSES))
def test_a_stop_after_any_pass_loses_no_token_and_no_pass(tmp_path: Path, num_passes: int, reports_first: bool) -> None:
    whole = run_at(tmp_path / "whole", FakeSession())
    first = stopped_at(tmp_path / "stopped", num_passes, reports_first=reports_first)
    second = FakeSession(reports_first=reports_first)
    store = run_at(tmp_path / "stopped", second)
    assert parts(store) == parts(whole)
    assert first.num_sampled + second.num_sampled == recorded(whole)[1]
    indices, num_issued = recorded(store)
    assert indices == list(range(first.num_passes + second.num_passes))
    assert num_issued == recorded(whole)[1]


def test_a_stop_before_what_was_saved_is_seated_again_loses_nothing(tmp_path: Path) -> None:
    whole = run_at(tmp_path / "whole", FakeSession())
    starts = [stopped_at(tmp_path / "stopped", num_passes) for num_passes in (4, 0, 1, 0, 3)]
    starts.append(FakeSession())
    store = run_at(tmp_path / "stopped", starts[-1])
    assert parts(store) == parts(whole)
    assert sum(session.num_sampled for session in starts) == recorded(whole)[1]


def test_what_a_checkpoint_holds_of_committed_parts_is_dropped(tmp_path: Path) -> None:
    whole = run_at(tmp_path / "whole", FakeSession())
    stopped_at(tmp_path / "old", 6)
    path = store_at(tmp_path / "old", made()).directory.run_checkpoint
    old = path.read_bytes()
    stopped_at(tmp_path / "old", 6)
    assert store_at(tmp_path / "old", made()).committed_parts()
    path.write_bytes(old)
    store = run_at(tmp_path / "old", FakeSession())
    assert parts(store) == parts(whole)
    indices, _ = recorded(store)
    assert len(indices) == len(set(indices))


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_costs_the_checkpoint_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    real = getattr(os, step)

    def fail(*arguments: object) -> object:
        is_checkpoint = "running" in str(arguments[0]) or any(tmp_path.glob(".running*"))
        if is_checkpoint:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, step, fail)
    store = run_at(tmp_path, FakeSession())
    assert is_finished(store.directory)
    assert "was not saved" in caplog.text
    assert "ENOSPC" in caplog.text


def test_a_full_disk_at_a_commit_stops_the_run_and_the_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_at(tmp_path / "whole", FakeSession())
    stopped_at(tmp_path / "full", 3)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", fail)
        with pytest.raises(OutputError) as stopped:
            run_at(tmp_path / "full", FakeSession())
    assert stopped.value.exit_code == 75
    again = FakeSession()
    store = run_at(tmp_path / "full", again)
    assert parts(store) == parts(whole)
    assert again.num_sampled < recorded(whole)[1]
