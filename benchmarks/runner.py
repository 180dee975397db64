"""Runs measurements in separate processes (workers), so that none is affected by an earlier one.

A worker of Weightstream runs with this Python. A worker of a peer runs with the Python of the peer's virtual
environment, which is created on first use with pinned versions.
"""

import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event, Timer
from types import FrameType
from typing import Any

from jobs.config.process import tuned_environment
from runtime.cache_root import cache_root
from runtime.errors import WeightstreamError
from runtime.measure.machine_cache import cpu_flags

from .contenders import Isolation, Peer
from .instruction_sets import cmake_arguments, restriction
from .task import BenchmarkTask, Result
from .worker import REFUSED

log = logging.getLogger(__name__)

ERROR = re.compile(r"(\[\w+\]: )?[\w.]*(Error|Exception)\b")  # the last line of a traceback begins like this


@dataclass(frozen=True, kw_only=True)
class TimeLimit:
    """The seconds that a worker may take, and the message of the error if it takes longer."""

    seconds: float
    message: str


@dataclass(frozen=True, kw_only=True)
class WorkerProcess:
    """A process that calls `answers` of `module` with `question`. `name`: its name in errors. `environment`: its
    variables; None: those of jobs. `hides_stderr`: stderr is not shown, only used for the error message."""

    name: str
    module: str
    question: Mapping[str, object]
    python: str = sys.executable
    environment: Mapping[str, str] | None = None
    limit: TimeLimit | None = None
    hides_stderr: bool = False

    def lines(self) -> Iterator[str]:
        """Yields each answer, a line of JSON, as soon as it is written. Kills the process and its children at the end,
        also if the iterator is closed early. Raises WeightstreamError if the process fails or exceeds its limit."""
        command = [self.python, "-m", "benchmarks.worker", self.module, json.dumps(self.question)]
        environment = tuned_environment(os.environ) if self.environment is None else self.environment
        with (
            _exit_on_sigterm(),
            TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr,
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr if self.hides_stderr else None,
                text=True,
                env=environment,
                start_new_session=True,
            ) as process,
        ):
            assert process.stdout is not None, "it is a pipe"
            try:
                with _kill_after(self.limit, process.pid) as is_late:
                    yield from process.stdout
                    process.wait()
            finally:
                _kill_session(process.pid)  # also the worker's children, which would keep memory and cores busy
            stderr.seek(0)
            errors = stderr.read()
        if self.limit is not None and is_late.is_set():
            raise WeightstreamError(f"{self.name} {self.limit.message}")
        if process.returncode:
            raise WeightstreamError(f"{self.name} {format_failure(process.returncode, errors)}")


def ask_worker(module: str, question: Mapping[str, object]) -> dict[str, Any]:
    """Returns the last answer of `module` in a separate process. Raises WeightstreamError if it fails."""
    return json.loads(list(WorkerProcess(name=module, module=module, question=question).lines())[-1])


def run_measurement(task: BenchmarkTask) -> Result:
    """Runs a task in a separate process. Raises WeightstreamError if it fails or exceeds its limit."""
    peer = task.entry if isinstance(task.entry, Peer) else None
    limit = None
    if task.limit_minutes is not None:
        message = f"took longer than peer_minutes={task.limit_minutes:g}"
        limit = TimeLimit(seconds=60 * task.limit_minutes, message=message)
    worker = WorkerProcess(
        name=f"contender {task.contender}",
        module="benchmarks.measure",
        question=asdict(task),
        environment=None if peer is None else dict(os.environ),
        limit=limit,
        hides_stderr=peer is not None or task.is_check,
    )
    if peer is not None and peer.isolation is not None:
        worker = _isolate(worker, task, peer.isolation)
    return Result(**json.loads(list(worker.lines())[-1]))


