"""The run directory: the paths of its files, its lock, and the check that it belongs to this run."""

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.closing import Closing
from runtime.errors import ConfigError, DamagedRunError, RunMismatchError, WeightstreamError

from ..files.locks import RunLock
from ..files.publishing import PERMANENT_ERRNOS, JsonValue, fsync_directory, output_error, read_json, write_json
from .manifest import RunManifest

EVALUATION_NAME = "evaluation.json"  # in the directory of an evaluation, beside the directories of its runs


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """The paths of a run's files. `generations` and `throughput` have only Parquet parts and hidden files."""

    path: Path

    @property
    def manifest(self) -> Path:
        return self.path / "run.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.parquet"

    def window_plan(self, number: int) -> Path:
        return self.path / f"plan-{number:05d}.parquet"

    @property
    def plans(self) -> list[Path]:
        """The plan files that exist, in order of their windows."""
        if self.plan.exists():
            return [self.plan]
        return sorted(self.path.glob("plan-*.parquet"), key=lambda path: (len(path.name), path.name))

    @property
    def survey(self) -> Path:
        return self.path / "survey.json"

    @property
    def row_digests(self) -> Path:
        return self.path / "row_digests.parquet"

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
    def run_checkpoint(self) -> Path:
        return self.path / "running.parquet"

    @property
    def leases(self) -> Path:
        return self.path / "leases"

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
    def batch_output(self) -> Path:
        """The results of an OpenAI batch. Failed requests are in `batch_errors`."""
        return self.path / "output.jsonl"

    @property
    def batch_errors(self) -> Path:
        return self.path / "errors.jsonl"

    @property
    def store_token(self) -> Path:
        """A file with a random id, by which the copy in an object store recognizes this directory."""
        return self.path / ".store_token.json"

    @property
    def tracking(self) -> Path:
        """Id of the run in trackers."""
        return self.path / ".tracking.json"

    @property
    def inputs(self) -> Path:
        """The state of the input files of a finished run; see `jobs.record.finished`."""
        return self.path / ".inputs.json"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    def block_checkpoint(self, block: int) -> Path:
        return self.path / f"running-{block:05d}.parquet"

    def generations_part(self, block: int) -> Path:
        return self.generations / f"part-{block:05d}.parquet"

    def throughput_part(self, block: int) -> Path:
        return self.throughput / f"part-{block:05d}.parquet"


@dataclass(frozen=True, kw_only=True)
class RunState(Closing):
    """An open run directory. Closing it releases its lock. `manifest` has the identity in run.json."""

    directory: RunDirectory
    manifest: RunManifest
    is_resumed: bool
    lock: RunLock

    def close(self) -> None:
        self.lock.release()


def open_run(
    path: Path,
    manifest: RunManifest,
    *,
    is_shared: bool = False,
    remote_manifest: Mapping[str, JsonValue] | None = None,
) -> RunState:
    """Opens the run in `path` and takes its lock; if `is_shared`, other workers may hold it, too. On the first start,
    writes `manifest` to run.json. On later starts, compares `manifest` with run.json. `remote_manifest`: run.json of
    the run's copy, which must have the same identity.

    Raises RunMismatchError (another run, with a diff), ConfigError (not usable as a run directory), DamagedRunError
    (run.json unreadable, or symbolic links), RunInUseError, OutputError (disk fault: a retry may help).
    """
    run = RunDirectory(path=path)
    try:
        # A run must write only below its own directory.
        for child in (run.lock, run.generations, run.throughput, run.quarantine, run.trace, run.leases):
            if child.is_symlink():
                raise DamagedRunError(
                    f"{child} is a symbolic link, to {child.readlink()}: a run writes only into its own directory. "
                    f"Remove the link, or choose another directory with run="
                )
        stored = _read_stored_manifest(run, manifest, remote_manifest)
        run.path.mkdir(parents=True, exist_ok=True)
        lock = RunLock(run.lock, is_shared=is_shared)
    except OSError as error:
        raise run_directory_error(run, error) from error
    try:
        if not run.manifest.exists() and not write_json(
            run.manifest, remote_manifest or manifest.to_json(), exclusive=True
        ):
            stored = _read_stored_manifest(run, manifest, remote_manifest)  # another worker wrote it first
        for folder in (run.generations, run.throughput):
            folder.mkdir(exist_ok=True)
        fsync_directory(run.path)
        fsync_directory(run.path.parent)  # the name of a new run directory must survive a crash
    except OSError as error:
        lock.release()
        raise run_directory_error(run, error) from error
    except BaseException:
        lock.release()
        raise
    return RunState(directory=run, manifest=stored or manifest, is_resumed=stored is not None, lock=lock)


def _read_stored_manifest(
    run: RunDirectory, manifest: RunManifest, remote_manifest: Mapping[str, JsonValue] | None
) -> RunManifest | None:
    """`manifest` with the identity in run.json, here or in the run's copy; None if there is no run.json. Raises an
    error if the identity differs, or if the directory has files of something else."""
    try:
        stored = read_json(run.manifest)
    except FileNotFoundError:
        names = sorted(entry.name for entry in run.path.iterdir()) if run.path.exists() else []
        foreign_names = [name for name in names if not name.startswith(".") and not name.endswith(".log")]
        if foreign_names:
            raise ConfigError(
                f"{run.path} is not a run directory: it has no run.json but {len(foreign_names)} other entries "
                f"({', '.join(map(json.dumps, foreign_names[:3]))}). Choose a new or empty directory with run="
            ) from None
        stored = remote_manifest
    if stored is None:
        return None
    if remote_manifest is not None and remote_manifest.get("semantic_digest") != stored.get("semantic_digest"):
        manifest.with_stored_identity(remote_manifest, run.manifest)  # raises with a diff, if the values differ
        raise RunMismatchError(
            f"{run.path} and its copy (output_url) were started as different runs: choose another directory with run= "
            f"or output_root="
        )
    return manifest.with_stored_identity(stored, run.manifest)


def require_writable(path: Path) -> None:
    """Raises ConfigError or OutputError if the run directory `path` cannot be created or written. Writes nothing."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    error_number = errno.ENOTDIR
    if existing.is_dir():
        is_read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        is_accessible = os.access(existing, os.W_OK | os.X_OK)
        error_number = errno.EROFS if is_read_only else 0 if is_accessible else errno.EACCES
    if error_number:
        raise run_directory_error(RunDirectory(path=path), OSError(error_number, os.strerror(error_number)))


def run_directory_error(run: RunDirectory, error: OSError) -> WeightstreamError:
    """The error for a run directory that cannot be used. ConfigError if another start would fail, too. OutputError if
    it may succeed, as with a full disk, or a file system that became read-only during the run."""
    was_writable = error.errno == errno.EROFS and run.manifest.exists()
    if error.errno not in PERMANENT_ERRNOS or was_writable:
        return output_error(run.path, error)
    is_name_problem = error.errno == errno.ENAMETOOLONG or (run.path.exists() and not run.path.is_dir())
    key = "run=" if is_name_problem else "output_root="
    return ConfigError(f"cannot use {run.path} as a run directory: {error.strerror or error}. Choose another {key}")
