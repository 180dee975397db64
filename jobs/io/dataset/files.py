"""Input files: which ones a path means, how they are opened, and what their errors are called."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from runtime.errors import DatasetError


def list_files(path: str, suffixes: tuple[str, ...], key: str = "path") -> list[Path]:
    """The file `path`, or the files with one of `suffixes` in the directory `path`, by name.

    Files whose names begin with `.` or `_` are skipped, as Parquet readers do. Raises DatasetError.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise DatasetError(f"dataset.{key}={path} does not exist (looked for {root.absolute()})")
    if not root.is_dir():
        return [root]
    names = (entry for entry in root.iterdir() if not entry.name.startswith((".", "_")))
    files = sorted(entry for entry in names if entry.name.endswith(suffixes) and entry.is_file())
    if not files:
        raise DatasetError(f"dataset.{key}={path} is a directory without files ending in {', '.join(suffixes)}")
    return files


def open_bytes(path: Path) -> BinaryIO | gzip.GzipFile:
    """Opened for reading; `.gz` is unpacked on the way."""
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors of the file system and of gzip leave as DatasetError with the file's name."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
