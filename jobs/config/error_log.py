"""Conversion of unexpected exceptions to one-line errors, with the traceback in a file."""

import errno
import logging
import os
import subprocess
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from runtime.errors import BudgetError, ConfigError, InternalError, Interrupted, MemoryShortage, WeightstreamError
from runtime.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)
SBATCH, NO_SRUN = "sbatch", 'Could not detect "srun"'  # so says submitit
NO_HOME = "Could not determine home directory"  # so says pathlib of ~ without a home, and of ~name without such a user
NO_TEMPORARY = "No usable temporary directory"  # so says tempfile, which torch asks as it is imported


@contextmanager
def log_errors(path: Path | None = None) -> Iterator[None]:
    """Context manager that converts exceptions other than WeightstreamError to one. The traceback is appended to
    `path`, the log of a run that has begun; None writes a new temporary file."""
    try:
        yield
    except WeightstreamError:
        raise
    except Exception as error:  # whatever it is: otherwise a bare traceback would reach the user
        raise to_user_error(error, path) from error


def to_user_error(error: Exception, path: Path | None = None) -> WeightstreamError:
    """Converts an unexpected exception to the error shown to the user."""
    if any(is_out_of_memory(each) for each in _chain(error)):
        kind = BudgetError if path is None else MemoryShortage  # a run that has begun may go on
        return kind(
            f"this process was given no more memory ({_first_line(error)}): raise what limits it (ulimit -v, a "
            "container's or a job's memory), or lower offload.host_memory_gib, offload.device_memory_gib or "
            "policy.micro_batch_size"
        )
    if (slurm_error := _slurm_error(error)) is not None:
        return slurm_error
    if isinstance(error, RuntimeError) and str(error).startswith(NO_HOME):
        return ConfigError("a path begins with ~, and no home directory is known for it: write the path in full")
    if any(isinstance(each, FileNotFoundError) and NO_TEMPORARY in str(each) for each in _chain(error)):
        return ConfigError(
            "no directory for temporary files can be written: not what TMPDIR names, nor /tmp, /var/tmp and the "
            "current one. Set TMPDIR to one that can, or make room there"
        )
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return ConfigError(f"{str(error.filename)[:60]!r} ... is longer than a path may be, which no file can have")
    return InternalError(
        f"internal error, a mistake of Weightstream's and none of yours: {type(error).__name__}: {_first_line(error)}; "
        f"the traceback is in {_log_traceback(error, path)}: please report it. The same command goes on from what is "
        "committed"
    )


def _slurm_error(error: Exception) -> WeightstreamError | None:
    """The error for a sweep that submitit could not run through Slurm; None for any other exception. Submitit is an
    optional dependency, so its exceptions are matched by name."""
    sbatch = error.__cause__
    if isinstance(sbatch, subprocess.CalledProcessError) and Path(sbatch.cmd[0]).name == SBATCH:
        words = str(sbatch.stderr or sbatch.stdout or f"it ended with {sbatch.returncode} and no word").strip()
        words = "; ".join(line.removeprefix(f"{SBATCH}: ").removeprefix("error: ") for line in words.splitlines())
        return ConfigError(
            f"{SBATCH} refuses the sweep: {words}. Its partition, account, time and memory are the settings "
            "hydra.launcher.partition, account, timeout_min, mem_gb, cpus_per_task and gpus_per_node"
        )
    is_absent = isinstance(error, FileNotFoundError) and error.filename == SBATCH
    if is_absent or (isinstance(error, RuntimeError) and str(error).startswith(NO_SRUN)):
        return ConfigError(
            "hydra/launcher=slurm finds no Slurm here (srun and sbatch): start the sweep where they are, or leave the "
            "launcher out to run it here, one job after another"
        )
    if type(error).__name__ == "UncompletedJobError" and type(error).__module__.startswith("submitit."):
        return Interrupted(f"a job of the sweep ended without a result: {_first_line(error)}; the same command goes on")
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, outermost first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__


def _log_traceback(error: Exception, path: Path | None) -> str:
    text = f"{datetime.now().isoformat(timespec='seconds')}\n{''.join(traceback.format_exception(error))}\n"
    try:
        return _append_traceback(text, path) if path is not None else _write_traceback(text)
    except OSError as problem:
        log.error("no file takes this traceback (%s):\n%s", problem, text)
        return "the log, above"


def _append_traceback(text: str, path: Path) -> str:
    """Does not follow links: the run's directory may belong to someone else."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    return str(path)


def _write_traceback(text: str) -> str:
    with tempfile.NamedTemporaryFile(
        "w", prefix="weightstream-", suffix=".log", delete=False, encoding="utf-8", errors="backslashreplace"
    ) as file:
        file.write(text)
        return file.name
