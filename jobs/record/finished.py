"""Recognizes a finished run by the sizes and times of its input files, before torch is imported.

When a run has finished, the state of its inputs (sizes and times) is written to `.inputs.json`. If the command is
started again with the same settings and the same state, it has nothing to do. If the state is unknown or differs, model
and data are opened and compared by their digests.
"""

import os
import platform
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import cast

from runtime import __version__
from runtime.config.settings import Parallelism, Verify
from runtime.config.texts import is_url
from runtime.errors import WeightstreamError

from ..config.settings import RunSettings, flatten, run_directory
from ..files.publishing import PARQUET_PROBLEMS, JsonValue, json_digest, read_json, write_json
from .manifest import PATH_KEYS
from .passes import Status
from .run_dir import RunDirectory
from .run_reader import Condition, RunReader
from .success import is_finished
from .summary import Outcome, summarize

LIBRARIES = ("torch", "transformers", "pyarrow")
COMMIT = re.compile(r"[0-9a-f]{40}")
DISPLAY_KEYS = ("log_level", "quiet", "summary", "out")  # settings that change no file of the run
MAX_FILES = 10_000  # in all inputs together; with more, digests are compared


def input_state(config: RunSettings) -> str | None:
    """Digest of all settings, library versions, and the path, size and times of each input file. None if these do not
    determine the output: URLs, hub ids without a commit, several ranks, multi-turn chats. Call it before the inputs are
    read, so that a change made meanwhile is noticed."""
    values = {key: value for key, value in flatten(config).items() if key not in DISPLAY_KEYS}
    is_one_run = config.devices.way is Parallelism.one and not config.dataset.has_turns and config.output_url is None
    if not is_one_run or config.model.verify is Verify.full or config.dataset.kind.name == "hub":
        return None
    files: list[JsonValue] = []
    try:
        for key in PATH_KEYS:
            value = values.get(key)
            if not isinstance(value, str):
                continue
            path = Path(value).expanduser()
            if is_url(value) or not path.exists():
                if key == "model.path" and COMMIT.fullmatch(config.model.revision or ""):
                    continue  # a commit of the hub never changes
                return None
            files += islice(_file_states(path), MAX_FILES + 1 - len(files))
        if len(files) > MAX_FILES:
            return None
        versions: JsonValue = {"weightstream": __version__, **{name: version(name) for name in LIBRARIES}}
    except (OSError, RuntimeError, ImportError):
        return None
    return json_digest([values, versions, platform.node(), files])


def _file_states(path: Path) -> Iterator[JsonValue]:
    """Yields path, size, times and inode of a file, or of each file below a directory. Raises OSError."""
    for folder, folders, names in os.walk(path, followlinks=True):
        folders.sort()
        for name in sorted(names):
            yield from _file_states(Path(folder) / name)
    if not path.is_dir():
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe, for example
            raise OSError(f"{path} is not a file")
        # A program can reset mtime, but not ctime.
        yield [str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def record_inputs(directory: Path, state: str | None) -> None:
    """Writes the state of the inputs of the finished run in `directory`. Ignores errors: they only make the next start
    slower."""
    with suppress(OSError, WeightstreamError):
        path = RunDirectory(path=directory).inputs
        if state is not None and (not path.exists() or read_json(path) != {"state": state}):
            write_json(path, {"state": state}, exclusive=False)


def find_finished(config: RunSettings, state: str | None) -> Outcome | None:
    """The outcome of a finished run with intact parts, if its inputs have the same `state` as when it finished.
    Otherwise None."""
    directory = RunDirectory(path=run_directory(config))
    try:
        if state is None or not directory.inputs.exists() or read_json(directory.inputs) != {"state": state}:
            return None
        run = RunReader(directory=directory, manifest=read_json(directory.manifest))
        if not run.is_planned or run.condition is not Condition.done or not is_finished(directory):
            return None
        passes = [row for block in sorted(run.parts) for row in run.read_passes(block)]
        rows, totals = read_json(directory.success)["rows"], read_json(directory.summary).get("totals")
    except (*PARQUET_PROBLEMS, WeightstreamError, LookupError):
        return None
    counts = cast("Mapping[Status, int]", rows)  # `is_finished` has verified the file's digest
    summary = summarize(passes, rows=counts, totals=totals if isinstance(totals, dict) else None)
    return Outcome(directory=directory.path, summary=summary, was_finished=True)
