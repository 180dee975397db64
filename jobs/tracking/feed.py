"""Sends the curves of a run to the process that reports it; never waits for that process before the run has ended."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..config.settings import Tracker
from ..config.signals import StopFlag
from ..record.passes import PassRow, Start, Status
from .curves import Curves
from .reporter import end_seconds

log = logging.getLogger(__name__)
MODULE = "jobs.tracking.reporter"
EXIT_SECONDS = 10.0  # to end by itself, after `end_seconds`
POLL_SECONDS, QUIET_SECONDS = 0.05, 3.0
ROOT = Path(__file__).resolve().parents[2]


class RunFeed:
    """Curves of the passes of this process. Does nothing without `track` and `metrics_file`. `directory`: of the run,
    the chat or the evaluation."""

    def __init__(
        self,
        directory: Path = Path(),
        track: Sequence[Tracker] = (),
        metrics_file: str | None = None,
        start: Start | None = None,
    ):
        self._directory, self._track, self._metrics_file = directory, track, metrics_file
        self._start = start or Start()
        self._curves = Curves()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._num_before = self._errors_before = 0  # rows and bad rows of finished windows and runs

    @property
    def is_enabled(self) -> bool:
        return bool(self._track) or self._metrics_file is not None

    def open(self, *, is_shared: bool) -> None:
        """Starts the process, once; the run's directory exists. `is_shared`: other processes work on the run too."""
        if not self.is_enabled or self._process is not None:
            return
        settings = {
            "directory": str(self._directory),
            "track": [tracker.value for tracker in self._track],
            "metrics_file": self._metrics_file,
            "worker": f"{socket.gethostname()}-{os.getpid()}" if is_shared else None,
            "started_at": self._start.at,
        }
        # -P: no code of the current directory. A session of its own: Ctrl-C in a terminal stops the run alone.
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )
        except OSError as error:
            log.warning("track and metrics_file: cannot start their process (%s); the run goes on without them", error)
            self._track, self._metrics_file = (), None
            return
        assert self._process.stdin is not None, "is a pipe"
        os.set_blocking(self._process.stdin.fileno(), False)
        self._reader = threading.Thread(target=self._log_events, name="feed-events", daemon=True)
        self._reader.start()

    def expect(self, num_rows: int, num_done: int, num_errors: int | None = None) -> None:
        """Sets the planned and committed rows of the current window; `num_errors`: bad ones among these, if known."""
        self._curves.num_rows = self._num_before + num_rows
        self._curves.num_done = self._num_before + num_done
        if num_errors is not None:
            self._curves.num_errors = self._errors_before + num_errors

    def end_window(self) -> None:
        """Ends the current window, or run of an evaluation: rows of the next one are added."""
        self._num_before, self._errors_before = self._curves.num_rows, self._curves.num_errors

    def finish_row(self, status: Status) -> None:
        self._curves.num_done += 1
        self._curves.num_errors += status == "error"

    def advance(self, row: PassRow) -> None:
        """Counts a pass; call it after `finish_row` for the rows that ended in it."""
        if self._process is None:
            return
        self._curves.add(row)
        now = time.time()
        if self._curves.is_due(now):
            self._send({"at": now, "values": self._curves.take_point(now)})

    def close(self, status: str, exit_code: int) -> None:
        """Sends the last point and the end, and waits until all is sent, time is up, or a stop signal arrives."""
        process, now = self._process, time.time()
        if process is None or process.stdin is None:
            return
        begin, limit = time.monotonic(), end_seconds(status) + EXIT_SECONDS
        messages = [{"at": now, "values": self._curves.take_point(now)}, {"status": status, "exit_code": exit_code}]
        is_announced = False
        with StopFlag() as stop:
            while process.poll() is None and time.monotonic() - begin < limit and not stop.requested:
                while messages and self._send(messages[0]):
                    del messages[0]
                if not messages and not process.stdin.closed:
                    with suppress(OSError):
                        process.stdin.close()
                if not is_announced and time.monotonic() - begin > QUIET_SECONDS:
                    log.info("sending the rest to track and metrics_file, for up to %g s", limit)
                    is_announced = True
                time.sleep(POLL_SECONDS)
        if process.poll() is None:
            log.warning("track and metrics_file: not all was sent within %g s", time.monotonic() - begin)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if self._reader is not None:
            self._reader.join(1.0)
        self._process = None

    def _send(self, message: dict[str, object]) -> bool:
        """Returns False if the pipe is full: the point is dropped, and the next one has its sums."""
        assert self._process is not None, "open"
        assert self._process.stdin is not None, "is a pipe"
        try:
            # Shorter than PIPE_BUF, hence written whole or not at all.
            os.write(self._process.stdin.fileno(), json.dumps(message).encode() + b"\n")
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # it has ended or was closed; the thread below has logged it
            return True
        return True

    def _log_events(self) -> None:
        process = self._process
        assert process is not None, "open"
        assert process.stdout is not None, "is a pipe"
        for line in process.stdout:
            event = json.loads(line)
            if "problem" in event:
                log.warning("%s: %s; the run does not depend on it", event["target"], event["problem"])
            else:
                log.info("%s: %s", event["target"], event["location"])
        if process.wait():
            log.warning("track and metrics_file: their process ended with exit code %d", process.returncode)
