"""What SIGKILL leaves of a run: its directory as it was at that moment, and nothing of what the process knew.

So a kill needs no process of its own: a copy of the directory is a run that was killed when the copy was made.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

STEPS = ("fsync", "link", "unlink", "replace", "rename", "mkdir")


class Killed(BaseException):
    """Ends a run behind its last copy."""


class File(NamedTuple):
    """Two that are equal hold the same bytes."""

    path: Path
    inode: int
    num_bytes: int
    changed_ns: int


class Kills:
    """Copies a run's directory before and after each of its steps of the file system, where anything has changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._watch: Callable[[], None] = lambda: None
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow, and a kill loses nothing that was written
        for name in STEPS:
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))

    @contextmanager
    def copied(self, run: Path, copies: Path, *, most: int | None = None) -> Iterator[list[Path]]:
        """Fills the list with the copies, made in `copies`; what is done inside is cut short behind the `most`th."""
        paths: list[Path] = []
        seen = _files(run)

        def watch() -> None:
            nonlocal seen
            if seen == (seen := _files(run)):
                return
            self._watch = lambda: None
            paths.append(Path(shutil.copytree(run, copies / str(len(paths)))))
            if len(paths) == most:
                raise Killed
            self._watch = watch

        self._watch = watch
        try:
            with suppress(Killed):
                yield paths
        finally:
            self._watch = lambda: None

    def _watched(self, real: Callable[..., object]) -> Callable[..., object]:
        def step(*arguments: object, **keywords: object) -> object:
            self._watch()
            result = real(*arguments, **keywords)
            self._watch()
            return result

        return step


def _files(directory: Path) -> list[File]:
    entries = [(path, path.stat()) for path in sorted(directory.rglob("*"))]
    return [File(path, stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in entries]
