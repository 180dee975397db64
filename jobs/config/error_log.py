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
SBATCH, NO_SRUN = "sbatch", 'Could not detect "srun"'  # submitit's error message
NO_HOME = "Could not determine home directory"  # pathlib's message for ~ and ~name without a home directory
NO_TEMPORARY = "No usable temporary directory"  # tempfile's message, during the import of torch


@contextmanager
def log_errors(path: Path | None = None) -> Iterator[None]:
    """Context manager that converts unexpected exceptions to WeightstreamError. The traceback is appended to `path`,
    the log of a started run; None writes a new temporary file."""
    try:
        yield
    except WeightstreamError:
        raise
    except Exception as error:  # all types: the user must not see a bare traceback
        raise to_user_error(error, path) from error


def to_user_error(error: Exception, path: Path | None = None) -> WeightstreamError:
    """Converts an unexpected exception to the error shown to the user."""
    if any(is_out_of_memory(cause) for cause in _chain(error)):
        kind = BudgetError if path is None else MemoryShortage  # a started run can be resumed
        return kind(
            f"out of memory ({_first_line(error)}): raise the limit of the process (ulimit -v), container or job, or "
            "lower offload.host_memory_gib, offload.device_memory_gib or policy.micro_batch_size"
        )
    if (slurm_error := _slurm_error(error)) is not None:
        return slurm_error
    if isinstance(error, RuntimeError) and str(error).startswith(NO_HOME):
        return ConfigError("a path begins with ~, but its home directory is unknown: write the full path")
    if any(isinstance(cause, FileNotFoundError) and NO_TEMPORARY in str(cause) for cause in _chain(error)):
        return ConfigError(
            "no writable directory for temporary files: tried TMPDIR, /tmp, /var/tmp and the current directory. Set "
            "TMPDIR to a writable directory, or free space"
        )
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return ConfigError(f"path too long: {str(error.filename)[:60]!r} ...: use a shorter one")
    return InternalError(
        f"internal error in Weightstream: {type(error).__name__}: {_first_line(error)}; the traceback is in "
        f"{_log_traceback(error, path)}: please report it. Start the same command again to resume from the last commit"
    )


def _slurm_error(error: Exception) -> WeightstreamError | None:
    """Returns the error for a sweep that submitit could not run through Slurm; None for any other exception. Matches
    submitit's exceptions by name: it is an optional dependency."""
    sbatch = error.__cause__
    if isinstance(sbatch, subprocess.CalledProcessError) and Path(sbatch.cmd[0]).name == SBATCH:
        words = str(sbatch.stderr or sbatch.stdout or f"exit code {sbatch.returncode}, no message").strip()
        words = "; ".join(line.removeprefix(f"{SBATCH}: ").removeprefix("error: ") for line in words.splitlines())
        return ConfigError(
            f"{SBATCH} rejected the sweep: {words}. Check hydra.launcher.partition, account, timeout_min, mem_gb, "
            "cpus_per_task and gpus_per_node"
        )
    is_absent = isinstance(error, FileNotFoundError) and error.filename == SBATCH
    if is_absent or (isinstance(error, RuntimeError) and str(error).startswith(NO_SRUN)):
        return ConfigError(
            "hydra/launcher=slurm needs srun and sbatch, which are not installed here: start the sweep where they are, "
            "or omit hydra/launcher to run its jobs here, one by one"
        )
    if type(error).__name__ == "UncompletedJobError" and type(error).__module__.startswith("submitit."):
        return Interrupted(f"a sweep job ended without a result: {_first_line(error)}; start the same command again")
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
        return append_text(text, path) if path is not None else _write_traceback(text)
    except OSError as problem:
        log.error("cannot write this traceback to a file (%s):\n%s", problem, text)
        return "the log above"


def append_text(text: str, path: Path) -> str:
    """Appends to a file of a run's directory and returns its path. Raises OSError."""
    # O_NOFOLLOW: the run's directory may belong to another user
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
