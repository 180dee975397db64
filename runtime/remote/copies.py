"""Local copies of files at a URL, in the cache directory. Files appear only when complete.

A copy is keyed by the URL and its files' sizes and tags: changed files become a new copy, and readers of the old one
are not disturbed. An interrupted copy resumes after its last byte.
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
NUM_RANGES = 8  # that are asked for at once
SECONDS_PER_LINE, SECONDS_PER_LOOK = 10.0, 0.5
NAME = re.compile(r"[^/\\\0]+")


def local_copy(store: ObjectStore, cache: Path, patterns: Sequence[str], error_type: type[WeightstreamError]) -> Path:
    """The file, or the directory of those files whose names `patterns` match, that lies at the store's URL, as a copy
    below `cache`. Hidden files and folders inside are passed over.

    Raises `error_type` where nothing is there, or no room here; StorageError, ConfigError and Interrupted.
    """
    files = store.list_files(is_deep=False)
    selected = files if "" in files else {name: files[name] for name in files if _is_selected(name, patterns)}
    if not selected:
        what = f"{format_count(len(files), 'file')} and none of {', '.join(patterns)}" if files else "nothing there"
        raise error_type(f"{store.key}={store.url}: there is {what}")
    name = store.url.rstrip("/").rpartition("/")[2]
    listing = [store.url, *([each, file.num_bytes, file.tag] for each, file in sorted(selected.items()))]
    folder = cache / "copies" / hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:24]
    root = folder / name if "" not in selected else folder
    targets = {each: root / (each or name) for each in selected}
    if not all(target.exists() for target in targets.values()):
        try:  # others have no look at what may be private in its store
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
    """Locks the copy against other processes; waits until the holder is done or has ended."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        has_logged = False
        while True:
            try:
                flock(descriptor, LOCK_EX | LOCK_NB)
                break
            except BlockingIOError:
                if not has_logged:
                    log.info("another process copies %s", store.url)
                has_logged = True
                _raise_if_stopped(store)
                time.sleep(SECONDS_PER_LOOK)
        yield
    finally:
        os.close(descriptor)


def _raise_if_stopped(store: ObjectStore) -> None:
    if store.retry.should_stop():
        raise Interrupted(f"stopped while {store.url} was copied; start the same command again to resume")


def _copy(
    store: ObjectStore,
    files: Mapping[str, StoredFile],
    targets: Mapping[str, Path],
    error_type: type[WeightstreamError],
) -> None:
    """Fetches the files that are not at their targets yet. The caller holds the copy's lock."""
    missing = {name: file for name, file in files.items() if not targets[name].exists()}
    partial_bytes = sum(_file_bytes(_partial_path(targets[name])) for name in missing)
    done_bytes, all_bytes = 0, sum(file.num_bytes for file in missing.values()) - partial_bytes
    folder = next(iter(targets.values())).parent
    free = shutil.disk_usage(folder).free
    if free < all_bytes:
        raise error_type(
            f"{store.key}={store.url} takes {format_bytes(all_bytes)} of copies, and {format_bytes(free)} are free in "
            f"{folder}: make room, or set XDG_CACHE_HOME or offload.cache_dir"
        )
    log.info("copying %s, %s of %s", store.url, format_count(len(missing), "file"), format_bytes(all_bytes))
    logged_at = time.monotonic()
    for name, file in missing.items():
        partial = _partial_path(targets[name])
        try:
            with partial.open("ab") as out, ThreadPoolExecutor(NUM_RANGES) as pool:
                for begin in range(out.tell(), file.num_bytes, RANGE_BYTES * NUM_RANGES):
                    ends = range(begin, min(begin + RANGE_BYTES * NUM_RANGES, file.num_bytes), RANGE_BYTES)
                    for data in pool.map(
                        lambda at, name=name, file=file: _read_range(store, name, file, at, error_type), ends
                    ):
                        out.write(data)
                        done_bytes += len(data)
                        if time.monotonic() - logged_at >= SECONDS_PER_LINE:
                            logged_at = time.monotonic()
                            done, whole = format_bytes(done_bytes), format_bytes(all_bytes)
                            log.info("copying %s: %s of %s", store.url, done, whole)
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            raise StorageError(f"{partial} cannot be written: {error.strerror or error}") from error
        if store.list_files(is_deep=False).get(name) != file or _file_bytes(partial) != file.num_bytes:
            partial.unlink()
            raise StorageError(f"{store.url} was written while it was copied ({name}): start the command again")
        partial.replace(targets[name])  # after fsync and the size check: a target is always complete


def _read_range(
    store: ObjectStore, name: str, file: StoredFile, begin: int, error_type: type[WeightstreamError]
) -> bytes:
    _raise_if_stopped(store)
    end = min(begin + RANGE_BYTES, file.num_bytes)
    try:
        data = store.read(name, begin, end)
    except FileNotFoundError as error:
        raise error_type(f"{store.key}={store.url}: {name} went away while it was copied") from error
    if len(data) != end - begin:
        raise StorageError(f"{store.url} gave {len(data):,} of {end - begin:,} bytes of {name}")
    return data


def _partial_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _file_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
