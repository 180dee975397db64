"""What killed writers left half written is swept, by anybody, and nothing that is being written is."""

import errno
import fcntl
from pathlib import Path
from typing import BinaryIO

import pytest

from jobs.files.publishing import publish, sweep_temps, write_all


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_sweep_leaves_what_a_living_writer_writes_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        file.write(b"half")
        assert sweep_temps(tmp_path) == 1, "that of the killed writer"
        file.write(b" and whole")

    (tmp_path / ".part.1-a.tmp").write_text("killed")
    (tmp_path / ".part.2-b.tmp").symlink_to(tmp_path / "elsewhere")
    assert publish(tmp_path / "part", write, exclusive=True)
    assert (tmp_path / "part").read_bytes() == b"half and whole"
    assert names(tmp_path) == [".part.2-b.tmp", "part"]


def test_a_writer_that_is_swept_before_it_has_locked_its_file_begins_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, locked = fcntl.flock, list[int]()

    def late(file: BinaryIO, kind: int) -> None:
        if not locked:
            Path(file.name).unlink()
        locked.append(kind)
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    assert publish(tmp_path / "part", lambda file: write_all(file, b"whole"), exclusive=True)
    assert len(locked) == 2
    assert (tmp_path / "part").read_bytes() == b"whole"
    assert names(tmp_path) == ["part"]


def test_without_locks_only_who_is_alone_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert publish(tmp_path / "part", lambda file: write_all(file, b"whole"), exclusive=True)
    (tmp_path / ".part.1-a.tmp").write_text("x")
    assert sweep_temps(tmp_path) == 0
    assert sweep_temps(tmp_path, is_only_writer=True) == 1


def test_sweep_removes_temps_and_nothing_else(tmp_path: Path) -> None:
    for name in (".part.1-a.tmp", ".run.json.2-b.tmp", ".lock", "part.tmp", "part"):
        (tmp_path / name).write_text("x")
    (tmp_path / ".folder.tmp").mkdir()
    assert sweep_temps(tmp_path) == 2
    assert names(tmp_path) == [".folder.tmp", ".lock", "part", "part.tmp"]
