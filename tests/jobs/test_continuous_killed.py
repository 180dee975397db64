"""Killed at any step of a continuous run, its checkpoints among them, the run ends with the same bytes."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from jobs.record.parts import PartStore
from jobs.record.success import is_finished
from tests.jobs import part_support
from tests.jobs import streaming_support as case
from tests.jobs.kill_support import Kills

NUM_ROWS = 6  # two blocks
ASKED = case.made(NUM_ROWS)


def start(path: Path) -> case.FakeSession:
    """A start of the run at `path`, up to its end."""
    session = case.FakeSession()
    case.run_at(path, session, batch=ASKED)
    return session


def audit(store: PartStore, whole: Mapping[str, bytes]) -> None:
    for name, data in part_support.parts(store).items():
        assert name.startswith(".") or data == whole[name], name
    assert not store.directory.success.exists() or is_finished(store.directory), "success over missing parts"


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_step_and_again_while_resuming_a_run_ends_with_the_same_bytes(
    stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every fifth in `make test`."""
    kills = Kills(monkeypatch)
    store = case.store_at(tmp_path / "whole", ASKED)
    with kills.copied(tmp_path / "whole", tmp_path / "killed") as killed:
        num_tokens = start(tmp_path / "whole").num_sampled
    whole = part_support.parts(store)
    assert len(killed) > 40, len(killed)
    for number, path in enumerate(killed[::stride]):
        audit(case.store_at(path, ASKED), whole)
        with kills.copied(path, tmp_path / "again" / str(number), most=1 + number % 7) as again:
            start(path)
        store = case.store_at((again or [path])[-1], ASKED)
        audit(store, whole)
        last = start(store.directory.path)
        assert part_support.parts(store) == whole
        assert is_finished(store.directory)
        indices = [row.pass_index for row in store.read_passes()]
        assert len(indices) == len(set(indices)), "a pass is in two parts"
        assert part_support.quarantined(store) == []
        left = [*store.directory.path.rglob(".*"), *store.directory.path.glob("running*")]
        assert left == []
        assert number * stride < len(killed) // 2 or last.num_sampled < num_tokens, "all was generated again"
