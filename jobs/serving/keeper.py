"""Runs the job of each batch, one after another, in a process of its own; ends it on request, and finds one again that
an earlier server started.
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
EXIT_INTERRUPTED = 75  # the exit code of a job that can go on
FINAL_EXIT_CODES = (2, 4, 70)  # of one that would end so again; 1 and 120 are Python's, where a message finds no room
MAX_FAILURES, MAX_PAUSE_SECONDS = 20, 300.0  # of a job that gets no further: an hour in all, as pauses double from 1 s
MAX_MESSAGE = 2_000  # characters of a job's error that a record keeps
LOG_TAIL_BYTES = 64 * KIB


@dataclass(frozen=True, kw_only=True)
class _RetryState:
    """Failures of a batch since it last got further. `num_ends`: of its job alone, that many of which are too many.
    `until`: when it is tried again, by the monotonic clock, unless its status is another one by then."""

    num_tries: int = 0
    num_failures: int = 0
    num_parts: int = 0
    retry_at: float = 0.0
    status: str = ""

    def seconds_left(self, batch: JsonRecord, now: float) -> float:
        return self.retry_at - now if batch["status"] == self.status else 0.0


class Keeper(threading.Thread):
    """Brings batches to their end until `stop`, the oldest first; a job that runs then goes on without it. `settings`:
    of every job, as its command line has them, those of `encode.*` of the jobs that encode.

    No exception ends the thread. What can pass (a full disk, no descriptors, a job that was interrupted or killed) is
    tried again after a pause, behind the other batches."""

    def __init__(self, store: BatchStore, settings: list[str], output_root: Path):
        super().__init__(daemon=True, name="batches")
        self._store, self._settings, self._output_root = store, settings, output_root.absolute()
        self._stop_event, self._wake_event = threading.Event(), threading.Event()
        self._current: str | None = None  # the batch whose job runs
        self._process: subprocess.Popen[bytes] | None = None  # of the current one; None where an earlier server's runs
        self._log_start = 0  # where the words of the current one's job begin
        self._is_stop_requested = False  # the job of the current one has been asked to stop
        self._retry_states: dict[str, _RetryState] = {}

    def wake(self) -> None:
        """Says that there may be something new to do."""
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
        """Does what can be done now; returns the seconds until there may be more, None until it is woken."""
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
        """Whether a process works on the batch: a job that a server started, or another at its run. Raises OSError."""
        return is_locked(self._store.log_path(str(batch["id"]))) or is_locked(self._run_directory(batch).lock)

    def _attempt(self, batch: JsonRecord) -> None:
        """Takes the next step of a batch. A failure that can pass puts it off, any other ends it. Raises OutputError
        where that cannot be written down."""
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
            # The lock belongs to the open file, so that it stays for as long as a process of the job has this as its
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
        """Makes files of what is done, for the API to give."""
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
        """Has a job started again that was interrupted or killed, as long as it gets further."""
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
    """The job that answers requests to the batch's endpoint; its runs lie in a folder of this name."""
    return "encode" if batch["endpoint"] in ENCODE_ENDPOINTS else "generate"


def _request_stop(job: "subprocess.Popen[bytes] | None", run: RunDirectory) -> bool:
    """Asks a job to stop, which it does behind its pass; False where it cannot be asked yet."""
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
    """The last error in a job's log from `start` on; None where it has none, as on a full disk."""
    with path.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        for line in reversed(file.read().decode("utf-8", errors="replace").splitlines()):
            if line.startswith(("error: ", "interrupted: ")):
                return line.partition(": ")[2]
    return None


def _format_error(error: Exception) -> str:
    """The error, and where it came from if nobody foresaw it."""
    if isinstance(error, OSError | WeightstreamError):
        return str(error)
    return "".join(traceback.format_exception(error))
