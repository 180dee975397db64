"""Runs the jobs of batches, one at a time, each in its own process; cancels jobs on request, and adopts jobs that an
earlier server started."""

import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.errors import ConfigError, DamagedRunError, WeightstreamError
from runtime.units import KIB

from ..config.words import quote
from ..datasets.openai_body import ENCODE_ENDPOINTS
from ..exporting.export import write_batch_files
from ..files.publishing import read_json
from ..record.run_dir import RunDirectory
from ..record.run_reader import is_locked
from .config import job_settings
from .store import RESULT_PURPOSE, BatchStore, JsonRecord

log = logging.getLogger(__name__)
POLL_SECONDS = 0.5
EXIT_INTERRUPTED = 75  # exit code of a resumable job
FINAL_EXIT_CODES = (2, 4, 70)  # permanent failures; 1 and 120 are Python's own, e.g. on a full disk
MAX_FAILURES, MAX_PAUSE_SECONDS = 20, 300.0  # failures without progress: about an hour, as pauses double from 1 s
MAX_MESSAGE = 2_000  # characters of a job's error in a record
LOG_TAIL_BYTES = 64 * KIB


@dataclass(frozen=True, kw_only=True)
class _RetryState:
    """Failures of a batch since its last progress. `num_tries`: all failed steps; `num_failures`: failed jobs only.
    `num_parts`: parts at the last failure. `retry_at`: monotonic time of the next try; void once `status` changes."""

    num_tries: int = 0
    num_failures: int = 0
    num_parts: int = 0
    retry_at: float = 0.0
    status: str = ""

    def seconds_left(self, batch: JsonRecord, now: float) -> float:
        return self.retry_at - now if batch["status"] == self.status else 0.0


