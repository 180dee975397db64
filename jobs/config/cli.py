"""Entry points of jobs: exit codes, one-line errors on stderr, and rewriting of command-line words.

Hydra is not imported here, only by the job files; its exceptions are recognized by their module.
"""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, TypeVar

import runtime
from runtime.errors import ConfigError, InternalError, Interrupted, JobEnded, OutputError, WeightstreamError

from .error_log import log_errors, to_user_error
from .help import help_text
from .process import exit_as_rank, prepare_process
from .screen import fold_for_screen
from .typed import known_keys, unknown_key
from .words import MULTIRUN, rewrite_words, suggest_key

C = TypeVar("C")

REFUSED = 2
RESUMABLE = Interrupted.exit_code
_WORST_FIRST = (InternalError.exit_code, 4, REFUSED, RESUMABLE, 3, 0)  # of the jobs of a sweep

_exit_codes: ContextVar[list[int] | None] = ContextVar("exit_codes", default=None)


def as_job(body: Callable[[C], int | None]) -> Callable[[C], int | None]:
    """Decorator between `@hydra.main` and a job's `main`: a failing job prints one line, and a sweep continues without
    it.

    `body` returns its exit code, None for 0. Exit code 75 also stops the sweep. In a process started by a launcher,
    without `run_job`, exceptions propagate to the launcher, and nonzero exit codes raise `JobEnded`.
    """

    @functools.wraps(body)
    def job(config: C) -> int | None:
        return _run(body, config)  # launchers pickle `job` by value with its globals, but `_run` by name

    return job


def _run(body: Callable[[C], int | None], config: C) -> int | None:
    codes = _exit_codes.get()
    if codes is None:
        if code := body(config):
            raise JobEnded(code)
        return code
    try:
        with log_errors():
            code = body(config) or 0
    except WeightstreamError as error:
        code = error.exit_code
        print_error(error)
    assert code in _WORST_FIRST, f"exit code {code}"
    codes.append(code)
    if code == RESUMABLE:
        raise SystemExit(code)
    return code


def run_job(entry: Callable[[], None], schema: type) -> NoReturn:
    """Calls `entry`, a `@hydra.main` over an `as_job`, and exits with the job's code, or 2 if Hydra refuses the config.

    `schema`: the config dataclass; for an unknown key, its closest key is suggested. Unexpected exceptions exit with 70
    and write their traceback to a file; Ctrl-C exits with 75.
    """
    prepare_process()
    try:
        _run_job(entry, schema)
    except SystemExit as end:
        exit_as_rank(end.code)
        raise


def _run_job(entry: Callable[[], None], schema: type) -> NoReturn:
    job = Path(inspect.unwrap(entry).__code__.co_filename).stem
    if (code := _run_subcommand(job, sys.argv[1:], schema)) is not None:
        sys.exit(code)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing and exiting by itself
    codes: list[int] = []
    _exit_codes.set(codes)
    try:
        entry()
    except WeightstreamError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print_error(Interrupted("start the same command again to resume"))
        sys.exit(RESUMABLE)
    except Exception as error:
        if _is_hydra_error(error):
            print_error(describe_hydra_error(error, known_keys(schema)))
            sys.exit(REFUSED)
        user_error = _sweep_output_error(error) or to_user_error(error)
        print_error(user_error)
        sys.exit(user_error.exit_code)
    finally:
        _exit_codes.set(None)
    sys.exit(min(codes, key=_WORST_FIRST.index, default=0))


def _sweep_output_error(error: Exception) -> ConfigError | None:
    """Returns the ConfigError for a sweep directory that Hydra cannot write; None for any other exception."""
    is_sweep = any(word in sys.argv for word in MULTIRUN)
    if not is_sweep or not isinstance(error, OSError) or os.sep not in str(error.filename):  # `sbatch` has no path
        return None
    return ConfigError(f"cannot write {error.filename}: {error.strerror}; set output_root to another directory")


