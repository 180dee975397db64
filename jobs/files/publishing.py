"""Atomic, durable publishing of files: readers see a complete file or none, after any kill. A file is written under a
hidden temporary name in the same directory, fsynced, and then renamed or linked. Hidden means a leading dot: Parquet
readers, `datasets` and shell globs skip it."""

import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from glob import escape
from itertools import count
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from runtime.errors import ConfigError, DamagedRunError, OutputError
from runtime.units import MIB, format_bytes

JsonValue: TypeAlias = "str | int | float | bool | Sequence[JsonValue] | Mapping[str, JsonValue] | None"

LOG = logging.getLogger(__name__)
TEMP_SUFFIX = ".tmp"
MAX_JSON_BYTES = 256 * MIB  # enough for _SUCCESS.json of a million parts
PERMANENT_ERRNOS = frozenset(
    {errno.EEXIST, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR}
    | {errno.ENOENT}
)  # a retry cannot help
PARQUET_PROBLEMS = (pa.ArrowException, OSError, ValueError)  # raised by `parse_parquet` for damaged bytes


def publish(
    path: Path,
    write: Callable[[BinaryIO], None],
    *,
    exclusive: bool,
    check: Callable[[Path], None] | None = None,
    expected_bytes: int = 0,
) -> bool:
    """Writes `path` so that it is complete and durable once visible. If the file exists, `exclusive=True` leaves it and
    returns False; `exclusive=False` replaces it. `check` rereads the temporary file and raises OSError if it is wrong.
    `expected_bytes`: for the message of a full disk. Raises OutputError; an existing file is then unchanged."""
    try:
        with _temp_file(path) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # before the name is visible: a crash must not leave an empty file
            temp = Path(file.name)
            if check is not None:
                check(temp)
            if exclusive:  # `link` fails if another process was first; `rename` would replace its file
                try:
                    os.link(temp, path)
                except FileExistsError:
                    return False
                temp.unlink()
            else:
                temp.replace(path)
            fsync_directory(path.parent)  # makes the name durable too
            return True
    except OSError as error:
        raise output_error(path, error, expected_bytes=expected_bytes) from error


@contextmanager
def _temp_file(path: Path) -> Iterator[BinaryIO]:
    """Context manager: a new hidden file, locked so that `sweep_temps` skips it."""
    temp = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMP_SUFFIX}")
    file = temp.open("xb")
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink == 0:  # race: swept before it was locked
            with _temp_file(path) as new_file:
                yield new_file
        else:
            yield file
    finally:
        with suppress(OSError):  # fails if the file was renamed; if it remains, `sweep_temps` removes it later
            temp.unlink()
        file.close()  # last: closing releases the lock


def fsync_directory(directory: Path) -> None:
    """Makes new and removed names in `directory` durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> Path:
    """Creates the directory and its parents if missing; returns it. Raises ConfigError if a retry cannot help,
    otherwise OutputError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in PERMANENT_ERRNOS:
            raise ConfigError(f"cannot create directory {directory}: {error.strerror}; choose another") from error
        raise output_error(directory, error) from error
    return directory


def sweep_temps(directory: Path, name: str | None = None, *, is_only_writer: bool = False) -> int:
    """Removes temporary files of killed writers, of the file `name` or of all files; returns their number. Files locked
    by a live writer stay, unless `is_only_writer`: no other process writes here. Raises OSError."""
    pattern = f".*{TEMP_SUFFIX}" if name is None else f".{escape(name)}.*{TEMP_SUFFIX}"
    return sum(_sweep(entry, is_only_writer=is_only_writer) for entry in directory.glob(pattern) if entry.is_file())


