"""Logging setup: what goes to stderr, and a run's log file, which has all details.

stderr shows a few lines and warnings. `run.log` in the run's directory also has debug records of this project: plan,
memory ledgers, search. Records before the directory is known are buffered.
"""

import logging
import os
import shlex
import socket
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import runtime
from runtime.config.settings import Parallelism
from runtime.errors import WeightstreamError
from runtime.ranks.launch import Launch

from .error_log import append_text
from .settings import LogLevel, RunSettings, run_directory, settings_warnings

log = logging.getLogger(__name__)
NOISY_LOGGERS = ("botocore", "aiobotocore")  # they log the signatures of object store requests


OWN_LOGGERS = ("runtime", "jobs")
MAX_BUFFERED = 1000  # records before a run's directory is known


class RunLog(logging.Handler):
    """Appends records to the log of the open run; buffers the latest ones while none is open. Each record is one write,
    so several processes can share a file. A file that cannot be written changes nothing for the run."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
        self._path: Path | None = None
        self._buffer = deque[str](maxlen=MAX_BUFFERED)

    def emit(self, record: logging.LogRecord) -> None:
        self._write(self.format(record))

    def open(self, path: Path) -> None:
        self._path, lines = path, [*self._buffer]
        self._buffer.clear()
        # The command at the end of the run may contain a secret address.
        words = ("on_end=..." if word.lstrip("+").startswith("on_end=") else word for word in sys.orig_argv[1:])
        command = shlex.join(words)
        self._write(f"# weightstream {runtime.__version__} on {socket.gethostname()}, process {os.getpid()}: {command}")
        for line in lines:
            self._write(line)

    def close_run(self) -> None:
        self._path = None

    def _write(self, line: str) -> None:
        if self._path is None:
            self._buffer.append(line)
            return
        with suppress(OSError):
            append_text(f"{line}\n", self._path)


RECORDS = RunLog()


@contextmanager
def run_log(path: Path) -> Iterator[None]:
    """Appends all log records to `path` while a run is open, and why it ended early."""
    RECORDS.open(path)
    try:
        yield
    except WeightstreamError as error:
        log.debug("%s: %s", type(error).__name__, error)
        raise
    finally:
        RECORDS.close_run()


def setup_logging(level: LogLevel, *, quiet: bool = False) -> None:
    """Logs to stderr with the time of each line, and also the date if stderr is not a terminal. Buffers all records of
    this project for `run_log`. `quiet`: nothing below warnings."""
    level = LogLevel.warning if quiet and level in (LogLevel.debug, LogLevel.info) else level
    logging.basicConfig(
        level=level.value.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S" if sys.stderr.isatty() else None,
        stream=sys.stderr,
        force=True,
    )
    root = logging.getLogger()
    for handler in root.handlers:
        handler.setLevel(root.level)  # without it, debug records of the loggers below would be shown
    root.addHandler(RECORDS)
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.DEBUG)
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def setup_plain_logging(level: LogLevel) -> None:
    """Logs to stderr without times, for short jobs."""
    logging.basicConfig(level=level.value.upper(), format="%(levelname)s %(message)s", stream=sys.stderr)


def log_start(log: logging.Logger, config: RunSettings) -> None:
    """Sets up logging; logs warnings about the settings, the model and the output directory. With several ranks, only
    rank 0 logs below warnings. Raises ConfigError if the device is missing."""
    launch = Launch.from_environment(os.environ) if config.devices.way is not Parallelism.one else None
    if launch is not None and launch.rank:
        setup_logging(LogLevel.warning)
        return
    setup_logging(config.log_level, quiet=config.quiet)
    if config.machine.device not in ("auto", "cpu") and config.num_workers == 1:
        from runtime.stream.device import choose_device  # torch

        choose_device(config.machine.device)
    for sentence in settings_warnings(config):
        log.warning("%s", sentence)
    log.info("opening %s; results go to %s", config.model.path or f"model={config.model.name}", run_directory(config))
