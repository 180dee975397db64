"""Input files: finds, opens and decompresses them, and makes error messages about them."""

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
COMPRESSION_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
PARQUET, TAR, TAR_OFFSET = b"PAR1", b"ustar", 257  # magic bytes; those of tar are at byte 257
UNSUPPORTED_MAGIC = {  # formats that are not text, by magic bytes: the end of an error message
    PARQUET: "Parquet: set dataset=parquet",
    b"ARROW1": "an Arrow file: convert it to Parquet, and set dataset=parquet",
    b"PK\x03\x04": "a zip archive or a spreadsheet: unpack it, or save it as CSV",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive: unpack it",
    b"\x04\x22\x4d\x18": "compressed by lz4: unpack it with lz4 -d",
    b"\x89HDF": "an HDF5 file: convert it to Parquet, and set dataset=parquet",
}
KIND_BY_SUFFIX = {
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".parquet": "parquet",
}
KIND_NAMES = {"csv": "CSV", "jsonl": "JSON", "parquet": "Parquet"}
CACHE_DIR: ContextVar[str | None] = ContextVar("COPIES", default=None)  # offload.cache_dir of the run, for downloads


def require_existing_path(path: str, key: str = "path") -> Path:
    """Returns the path of a dataset. Raises DatasetError if it does not exist or is a URL."""
    if is_url(path):
        raise DatasetError(f"dataset.{key}={path} is a URL, not a path: download it, and set the path of the copy")
    root = Path(path).expanduser()
    if not root.exists():
        is_glob = any(sign in path for sign in "*?[")
        hint = "; patterns are not supported: set a file, or a directory to read all its files" if is_glob else ""
        raise DatasetError(f"dataset.{key}={path} does not exist (looked for {root.absolute()}){hint}")
    return root


def list_files(path: str, suffixes: tuple[str, ...], key: str = "path") -> list[Path]:
    """Returns the file `path`, or the files of the directory `path` with one of `suffixes`, sorted by name. A URL is
    downloaded to the cache first.

    Skips names that begin with `.` or `_`, as Parquet readers do. Raises DatasetError, and the errors of `local_copy`.
    """
    root = _download_copy(path, suffixes, key) if is_url(path) else require_existing_path(path, key)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DatasetError(
            f"dataset.{key}={path} is neither a file nor a directory; devices and pipes are not supported"
        )
    names = (entry for entry in root.iterdir() if not entry.name.startswith((".", "_")))
    files = sorted(entry for entry in names if entry.name.endswith(suffixes) and entry.is_file())
    if not files:
        raise DatasetError(f"dataset.{key}={path} is a directory without files ending in {', '.join(suffixes)}")
    return files


@cache  # downloads once in a process, so that all reads see the same bytes
def _download_copy(url: str, suffixes: tuple[str, ...], key: str) -> Path:
    patterns = [f"[!_.]*{suffix}" for suffix in suffixes]
    return local_copy(ObjectStore(url, f"dataset.{key}"), cache_root(CACHE_DIR.get()), patterns, DatasetError)


def open_bytes(path: Path) -> io.BufferedReader:
    """Opens a file for reading. Decompresses by magic bytes, not by name; converts UTF-16 with a byte order mark to
    UTF-8. Raises DatasetError if the file is not text, and OSError."""
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
        unsupported = next((hint for magic, hint in UNSUPPORTED_MAGIC.items() if head.startswith(magic)), None)
        if unsupported is None and head[TAR_OFFSET:].startswith(TAR):
            unsupported = "a tar archive: unpack it, and set the path of a file in it"
        if unsupported is not None:
            raise DatasetError(f"{path} is {unsupported}")
        is_utf16 = stream.peek(2).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    except BaseException:
        stream.close()
        raise
    return io.BufferedReader(_ChunkStream(_transcode_utf16(stream)), CHUNK_BYTES) if is_utf16 else stream


def detect_compression(path: Path) -> str | None:
    """Returns the compression of a file by its magic bytes, or None. Raises OSError if its suffix is that of a
    compressed file, but its content is not compressed."""
    with path.open("rb") as file:
        head = file.read(max(map(len, COMPRESSION_MAGIC)))
    compression = next((name for magic, name in COMPRESSION_MAGIC.items() if head.startswith(magic)), None)
    if head and compression is None and path.name.endswith(COMPRESSED_SUFFIXES):
        raise OSError(f"its name ends in {path.suffix}, but its content is not compressed that way: rename it")
    return compression


