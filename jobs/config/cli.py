"""Turns a failure into one line on stderr and an exit code: what stands between a job and the shell.

Hydra is not imported here (only the job files do that); its exceptions are known by the module they come from.
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
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn, TypeVar

import runtime
from runtime.errors import ConfigError, InternalError, Interrupted, JobEnded, OutputError, WeightstreamError

from .error_log import log_errors, to_user_error
from .help import help_text
from .process import exit_as_rank, prepare_process
from .typed import ARCHITECTURE, known_keys, unknown_key

C = TypeVar("C")

MULTIRUN = ("--multirun", "-m")
REFUSED = 2
RESUMABLE = Interrupted.exit_code
_WORST_FIRST = (InternalError.exit_code, 4, REFUSED, RESUMABLE, 3, 0)  # of the jobs of a sweep

_exit_codes: ContextVar[list[int] | None] = ContextVar("exit_codes", default=None)


def as_job(body: Callable[[C], int | None]) -> Callable[[C], int | None]:
    """Goes between `@hydra.main` and a job's `main`: a job that fails ends in one line, and a sweep goes on without it.

    `body` returns its exit code, None for 0. An exit code of 75 stops a sweep too: whoever stopped one job meant all.
    In a process that a launcher started, where no `run_job` waits, errors pass through for the launcher to see, and
    other exit codes than 0 are errors.
    """

    @functools.wraps(body)
    def job(config: C) -> int | None:
        return _run(body, config)  # a launcher pickles `job` by value, with the globals that it names; this one by name

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
    """Call `entry`, a `@hydra.main` over an `as_job`; exit with the job's own code, or 2 if Hydra refuses the config.

    `schema` is the config dataclass, for naming the key that a mistyped one was meant to be. An exception that is
    neither ours nor Hydra's ends it with 70, its traceback in a file that the line names; Ctrl-C ends it with 75.
    """
    prepare_process()
    try:
        _run_job(entry, schema)
    except SystemExit as end:
        exit_as_rank(end.code)
        raise


def _run_job(entry: Callable[[], None], schema: type) -> NoReturn:
    if (
        code := _run_subcommand(Path(inspect.unwrap(entry).__code__.co_filename).stem, sys.argv[1:], schema)
    ) is not None:
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
        print_error(Interrupted("the same command goes on from here"))
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
    """What the user is told where Hydra cannot write what it keeps of a sweep; None for anything else. A job's own
    errors do not come here."""
    is_sweep = any(word in sys.argv for word in MULTIRUN)
    if not is_sweep or not isinstance(error, OSError) or os.sep not in str(error.filename):  # a program has no path
        return None
    return ConfigError(f"{error.filename} cannot be written: {error.strerror}: choose another place with output_root=")


def _run_subcommand(job: str, words: list[str], schema: type) -> int | None:
    """The exit code of a command that asks about the job, or that has an option no job has; None for one to run."""
    try:
        if "--version" in words:
            print_line(f"weightstream {runtime.__version__}")
        elif {"--help", "-h"} & {*words}:
            print_line(help_text(job, words))
        elif (suggestion := suggest_key(words, schema)) is not None:
            raise ConfigError(suggestion)
        else:
            return None
    except ConfigError as error:
        print_error(error)
        return REFUSED
    return 0


def expand_prompt(words: list[str]) -> list[str]:
    """`prompt=TEXT` as the settings that it is short for, with all that Hydra would read in the text quoted."""
    expanded = []
    for word in words:
        name, sign, text = word.partition("=")
        if (name, sign) != ("prompt", "="):
            expanded.append(word)
            continue
        expanded += ["dataset=prompt", f"dataset.prompt={quote(text)}"]
    return expanded


def infer_dataset_kind(words: list[str]) -> list[str]:
    """The words with the kind of data set that the ending of `dataset.path` tells, where they choose none."""
    from ..datasets.files import ending_kind  # needs pyarrow, which not every job has

    if any(re.match(r"[+~]*dataset(=|@|\.kind=)", word) for word in words):
        return words
    values = [word.partition("=")[2] for word in words if word.partition("=")[0] == "dataset.path"]
    is_sweep = bool({"--multirun", "-m"} & {*words})
    paths = [path for value in values for path in (value.split(",") if is_sweep else [value])]
    kinds = {ending_kind(path.strip("'\"")) for path in paths}
    return [*words, *(f"dataset={kind}" for kind in kinds if len(kinds) == 1 and kind is not None)]


def quote(text: str) -> str:
    """A value that Hydra reads back as this text, whatever is in it."""
    escaped = re.sub(r'(\\*)"', lambda match: 2 * match[1] + '\\"', text).replace("${", "\\${")
    escaped += "\\" * (len(escaped) - len(escaped.rstrip("\\")))
    return f'"{escaped}"'


def suggest_key(words: list[str], schema: type) -> str | None:
    """What a word that looks like an option and is a key was meant to be, or one of a model's architecture that Hydra
    would take and the job has no use for; None where there is neither."""
    keys = known_keys(schema)
    for word, after in zip_longest(words, words[1:], fillvalue="VALUE"):
        name, _, value = word.removeprefix("--").partition("=")
        key = name.lstrip("+~")
        if key.partition(".")[0] == ARCHITECTURE:
            if ARCHITECTURE not in keys:
                return unknown_key(key, keys)
            if key == ARCHITECTURE and not value.startswith("{"):
                return f"{word}: a model's architecture stands in its file: model={value or 'OPTION'} chooses it"
        if word.startswith("--") and name in keys and name != "run":  # which Hydra has an option for
            return f"{word} is no option but a setting: write {name}={value or after}"
    return None


def print_line(text: str = "") -> None:
    """Prints a line on stdout. Where nobody reads it any more, as behind `| head`, this line and all that follow go
    nowhere, and the job ends with its own exit code. Raises OutputError where it cannot be written."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise OutputError(f"cannot write to stdout: {error.strerror}") from error


