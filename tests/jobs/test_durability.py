"""What is written survives a power cut: whole bytes, then their sync, then the name, then the sync of its folder."""

import os
import stat
from pathlib import Path
from typing import TypeAlias

import pytest

from jobs.files.publishing import move_to_quarantine, publish, write_all
from jobs.record.manifest import RunManifest
from jobs.record.run_dir import RunDirectory, open_run

CONTENT = b"x" * 100  # less than a buffer holds: unflushed, none of it is in the file
Event: TypeAlias = tuple[str, object]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What reached the operating system, in order: bytes of a file at its sync, folders, names."""
    found: list[Event] = []
    link, rename, replace = os.link, os.rename, os.replace

    def sync(descriptor: int) -> None:
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        found.append(("folder", place) if is_folder else ("bytes", place.read_bytes()))

    def named(act):
        def recorded(source: Path, target: Path) -> None:
            act(source, target)
            found.append(("name", Path(target)))

        return recorded

    monkeypatch.setattr(os, "fsync", sync)
    for name, act in (("link", link), ("rename", rename), ("replace", replace)):
        monkeypatch.setattr(os, name, named(act))
    return found


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_file_is_durable_before_it_has_its_name_and_then_the_name_is(
    tmp_path: Path, events: list[Event], exclusive: bool
) -> None:
    path = tmp_path / "file"
    publish(path, lambda file: write_all(file, CONTENT), exclusive=exclusive)
    assert events == [("bytes", CONTENT), ("name", path), ("folder", tmp_path)]


def test_a_file_that_is_put_aside_is_durably_gone_here_and_there(tmp_path: Path, events: list[Event]) -> None:
    path, folder = tmp_path / "parts" / "part", tmp_path / "quarantine"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    move_to_quarantine(path, folder, "it is damaged")
    assert events[0] == ("name", folder / "parts-part.0")
    assert set(events[1:]) == {("folder", path.parent), ("folder", folder)}


def test_a_new_run_directory_its_folders_and_its_own_name_are_durable(tmp_path: Path, events: list[Event]) -> None:
    run = RunDirectory(path=tmp_path / "generate" / "run")
    open_run(run.path, RunManifest(semantic={"model.name": "tiny"}, operational={}, versions={})).close()
    kinds = [event if event[0] != "bytes" else "bytes" for event in events]
    assert kinds[:3] == ["bytes", ("name", run.manifest), ("folder", run.path)]
    assert kinds[-2:] == [("folder", run.path), ("folder", run.path.parent)]
