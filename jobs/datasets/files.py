"""Input files: which ones a path means, how they are opened, and what their errors are called."""

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from runtime.cache_root import cache_root
from runtime.config.texts import is_url
from runtime.errors import DatasetError
from runtime.remote.copies import local_copy
from runtime.remote.object_store import ObjectStore
from runtime.units import MIB

CHUNK_BYTES, HEAD_BYTES = MIB, MIB // 16
COMPRESSION_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}  # magic bytes
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
PARQUET, TAR, TAR_OFFSET = b"PAR1", b"ustar", 257
UNSUPPORTED_MAGIC = {  # what holds rows and is no text, by magic bytes
    PARQUET: "Parquet: dataset=parquet",
    b"ARROW1": "an Arrow file: write it as Parquet, and take dataset=parquet",
    b"PK\x03\x04": "a zip archive or a spreadsheet: unpack it, or save it as CSV",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive: unpack it",
    b"\x04\x22\x4d\x18": "packed by lz4: unpack it with lz4 -d",
    b"\x89HDF": "an HDF5 file: write it as Parquet, and take dataset=parquet",
}
KIND_BY_SUFFIX = {
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".parquet": "parquet",
}
KIND_NAMES = {"csv": "CSV", "jsonl": "JSON", "parquet": "Parquet"}
CACHE_DIR: ContextVar[str | None] = ContextVar("COPIES", default=None)  # `offload.cache_dir` of the run that reads rows


def require_existing_path(path: str, key: str = "path") -> Path:
    """The path of a data set; DatasetError where it leads nowhere, or is a URL where a path must be."""
    if is_url(path):
        raise DatasetError(f"dataset.{key}={path} is a URL: copy what is there, and name the copy")
    root = Path(path).expanduser()
    if not root.exists():
        is_glob = any(sign in path for sign in "*?[")
        hint = "; a pattern is not taken: name a file, or a directory, of which all files are read" if is_glob else ""
        raise DatasetError(f"dataset.{key}={path} does not exist (looked for {root.absolute()}){hint}")
    return root


def list_files(path: str, suffixes: tuple[str, ...], key: str = "path") -> list[Path]:
    """The file `path`, or the files with one of `suffixes` in the directory `path`, by name; of a URL, copies of them.

    Files whose names begin with `.` or `_` are skipped, as Parquet readers do. Raises DatasetError, and what
    `local_copy` raises.
    """
    root = _download_copy(path, suffixes, key) if is_url(path) else require_existing_path(path, key)
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
def _download_copy(url: str, suffixes: tuple[str, ...], key: str) -> Path:
    patterns = [f"[!_.]*{suffix}" for suffix in suffixes]
    return local_copy(ObjectStore(url, f"dataset.{key}"), cache_root(CACHE_DIR.get()), patterns, DatasetError)


def open_bytes(path: Path) -> io.BufferedReader:
    """Opened for reading: packed files are unpacked on the way, whatever their names, and UTF-16 with a byte order mark
    is read as UTF-8. Raises DatasetError for what is no text at all, OSError."""
    compression = detect_compression(path)
    stream: io.BufferedReader
    if compression == "zstd":
        stream = io.BufferedReader(_ChunkStream(_decompress_zstd(path)), CHUNK_BYTES)
    elif compression is not None:
        opened: io.BufferedIOBase = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}[compression](path, "rb")
        stream = io.BufferedReader(cast(io.RawIOBase, opened))
    else:
        stream = path.open("rb")
    try:
        head = stream.peek(TAR_OFFSET + len(TAR))
        unsupported = next((told for magic, told in UNSUPPORTED_MAGIC.items() if head.startswith(magic)), None)
        if unsupported is None and head[TAR_OFFSET:].startswith(TAR):
            unsupported = "a tar archive: unpack it, and name a file in it"
        if unsupported is not None:
            raise DatasetError(f"{path} is {unsupported}")
        is_utf16 = stream.peek(2).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    except BaseException:
        stream.close()
        raise
    return io.BufferedReader(_ChunkStream(_transcode_utf16(stream)), CHUNK_BYTES) if is_utf16 else stream


