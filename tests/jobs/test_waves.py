"""Waves: a stop inside a block loses none of its tokens, a kill those since they were last saved, and null all."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.record.parts import PartStore
from jobs.record.success import is_finished
from runtime.errors import Interrupted, KVFileError, OutputError
from tests.generations import read_generations
from tests.jobs import part_support
from tests.jobs.kill_support import Kills
from tests.jobs.streaming_support import FakeSession, made, run_at, start_waves, store_at

NUM_PASSES = 28  # of a run that is not stopped
Start = Callable[..., PartStore]


def stopped_at(
    path: Path, num_passes: int, *, stop: Exception | None = None, seconds: float | None = 0.0
) -> FakeSession:
    session = FakeSession(stop_after=num_passes, stop=stop or Interrupted("stopped"))
    with pytest.raises(type(stop or Interrupted("stopped"))):
        start_waves(path, session, checkpoint_seconds=seconds)
    return session


def rows(store: PartStore) -> pa.Table:
    return read_generations(store.directory)


def num_stops(store: PartStore) -> list[str]:
    footers = [pq.read_schema(path).metadata for path in sorted(store.directory.generations.iterdir())]
    return [(footer.get(b"weightstream.num_stops") or b"0").decode() for footer in footers]


def recorded(store: PartStore) -> tuple[int, int]:
    """Passes in all throughput parts, and the tokens that they issued."""
    passes = store.read_passes()
    return len(passes), sum(row.issued_tokens for row in passes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> PartStore:
    """A run that nothing stopped."""
    session = FakeSession()
    store = start_waves(tmp_path_factory.mktemp("whole"), session)
    assert session.num_passes == NUM_PASSES
    assert recorded(store) == (NUM_PASSES, session.num_sampled)
    assert num_stops(store) == ["0", "0", "0"]
    return store


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("num_passes", range(0, NUM_PASSES, 2))
def test_a_stop_after_any_pass_loses_no_token_and_counts_every_pass_once(
    tmp_path: Path, num_passes: int, whole: PartStore
) -> None:
    first = stopped_at(tmp_path, num_passes, seconds=1e9)
    second = FakeSession()
    store = start_waves(tmp_path, second)
    assert rows(store).equals(rows(whole))
    assert first.num_sampled + second.num_sampled == recorded(whole)[1]
    assert recorded(store) == (first.num_passes + second.num_passes, recorded(whole)[1])
    for block in store.blocks:
        assert [row.pass_index for row in store.read_passes([block])] == list(range(len(store.read_passes([block]))))
    assert not list(tmp_path.glob("running*"))


def test_a_part_says_how_often_its_block_went_on_inside_and_others_keep_their_bytes(
    tmp_path: Path, whole: PartStore
) -> None:
    for num_passes in (14, 1):
        stopped_at(tmp_path, num_passes)
    store = start_waves(tmp_path, FakeSession())
    assert num_stops(store) == ["0", "2", "0"]
    assert rows(store).equals(rows(whole))
    parts, of_whole = part_support.parts(store), part_support.parts(whole)
    assert [parts[name] == of_whole[name] for name in sorted(parts)] == [True, False, True]


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("start", [start_waves, run_at], ids=["wave", "continuous"])
@pytest.mark.parametrize("stop", [KVFileError("EIO"), OutputError("ENOSPC"), Interrupted("SIGTERM")], ids=repr)
def test_what_was_sampled_is_saved_whichever_error_of_ours_ends_a_start(
    tmp_path: Path, start: Start, stop: Exception
) -> None:
    uninterrupted = FakeSession()
    start(tmp_path / "whole", uninterrupted)
    first, second = FakeSession(stop_after=7, stop=stop), FakeSession()
    with pytest.raises(type(stop)):
        start(tmp_path / "stopped", first, checkpoint_seconds=1e9)
    start(tmp_path / "stopped", second)
    assert first.num_sampled > 0
    assert first.num_sampled + second.num_sampled == uninterrupted.num_sampled


@pytest.mark.parametrize("start", [start_waves, run_at], ids=["wave", "continuous"])
def test_any_other_exception_saves_nothing_for_it_may_have_come_in_the_middle_of_a_pass(
    tmp_path: Path, start: Start
) -> None:
    with pytest.raises(AssertionError):
        start(tmp_path, FakeSession(stop_after=7, stop=AssertionError()), checkpoint_seconds=1e9)
    assert not list(tmp_path.glob("running*"))


def test_null_saves_nothing_takes_nothing_up_and_keeps_every_byte(tmp_path: Path, whole: PartStore) -> None:
    stopped_at(tmp_path, 14)
    assert [path.name for path in tmp_path.glob("running*")] == ["running-00001.parquet"]
    stopped_at(tmp_path, 3, seconds=None)
    assert part_support.parts(start_waves(tmp_path, FakeSession(), checkpoint_seconds=None)) == part_support.parts(
        whole
    )
    assert not list(tmp_path.glob("running*"))


def test_it_is_saved_as_often_as_asked_and_not_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, saved = FakeSession(), list[int]()
    clock = SimpleNamespace(monotonic=lambda: float(session.num_passes))
    monkeypatch.setattr("jobs.run.block_loop.time", clock)
    monkeypatch.setattr(
        "jobs.record.run_checkpoint.RunCheckpointFile.save", lambda file, running: saved.append(len(running.passes))
    )
    start_waves(tmp_path, session, checkpoint_seconds=4)
    assert saved == [4, 8, 4, 8, 4]


@pytest.mark.parametrize("spoil", ["another block's", "cut", "another run's"])
def test_a_file_that_is_not_this_blocks_moves_to_quarantine_and_the_block_begins_again(
    tmp_path: Path, spoil: str, whole: PartStore
) -> None:
    stopped_at(tmp_path, 14)
    path = tmp_path / "running-00001.parquet"
    data = path.read_bytes()
    if spoil == "another block's":
        path.rename(tmp_path / "running-00002.parquet")
    elif spoil == "cut":
        path.write_bytes(data[:-20])
    else:
        path.write_bytes(data.replace(store_at(tmp_path, made()).manifest.digest.encode(), b"0" * 64))
    store = start_waves(tmp_path, FakeSession())
    assert rows(store).equals(rows(whole))
    assert num_stops(store) == ["0", "0", "0"]
    assert len(part_support.quarantined(store)) == 1


@pytest.mark.parametrize("stride", [8, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_every_step_and_again_while_resuming_a_run_ends_with_the_same_rows(
    stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, kills = made(6), Kills(monkeypatch)
    session = FakeSession()
    with kills.copied(tmp_path / "whole", tmp_path / "killed") as killed:
        expected = rows(start_waves(tmp_path / "whole", session, batch=asked))
    assert len(killed) > 40, len(killed)
    for number, path in enumerate(killed[::stride]):
        final: dict[str, bytes] = {p.name: p.read_bytes() for p in path.glob("generations/part*")}
        with kills.copied(path, tmp_path / "again" / str(number), most=1 + number % 7) as again:
            start_waves(path, FakeSession(), batch=asked)
        last = FakeSession()
        store = start_waves((again or [path])[-1], last, batch=asked)
        assert rows(store).equals(expected)
        assert is_finished(store.directory)
        assert {name: part_support.parts(store)[name] for name in final} == final, "a committed part was changed"
        assert part_support.quarantined(store) == []
        assert [*store.directory.path.rglob(".*"), *store.directory.path.glob("running*")] == []
        assert number * stride < len(killed) // 2 or last.num_sampled < session.num_sampled, "all was generated again"
