"""Input files: which ones a path means, how they are opened, and what their errors are called."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO

from runtime.errors import DatasetError
from runtime.remote.copies import local_copy
from runtime.remote.object_store import ObjectStore
from runtime.store.cache_root import cache_root
from runtime.units import MIB
from runtime.urls import is_url

CHUNK_BYTES = MIB


def require_there(path: str, key: str = "path") -> Path:
    """The path of a data set; DatasetError where it leads nowhere, or is a URL where a path must be."""
    if is_url(path):
        raise DatasetError(f"dataset.{key}={path} is a URL: copy what is there, and name the copy")
    root = Path(path).expanduser()
    if not root.exists():
        raise DatasetError(f"dataset.{key}={path} does not exist (looked for {root.absolute()})")
    return root


def list_files(path: str, suffixes: tuple[str, ...], key: str = "path") -> list[Path]:
    """The file `path`, or the files with one of `suffixes` in the directory `path`, by name; of a URL, copies of them.

    Files whose names begin with `.` or `_` are skipped, as Parquet readers do. Raises DatasetError, and what
    `local_copy` raises.
    """
    root = _copied(path, suffixes, key) if is_url(path) else require_there(path, key)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DatasetError(f"dataset.{key}={path} is neither a file nor a directory: devices and pipes may never end")
    names = (entry for entry in root.iterdir() if not entry.name.startswith((".", "_")))
    files = sorted(entry for entry in names if entry.name.endswith(suffixes) and entry.is_file())
    if not files:
        raise DatasetError(f"dataset.{key}={path} is a directory without files ending in {', '.join(suffixes)}")
    return files


@cache  # a run reads what was there when it first looked
def _copied(url: str, suffixes: tuple[str, ...], key: str) -> Path:
    patterns = [f"[!_.]*{suffix}" for suffix in suffixes]
    return local_copy(ObjectStore(url, f"dataset.{key}"), cache_root(), patterns, DatasetError)


def open_bytes(path: Path) -> BinaryIO | gzip.GzipFile:
    """Opened for reading; `.gz` is unpacked on the way."""
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")


def bounded_lines(stream: BinaryIO | gzip.GzipFile, most_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Each line, ended by byte 10 or the file, and how many bytes it has. Of one longer than `most_bytes`, its end not
    counted, the rest is passed over and never held."""
    while line := stream.readline(most_bytes + len(b"\r\n")):
        num_bytes, end = len(line), line[-1:]
        while num_bytes > most_bytes and end != b"\n" and (more := stream.readline(CHUNK_BYTES)):
            num_bytes, end = num_bytes + len(more), more[-1:]
        yield line, num_bytes


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors of the file system and of gzip leave as DatasetError with the file's name."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
