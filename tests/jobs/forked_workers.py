"""Workers of the benchmarks that are forked off a process which has loaded the libraries, where what they measure is
tested and not that a Python starts; `test_bench_gpu.py` and `test_bench_evaluation.py` start one.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Self

from benchmarks.worker import respond
from tests.processes import PROCESSES


class ForkedWorker:
    """In the place of `subprocess.Popen`, for the command of a worker."""

    processes = PROCESSES

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: int,
        stderr: None = None,
        text: bool = False,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ):
        assert [*command[:3]] == [sys.executable, "-m", "benchmarks.worker"]
        here, there = self.processes.Pipe(duplex=False)
        self._process = self.processes.Process(target=_work, args=(command[3:], dict(env or {}), there))
        self._process.start()
        there.close()
        self.stdout = os.fdopen(os.dup(here.fileno()), encoding="utf-8")
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()

    def wait(self) -> int:
        self._process.join()
        return self.returncode

    @property
    def returncode(self) -> int:
        assert self._process.exitcode is not None
        return self._process.exitcode


def _work(arguments: Sequence[str], environment: Mapping[str, str], there: Connection) -> None:
    os.setsid()
    os.environ.update(environment)
    # A worker that starts others does so before it computes.
    ForkedWorker.processes = multiprocessing.get_context("fork")
    subprocess.Popen = ForkedWorker
    with os.fdopen(os.dup(there.fileno()), "w", encoding="utf-8") as out:
        respond(arguments, out)