def print_and_return(code: int, output: str, error: str) -> int:
    """Says what other processes came to, as they said it, and returns their exit code."""
    if output:
        print_line(output)
    if error:
        print(error, file=sys.stderr, flush=True)
    return code


def print_error(error: Exception | str) -> None:
    """`error: ...` on stderr, or `interrupted: ...`. Control characters are shown, not sent: a message may quote text
    from a data set."""
    text = "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in str(error))
    kind = "interrupted" if isinstance(error, Interrupted) else "error"
    with suppress(OSError):  # the exit code says it where nobody reads
        print(f"{kind}: {text}", file=sys.stderr, flush=True)


def describe_hydra_error(error: Exception, known: list[str]) -> str:
    """One line for an exception raised while Hydra composed a config; `known` are the config's dotted keys."""
    text = str(error) or str(error.__cause__ or type(error).__name__)
    options = getattr(error, "options", None)
    missing = getattr(error, "missing_cfg_file", None)
    if missing is not None and "submitit" in missing:
        return "hydra/launcher=slurm needs the extra: pip install -e '.[slurm]', or use slurm/generate.sbatch"
    if missing is not None and options is not None:
        group, _, option = missing.rpartition("/") if missing.startswith("hydra/") else missing.partition("/")
        if group == "model" and ("/" in option or Path(option).exists()):
            return f"model={option} does not exist: a directory or a hub id is model=hf model.path={option}"
        close = get_close_matches(option, options, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return f"{group}={option} does not exist: {hint}{group} is one of {', '.join(options)}"
    if match := re.match(r"Could not override '(.+?)'", text):
        key = match[1]
        return (
            f"unknown key {key}: --cfg hydra shows those of Hydra"
            if key.startswith("hydra")
            else unknown_key(key, known)
        )
    if match := re.match(r"Multiple values for (.+?)\. ", text):
        return f"{match[1]} is chosen already: write {match[1]}=<option> without the +"
    if text.startswith("Config group override must be"):
        return "a group takes the name of one of its options, as in offload=nvme; --help lists them"
    if match := re.match(r"Ambiguous value for argument '(.+)'", text):
        return (
            f"{match[1]} looks like a sweep: add --multirun, or write a list as key=[a,b], or quote it as key=\"'a,b'\""
        )
    if override := getattr(error, "override", None):
        if any("\ud800" <= char <= "\udfff" for char in override):
            return f"cannot read {override!r}: it is not UTF-8; give what it names another name, or a link that has one"
        if "=" not in override:
            return f"{override!r} is not key=value; --help shows how to call this job"
        return f"cannot read {override!r} ({_first_line(text)}); quote text as key=\"'text'\""
    return _first_line(text.split("Config search path")[0])


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("See "))


def _is_hydra_error(error: Exception) -> bool:
    """True for Hydra's and OmegaConf's exceptions, and for built-in ones that their own code raised."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    raised_in = frame.tb_frame.f_globals.get("__name__", "") if frame is not None else ""
    return any(name.partition(".")[0] in ("hydra", "omegaconf") for name in (type(error).__module__, raised_in))
