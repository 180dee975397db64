"""Runs the job of each batch, one at a time, in its own process; cancels jobs on request, and finds jobs that an
earlier server started.
"""

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

from ..config.cli import quote
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
MAX_FAILURES, MAX_PAUSE_SECONDS = 20, 300.0  # without progress: an hour in all, pauses double from 1 s
MAX_MESSAGE = 2_000  # characters of a job's error that a record keeps
LOG_TAIL_BYTES = 64 * KIB


@dataclass(frozen=True, kw_only=True)
class _RetryState:
    """Failures of a batch since it last made progress. `num_failures`: exits of its job, limited by `MAX_FAILURES`.
    `retry_at`: monotonic time of the next try; ignored if the status has changed since."""

    num_tries: int = 0
    num_failures: int = 0
    num_parts: int = 0
    retry_at: float = 0.0
    status: str = ""

    def seconds_left(self, batch: JsonRecord, now: float) -> float:
        return self.retry_at - now if batch["status"] == self.status else 0.0


class Keeper(threading.Thread):
    """Thread that runs batches until `stop`, the oldest first; a running job continues after it. `settings`: overrides
    for every job; those of `encode.*` apply only to encode jobs.

    No exception ends the thread. Transient failures (a full disk, no descriptors, an interrupted or killed job) are
    retried after a pause, after the other batches.
    """

    def __init__(self, store: BatchStore, settings: list[str], output_root: Path):
        super().__init__(daemon=True, name="batches")
        self._store, self._settings, self._output_root = store, settings, output_root.absolute()
        self._stop_event, self._wake_event = threading.Event(), threading.Event()
        self._current: str | None = None  # the batch whose job runs
        self._process: subprocess.Popen[bytes] | None = None  # None if an earlier server started the job
        self._log_start = 0  # offset of the current job's output in its log
        self._is_stop_requested = False  # the job of the current one has been asked to stop
        self._retry_states: dict[str, _RetryState] = {}

    def wake(self) -> None:
        """Notifies the thread of new work."""
        self._wake_event.set()

    def stop(self) -> None:
        self._stop_event.set()
        self._wake_event.set()

    def run(self) -> None:
        while not self._stop_event.is_set():
            self._wake_event.clear()
            try:
                seconds = self._step()
            except Exception as error:  # whatever it is: the other batches can still be done
                log.error("batches are looked at again: %s", _format_error(error))
                seconds = POLL_SECONDS
            self._wake_event.wait(seconds)

    def _step(self) -> float | None:
        """Does all work that is due. Returns the seconds until the next step; None to wait for `wake`."""
        left = self._store.unfinished_batches()
        begun = (batch for batch in left if batch["status"] != "validating")  # whose job may run unknown to this server
        running = next((batch for batch in left if batch["id"] == self._current), None) or next(
            (batch for batch in begun if self._is_running(batch)), None
        )
        now, waiting = time.monotonic(), [batch for batch in left if batch is not running]
        waits = [self._retry_state(str(batch["id"])).seconds_left(batch, now) for batch in waiting]
        ready = [batch for batch, seconds in zip(waiting, waits, strict=True) if seconds <= 0]
        cancelling = [batch for batch in ready if batch["status"] == "cancelling" and not self._is_running(batch)]
        if running is not None:
            self._attempt(running)
        for batch in cancelling or (ready[:1] if running is None else []):
            self._attempt(batch)
        if self._current is not None:
            return POLL_SECONDS
        return 0.0 if ready or running is not None else min(waits, default=None)

    def _is_running(self, batch: JsonRecord) -> bool:
        """True if a process works on the batch: its job, or any other process in its run directory. Raises OSError."""
        return is_locked(self._store.log_path(str(batch["id"]))) or is_locked(self._run_directory(batch).lock)

    def _attempt(self, batch: JsonRecord) -> None:
        """Advances a batch by one step. Postpones it after a transient failure; fails it after any other. Raises
        OutputError if that cannot be recorded."""
        id = str(batch["id"])
        try:
            self._advance(id, batch)
        except Exception as error:
            if id == self._current and (self._process is None or self._process.poll() is not None):
                self._current = self._process = None  # the next attempt finds on disk what it has come to
            if isinstance(error, WeightstreamError) and error.exit_code != EXIT_INTERRUPTED:
                self._fail(id, str(error))
            else:
                self._postpone(batch, _format_error(error))

    def _advance(self, id: str, batch: JsonRecord) -> None:
        run, is_cancelled = self._run_directory(batch), batch["status"] == "cancelling"
        process = self._process if id == self._current else None
        code = process.poll() if process is not None else None
        # of our own job, which has ended: workers that it left behind
        is_running = self._is_running(batch) if process is None else code is None or is_locked(run.lock)
        if is_running:
            if id != self._current or code is not None:
                self._current, self._process, self._is_stop_requested = id, None, False
            if is_cancelled and not self._is_stop_requested:
                self._is_stop_requested = _request_stop(self._process, run)
            return
        if run.success.exists():
            self._finish(id, run, "completed")
        elif is_cancelled:
            self._finish(id, run, "cancelled")
        elif code is None:
            self._start(id, batch)
            return
        else:
            words = _last_error(self._store.log_path(id), self._log_start)
            if code in FINAL_EXIT_CODES and words is not None:
                self._fail(id, words)
            elif code < 0:
                self._retry(batch, run, f"its job was killed by signal {-code} ({signal.strsignal(-code)})")
            else:
                self._retry(batch, run, words or f"exit code {code} without a word, see {self._store.log_path(id)}")
        if id == self._current:
            self._current = self._process = None

    def _start(self, id: str, batch: JsonRecord) -> None:
        source = self._store.content_path(str(batch["input_file_id"]))
        if not source.is_file():
            raise ConfigError(f"its file {batch['input_file_id']} is gone")
        own = [
            "dataset=openai_batch",
            f"dataset.path={quote(str(source.absolute()))}",
            f"run={id}",
            f"output_root={quote(str(self._output_root))}",
            "output_private=true",
        ]
        job = _job_name(batch)
        # a job elsewhere imports the same code as this process
        paths = [str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        root = Path(__file__).resolve().parents[2]
        if root.name not in ("site-packages", "dist-packages"):  # a checkout, which need not be installed
            paths.append(str(root))
        begun: JsonRecord = {"status": "in_progress", "in_progress_at": int(time.time())}
        now = self._store.update_batch(id, lambda record: begun if record["status"] == "validating" else {})
        if now["status"] != "in_progress":
            return  # cancelled in the meantime
        with self._store.log_path(id).open("ab") as log_file:
            self._log_start = log_file.tell()
            # Race: the lock belongs to the open file, so it is held for as long as a process of the job has this as its
            # output, the server's end included: no second job begins, also before the first has locked its run.
            try:
                fcntl.flock(log_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # it runs: the next step finds it
            except OSError:  # a file system without locks
                pass
            self._process = subprocess.Popen(
                # -P and a folder of ours: the current folder holds no code for the job, nor a library's settings
                [sys.executable, "-P", "-m", f"jobs.{job}", *job_settings(job, self._settings), *own],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
                cwd=self._store.jobs,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        self._current, self._is_stop_requested = id, False
        log.info("%s begins", id)

    def _finish(self, id: str, run: RunDirectory, status: str) -> None:
        """Exports the finished rows as output files of the API."""
        try:
            if run.manifest.exists():
                write_batch_files(run.path, partial=status == "cancelled")
        except ConfigError:
            if status == "completed":
                raise
            # nothing is done yet
        found: JsonRecord = {}
        counts, tokens = {"completed": 0, "failed": 0}, {"prompt_tokens": 0, "completion_tokens": 0}
        pairs = {"output": (run.batch_output, "completed"), "errors": (run.batch_errors, "failed")}
        for kind, (path, count) in pairs.items():
            if path.exists() and path.stat().st_size:
                file_id = f"{id.replace('batch_', 'file-')}-{kind}"
                self._store.add_file(file_id, path, f"{id}_{kind}.jsonl", RESULT_PURPOSE)
                found["output_file_id" if kind == "output" else "error_file_id"] = file_id
                with path.open("rb") as lines:
                    for line in lines:
                        counts[count] += 1
                        body = (json.loads(line).get("response") or {}).get("body") or {}
                        for name in tokens:
                            tokens[name] += (body.get("usage") or {}).get(name, 0)
        known = (self._store.batch(id) or {}).get("request_counts")
        total = known.get("total") if isinstance(known, dict) else 0
        counts["total"] = max(sum(counts.values()), total if isinstance(total, int) else 0)
        self._store.set_status(id, status, request_counts={**counts}, tokens=tokens, **found)
        self._retry_states.pop(id, None)
        log.info("%s is %s", id, status)

    def _fail(self, id: str, message: str) -> None:
        problem: JsonRecord = {"code": "job_failed", "message": message[:MAX_MESSAGE], "line": None, "param": None}
        self._store.set_status(id, "failed", errors={"object": "list", "data": [problem]})
        self._retry_states.pop(id, None)
        log.error("%s has failed: %s", id, message)

    def _retry(self, batch: JsonRecord, run: RunDirectory, reason: str) -> None:
        """Restarts an interrupted or killed job, as long as it makes progress."""
        id = str(batch["id"])
        trouble, num_parts = self._retry_state(id), sum(1 for _ in run.generations.glob("part-*"))
        if num_parts > trouble.num_parts:
            trouble = _RetryState(num_parts=num_parts)
        trouble = self._retry_states[id] = replace(trouble, num_failures=trouble.num_failures + 1)
        if trouble.num_failures < MAX_FAILURES:
            self._postpone(batch, reason)
        else:
            self._fail(id, f"its job ended {MAX_FAILURES} times without getting further; the last time: {reason}")

    def _postpone(self, batch: JsonRecord, reason: str) -> None:
        id = str(batch["id"])
        trouble = self._retry_state(id)
        pause = min(2.0 ** min(trouble.num_tries, 10), MAX_PAUSE_SECONDS)
        self._retry_states[id] = replace(
            trouble, num_tries=trouble.num_tries + 1, retry_at=time.monotonic() + pause, status=str(batch["status"])
        )
        log.warning("%s is tried again in %.0f s: %s", id, pause, reason)

    def _retry_state(self, id: str) -> _RetryState:
        return self._retry_states.get(id, _RetryState())

    def _run_directory(self, batch: JsonRecord) -> RunDirectory:
        return RunDirectory(path=self._output_root / _job_name(batch) / str(batch["id"]))


def _job_name(batch: JsonRecord) -> str:
    """Name of the job that serves the batch's endpoint; also the folder of its runs."""
    return "encode" if batch["endpoint"] in ENCODE_ENDPOINTS else "generate"


def _request_stop(job: "subprocess.Popen[bytes] | None", run: RunDirectory) -> bool:
    """Asks a job to stop after its current pass. Returns False if it is not ready for signals yet."""
    with suppress(OSError, DamagedRunError):
        if not is_locked(run.lock):
            return False  # it has not seen to stop signals yet
        if job is not None:
            job.terminate()
            return True
        holder = read_json(run.lock)
        pid = holder.get("pid")
        if holder.get("host") == socket.gethostname() and isinstance(pid, int) and pid > 0:
            os.kill(pid, signal.SIGTERM)
            return True
    return False


def _last_error(path: Path, start: int) -> str | None:
    """Returns the last error in a job's log after `start`; None if there is none, e.g. after a full disk."""
    with path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        for line in reversed(file.read().decode("utf-8", errors="replace").splitlines()):
            if line.startswith(("error: ", "interrupted: ")):
                return line.partition(": ")[2]
    return None


def _format_error(error: Exception) -> str:
    """Formats an error, with a traceback if it was unexpected."""
    if isinstance(error, OSError | WeightstreamError):
        return str(error)
    return "".join(traceback.format_exception(error))
