"""Output files at paths given by the user. An existing file is replaced only if Weightstream wrote it and it has not
changed since, according to a record in the user's cache."""

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from runtime.cache_root import cache_root
from runtime.errors import ConfigError, DamagedRunError, OutputError, WeightstreamError

from .publishing import PERMANENT_ERRNOS, publish, read_json, write_json


def publish_named(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Publishes `path` atomically, replacing an older file, and records that. Raises ConfigError if the path can never
    be written, and OutputError if a retry may help. After an error, an older file is unchanged."""
    try:
        publish(path, write, exclusive=False)
    except OutputError as error:
        if isinstance(error.__cause__, OSError):
            raise named_file_error(path, error.__cause__) from error
        raise
    with suppress(OSError, OutputError):  # without a record the next export will not replace the file
        record = _record_path(path)
        record.parent.mkdir(parents=True, exist_ok=True)
        write_json(record, _file_stamp(path), exclusive=False)


def named_file_error(path: Path, error: OSError) -> WeightstreamError:
    """ConfigError for errors that retrying cannot fix, otherwise OutputError."""
    kind = ConfigError if error.errno in PERMANENT_ERRNOS else OutputError
    return kind(f"{path} cannot be written: {error.strerror or error}; an older file is unchanged")


def is_replaceable(path: Path) -> bool:
    """True if nothing is at `path`, or an unchanged file written by `publish_named`."""
    try:
        return not path.exists() or read_json(_record_path(path)) == _file_stamp(path)
    except (OSError, DamagedRunError):
        return False


def require_replaceable(paths: Iterable[Path], setting: str) -> None:
    """Raises ConfigError if one of the output files exists and is not replaceable. Call it before slow work. `setting`:
    the setting that names them, with its value, such as `out=report.html`; for the message."""
    for path in paths:
        if not is_replaceable(path):
            raise ConfigError(
                f"{setting}: {path} exists, and was not written by Weightstream or was changed since. Remove it, or "
                f"choose another {setting.partition('=')[0]}="
            )


def _record_path(path: Path) -> Path:
    name = hashlib.sha256(str(path.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return cache_root() / "written" / f"{name}.json"


def _file_stamp(path: Path) -> dict[str, int]:
    """Size and modification time, to detect later changes. Raises OSError."""
    status = path.stat()
    return {"num_bytes": status.st_size, "modified_ns": status.st_mtime_ns}