def detect_compression(path: Path) -> str | None:
    """What the file is packed by, if it is. Raises OSError, also where only its name says so."""
    with path.open("rb") as file:
        head = file.read(max(map(len, COMPRESSION_MAGIC)))
    compression = next((name for magic, name in COMPRESSION_MAGIC.items() if head.startswith(magic)), None)
    if head and compression is None and path.name.endswith(COMPRESSED_SUFFIXES):
        raise OSError(f"its name ends in {path.suffix}, and it is not packed so: rename it")
    return compression


def _decompress_zstd(path: Path) -> Iterator[bytes]:
    with pa.OSFile(str(path)) as file, pa.CompressedInputStream(file, "zstd") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def _transcode_utf16(stream: io.BufferedReader) -> Iterator[bytes]:
    """UTF-16 as UTF-8. What it cannot encode becomes bytes that UTF-8 has not, and costs its row."""
    decoder = codecs.getincrementaldecoder("utf-16")("surrogatepass")
    with stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield decoder.decode(chunk).encode("utf-8", "surrogatepass")
    if decoder.getstate()[0]:
        raise EOFError("it is UTF-16 and ends within a character")


class _ChunkStream(io.RawIOBase):
    """A stream of what an iterator gives."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks, self._left = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left = memoryview(chunk)
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count

    def close(self) -> None:
        if isinstance(self._chunks, Generator):
            self._chunks.close()
        super().close()


def skip_bytes(stream: io.BufferedReader, num_bytes: int) -> None:
    """Goes on so many bytes from the beginning: of what is packed, by unpacking them."""
    if isinstance(stream.raw, io.FileIO):
        stream.seek(num_bytes)
        return
    while num_bytes and (chunk := stream.read(min(num_bytes, CHUNK_BYTES))):
        num_bytes -= len(chunk)


def other_kind_hint(path: Path, kind: str) -> str:
    """What to say of a file that cannot be read as this kind, and looks like another one; empty where it does not."""
    other = ""
    with suppress(DatasetError), translate_read_errors(path):
        with path.open("rb") as file:
            other = "parquet" if file.read(len(PARQUET)) == PARQUET else ""
        if not other:
            with open_bytes(path) as stream:
                text = stream.read(HEAD_BYTES).decode("utf-8", "replace").removeprefix("\ufeff").lstrip()
            is_csv = kind_from_suffix(path.name) == "csv" or any(
                _has_equal_columns(text, delimiter) for delimiter in ",\t;|"
            )
            other = "jsonl" if text.startswith(("{", "[")) else "csv" if is_csv else ""
    return f"; {path.name} looks like {KIND_NAMES[other]}: dataset={other}" if other and other != kind else ""


def _has_equal_columns(text: str, delimiter: str) -> bool:
    """Whether the first lines have as many columns each."""
    counts = {line.count(delimiter) for line in text.splitlines()[:2] if line}
    return len(counts) == 1 and 0 not in counts


def kind_from_suffix(name: str) -> str | None:
    """The kind of data set that a file's name ends like; None where it tells of none."""
    stem = strip_compression_suffix(name)
    return next((kind for ending, kind in KIND_BY_SUFFIX.items() if stem.endswith(ending)), None)


def strip_compression_suffix(name: str) -> str:
    """The name without what a compressor added to it."""
    return next((name.removesuffix(ending) for ending in COMPRESSED_SUFFIXES if name.endswith(ending)), name)


def with_compressed_suffixes(*endings: str) -> tuple[str, ...]:
    """These endings of names, also with what compressors add."""
    return tuple(ending + more for ending in endings for more in ("", *COMPRESSED_SUFFIXES))


def read_bounded_lines(stream: io.BufferedReader, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Each line, ended by byte 10 or the file, and how many bytes it has. Of one longer than `most_bytes`, its end not
    counted, the rest is passed over and never held."""
    while line := stream.readline(max_bytes + len(b"\r\n")):
        num_bytes, end = len(line), line[-1:]
        while num_bytes > max_bytes and end != b"\n" and (more := stream.readline(CHUNK_BYTES)):
            num_bytes, end = num_bytes + len(more), more[-1:]
        yield line, num_bytes


@contextmanager
def translate_read_errors(path: Path) -> Iterator[None]:
    """Errors of the file system and of what unpacks leave as DatasetError with the file's name."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
