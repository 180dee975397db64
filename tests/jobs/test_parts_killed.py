"""Killed at any step of a commit, the run ends with the same bytes."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from jobs.record.parts import PartStore
from jobs.record.success import is_finished
from tests.jobs import part_support as case
from tests.jobs.kill_support import Kills

CORRUPT = b"corrupt"


def finish(store: PartStore) -> None:
    for block in sorted(set(store.blocks) - set(store.committed_parts())):
        store.commit(block, case.rows_of(block), case.PASSES)
    store.publish_success()


def audit(store: PartStore, whole: Mapping[str, bytes]) -> None:
    for name, data in case.parts(store).items():
        assert name.startswith(".") or data in (whole[name], CORRUPT), name
    assert not store.directory.success.exists() or is_finished(store.directory), "success over missing parts"


def test_killed_at_every_commit_step_and_again_while_resuming_a_run_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = Kills(monkeypatch)
    whole = case.parts(case.committed_store(tmp_path / "whole"))
    store = case.store_at(tmp_path / "run")
    store.commit(0, case.rows_of(0), case.PASSES)
    store.directory.generations_part(0).write_bytes(CORRUPT)
    with kills.copied(tmp_path / "run", tmp_path / "killed") as killed:
        finish(store)
    assert len(killed) > 15, killed
    for number, path in enumerate(killed):
        audit(case.store_at(path), whole)
        with kills.copied(path, tmp_path / "again" / str(number), most=1 + number % 7) as again:
            finish(case.store_at(path))
        store = case.store_at((again or [path])[-1])
        audit(store, whole)
        finish(store)
        assert case.parts(store) == whole
        assert is_finished(store.directory)
        assert [p.read_bytes() for p in case.quarantined(store)] == [CORRUPT]
        assert list(store.directory.path.rglob(".*")) == []


def test_a_file_size_limit_of_the_kernel_commits_nothing(tmp_path: Path) -> None:
    script = f"""if True:
        import resource, sys
        from pathlib import Path
        sys.path.insert(0, {str(case.ROOT)!r})
        from tests.jobs import part_support as case
        from runtime.errors import OutputError
        store = case.store_at(Path({str(tmp_path)!r}))
        store.commit(0, case.rows_of(0), case.PASSES)
        before = case.parts(store)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        try:
            store.commit(1, case.rows_of(1), case.PASSES)
        except OutputError as error:
            assert "EFBIG" in str(error), error
        else:
            raise SystemExit("committed more than the limit allows")
        assert case.parts(store) == before
    """
    result = subprocess.run([sys.executable, "-c", script], cwd=case.ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
