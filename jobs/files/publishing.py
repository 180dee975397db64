"""Publishing a file: a reader sees all of it or nothing, whatever is killed and whenever.

A file is written under a hidden name beside its final one, made durable, and only then given its name.
Hidden means a leading dot: Parquet readers, `datasets` and shell globs pass over it. Who may read what a run writes is
said here too, as prompts and completions are in it.
"""

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
MAX_JSON_BYTES = 256 * MIB  # of one record; the list of a run of a million parts has less
PERMANENT_ERRNOS = frozenset(
    {errno.EEXIST, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR}
    | {errno.ENOENT}
)  # of a path that cannot be written, which no waiting heals
PARQUET_PROBLEMS = (pa.ArrowException, OSError, ValueError)  # what `parse_parquet` raises on damaged bytes


def publish(
    path: Path,
    write: Callable[[BinaryIO], None],
    *,
    exclusive: bool,
    check: Callable[[Path], None] | None = None,
    expected_bytes: int = 0,
) -> bool:
    """Write `path` so that it is complete and durable from the moment it can be seen.

    `exclusive`: the first commit wins; False means that the file was there already and was left as it is.
    Otherwise an older file is replaced. `check` reads the written file back and raises OSError if it is not right.
    `expected_bytes` only makes the message of a full disk better. Raises OutputError; an older file is then still good.
    """
    try:
        with _temp_file(path) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            temp = Path(file.name)
            if check is not None:
                check(temp)
            if exclusive:  # `os.rename` would silently replace another's commit; `os.link` refuses
                try:
                    os.link(temp, path)
                except FileExistsError:
                    return False
                temp.unlink()
            else:
                temp.replace(path)
            fsync_directory(path.parent)
            return True
    except OSError as error:
        raise output_error(path, error, expected_bytes=expected_bytes) from error


@contextmanager
def _temp_file(path: Path) -> Iterator[BinaryIO]:
    """A new hidden file. Its lock ends with the process, so that `sweep_temps` knows one that is being written; where
    the file system has no locks, nobody sweeps it."""
    temp = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMP_SUFFIX}")
    file = temp.open("xb")
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink == 0:  # swept in the moment before it was locked
            with _temp_file(path) as another:
                yield another
        else:
            yield file
    finally:
        with suppress(OSError):  # gone after a replace; one that stays is hidden, and swept later
            temp.unlink()
        file.close()


def fsync_directory(directory: Path) -> None:
    """Make the names in `directory` durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> Path:
    """It, with all above it; it may be there already. Raises ConfigError where none can be made there, OutputError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in PERMANENT_ERRNOS:
            raise ConfigError(f"the directory {directory} cannot be made: {error.strerror}: choose another") from error
        raise output_error(directory, error) from error
    return directory


def sweep_temps(directory: Path, name: str | None = None, *, is_only_writer: bool = False) -> int:
    """Removes what killed writers left half written, of the file `name` or of all; returns how many. What a living
    writer has locked stays. `is_alone`: nobody else writes here, so that all go, also where the file system has no
    locks. Raises OSError."""
    pattern = f".*{TEMP_SUFFIX}" if name is None else f".{escape(name)}.*{TEMP_SUFFIX}"
    return sum(_sweep(entry, is_only_writer=is_only_writer) for entry in directory.glob(pattern) if entry.is_file())


def _sweep(temp: Path, *, is_only_writer: bool) -> bool:
    """Whether it was left behind; then it is gone."""
    try:
        descriptor = os.open(temp, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # published in between, or swept by another
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
    """Move a file that cannot be used into `folder`, where nothing is overwritten, and say so. Raises OSError."""
    folder.mkdir(exist_ok=True)
    targets = (folder / f"{path.parent.name}-{path.name}.{number}" for number in count())
    target = next(target for target in targets if not target.exists())
    path.rename(target)
    fsync_directory(path.parent)
    fsync_directory(folder)
    LOG.warning("%s was moved to %s: %s", path, target, reason)


def output_error(path: Path, error: OSError, *, expected_bytes: int = 0) -> OutputError:
    """The error a user meets when `path` cannot be written: what, why, how much room there is, what to change."""
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
    """One text per value: sorted keys, no spaces, ASCII. ValueError on NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def json_digest(value: JsonValue) -> str:
    """SHA-256 of the canonical text, in hex."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def write_json(path: Path, value: JsonValue, *, exclusive: bool) -> bool:
    """Publish `value` as indented JSON; see `publish` for `exclusive` and the result."""
    text = json.dumps(value, sort_keys=True, indent=2, allow_nan=False) + "\n"
    return publish(path, lambda file: write_all(file, text.encode()), exclusive=exclusive, expected_bytes=len(text))


def write_all(file: BinaryIO, data: bytes) -> None:
    file.write(data)


class UnexpectedFileError(OSError):
    """What lies where a file of ours belongs is none, such as a pipe or a link to a device, or far too large: reading
    it may never end."""


def read_regular_file(
    path: Path, *, max_bytes: int | None = None, follow_links: bool = True
) -> tuple[bytes, os.stat_result]:
    """A regular file's bytes and what it is. `follows`: links too. Never waits. Raises FileNotFoundError where there is
    nothing, UnexpectedFileError for anything else and for more than `most_bytes`, OSError."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if path.is_symlink():  # one that leads nowhere too: its name is taken
            raise UnexpectedFileError(f"{path} is a symbolic link, to {path.readlink()}") from error
        if error.errno == errno.ENXIO:
            raise UnexpectedFileError(f"{path} is a socket or a device") from error
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnexpectedFileError(f"{path} is no regular file")
        if max_bytes is not None and status.st_size > max_bytes:
            raise UnexpectedFileError(
                f"{path} is {format_bytes(status.st_size)} large, above {format_bytes(max_bytes)}"
            )
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(-1 if max_bytes is None else max_bytes), status
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, JsonValue]:
    """The object in `path`. DamagedRunError when it is empty, torn, no object or no file; OSError when it cannot be
    read."""
    try:
        data, _ = read_regular_file(path, max_bytes=MAX_JSON_BYTES)
    except UnexpectedFileError as error:
        raise DamagedRunError(f"{error}, where Weightstream keeps a file of its own: move it away") from error
    return parse_json(data, path)


def parse_json(data: bytes, path: Path) -> dict[str, JsonValue]:
    """The object in the bytes of `path`. Raises DamagedRunError."""

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
        f"{path} {what}. Weightstream never leaves such a file: look at the directory, "
        f"then move it away, or choose another one with run="
    )


def write_parquet(table: pa.Table, file: BinaryIO) -> None:
    """Writes a table with page checksums and without statistics: no checksum covers those, and readers trust them to
    skip rows."""
    pq.write_table(table, file, write_page_checksum=True, write_statistics=False)


def parse_parquet(data: bytes) -> pa.Table:
    """The whole table, every page checked. Raises one of PARQUET_PROBLEMS."""
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
    """What this process makes inside is for its owner alone: by the umask, so that nothing is left out."""
    before = os.umask(GROUP_AND_OTHERS)
    os.umask(before | GROUP_AND_OTHERS)
    try:
        yield
    finally:
        os.umask(before)
