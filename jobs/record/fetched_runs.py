"""Runs in an object store, fetched to be read: what has changed there since the last time comes to the cache
directory."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from runtime.cache_root import cache_root
from runtime.config.texts import url_child
from runtime.errors import ConfigError, DamagedRunError
from runtime.remote.object_store import ObjectStore, Patience, StoredFile

from ..files.publishing import PRIVATE_FOLDER_MODE, make_directory, publish, read_json, write_all, write_json
from .stored_run import NUM_FETCHES, OWN, RUN

PATIENCE_SECONDS = 30.0  # somebody waits
PLAIN = re.compile(r"[^/\\\0*?\[]*[^/\\\0*?\[.][^/\\\0*?\[]*")  # a folder's name: no pattern, and more than dots
TURN = re.compile(r"turn-([1-9]\d*)")
RECORD = ".fetched.json"


@dataclass(frozen=True, kw_only=True)
class FetchedRun:
    """A run at `url`, and the directory that its files were fetched to."""

    url: str
    path: Path


def fetch_runs(url: str, key: str) -> list[FetchedRun]:
    """The run at `url`, the value of the setting `key`, or its turns; or those that a pattern in it matches. What is
    generated and in no part yet is left there. Raises ConfigError, StorageError and OutputError."""
    scheme, _, place = url.rstrip("/").partition("://")
    steps = place.split("/")
    num_plain = next((i for i, step in enumerate(steps) if not PLAIN.fullmatch(step)), len(steps))
    if num_plain == 0:
        raise ConfigError(f"{key}={url} names no bucket")
    base, pattern = f"{scheme}://{'/'.join(steps[:num_plain])}", "/".join(steps[num_plain:])
    store = ObjectStore(base, key, Patience(seconds=PATIENCE_SECONDS))
    files = store.listed(is_deep=True)
    names = [name.removesuffix(RUN).rstrip("/") for name in files if name == RUN or name.endswith(f"/{RUN}")]
    found = sorted((name for name in names if _is_meant(name, pattern)), key=_order)
    if not found:
        runs = f"; {len(names)} runs lie below it, of which {url_child(base, names[0])} is one" if names else ""
        raise ConfigError(f"{key}={url} is no run: there is no {RUN}{runs}")
    folder = cache_root() / "runs" / hashlib.sha256(base.encode()).hexdigest()[:24] / steps[num_plain - 1]
    make_directory(folder.parent).chmod(PRIVATE_FOLDER_MODE)
    return [_fetched(store, name, files, folder / name) for name in found]


def _is_meant(name: str, pattern: str) -> bool:
    """Whether the run `name` is what the pattern matches, or a turn of it."""
    steps, meant = [step for step in name.split("/") if step], [step for step in pattern.split("/") if step]
    if len(steps) == len(meant) + 1 and TURN.fullmatch(steps[-1]):
        steps = steps[:-1]
    is_plain = all(PLAIN.fullmatch(step) for step in steps)
    return is_plain and len(steps) == len(meant) and all(map(fnmatchcase, steps, meant))


def _order(name: str) -> tuple[str, int]:
    turn = TURN.fullmatch(PurePosixPath(name).name)
    return (name, 0) if turn is None else (str(PurePosixPath(name).parent), int(turn[1]))


def _fetched(store: ObjectStore, name: str, files: Mapping[str, StoredFile], path: Path) -> FetchedRun:
    """Fetches what is not here as it is there, and drops what is not there any more."""
    prefix = f"{name}/" if name else ""
    there = {each.removeprefix(prefix): file for each, file in files.items() if each.startswith(prefix)}
    there = {each: file for each, file in there.items() if OWN.fullmatch(each) and not each.startswith("running")}
    record, here = make_directory(path) / RECORD, dict[str, object]()
    with suppress(FileNotFoundError, DamagedRunError):
        here.update(read_json(record))
    told = {each: [file.num_bytes, file.tag] for each, file in sorted(there.items())}
    for each in here.keys() - told.keys():
        (path / each).unlink(missing_ok=True)
    new = [each for each, value in told.items() if here.get(each) != value or not (path / each).exists()]
    _fetch(store, prefix, new, path)
    write_json(record, told, exclusive=False)
    return FetchedRun(url=url_child(store.url, name) if name else store.url, path=path)


def _fetch(store: ObjectStore, prefix: str, names: Sequence[str], path: Path) -> None:
    def fetch(name: str) -> None:
        try:
            data = store.read(f"{prefix}{name}")
        except FileNotFoundError:  # since it was listed
            return
        target = path / name
        make_directory(target.parent)
        publish(target, lambda file: write_all(file, data), exclusive=False, expected_bytes=len(data))

    with ThreadPoolExecutor(NUM_FETCHES) as pool:
        list(pool.map(fetch, names))