def _decompress_zstd(path: Path) -> Iterator[bytes]:
    with pa.OSFile(str(path)) as file, pa.CompressedInputStream(file, "zstd") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def _transcode_utf16(stream: io.BufferedReader) -> Iterator[bytes]:
    """Yields UTF-16 as UTF-8. Lone surrogates become invalid UTF-8, so only their row is rejected later."""
    decoder = codecs.getincrementaldecoder("utf-16")("surrogatepass")
    with stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield decoder.decode(chunk).encode("utf-8", "surrogatepass")
    if decoder.getstate()[0]:
        raise EOFError("UTF-16 text that ends inside a character")


class _ChunkStream(io.RawIOBase):
    """A raw stream of the bytes of an iterator."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks, self._remaining = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._remaining:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._remaining = memoryview(chunk)
        num_bytes = min(len(buffer), len(self._remaining))
        buffer[:num_bytes], self._remaining = self._remaining[:num_bytes], self._remaining[num_bytes:]
        return num_bytes

    def close(self) -> None:
        if isinstance(self._chunks, Generator):
            self._chunks.close()
        super().close()


def skip_bytes(stream: io.BufferedReader, num_bytes: int) -> None:
    """Skips the first `num_bytes` of a stream: by seeking, or by reading if it is compressed."""
    if isinstance(stream.raw, io.FileIO):
        stream.seek(num_bytes)
        return
    while num_bytes and (chunk := stream.read(min(num_bytes, CHUNK_BYTES))):
        num_bytes -= len(chunk)


def other_kind_hint(path: Path, kind: str) -> str:
    """A hint with the kind that a file looks like. Empty if it looks like `kind`, or like no known kind."""
    other = ""
    with suppress(DatasetError), translate_read_errors(path):
        with path.open("rb") as file:
            other = "parquet" if file.read(len(PARQUET)) == PARQUET else ""
        if not other:
            with open_bytes(path) as stream:
                text = stream.read(HEAD_BYTES).decode("utf-8", "replace").removeprefix("\ufeff").lstrip()
            has_columns = any(_has_equal_columns(text, delimiter) for delimiter in ",\t;|")
            is_csv = kind_from_suffix(path.name) == "csv" or has_columns
            other = "jsonl" if text.startswith(("{", "[")) else "csv" if is_csv else ""
    return f"; {path.name} looks like {KIND_NAMES[other]}: dataset={other}" if other and other != kind else ""


def _has_equal_columns(text: str, delimiter: str) -> bool:
    """True if the first two lines have the same number of delimiters, and at least one."""
    counts = {line.count(delimiter) for line in text.splitlines()[:2] if line}
    return len(counts) == 1 and 0 not in counts


def kind_from_suffix(name: str) -> str | None:
    """The kind of dataset for the suffix of a file name, or None."""
    stem = strip_compression_suffix(name)
    return next((kind for ending, kind in KIND_BY_SUFFIX.items() if stem.endswith(ending)), None)


def strip_compression_suffix(name: str) -> str:
    """Removes a compression suffix such as `.gz`."""
    return next((name.removesuffix(ending) for ending in COMPRESSED_SUFFIXES if name.endswith(ending)), name)


def with_compressed_suffixes(*endings: str) -> tuple[str, ...]:
    """The given suffixes, without and with each compression suffix."""
    return tuple(ending + more for ending in endings for more in ("", *COMPRESSED_SUFFIXES))


def read_bounded_lines(stream: io.BufferedReader, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yields each line, with its length in bytes. Only a newline character (byte 10) ends a line. A line of more than
    `max_bytes` without its end is truncated, so that it is never in memory as a whole; its length is the full one."""
    while line := stream.readline(max_bytes + len(b"\r\n")):
        num_bytes, end = len(line), line[-1:]
        while num_bytes > max_bytes and end != b"\n" and (more := stream.readline(CHUNK_BYTES)):
            num_bytes, end = num_bytes + len(more), more[-1:]
        yield line, num_bytes


@contextmanager
def translate_read_errors(path: Path) -> Iterator[None]:
    """Turns errors of the file system and of decompression into DatasetError with the name of the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
