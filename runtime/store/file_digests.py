"""Integrity of weight files: cached SHA-256 of whole files, and CRC-32 of the pieces of a packed shard, checked in full
or in a sample.

Digests are cached with the file's size and dates. Bit rot changes neither, and is found only once the cache is deleted.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import CheckpointError, Interrupted
from ..units import GIB, format_count
from .header import MAX_HEADER_BYTES
from .read_errors import read_error, with_retries

log = logging.getLogger(__name__)

BUFFER_BYTES = 8 << 20
NUM_THREADS = 4
PIECE_BYTES = 4 << 20
NUM_SAMPLED = 8  # pieces that every start reads: 32 MiB at most
METADATA = "weightstream"  # in a header: what is said of the original, and the sums
SETTLED_SECONDS = (
    2.0  # a file that was written just now may be written again within one tick of the file system's clock
)
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class _Stamp:
    """File metadata that changes when a file is written or replaced."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @property
    def is_settled(self) -> bool:
        return time.time() - max(self.mtime_ns, self.ctime_ns) / 1e9 >= SETTLED_SECONDS

    def cache_path(self, cache: Path) -> Path:
        return cache / "digests" / f"{hashlib.sha256(os.fsencode(self.path)).hexdigest()[:32]}.json"


def digest_files(
    files: Sequence[str],
    cache: Path,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    setting: str = "model.verify=full",
) -> Mapping[str, str]:
    """The SHA-256 of each of `files`, in hexadecimal digits: the kept one where the file is as it was then, else of all
    its bytes, a few files at a time. `setting`: the setting that messages name.

    Raises CheckpointError, also for a blob of the Hugging Face cache that is not the one its name says and for a file
    that is written meanwhile; StorageError for a fault that may pass; Interrupted when `should_stop` says so.
    """
    stamps = {file: _stamp(file) for file in files}
    found = {file: _find_digest(stamp, cache) for file, stamp in stamps.items()}
    unknown = {file: stamp for file, stamp in stamps.items() if found[file] is None}
    read = _digest_all(unknown, cache, should_stop, setting) if unknown else {}
    digests = {file: digest or read[file] for file, digest in found.items()}
    for file, digest in digests.items():
        # The Hugging Face cache names a large file by the SHA-256 that the hub has of it.
        blob = Path(file).resolve()
        is_named = Path(file).is_symlink() and blob.parent.name == "blobs" and DIGEST.fullmatch(blob.name) is not None
        if is_named and blob.name != digest:
            raise CheckpointError(
                f"{file}: its bytes are not those of the hub: expected sha256 {blob.name}, as its blob is named, found "
                f"{digest}. Remove {blob} and the link, and fetch it again"
            )
    return digests


def _digest_all(
    stamps: Mapping[str, _Stamp], cache: Path, should_stop: Callable[[], bool], setting: str
) -> dict[str, str]:
    gib = sum(stamp.size for stamp in stamps.values()) / GIB
    log.info("%s: reading all bytes of %s, %.2f GiB", setting, format_count(len(stamps), "file"), gib)
    started = time.monotonic()

    def read(file: str) -> str:
        digest = _digest_file(file, should_stop, setting)
        if _stamp(file) != stamps[file]:
            raise CheckpointError(f"{file}: was written while its bytes were read for {setting}")
        if stamps[file].is_settled:
            _store_digest(stamps[file], digest, cache)
        return digest

    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="digest") as threads:
        digests = dict(zip(stamps, threads.map(read, stamps), strict=True))
    log.info("%s: read %.2f GiB in %.1f s", setting, gib, time.monotonic() - started)
    return digests


def _digest_file(file: str, should_stop: Callable[[], bool], setting: str) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(BUFFER_BYTES))
    try:
        with Path(file).open("rb", buffering=0) as handle:
            while count := with_retries(lambda: handle.readinto(buffer), file, "reading all of it", time.sleep):
                digest.update(buffer[:count])
                if should_stop():
                    raise Interrupted(
                        f"{setting} was being read for its SHA-256; start the same command again to go on"
                    )
    except OSError as error:
        raise read_error(file, "opening it", error) from error
    return digest.hexdigest()


def _stamp(file: str) -> _Stamp:
    try:
        path = Path(file).resolve()
        stat = path.stat()
    except OSError as error:
        raise read_error(file, "asking for its size and dates", error) from error
    return _Stamp(
        path=str(path), size=stat.st_size, mtime_ns=stat.st_mtime_ns, ctime_ns=stat.st_ctime_ns, inode=stat.st_ino
    )


def _find_digest(stamp: _Stamp, cache: Path) -> str | None:
    """The cached digest if the file is unchanged, else None. Warns of an unreadable cache file."""
    path = stamp.cache_path(cache)
    try:
        kept = json.loads(path.read_text())
        stored, digest = kept["file"], kept["sha256"]
        is_sound = isinstance(digest, str) and DIGEST.fullmatch(digest) is not None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be used and is passed over: %s", path, error)
        return None
    return digest if is_sound and stored == asdict(stamp) else None


def _store_digest(stamp: _Stamp, digest: str, cache: Path) -> None:
    path = stamp.cache_path(cache)
    temp = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temp.write_text(json.dumps({"file": asdict(stamp), "sha256": digest}, indent=1) + "\n")
        temp.replace(path)
    except OSError as error:
        log.warning("%s cannot be written, so the next start reads %s again: %s", path, stamp.path, error)


def crc32_sums(path: Path, begin: int) -> str:
    """Eight hexadecimal digits for each piece from `begin` on, one behind the other."""
    sums = list[str]()
    with path.open("rb") as file:
        file.seek(begin)
        while piece := file.read(PIECE_BYTES):
            sums.append(f"{zlib.crc32(piece):08x}")
    return "".join(sums)


def read_packing_record(path: Path) -> tuple[Mapping[str, object], int]:
    """Returns what the header of a packed shard says of its original, and where its data begins. Raises CheckpointError
    for a file that is no such shard."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
        record = json.loads(header["__metadata__"][METADATA])
        num_pieces = -(-(path.stat().st_size - 8 - length) // PIECE_BYTES)
        if len(record["crc32"]) != 8 * num_pieces:
            raise ValueError("not a sum for each piece")
        return record, 8 + length
    except OSError as error:
        raise read_error(path, "reading its header", error) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: no shard of a packed store, as `weightstream pack` writes them, or damaged: "
            "pack the original anew"
        ) from error


def check_packed(files: Sequence[str], *, is_full: bool) -> None:
    """Checks all pieces of a packed store's shards, or a few at equal distances. Raises CheckpointError."""
    records = {file: read_packing_record(Path(file)) for file in files}
    pieces = [(file, number) for file, (about, _) in records.items() for number in range(len(str(about["crc32"])) // 8)]
    count = len(pieces) if is_full else min(NUM_SAMPLED, len(pieces))
    chosen = [pieces[turn * len(pieces) // count] for turn in range(count)]
    for file, (about, begin) in records.items():
        sums = str(about["crc32"])
        try:
            with Path(file).open("rb") as opened:
                for number in (number for name, number in chosen if name == file):
                    opened.seek(begin + number * PIECE_BYTES)
                    found, packed = f"{zlib.crc32(opened.read(PIECE_BYTES)):08x}", sums[8 * number : 8 * number + 8]
                    if found != packed:
                        raise CheckpointError(
                            f"{file}: the 4 MiB at byte {begin + number * PIECE_BYTES:,} are not as packed (CRC-32 "
                            f"{found}, not {packed}): pack the original anew"
                        )
        except OSError as error:
            raise read_error(file, "checking pieces of it", error) from error
