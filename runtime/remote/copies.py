"""Local copies of files at a URL, in the cache directory. A file gets its name only when it is complete.

A copy's directory is named after a hash of the URL and the sizes and tags of its files. So changed files become a new
copy, and programs that read the old copy are not disturbed. An interrupted copy resumes after its last byte.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from fnmatch import fnmatch
from pathlib import Path

from ..errors import Interrupted, StorageError, WeightstreamError
from ..units import MIB, format_bytes, format_count
from .object_store import ObjectStore, StoredFile

log = logging.getLogger(__name__)

RANGE_BYTES = 16 * MIB
NUM_RANGES = 8  # ranges that are read at the same time
SECONDS_PER_LINE = 10.0  # between log lines about progress
SECONDS_PER_LOOK = 0.5  # between attempts to take the lock
NAME = re.compile(r"[^/\\\0]+")


def local_copy(store: ObjectStore, cache: Path, patterns: Sequence[str], error_type: type[WeightstreamError]) -> Path:
    """Copies the file at the store's URL, or the files in that directory that match `patterns`, to a directory in
    `cache`. Returns the path of the copied file or directory. Hidden files and subdirectories are not copied.

    Raises `error_type` if there is no such file or not enough disk space, and StorageError, ConfigError and
    Interrupted."""
    files = store.list_files(is_deep=False)
    selected = files if "" in files else {name: files[name] for name in files if _is_selected(name, patterns)}
    if not selected:
        problem = (
            f"none of {format_count(len(files), 'file')} matches {', '.join(patterns)}" if files else "no such file"
        )
        raise error_type(f"{store.key}={store.url}: {problem}")
    name = store.url.rstrip("/").rpartition("/")[2]
    # If the URL is a file, its name in `selected` is "", and the copy is `folder / name`.
    listing = [store.url, *([each, file.num_bytes, file.tag] for each, file in sorted(selected.items()))]
    folder = cache / "copies" / hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:24]
    root = folder / name if "" not in selected else folder
    targets = {each: root / (each or name) for each in selected}
    if not all(target.exists() for target in targets.values()):
        try:  # mode 0700: the files may be private in their store
            root.parents[0].mkdir(parents=True, exist_ok=True)
            root.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise error_type(f"{store.key}={store.url} cannot be copied to {root}: {error.strerror}") from error
        with _lock(folder / ".lock", store):
            _copy(store, selected, targets, error_type)
    return folder / name


def _is_selected(name: str, patterns: Sequence[str]) -> bool:
    is_plain = NAME.fullmatch(name) is not None and not name.startswith(".")
    return is_plain and any(fnmatch(name, pattern) for pattern in patterns)


@contextmanager
def _lock(path: Path, store: ObjectStore) -> Iterator[None]:
    """Locks the copy against other processes. The operating system releases the lock if the process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        has_logged = False
        while True:
            try:
                flock(descriptor, LOCK_EX | LOCK_NB)  # nonblocking: a stop must end the wait
                break
            except BlockingIOError:
                if not has_logged:
                    log.info("waiting for another process that copies %s", store.url)
                has_logged = True
                _raise_if_stopped(store)
                time.sleep(SECONDS_PER_LOOK)
        yield
    finally:
        os.close(descriptor)


def _raise_if_stopped(store: ObjectStore) -> None:
    if store.retry.should_stop():
        raise Interrupted(f"stopped while copying {store.url}; start the same command again to resume")


def _copy(
    store: ObjectStore,
    files: Mapping[str, StoredFile],
    targets: Mapping[str, Path],
    error_type: type[WeightstreamError],
) -> None:
    """Downloads the missing files. `targets`: name -> local path. The caller must hold the copy's lock."""
    missing = {name: file for name, file in files.items() if not targets[name].exists()}
    partial_bytes = sum(_file_bytes(_partial_path(targets[name])) for name in missing)
    done_bytes, all_bytes = 0, sum(file.num_bytes for file in missing.values()) - partial_bytes
    folder = next(iter(targets.values())).parent
    free = shutil.disk_usage(folder).free
    if free < all_bytes:
        raise error_type(
            f"{store.key}={store.url}: a local copy needs {format_bytes(all_bytes)}, and {folder} has "
            f"{format_bytes(free)} free: make room, or set offload.cache_dir or XDG_CACHE_HOME"
        )
    log.info("copying %s, %s of %s", store.url, format_count(len(missing), "file"), format_bytes(all_bytes))
    logged_at = time.monotonic()
    for name, file in missing.items():
        partial = _partial_path(targets[name])
        try:
            with partial.open("ab") as out, ThreadPoolExecutor(NUM_RANGES) as pool:
                for begin in range(out.tell(), file.num_bytes, RANGE_BYTES * NUM_RANGES):
                    begins = range(begin, min(begin + RANGE_BYTES * NUM_RANGES, file.num_bytes), RANGE_BYTES)
                    for data in pool.map(
                        lambda at, name=name, file=file: _read_range(store, name, file, at, error_type), begins
                    ):
                        out.write(data)
                        done_bytes += len(data)
                        if time.monotonic() - logged_at >= SECONDS_PER_LINE:
                            logged_at = time.monotonic()
                            progress = format_bytes(done_bytes), format_bytes(all_bytes)
                            log.info("copying %s: %s of %s", store.url, *progress)
                out.flush()
                os.fsync(out.fileno())  # before the rename, so that a crash cannot leave an incomplete target
        except OSError as error:
            raise StorageError(f"{partial}: cannot write: {error.strerror or error}") from error
        if store.list_files(is_deep=False).get(name) != file or _file_bytes(partial) != file.num_bytes:
            partial.unlink()
            raise StorageError(f"{store.url}: {name} changed while it was copied: start the same command again")
        partial.replace(targets[name])  # atomic: a target is always complete


def _read_range(
    store: ObjectStore, name: str, file: StoredFile, begin: int, error_type: type[WeightstreamError]
) -> bytes:
    """Reads up to `RANGE_BYTES` of a file from `begin` on."""
    _raise_if_stopped(store)
    end = min(begin + RANGE_BYTES, file.num_bytes)
    try:
        data = store.read(name, begin, end)
    except FileNotFoundError as error:
        raise error_type(f"{store.key}={store.url}: {name} was deleted while it was copied") from error
    if len(data) != end - begin:
        raise StorageError(f"{store.url}: {name}: read {len(data):,} of {end - begin:,} bytes")
    return data


def _partial_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _file_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