class Keeper(threading.Thread):
    """Thread that runs batches until `stop`, the oldest first; a running job continues after `stop`. `settings`:
    overrides for every job; `encode.*` apply only to encode jobs. No exception ends the thread. Transient failures (a
    full disk, no descriptors, an interrupted or killed job) are retried after a pause, after the other batches."""

    def __init__(self, store: BatchStore, settings: list[str], output_root: Path):
        super().__init__(daemon=True, name="batches")
        self._store, self._settings, self._output_root = store, settings, output_root.absolute()
        self._stop_event, self._wake_event = threading.Event(), threading.Event()
        self._is_claimed, self._has_yielded = threading.Event(), threading.Event()
        self._current: str | None = None  # batch with the running job
        self._process: subprocess.Popen[bytes] | None = None  # None if an earlier server started the job
        self._log_start = 0  # offset of the current job's output in its log
        self._is_stop_requested = False  # the current job got a stop signal
        self._retry_states: dict[str, _RetryState] = {}

    def wake(self) -> None:
        """Notifies the thread of new work."""
        self._wake_event.set()

    def stop(self) -> None:
        self._stop_event.set()
        self._wake_event.set()

    def claim(self) -> None:
        """Interrupts the running job and starts none until `release`: single requests need the machine's memory."""
        self._is_claimed.set()
        self._wake_event.set()

    def release(self) -> None:
        self._is_claimed.clear()
        self._has_yielded.clear()
        self._wake_event.set()

    @property
    def has_yielded(self) -> bool:
        """True if no job runs, and none starts until `release`."""
        return self._has_yielded.is_set()

    @property
    def has_work(self) -> bool:
        return bool(self._store.unfinished_batches())

    def run(self) -> None:
        while not self._stop_event.is_set():
            self._wake_event.clear()  # before the step: a wake during it must not be lost
            try:
                seconds = self._step()
            except Exception as error:  # the thread must not end
                log.error("retrying all batches: %s", _format_error(error))
                seconds = POLL_SECONDS
            self._wake_event.wait(seconds)

    def _step(self) -> float | None:
        """Advances all batches. Returns the seconds until the next step; None to wait for `wake`."""
        unfinished = self._store.unfinished_batches()
        # An earlier server may have started the job of a batch.
        started = (batch for batch in unfinished if batch["status"] != "validating")
        running = next((batch for batch in unfinished if batch["id"] == self._current), None) or next(
            (batch for batch in started if self._is_running(batch)), None
        )
        now, waiting = time.monotonic(), [batch for batch in unfinished if batch is not running]
        waits = [self._retry_state(str(batch["id"])).seconds_left(batch, now) for batch in waiting]
        ready = [batch for batch, seconds in zip(waiting, waits, strict=True) if seconds <= 0]
        cancelling = [batch for batch in ready if batch["status"] == "cancelling" and not self._is_running(batch)]
        if running is not None:
            self._attempt(running)
        for batch in cancelling or (ready[:1] if running is None else []):
            self._attempt(batch)
        if self._is_claimed.is_set() and running is None and self._current is None:
            self._has_yielded.set()
        if self._current is not None or self._is_claimed.is_set():
            return POLL_SECONDS
        return 0.0 if ready or running is not None else min(waits, default=None)

    def _is_running(self, batch: JsonRecord) -> bool:
        """True if a job of the batch or another process in its run directory is running. Raises OSError."""
        return is_locked(self._store.log_path(str(batch["id"]))) or is_locked(self._run_directory(batch).lock)

    def _attempt(self, batch: JsonRecord) -> None:
        """Advances a batch by one step. Postpones the batch after a transient failure; fails it after a permanent one.
        Raises OutputError if the failure cannot be recorded."""
        id = str(batch["id"])
        try:
            self._advance(id, batch)
        except Exception as error:
            if id == self._current and (self._process is None or self._process.poll() is not None):
                self._current = self._process = None  # the next attempt reads the result from disk
            if isinstance(error, WeightstreamError) and error.exit_code != EXIT_INTERRUPTED:
                self._fail(id, str(error))
            else:
                self._postpone(batch, _format_error(error))

    def _advance(self, id: str, batch: JsonRecord) -> None:
        run, is_cancelled = self._run_directory(batch), batch["status"] == "cancelling"
        process = self._process if id == self._current else None
        code = process.poll() if process is not None else None
        # After our own job has ended, its workers may still hold the lock.
        is_running = self._is_running(batch) if process is None else code is None or is_locked(run.lock)
        if is_running:
            if id != self._current or code is not None:
                self._current, self._process, self._is_stop_requested = id, None, False
            if (is_cancelled or self._is_claimed.is_set()) and not self._is_stop_requested:
                self._is_stop_requested = _request_stop(self._process, run)
            return
        if run.success.exists():
            self._finish(id, run, "completed")
        elif is_cancelled:
            self._finish(id, run, "cancelled")
        elif code is None:
            if not self._is_claimed.is_set():
                self._start(id, batch)
            return
        elif code == EXIT_INTERRUPTED and self._is_stop_requested:
            log.info("%s: interrupted for single requests", id)
        else:
            message = last_error(self._store.log_path(id), self._log_start)
            if code in FINAL_EXIT_CODES and message is not None:
                self._fail(id, message)
            elif code < 0:
                self._retry(batch, run, f"its job was killed by signal {-code} ({signal.strsignal(-code)})")
            else:
                self._retry(
                    batch, run, message or f"exit code {code} without a message, see {self._store.log_path(id)}"
                )
        if id == self._current:
            self._current = self._process = None

    def _start(self, id: str, batch: JsonRecord) -> None:
        source = self._store.content_path(str(batch["input_file_id"]))
        if not source.is_file():
            raise ConfigError(f"the input file {batch['input_file_id']} is missing")
        overrides = [
            "dataset=openai_batch",
            f"dataset.path={quote(str(source.absolute()))}",
            f"run={id}",
            f"output_root={quote(str(self._output_root))}",
            "output_private=true",
        ]
        job = _job_name(batch)
        changes: JsonRecord = {"status": "in_progress", "in_progress_at": int(time.time())}
        record = self._store.update_batch(id, lambda record: changes if record["status"] == "validating" else {})
        if record["status"] != "in_progress":
            return  # cancelled meanwhile
        with self._store.log_path(id).open("ab") as log_file:
            self._log_start = log_file.tell()
            # The lock belongs to the open file: processes of the job hold it while this is their output, even after
            # the server has ended. So no second job starts before the first has locked its run.
            try:
                fcntl.flock(log_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # a job is running: the next step finds it
            except OSError:  # a file system without locks
                pass
            self._process = subprocess.Popen(
                # -P and a private cwd: no code or library settings from the current folder
                [sys.executable, "-P", "-m", f"jobs.{job}", *job_settings(job, self._settings), *overrides],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
                cwd=self._store.jobs,
                env=job_environment(),
            )
        self._current, self._is_stop_requested = id, False
        log.info("%s: job started", id)

    def _finish(self, id: str, run: RunDirectory, status: str) -> None:
        """Exports the finished rows as output files of the API and sets the status."""
        try:
            if run.manifest.exists():
                write_batch_files(run.path, partial=status == "cancelled")
        except ConfigError:
            if status == "completed":
                raise  # a cancelled run may have no rows
        files: JsonRecord = {}
        counts, tokens = {"completed": 0, "failed": 0}, {"prompt_tokens": 0, "completion_tokens": 0}
        results = {"output": (run.batch_output, "completed"), "errors": (run.batch_errors, "failed")}
        for kind, (path, count) in results.items():
            if path.exists() and path.stat().st_size:
                file_id = f"{id.replace('batch_', 'file-')}-{kind}"
                self._store.add_file(file_id, path, f"{id}_{kind}.jsonl", RESULT_PURPOSE)
                files["output_file_id" if kind == "output" else "error_file_id"] = file_id
                with path.open("rb") as lines:
                    for line in lines:
                        counts[count] += 1
                        body = (json.loads(line).get("response") or {}).get("body") or {}
                        for name in tokens:
                            tokens[name] += (body.get("usage") or {}).get(name, 0)
        recorded = (self._store.batch(id) or {}).get("request_counts")
        total = recorded.get("total") if isinstance(recorded, dict) else 0
        counts["total"] = max(sum(counts.values()), total if isinstance(total, int) else 0)
        self._store.set_status(id, status, request_counts={**counts}, tokens=tokens, **files)
        self._retry_states.pop(id, None)
        log.info("%s: %s", id, status)

    def _fail(self, id: str, message: str) -> None:
        problem: JsonRecord = {"code": "job_failed", "message": message[:MAX_MESSAGE], "line": None, "param": None}
        self._store.set_status(id, "failed", errors={"object": "list", "data": [problem]})
        self._retry_states.pop(id, None)
        log.error("%s failed: %s", id, message)

    def _retry(self, batch: JsonRecord, run: RunDirectory, reason: str) -> None:
        """Postpones an interrupted or killed job; fails it after `MAX_FAILURES` without progress."""
        id = str(batch["id"])
        state, num_parts = self._retry_state(id), sum(1 for _ in run.generations.glob("part-*"))
        if num_parts > state.num_parts:
            state = _RetryState(num_parts=num_parts)
        state = self._retry_states[id] = replace(state, num_failures=state.num_failures + 1)
        if state.num_failures < MAX_FAILURES:
            self._postpone(batch, reason)
        else:
            self._fail(id, f"its job ended {MAX_FAILURES} times without progress; the last time: {reason}")

    def _postpone(self, batch: JsonRecord, reason: str) -> None:
        id = str(batch["id"])
        state = self._retry_state(id)
        pause = min(2.0 ** min(state.num_tries, 10), MAX_PAUSE_SECONDS)
        self._retry_states[id] = replace(
            state, num_tries=state.num_tries + 1, retry_at=time.monotonic() + pause, status=str(batch["status"])
        )
        log.warning("%s: retry in %.0f s: %s", id, pause, reason)

    def _retry_state(self, id: str) -> _RetryState:
        return self._retry_states.get(id, _RetryState())

    def _run_directory(self, batch: JsonRecord) -> RunDirectory:
        return RunDirectory(path=self._output_root / _job_name(batch) / str(batch["id"]))


def job_environment() -> dict[str, str]:
    """The environment of a process in another directory that must import the same code as this one."""
    paths = [str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    root = Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):  # a checkout that may not be installed
        paths.append(str(root))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _job_name(batch: JsonRecord) -> str:
    """Name of the job that serves the batch's endpoint; also the folder of its runs."""
    return "encode" if batch["endpoint"] in ENCODE_ENDPOINTS else "generate"


def _request_stop(job: "subprocess.Popen[bytes] | None", run: RunDirectory) -> bool:
    """Sends SIGTERM: the job stops at the end of its pass. Returns False if it is not ready for signals yet."""
    with suppress(OSError, DamagedRunError):
        if not is_locked(run.lock):
            return False  # it may not handle signals before it locks the run
        if job is not None:
            job.terminate()
            return True
        holder = read_json(run.lock)
        pid = holder.get("pid")
        if holder.get("host") == socket.gethostname() and isinstance(pid, int) and pid > 0:
            os.kill(pid, signal.SIGTERM)
            return True
    return False


def last_error(path: Path, start: int) -> str | None:
    """The last error in a job's log after `start`; None without one, e.g. after a full disk."""
    with path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        for line in reversed(file.read().decode("utf-8", errors="replace").splitlines()):
            if line.startswith(("error: ", "interrupted: ")):
                return line.partition(": ")[2]
    return None


def _format_error(error: Exception) -> str:
    """The message of an expected error; the traceback of others."""
    if isinstance(error, OSError | WeightstreamError):
        return str(error)
    return "".join(traceback.format_exception(error))
