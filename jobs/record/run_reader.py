"""Reads runs, finished or not, without the engine. The settings `runs=` and `run=` are directories, URLs of object
stores, or globs.

A chat with several turns is a directory with a run for each turn, `turn-1`, `turn-2` ...
"""

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import Enum
from fnmatch import fnmatchcase
from functools import cached_property
from glob import glob
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from runtime.cache_root import cache_root
from runtime.config.texts import is_url, url_child
from runtime.errors import ConfigError, DamagedRunError
from runtime.remote.object_store import ObjectStore, RetryPolicy, StoredFile

from ..files.publishing import (
    PARQUET_PROBLEMS,
    PRIVATE_FOLDER_MODE,
    JsonValue,
    make_directory,
    publish,
    read_json,
    read_regular_file,
    write_all,
    write_json,
)
from .part_files import PART_NAME, parse_part, visible_files
from .passes import PassRow
from .plan_file import read_plan_table
from .run_dir import RunDirectory
from .stored_run import MANIFEST_NAME, NUM_FETCHES, RUN_FILE

RETRY_SECONDS = 30.0  # short, because a user waits
PLAIN_NAME = re.compile(r"[^/\\\0*?\[]*[^/\\\0*?\[.][^/\\\0*?\[]*")  # a folder name: no glob, and not only dots
TURN = re.compile(r"turn-([1-9]\d*)")
FETCH_RECORD = ".fetched.json"
PASS_COLUMNS = [field.name for field in fields(PassRow) if not field.name.startswith("stage_")]


def fetch_runs(url: str, key: str) -> list[tuple[Path, str]]:
    """Downloads the run at `url` or, if it is a glob, all runs that match, with all turns of chats. Checkpoints are
    left out. `key`: the setting, for messages. Returns the local directory and URL of each run. Raises ConfigError,
    StorageError and OutputError."""
    scheme, _, location = url.rstrip("/").partition("://")
    segments = location.split("/")
    num_fixed = next((i for i, segment in enumerate(segments) if not PLAIN_NAME.fullmatch(segment)), len(segments))
    if num_fixed == 0:
        raise ConfigError(f"{key}={url} names no bucket")
    # `base`: bucket and folders before the first segment with a wildcard; `pattern`: the segments from there on.
    base, pattern = f"{scheme}://{'/'.join(segments[:num_fixed])}", "/".join(segments[num_fixed:])
    store = ObjectStore(base, key, RetryPolicy(seconds=RETRY_SECONDS))
    files = store.list_files(is_deep=True)
    names = [
        name.removesuffix(MANIFEST_NAME).rstrip("/")
        for name in files
        if name == MANIFEST_NAME or name.endswith(f"/{MANIFEST_NAME}")
    ]

    def sort_key(name: str) -> tuple[str, int]:  # turns of a chat by number
        turn = TURN.fullmatch(PurePosixPath(name).name)
        return (name, 0) if turn is None else (str(PurePosixPath(name).parent), int(turn[1]))

    matches = sorted((name for name in names if _matches_run(name, pattern)), key=sort_key)
    if not matches:
        runs = f"; {len(names)} runs are below it, such as {url_child(base, names[0])}" if names else ""
        raise ConfigError(f"{key}={url} is not a run: it has no {MANIFEST_NAME}{runs}")
    folder = cache_root() / "runs" / hashlib.sha256(base.encode()).hexdigest()[:24] / segments[num_fixed - 1]
    make_directory(folder.parent).chmod(PRIVATE_FOLDER_MODE)
    return [_fetch_run(store, name, files, folder / name) for name in matches]


def _matches_run(name: str, pattern: str) -> bool:
    """True if the run `name` matches the pattern, or if it is a turn of a chat that does."""
    segments, expected_segments = ([segment for segment in path.split("/") if segment] for path in (name, pattern))
    if len(segments) == len(expected_segments) + 1 and TURN.fullmatch(segments[-1]):
        segments = segments[:-1]
    is_plain = all(PLAIN_NAME.fullmatch(segment) for segment in segments)  # `..` must not leave the local folder
    return is_plain and len(segments) == len(expected_segments) and all(map(fnmatchcase, segments, expected_segments))


def _fetch_run(store: ObjectStore, name: str, files: Mapping[str, StoredFile], path: Path) -> tuple[Path, str]:
    """Downloads new and changed files of the run `name` to `path`, and removes files that the store no longer has.
    Returns `path` and the run's URL."""
    prefix = f"{name}/" if name else ""
    stored = {file.removeprefix(prefix): info for file, info in files.items() if file.startswith(prefix)}
    stored = {
        file: info for file, info in stored.items() if RUN_FILE.fullmatch(file) and not file.startswith("running")
    }
    record, fetched = make_directory(path) / FETCH_RECORD, dict[str, object]()
    with suppress(FileNotFoundError, DamagedRunError):
        fetched.update(read_json(record))
    listing = {file: [info.num_bytes, info.tag] for file, info in sorted(stored.items())}
    for file in fetched.keys() - listing.keys():
        (path / file).unlink(missing_ok=True)
    new = [file for file, value in listing.items() if fetched.get(file) != value or not (path / file).exists()]

    def fetch(name: str) -> None:
        try:
            data = store.read(f"{prefix}{name}")
        except FileNotFoundError:  # removed since it was listed
            return
        target = path / name
        make_directory(target.parent)
        publish(target, lambda file: write_all(file, data), exclusive=False, expected_bytes=len(data))

    with ThreadPoolExecutor(NUM_FETCHES) as pool:
        list(pool.map(fetch, new))
    write_json(record, listing, exclusive=False)  # last: after a crash, downloads are only repeated
    return path, url_child(store.url, name) if name else store.url


