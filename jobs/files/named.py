"""Files at paths that the user names: one that is there is replaced only if Weightstream wrote it and nobody has
changed it since. Which those are is kept in the user's cache: without it a file counts as somebody's own."""

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from runtime.cache_root import cache_root
from runtime.errors import ConfigError, DamagedRunError, OutputError, WeightstreamError

from .publishing import PERMANENT_ERRNOS, publish, read_json, write_json


def publish_named(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Publishes `path` whole, in place of an older file, and remembers that it was written here. Raises ConfigError
    where it can never be written, OutputError; an older file is then as it was."""
    try:
        publish(path, write, exclusive=False)
    except OutputError as error:
        if isinstance(error.__cause__, OSError):
            raise named_file_error(path, error.__cause__) from error
        raise
    with suppress(OSError, OutputError):  # then it is not replaced without a question
        record = _record(path)
        record.parent.mkdir(parents=True, exist_ok=True)
        write_json(record, _state(path), exclusive=False)


def named_file_error(path: Path, error: OSError) -> WeightstreamError:
    """What the user is told: what no waiting heals is refused."""
    kind = ConfigError if error.errno in PERMANENT_ERRNOS else OutputError
    return kind(f"{path} cannot be written: {error.strerror or error}; an older file is as it was")


def is_replaceable(path: Path) -> bool:
    """Whether nothing is there, or a file that was published here by `publish_named` and is as it was."""
    try:
        return not path.exists() or read_json(_record(path)) == _state(path)
    except (OSError, DamagedRunError):
        return False


def require_replaceable(paths: Iterable[Path], setting: str) -> None:
    """Raises ConfigError where one of the files that `setting` leads to is somebody's own: before work is done for
    it."""
    for path in paths:
        if not is_replaceable(path):
            raise ConfigError(
                f"{setting}: {path} is there, and was not written by Weightstream or was changed since: it stays as it "
                f"is. Remove it, or choose another {setting.partition('=')[0]}="
            )


def _record(path: Path) -> Path:
    name = hashlib.sha256(str(path.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return cache_root() / "written" / f"{name}.json"


def _state(path: Path) -> dict[str, int]:
    """What is no longer so once somebody has changed the file. Raises OSError."""
    found = path.stat()
    return {"num_bytes": found.st_size, "modified_ns": found.st_mtime_ns}
