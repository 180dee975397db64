"""The run directory: where every file of a run lies, whose run it is, and that one process works in it."""

import errno
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.closing import Closing
from runtime.errors import ConfigError, DamagedRunError, MillraceError, RunMismatchError

from .files import (
    JsonValue,
    RunLock,
    canonical_json,
    fsync_directory,
    json_digest,
    output_error,
    read_json,
    write_json,
)

LOG = logging.getLogger(__name__)
FORMAT = 1
MAX_DIFF_LINES = 20
MAX_VALUE_CHARS = 80
LASTING_ERRNOS = frozenset(
    {errno.EEXIST, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR}
)


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """Every path of a run. `generations` and `throughput` hold Parquet parts and nothing else a reader can see."""

    path: Path

    @property
    def manifest(self) -> Path:
        return self.path / "run.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.parquet"

    @property
    def schedule(self) -> Path:
        return self.path / "schedule.txt"

    @property
    def rates(self) -> Path:
        return self.path / "rates.json"

    @property
    def generations(self) -> Path:
        return self.path / "generations"

    @property
    def throughput(self) -> Path:
        return self.path / "throughput"

    @property
    def running(self) -> Path:
        return self.path / "running.parquet"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine"

    @property
    def trace(self) -> Path:
        return self.path / "trace"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def log(self) -> Path:
        return self.path / "run.log"

    @property
    def success(self) -> Path:
        return self.path / "_SUCCESS.json"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    def generations_part(self, block: int) -> Path:
        return self.generations / f"part-{block:05d}.parquet"

    def throughput_part(self, block: int) -> Path:
        return self.throughput / f"part-{block:05d}.parquet"


@dataclass(frozen=True, kw_only=True)
class RunManifest:
    """What makes a run this run, by dotted key.

    `semantic`: all that can change the text; equal on every resume. `operational`: how the work is done; may change and
    is recorded in each throughput part. `versions`: of the libraries; a change is logged.
    """

    semantic: Mapping[str, JsonValue]
    operational: Mapping[str, JsonValue]
    versions: Mapping[str, str]

    @property
    def digest(self) -> str:
        return json_digest(self.semantic)

    @property
    def name(self) -> str:
        return run_name(self.semantic)


def run_name(semantic: Mapping[str, JsonValue]) -> str:
    """`<model>-<data set>-<8 hex of the digest>`: the same settings always find the same directory."""
    values = [semantic.get(f"{group}.name", semantic.get(group)) for group in ("model", "dataset")]
    words = [_slug(value) for value in values if isinstance(value, str)]
    return "-".join([*(word for word in words if word), json_digest(semantic)[:8]])


def _slug(text: str) -> str:
    base = text.rstrip("/").rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9._]+", "-", base)[:32].strip("-._")


@dataclass(frozen=True, kw_only=True)
class RunState(Closing):
    """An opened run directory; a context manager that gives its lock back."""

    directory: RunDirectory
    manifest: RunManifest
    is_resumed: bool
    lock: RunLock

    def close(self) -> None:
        self.lock.release()


def open_run(path: Path, manifest: RunManifest) -> RunState:
    """Bind `path` to `manifest` on the first call, check that it is bound to the same one later, and lock it.

    `run.json` is written before anything else; on a refusal nothing at all is. Raises RunMismatchError (another run,
    with a diff), ConfigError (not a directory that can hold a run), DamagedRunError (run.json unreadable),
    OutputError (in use, or a fault of the disk: starting again later can help).
    """
    run = RunDirectory(path=path)
    try:
        is_resumed = _is_bound(run, manifest)
        run.path.mkdir(parents=True, exist_ok=True)
        lock = RunLock(run.lock)
    except OSError as error:
        raise _unusable(run.path, error) from error
    try:
        if not is_resumed and not write_json(run.manifest, _manifest_json(manifest), exclusive=True):
            is_resumed = _is_bound(run, manifest)  # another process was first
        _make_folders(run)
    except OSError as error:
        lock.release()
        raise _unusable(run.path, error) from error
    except BaseException:
        lock.release()
        raise
    return RunState(directory=run, manifest=manifest, is_resumed=is_resumed, lock=lock)


