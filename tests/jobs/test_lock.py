"""One process per run directory, and nothing else is written into on the way."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.files.locks import RunLock
from jobs.record.manifest import RunManifest
from jobs.record.run_dir import RunDirectory, open_run
from runtime.errors import DamagedRunError, RunInUseError

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = RunManifest(semantic={"model.name": "tiny"}, operational={}, versions={})


def test_lock_admits_one_process_and_names_the_holder(tmp_path: Path) -> None:
    script = f"""if True:
        import sys
        from pathlib import Path
        from jobs.files.locks import RunLock
        lock = RunLock(Path({str(tmp_path / ".lock")!r}))
        print("held", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunInUseError, match=rf"in use by pid {holder.pid} on host") as refused:
            RunLock(tmp_path / ".lock")
        assert refused.value.exit_code == 2  # 75 would be started again at once, and find the same holder
        holder.kill()
        holder.wait()
    RunLock(tmp_path / ".lock").release()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_released_lock_can_be_taken_again_and_released_twice(tmp_path: Path) -> None:
    for _ in range(2):
        lock = RunLock(tmp_path / ".lock")
        lock.release()
        lock.release()


def test_file_system_without_locks_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    RunLock(tmp_path / ".lock").release()
    assert "start one process per run" in caplog.text


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_that_is_another_file_is_refused_and_the_file_left(tmp_path: Path, link) -> None:
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("mine")
    run.mkdir()
    link(precious, run / ".lock")
    with pytest.raises(OSError, match="symbolic") if link is os.symlink else pytest.raises(DamagedRunError):
        RunLock(run / ".lock")
    with pytest.raises(DamagedRunError, match=r"\.lock is ") as refused:
        open_run(run, MANIFEST)
    assert refused.value.exit_code == 4
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("name", ["generations", "throughput", "quarantine", "trace"])
def test_a_folder_of_a_run_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".mine.tmp").write_text("mine")
    open_run(tmp_path / "run", MANIFEST).close()
    folder = tmp_path / "run" / name
    if folder.exists():
        folder.rmdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(DamagedRunError, match=rf"{name} is a symbolic link"):
        open_run(tmp_path / "run", MANIFEST)
    assert [path.name for path in elsewhere.iterdir()] == [".mine.tmp"]


def test_a_run_directory_may_itself_lie_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "real")
    open_run(tmp_path / "run", MANIFEST).close()
    assert RunDirectory(path=tmp_path / "real").manifest.exists()