def _sweep(temp: Path, *, is_only_writer: bool) -> bool:
    """Removes a temporary file unless a live process has locked it; returns True if removed."""
    try:
        descriptor = os.open(temp, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # published meanwhile, or swept by another process
        return False
    try:
        if not is_only_writer:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        temp.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def move_to_quarantine(path: Path, folder: Path, reason: str) -> None:
    """Moves an unusable file into `folder` without overwriting anything there, and logs it. Raises OSError."""
    folder.mkdir(exist_ok=True)
    targets = (folder / f"{path.parent.name}-{path.name}.{number}" for number in count())
    target = next(target for target in targets if not target.exists())
    path.rename(target)
    fsync_directory(path.parent)
    fsync_directory(folder)
    LOG.warning("%s was moved to %s: %s", path, target, reason)


def output_error(path: Path, error: OSError, *, expected_bytes: int = 0) -> OutputError:
    """The error for a `path` that cannot be written: cause, free space and remedy."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    free = "free space unknown"
    for parent in path.parents:
        with suppress(OSError):
            free = f"{format_bytes(shutil.disk_usage(parent).free)} free there"
            break
    needed = f", about {format_bytes(expected_bytes)} needed" if expected_bytes else ""
    hint = "make room or choose another output directory with output_root="
    if error.errno in (errno.EPERM, errno.ENOTSUP):
        hint = "the file system must allow hard links: choose an output directory on another one with output_root="
    elif error.errno == errno.EFBIG:
        hint = "files may be larger only with a higher limit (ulimit -f, RLIMIT_FSIZE), or on another file system"
    elif error.errno in PERMANENT_ERRNOS:
        hint = "make it a directory that can be written, or choose another one with output_root="
    return OutputError(
        f"cannot write {path}: {error.strerror or error} ({name}); {free}{needed}. "
        f"Finished parts are kept; {hint}, then start the same command again."
    )


def canonical_json(value: JsonValue) -> str:
    """JSON with sorted keys, no spaces, ASCII only: equal values give equal text. Raises ValueError on NaN and
    infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def json_digest(value: JsonValue) -> str:
    """SHA-256 of the canonical JSON, in hex."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def write_json(path: Path, value: JsonValue, *, exclusive: bool) -> bool:
    """Publishes `value` as indented JSON; `exclusive` and the result are those of `publish`."""
    text = json.dumps(value, sort_keys=True, indent=2, allow_nan=False) + "\n"
    return publish(path, lambda file: write_all(file, text.encode()), exclusive=exclusive, expected_bytes=len(text))


def write_all(file: BinaryIO, data: bytes) -> None:
    file.write(data)


class UnexpectedFileError(OSError):
    """The path is not a regular file (a pipe, a device, a link), so that reading could block, or is too large."""


def read_regular_file(
    path: Path, *, max_bytes: int | None = None, follow_links: bool = True
) -> tuple[bytes, os.stat_result]:
    """Contents and status of a regular file; never blocks. Raises UnexpectedFileError if it is not a regular file, has
    more than `max_bytes`, or is a symbolic link without `follow_links`. Raises OSError if it cannot be read."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if path.is_symlink():  # including dangling ones, which raise FileNotFoundError
            raise UnexpectedFileError(f"{path} is a symbolic link, to {path.readlink()}") from error
        if error.errno == errno.ENXIO:
            raise UnexpectedFileError(f"{path} is a socket or a device") from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnexpectedFileError(f"{path} is not a regular file")
        if max_bytes is not None and status.st_size > max_bytes:
            raise UnexpectedFileError(
                f"{path} has {format_bytes(status.st_size)}; the limit is {format_bytes(max_bytes)}"
            )
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(-1 if max_bytes is None else max_bytes), status
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, JsonValue]:
    """The JSON object in `path`. Raises DamagedRunError if it is not a regular file with a JSON object,
    OSError if it cannot be read."""
    try:
        data, _ = read_regular_file(path, max_bytes=MAX_JSON_BYTES)
    except UnexpectedFileError as error:
        raise DamagedRunError(f"{error}, in place of a file of Weightstream: remove it") from error
    return parse_json(data, path)


def parse_json(data: bytes, path: Path) -> dict[str, JsonValue]:
    """Parses a JSON object, the contents of `path`. Raises DamagedRunError."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(data.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise _damaged_error(path, len(data), str(error)) from error
    if not isinstance(value, dict):
        raise _damaged_error(path, len(data), f"it holds a {type(value).__name__}, not an object")
    return value


def _damaged_error(path: Path, num_bytes: int, reason: str) -> DamagedRunError:
    what = "is empty" if num_bytes == 0 else f"({num_bytes} bytes) is not valid: {reason}"
    return DamagedRunError(
        f"{path} {what}. Weightstream never leaves such a file: check the directory, "
        f"then remove the file, or choose another directory with run="
    )


def write_parquet(table: pa.Table, file: BinaryIO) -> None:
    """Writes a table with page checksums. Omits statistics: readers skip rows by them, but no checksum covers them."""
    pq.write_table(table, file, write_page_checksum=True, write_statistics=False)


def parse_parquet(data: bytes) -> pa.Table:
    """Reads a table and verifies all page checksums. Raises one of PARQUET_PROBLEMS."""
    table = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read()
    table.validate(full=True)
    return table


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


PRIVATE_FOLDER_MODE = 0o700
GROUP_AND_OTHERS = 0o077


@contextmanager
def private_umask() -> Iterator[None]:
    """Context manager: files created by this process inside it are readable only by their owner."""
    before = os.umask(GROUP_AND_OTHERS)
    os.umask(before | GROUP_AND_OTHERS)
    try:
        yield
    finally:
        os.umask(before)