def _is_bound(run: RunDirectory, manifest: RunManifest) -> bool:
    """Whether run.json is there and ours; raises when it or the directory is another's. Writes nothing."""
    try:
        stored = read_json(run.manifest)
    except FileNotFoundError:
        _refuse_foreign(run)
        return False
    _compare(run, stored, manifest)
    return True


def _refuse_foreign(run: RunDirectory) -> None:
    if not run.path.exists():
        return
    names = sorted(entry.name for entry in run.path.iterdir())
    strangers = [name for name in names if not name.startswith(".") and not name.endswith(".log")]
    if strangers:
        raise ConfigError(
            f"{run.path} is no run directory: it has no run.json but holds {len(strangers)} other entries "
            f"({', '.join(map(json.dumps, strangers[:3]))}). Choose a new or empty directory with run="
        )


def _compare(run: RunDirectory, stored: Mapping[str, JsonValue], manifest: RunManifest) -> None:
    semantic, versions = stored.get("semantic"), stored.get("versions")
    if stored.get("format") != FORMAT:
        raise RunMismatchError(
            f"{run.manifest} has format {json.dumps(stored.get('format'))}, this version of Millrace reads {FORMAT}. "
            f"Finish the run with the version that began it, or choose another directory with run="
        )
    if not isinstance(semantic, dict) or stored.get("semantic_digest") != json_digest(semantic):
        raise DamagedRunError(f"{run.manifest} was changed after it was written: its digest does not fit its settings")
    if json_digest(semantic) != manifest.digest:
        raise RunMismatchError(_mismatch(run, semantic, manifest.semantic))
    for line in _diff(versions if isinstance(versions, dict) else {}, manifest.versions):
        LOG.warning("%s was begun with other library versions; rounding may differ: %s", run.path, line)


def _mismatch(run: RunDirectory, was: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> str:
    lines = _diff(was, now)
    shown = [f"  {line}" for line in lines[:MAX_DIFF_LINES]]
    more = [f"  and {len(lines) - MAX_DIFF_LINES} more"] if len(lines) > MAX_DIFF_LINES else []
    head = f"{run.path} belongs to another run; {len(lines)} settings differ (key: was -> is):"
    tail = "Nothing was written. Put the settings back, or choose another directory with run="
    return "\n".join([head, *shown, *more, tail])


def _diff(was: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> list[str]:
    pairs = [(key, _show(was, key), _show(now, key)) for key in sorted({*was, *now})]
    return [f"{key}: {_cut(old)} -> {_cut(new)}" for key, old, new in pairs if old != new]


def _show(values: Mapping[str, JsonValue], key: str) -> str:
    return canonical_json(values[key]) if key in values else "(absent)"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."


def _manifest_json(manifest: RunManifest) -> dict[str, JsonValue]:
    return {
        "format": FORMAT,
        "name": manifest.name,
        "semantic": manifest.semantic,
        "semantic_digest": manifest.digest,
        "operational": manifest.operational,
        "versions": manifest.versions,
    }


def _make_folders(run: RunDirectory) -> None:
    for folder in (run.generations, run.throughput):
        folder.mkdir(exist_ok=True)
    fsync_directory(run.path)
    fsync_directory(run.path.parent)


def _unusable(path: Path, error: OSError) -> MillraceError:
    """What no retry can heal is refused (exit 2); what can pass, as a full disk, is resumable (exit 75)."""
    if error.errno not in LASTING_ERRNOS:
        return output_error(path, error)
    return ConfigError(f"cannot use {path} as a run directory: {error.strerror or error}. Choose another one with run=")