def _isolate(worker: WorkerProcess, task: BenchmarkTask, isolation: Isolation) -> WorkerProcess:
    """The worker in the peer's environment: its Python, its GGUF file, and variables that libraries read when they are
    loaded."""
    python = install_environment(isolation)
    libraries = {"OMP_NUM_THREADS": str(task.num_threads), "TOKENIZERS_PARALLELISM": "false"}
    if isolation.preloaded:
        folder = python.parent.parent / "lib"
        libraries["LD_PRELOAD"] = ":".join(str(folder / name) for name in isolation.preloaded)
    if isolation.gguf_kind is not None:
        task = replace(task, path=str(_export_gguf(Path(task.path), isolation.gguf_kind)))
    return replace(
        worker,
        module=isolation.module,
        question=asdict(task),
        python=str(python),
        environment=dict(os.environ) | libraries,
    )


def install_environment(isolation: Isolation) -> Path:
    """Returns the Python of the peer's environment. Installs it on first use. Raises WeightstreamError with pip's
    message."""
    build = _build_environment(isolation)
    parts = (sys.version, *isolation.requirements, *isolation.unwanted, *build.values())
    key = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]
    folder = cache_root() / "peers" / f"{isolation.name}-{key}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        requirements = ", ".join(isolation.requirements)
        log.warning("installing %s into %s, once; this may compile for minutes", requirements, folder)
        venv.create(folder, with_pip=True, clear=True)
        # pip's cache ignores CMAKE_ARGS: without --no-cache-dir it may install a build for another instruction set
        _pip(python, isolation, "install", *(["--no-cache-dir"] if build else []), *isolation.requirements)
        if isolation.unwanted:
            _pip(python, isolation, "uninstall", "--yes", *isolation.unwanted)
        ready.touch()  # last: an interrupted installation is repeated
    return python


def _build_environment(isolation: Isolation) -> dict[str, str]:
    """Environment variables for pip that restrict what it compiles to an instruction set; empty without a
    restriction."""
    isa = restriction()
    if isa is None or not isolation.is_built_here:
        return {}
    return {"CMAKE_ARGS": " ".join(cmake_arguments(isa, cpu_flags()))}


def _pip(python: Path, isolation: Isolation, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--quiet", *arguments]
    environment = {**os.environ, **_build_environment(isolation)}
    completed = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if completed.returncode:
        last = " / ".join(completed.stderr.strip().splitlines()[-3:])
        raise WeightstreamError(f"pip cannot install {', '.join(isolation.requirements)}: {last}")


def _export_gguf(checkpoint: Path, kind: str) -> Path:
    """The checkpoint as a GGUF file, written once."""
    from .peers.gguf_export import export_gguf  # imports torch

    target = gguf_path(checkpoint, kind)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        export_gguf(checkpoint, target, kind)
    return target


def gguf_path(checkpoint: Path, kind: str) -> Path:
    """The path of a checkpoint's GGUF file in the cache. It changes when a file of the checkpoint changes."""
    files = sorted(file for file in checkpoint.iterdir() if file.is_file())
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(repr(state).encode()).hexdigest()[:12]
    return cache_root() / "peers" / f"{checkpoint.name}-{digest}-{kind}.gguf"


@contextmanager
def _kill_after(limit: TimeLimit | None, session: int) -> Iterator[Event]:
    """Kills all processes of a session when the limit has passed, and sets the event."""
    is_late = Event()

    def end() -> None:
        is_late.set()
        _kill_session(session)

    timer = Timer(limit.seconds, end) if limit is not None else None
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield is_late
    finally:
        if timer is not None:
            timer.cancel()


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turns SIGTERM into SystemExit, so that `finally` kills the worker. The worker has a session of its own and does
    not get this process's signals."""

    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _kill_session(session: int) -> None:
    try:
        os.killpg(session, signal.SIGKILL)
    except ProcessLookupError:
        return  # all have exited


def format_failure(exit_code: int, stderr: str) -> str:
    """The reason why a worker failed, in one line: Weightstream's error, or the last error in stderr."""
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    lines = stderr.strip().splitlines() or ["see above"]
    if refusals := [number for number, line in enumerate(lines) if line.startswith(REFUSED)]:
        return f"cannot run: {'; '.join(map(str.strip, lines[refusals[-1] :])).removeprefix(REFUSED)}"
    error = next((line for line in reversed(lines) if ERROR.match(line)), lines[-1])
    return f"failed with exit code {exit_code}: {error}"
