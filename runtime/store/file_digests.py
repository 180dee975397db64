"""Integrity of weight files: SHA-256 of whole files, and CRC-32 of 4 MiB pieces of the shards that `weightstream pack`
wrote (packed shards).

SHA-256 digests are cached with the file's size and dates. A bit error on the disk changes neither: delete the cache to
find such errors.
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
from ..plan.shape.shapes import Stripes
from ..units import GIB, format_count
from .header import MAX_HEADER_BYTES
from .read_errors import read_error, with_retries
from .stripes import open_whole

log = logging.getLogger(__name__)

BUFFER_BYTES = 8 << 20
NUM_THREADS = 4
PIECE_BYTES = 4 << 20
NUM_SAMPLED = 8  # pieces checked at each start: at most 32 MiB
METADATA = "weightstream"  # key of the packing record (the original's description, checksums) in a shard's header
SETTLED_SECONDS = 2.0  # a file written more recently may change again without a change of its time stamp
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
        """True if a later change of the file will change its time stamps."""
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
    """Returns the SHA-256 of each file in hexadecimal: from the cache if the file is unchanged, else by reading it.
    `setting`: the setting to name in messages.

    Raises CheckpointError (also if a blob of the Hugging Face cache differs from its name, or a file changes while it
    is read), StorageError for a transient fault, and Interrupted if `should_stop` returns True.
    """
    stamps = {file: _stamp(file) for file in files}
    cached = {file: _find_digest(stamp, cache) for file, stamp in stamps.items()}
    missing = {file: stamp for file, stamp in stamps.items() if cached[file] is None}
    computed = _digest_all(missing, cache, should_stop, setting) if missing else {}
    digests = {file: digest or computed[file] for file, digest in cached.items()}
    for file, digest in digests.items():
        blob = Path(file).resolve()  # the Hugging Face cache names large files by their SHA-256 on the hub
        is_named = Path(file).is_symlink() and blob.parent.name == "blobs" and DIGEST.fullmatch(blob.name) is not None
        if is_named and blob.name != digest:
            raise CheckpointError(
                f"{file}: differs from the file on the hub: expected sha256 {blob.name} (the name of its blob), got "
                f"{digest}. Remove {blob} and the link, and download it again"
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
            raise CheckpointError(f"{file}: was written while it was read for {setting}")
        if stamps[file].is_settled:  # otherwise a later write could leave the stamp unchanged
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
            while count := with_retries(lambda: handle.readinto(buffer), file, "reading", time.sleep):
                digest.update(buffer[:count])
                if should_stop():
                    raise Interrupted(f"{setting}: interrupted; start the same command again to resume")
    except OSError as error:
        raise read_error(file, "opening it", error) from error
    return digest.hexdigest()


def _stamp(file: str) -> _Stamp:
    try:
        path = Path(file).resolve()
        stat = path.stat()
    except OSError as error:
        raise read_error(file, "stat", error) from error
    return _Stamp(
        path=str(path), size=stat.st_size, mtime_ns=stat.st_mtime_ns, ctime_ns=stat.st_ctime_ns, inode=stat.st_ino
    )


def _find_digest(stamp: _Stamp, cache: Path) -> str | None:
    """Returns the cached digest if the file is unchanged, else None. Logs a warning for an unreadable cache file."""
    path = stamp.cache_path(cache)
    try:
        entry = json.loads(path.read_text())
        cached_stamp, digest = entry["file"], entry["sha256"]
        is_digest = isinstance(digest, str) and DIGEST.fullmatch(digest) is not None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s: unreadable digest cache ignored: %s", path, error)
        return None
    return digest if is_digest and cached_stamp == asdict(stamp) else None


def _store_digest(stamp: _Stamp, digest: str, cache: Path) -> None:
    path = stamp.cache_path(cache)
    temp = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temp.write_text(json.dumps({"file": asdict(stamp), "sha256": digest}, indent=1) + "\n")
        temp.replace(path)  # atomic: other processes may read or write the same entry
    except OSError as error:
        log.warning("%s: cannot be written, so the next start reads %s again: %s", path, stamp.path, error)


def crc32_sums(path: Path, begin: int, stripes: Stripes | None = None) -> str:
    """Returns the CRC-32 of each 4 MiB piece from offset `begin` on, as eight hexadecimal digits, concatenated.
    `stripes`: of a file that is divided."""
    sums = list[str]()
    with open_whole(path, stripes) as file:
        file.seek(begin)
        while piece := file.read(PIECE_BYTES):
            sums.append(f"{zlib.crc32(piece):08x}")
    return "".join(sums)


def read_packing_record(path: Path, stripes: Stripes | None = None) -> tuple[Mapping[str, object], int]:
    """Returns the packing record (see `METADATA`) of a packed shard or a stripe, and the offset of its data.
    `stripes`: of a shard that is divided. Raises CheckpointError if the file has no such record, or is not as long as
    the record says."""
    record, begin = read_record(path, stripes)
    size = path.stat().st_size if stripes is None else stripes.num_bytes
    sums = record.get("crc32")
    if not isinstance(sums, str) or len(sums) != 8 * -(-(size - begin) // PIECE_BYTES):
        raise _no_record_error(path)
    return record, begin


def read_record(path: Path, stripes: Stripes | None = None) -> tuple[Mapping[str, object], int]:
    """Like `read_packing_record`, for a file of any length."""
    try:
        with open_whole(path, stripes) as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
        record = json.loads(header["__metadata__"][METADATA])
    except OSError as error:
        raise read_error(path, "reading its header", error) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _no_record_error(path) from error
    if not isinstance(record, dict):
        raise _no_record_error(path)
    return record, 8 + length


def _no_record_error(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: not a shard that `weightstream pack` wrote, or damaged: pack the original again")


def check_packed(files: Sequence[str], *, is_full: bool) -> None:
    """Verifies the CRC-32 of all pieces of packed shards or stripes if `is_full`, else of up to 8 evenly spaced ones.
    Raises CheckpointError."""
    records = {file: read_packing_record(Path(file)) for file in files}
    pieces = [
        (file, number) for file, (record, _) in records.items() for number in range(len(str(record["crc32"])) // 8)
    ]  # (path, number of the piece)
    count = len(pieces) if is_full else min(NUM_SAMPLED, len(pieces))
    sample = [pieces[index * len(pieces) // count] for index in range(count)]
    for file, (record, begin) in records.items():
        sums = str(record["crc32"])
        try:
            with Path(file).open("rb") as handle:
                for number in (number for path, number in sample if path == file):
                    handle.seek(begin + number * PIECE_BYTES)
                    actual, expected = f"{zlib.crc32(handle.read(PIECE_BYTES)):08x}", sums[8 * number : 8 * number + 8]
                    if actual != expected:
                        raise CheckpointError(
                            f"{file}: damaged: CRC-32 of the 4 MiB at byte {begin + number * PIECE_BYTES:,} is "
                            f"{actual}, expected {expected}: pack the original again"
                        )
        except OSError as error:
            raise read_error(file, "checking pieces", error) from error
