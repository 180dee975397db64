"""The process that reports a run to trackers and into a metrics file, started by `feed.py`: neither their packages, nor
their waiting for a network, nor their failures touch the run.

Reads a message of JSON per line, `values` with `at`, and `status` with `exit_code` at the end; without an end the run
was killed. Writes a line per event: `target` and `problem` or `location`.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .metrics_file import MetricsFile
from .trackers import TRACKERS, RunTracker, TrackedRun

# For what has not been sent when the run ends. Less for a run that was interrupted: a scheduler may kill it soon, and
# the next start goes on in the same run of the tracker.
END_SECONDS, INTERRUPTED_SECONDS = 60.0, 20.0
KILLED = {"status": "killed", "exit_code": None}
MAX_PROBLEM_CHARS = 500
Report = Callable[[Mapping[str, str]], None]


class Target(threading.Thread):
    """A tracker or the metrics file, in a thread of its own: one that waits does not keep the others waiting. Reports
    its first problem and, if it cannot be opened, ignores all messages."""

    def __init__(self, name: str, opener: Callable[[], RunTracker], report: Report):
        super().__init__(name=name, daemon=True)
        self._opener, self._report = opener, report
        self._has_problem = False
        self.messages: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()

    def run(self) -> None:
        try:
            tracker = self._opener()
        except BaseException as error:  # SystemExit too: packages of others raise what they like
            self._report_problem(error)
            return
        if tracker.location:
            self._report({"target": self.name, "location": tracker.location})
        while True:
            message = self.messages.get()
            try:
                if "status" in message:
                    tracker.finish(message["status"], message["exit_code"])
                    return
                tracker.log(message["values"], message["at"])
            except BaseException as error:
                self._report_problem(error)
                if "status" in message:
                    return

    def _report_problem(self, error: BaseException) -> None:
        if not self._has_problem:
            self._has_problem = True
            self._report({"target": self.name, "problem": describe(error)})


def end_seconds(status: str) -> float:
    return INTERRUPTED_SECONDS if status == "interrupted" else END_SECONDS


def describe(error: BaseException) -> str:
    """The error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[:MAX_PROBLEM_CHARS]


def main() -> None:
    """Runs until the run has ended and all is sent, at most `end_seconds` later."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # Slurm signals all processes
        signal.signal(number, signal.SIG_IGN)
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # packages print
        os.dup2(null, descriptor)
    mutex = threading.Lock()

    def report(event: Mapping[str, str]) -> None:
        with mutex:
            try:
                output.write(json.dumps(event) + "\n")
                output.flush()
            except OSError:  # the run was killed
                return

    settings = json.loads(sys.argv[1])
    try:
        run = TrackedRun.open(Path(settings["directory"]), worker=settings["worker"], started_at=settings["started_at"])
    except Exception as error:
        report({"target": "track", "problem": describe(error)})
        return
    openers: dict[str, Callable[[], RunTracker]] = {}
    for name in settings["track"]:
        openers[f"track={name}"] = partial(TRACKERS[name], run)
    if (path := settings["metrics_file"]) is not None:
        openers[f"metrics_file={path}"] = lambda: MetricsFile(Path(path), run)
    targets = [Target(name, opener, report) for name, opener in openers.items()]
    for target in targets:
        target.start()
    end: Mapping[str, Any] = KILLED
    for line in sys.stdin:
        message = json.loads(line)
        if "status" in message:
            end = message
            break
        for target in targets:
            target.messages.put(message)
    limit = end_seconds(end["status"])
    deadline = time.monotonic() + limit
    for target in targets:
        target.messages.put(end)
    for target in targets:
        target.join(max(0.0, deadline - time.monotonic()))
        if target.is_alive():
            report({"target": target.name, "problem": f"not all was sent within {limit:g} s after the run"})
    os._exit(0)  # threads of packages may still wait for a network


if __name__ == "__main__":
    main()