def _run_subcommand(job: str, words: list[str], schema: type) -> int | None:
    """Handles `--version`, `--help` and misspelled options. Returns the exit code, or None to run the job, with the
    words in `sys.argv` rewritten for Hydra."""
    try:
        if "--version" in words:
            print_line(f"weightstream {runtime.__version__}")
        elif {"--help", "-h"} & {*words}:
            print_line(fold_for_screen(help_text(job, words)))
        elif (suggestion := suggest_key(words, schema)) is not None:
            raise ConfigError(suggestion)
        else:
            sys.argv[1:] = rewrite_words(words, schema)
            return None
    except ConfigError as error:
        print_error(error)
        return REFUSED
    return 0


def print_line(text: str = "") -> None:
    """Prints a line to stdout. After a closed pipe, such as `| head`, output goes to /dev/null and the job keeps its
    exit code. Raises OutputError if stdout cannot be written."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise OutputError(f"cannot write to stdout: {error.strerror}") from error


def print_and_return(code: int, output: str, error: str) -> int:
    """Prints the output and error of other processes unchanged and returns their exit code."""
    if output:
        print_line(output)
    if error:
        print(error, file=sys.stderr, flush=True)
    return code


def print_error(error: Exception | str) -> None:
    """Prints `error: ...` or `interrupted: ...` to stderr. Control characters are escaped: a message may quote text
    from a data set."""
    text = "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in str(error))
    kind = "interrupted" if isinstance(error, Interrupted) else "error"
    with suppress(OSError):  # stderr may be closed; the exit code still reports the error
        print(f"{kind}: {text}", file=sys.stderr, flush=True)


def describe_hydra_error(error: Exception, known: list[str]) -> str:
    """Converts an exception from Hydra's composition to one line; `known` are the config's dotted keys."""
    text = str(error) or str(error.__cause__ or type(error).__name__)
    options = getattr(error, "options", None)
    missing = getattr(error, "missing_cfg_file", None)
    if missing is not None and "submitit" in missing:
        needs = "hydra/launcher=slurm needs the extra: pip install 'weightstream[slurm]'"
        return f"{needs}, or submit a script: weightstream slurm > job.sbatch"
    if missing is not None and options is not None:
        group, _, option = missing.rpartition("/") if missing.startswith("hydra/") else missing.partition("/")
        if group == "model" and Path(option).is_file():
            return f"model={option} is a file and no model: set a directory, a GGUF file or a hub id"
        if group == "model" and ("/" in option or Path(option).exists()):
            return f"model={option} does not exist: for a directory or a hub id write model=hf model.path={option}"
        close = get_close_matches(option, options, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return f"{group}={option} does not exist: {hint}{group} is one of {', '.join(options)}"
    if match := re.match(r"Could not override '(.+?)'", text):
        key = match[1]
        is_hydra = key.startswith("hydra")
        return f"unknown key {key}: --cfg hydra lists Hydra's keys" if is_hydra else unknown_key(key, known)
    if match := re.match(r"Multiple values for (.+?)\. ", text):
        return f"{match[1]} already has an option: write {match[1]}=<option> without the +"
    if text.startswith("Config group override must be"):
        return "a group must be set to one of its options, e.g. offload=nvme; --help lists them"
    if match := re.match(r"Ambiguous value for argument '(.+)'", text):
        return (
            f"{match[1]} looks like a sweep: add --multirun, or write a list as key=[a,b], or quote it as key=\"'a,b'\""
        )
    if override := getattr(error, "override", None):
        if any("\ud800" <= char <= "\udfff" for char in override):
            return f"cannot read {override!r}: not UTF-8; rename the file, or make a link with a UTF-8 name"
        if "=" not in override:
            return f"{override!r} is not key=value; --help shows how to call this job"
        return f"cannot read {override!r} ({_first_line(text)}); quote text as key=\"'text'\""
    return _first_line(text.split("Config search path")[0])


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("See "))


def _is_hydra_error(error: Exception) -> bool:
    """True for exceptions of Hydra and OmegaConf, and for built-in ones raised in their code."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    raised_in = frame.tb_frame.f_globals.get("__name__", "") if frame is not None else ""
    return any(name.partition(".")[0] in ("hydra", "omegaconf") for name in (type(error).__module__, raised_in))