class Condition(Enum):
    """The state of a run. `running`: a process has its lock. `damaged`: see `RunReader.problem`."""

    done = "done"
    running = "running"
    interrupted = "interrupted"
    damaged = "damaged"


@dataclass(frozen=True, kw_only=True)
class RunReader:
    """Reads one run. `manifest`: its run.json. `url`: its URL if it was downloaded from an object store."""

    directory: RunDirectory
    manifest: Mapping[str, JsonValue]
    url: str | None = None

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def location(self) -> str:
        """The run's URL or path, for messages."""
        return self.url or str(self.path)

    @cached_property
    def semantic(self) -> Mapping[str, JsonValue]:
        values = self.manifest.get("semantic")
        return values if isinstance(values, dict) else {}

    @cached_property
    def operational(self) -> Mapping[str, JsonValue]:
        values = self.manifest.get("operational")
        return values if isinstance(values, dict) else {}

    @property
    def shard(self) -> tuple[int, int]:
        """The index of this shard and the number of shards; (0, 1) without shards."""
        index, count = (self.semantic.get(f"shard.{name}") for name in ("index", "count"))
        return (index, count) if isinstance(index, int) and isinstance(count, int) else (0, 1)

    @property
    def turn(self) -> int:
        """The turn of the chats that this run answers, from 1."""
        return turn if isinstance(turn := self.semantic.get("turn"), int) else 1

    @property
    def num_turns(self) -> int:
        """The number of turns of the longest chat; 1 if no row has several turns."""
        return count if isinstance(count := self.semantic.get("num_turns"), int) else 1

    @cached_property
    def identity(self) -> Mapping[str, JsonValue]:
        """The settings that are the same in all shards and turns of a run."""
        excluded = {"shard.index", "shard.count", "input", "turn"}
        return {key: value for key, value in self.semantic.items() if key not in excluded}

    @property
    def is_planned(self) -> bool:
        """True if there is a plan, of the first window if the run has windows."""
        return bool(self.directory.plans)

    def plans(self) -> Iterator[pa.Table]:
        """Yields the plan, or the plan of each window that has one. Raises DamagedRunError."""
        for path in self.directory.plans:
            with suppress(FileNotFoundError):
                yield read_plan_table(path)

    @property
    def num_windows(self) -> int:
        """The number of windows, which are planned one after the other; 1 if all rows are in memory."""
        facts, window_rows = self.manifest.get("facts"), self.semantic.get("dataset.window_rows")
        num_rows = facts.get("input rows") if isinstance(facts, dict) else None
        if not isinstance(window_rows, int) or not isinstance(num_rows, int):
            return 1
        num_samples = n if isinstance(n := self.semantic.get("sampling.n"), int) else 1
        rows_per_window = max(1, window_rows // num_samples) * self.shard[1]  # of the whole input
        return -(-num_rows // rows_per_window)

    @cached_property
    def rows_by_block(self) -> Mapping[int, int]:
        """The number of rows of each planned block. Raises DamagedRunError."""
        counts: dict[int, int] = {}
        for plan in self.directory.plans:
            try:
                blocks = pq.read_table(pa.BufferReader(read_regular_file(plan)[0]), columns=["block"])["block"]
            except FileNotFoundError:
                continue
            except PARQUET_PROBLEMS as error:
                raise DamagedRunError(
                    f"{plan} is damaged ({error}): repeat the run's command: it shows how to repair it"
                ) from error
            counts |= {item["values"]: item["counts"] for item in blocks.value_counts().to_pylist()}
        return counts

    @cached_property
    def parts(self) -> Mapping[int, Path]:
        """The part files by block. Other files are ignored."""
        with suppress(FileNotFoundError):
            # is_file: reading a pipe would block.
            files = (path for path in visible_files(self.directory.generations) if path.is_file())
            names = {path: PART_NAME.fullmatch(path.name) for path in files}
            return {int(name[1]): path for path, name in names.items() if name is not None}
        return {}

    @cached_property
    def num_rows(self) -> int | None:
        """The number of planned rows; None if there is no plan yet. Raises DamagedRunError."""
        return sum(plan.num_rows for plan in self.plans()) if self.is_planned else None

    @cached_property
    def num_done(self) -> int:
        """The number of rows in parts. Raises DamagedRunError."""
        return sum(self._count_rows(path) for path in self.parts.values())

    @cached_property
    def problem(self) -> str | None:
        """A description of damage, as far as file names, footers and the plan show it; None if there is none."""
        try:
            recorded: dict[str, int] = {}  # rows by part in _SUCCESS.json
            if self.directory.success.exists():
                listed = read_json(self.directory.success).get("parts")
                parts = [part for part in listed if isinstance(part, dict)] if isinstance(listed, list) else []
                recorded = {str(part.get("file")): n for part in parts if isinstance(n := part.get("num_rows"), int)}
            missing = sorted(set(recorded) - {path.name for path in self.parts.values()})
            if missing:
                return f"{self.directory.success.name} lists {missing[0]}, which is missing"
            paths = {name: self.directory.generations / name for name in recorded}
            if wrong := [name for name, path in paths.items() if recorded[name] != self._count_rows(path)]:
                return f"{wrong[0]}: number of rows differs from {self.directory.success.name}"
            num_done = self.num_done  # raises DamagedRunError for a damaged part, also without a plan
            if self.num_rows is not None and num_done > self.num_rows:
                return f"the parts have {self.num_done} rows, the plan {self.num_rows}"
        except (DamagedRunError, OSError) as error:
            return str(error)
        return None

    @cached_property
    def condition(self) -> Condition:
        if self.problem is not None:
            return Condition.damaged
        if is_locked(self.directory.lock):
            return Condition.running
        return Condition.done if self.directory.success.exists() else Condition.interrupted

    def read_part(self, block: int) -> pa.Table:
        """Reads and verifies the part of a block. Raises DamagedRunError."""
        path = self.parts[block]
        try:
            table = parse_part(read_regular_file(path)[0])
        except PARQUET_PROBLEMS as error:
            raise DamagedRunError(f"{path} is damaged ({error}): repeat the run's command to regenerate it") from error
        footer = table.schema.metadata or {}
        owner = {b"weightstream.config": self.manifest.get("semantic_digest"), b"weightstream.block": str(block)}
        if any(footer.get(key) != str(value).encode() for key, value in owner.items()):
            raise DamagedRunError(f"{path} belongs to another run or block: repeat the run's command to move it aside")
        return table

    def read_passes(self, block: int) -> list[PassRow]:
        """The passes of a block that has a part. Raises one of PARQUET_PROBLEMS."""
        with pq.ParquetFile(pa.BufferReader(read_regular_file(self.directory.throughput_part(block))[0])) as file:
            return [PassRow(**row) for row in file.read(PASS_COLUMNS).to_pylist()]

    def _count_rows(self, path: Path) -> int:
        try:
            return pq.read_metadata(path).num_rows
        except PARQUET_PROBLEMS as error:
            raise DamagedRunError(f"{path} is damaged ({error})") from error


def is_locked(path: Path) -> bool:
    """True if another process holds this lock. False on file systems without locks. Raises OSError if there are no more
    file descriptors."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # Elastic workers hold the lock shared: only an exclusive lock detects them.
        if RunDirectory(path=path.parent).leases.exists():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def find_runs(names: Sequence[str], key: str) -> list[RunReader]:
    """Returns the runs that `names`, the values of the setting `key`, refer to, each once. A name is a run directory, a
    directory of a chat's turns, a glob, or a URL, which is downloaded. Raises ConfigError, DamagedRunError, and the
    errors of `fetch_runs`."""
    runs: dict[Path, RunReader] = {}  # by resolved path
    for name in names:
        if is_url(name):
            locations: Sequence[tuple[Path, str | None]] = fetch_runs(name, key)
        else:
            locations = [(path, None) for path in _local_runs(name, key)]
        for path, url in locations:
            directory = RunDirectory(path=path)
            run = RunReader(directory=directory, manifest=read_json(directory.manifest), url=url)
            runs.setdefault(path.resolve(), run)
    return list(runs.values())


def _local_runs(name: str, key: str) -> list[Path]:
    """The local runs that `name` refers to, turns of a chat in order."""
    path = Path(name).expanduser()
    matches = [path] if path.exists() else [Path(match) for match in sorted(glob(str(path)))]  # noqa: PTH207
    runs: list[Path] = []
    for match in matches:
        turns = {int(turn[1]): child for child in match.glob("turn-*") if (turn := TURN.fullmatch(child.name))}
        candidates = [match, *(turns[turn] for turn in sorted(turns))]
        runs += [path for path in candidates if RunDirectory(path=path).manifest.is_file()]
    if runs:
        return runs
    if not matches:
        raise ConfigError(
            f"{key}={name} does not exist (looked for {path.absolute()}): runs are in <output_root>/generate"
        )
    inside = [child for child in sorted(matches[0].glob("*")) if RunDirectory(path=child).manifest.is_file()]
    hint = f"; it contains {len(inside)} runs, such as {inside[0]}" if inside and len(matches) == 1 else ""
    raise ConfigError(f"{key}={name} is not a run: there is no run.json in {matches[0]}{hint}")
