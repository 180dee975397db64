"""The job of each batch: started in a process of its own, one after another, watched, ended on request, and found again
by its run's lock where an earlier server started it.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from runtime.errors import ConfigError, DamagedRunError, MillraceError

from ..config.cli import quoted
from ..datasets.openai_inputs import ENCODED
from ..exporting.export import write_batch_files
from ..files.publishing import read_json
from ..run.found import is_locked
from ..run.run_dir import RunDirectory
from .config import settings_of
from .store import FINAL, BatchStore, Record

log = logging.getLogger(__name__)
POLL_SECONDS = 0.5
ANSWERED = (0, 3)  # exit codes of a job whose rows are done
MAX_STARTS = 3  # in one server, of a job that others interrupt


class Keeper(threading.Thread):
    """Does the batches that are left, the oldest first, until `stop`; the job that runs then goes on without it.
    `settings`: of every job, as its command line has them, those of `encode.*` of the jobs that encode."""

    def __init__(self, store: BatchStore, settings: list[str], output_root: Path):
        super().__init__(daemon=True, name="batches")
        self._store, self._settings, self._output_root = store, settings, output_root.absolute()
        self._is_stopped, self._is_woken = threading.Event(), threading.Event()

    def wake(self) -> None:
        """Says that there may be something new to do."""
        self._is_woken.set()

    def stop(self) -> None:
        self._is_stopped.set()
        self._is_woken.set()

    def run(self) -> None:
        while not self._is_stopped.is_set():
            self._is_woken.clear()
            left = [batch for batch in self._store.batches() if batch["status"] not in FINAL]
            left.sort(key=lambda batch: batch["status"] != "cancelling")
            if not left:
                self._is_woken.wait()
                continue
            try:
                self._do(left[0])
            except (MillraceError, OSError) as error:
                self._fail(str(left[0]["id"]), str(error))

    def _do(self, batch: Record) -> None:
        """Brings one batch to its end."""
        id = str(batch["id"])
        run = RunDirectory(path=self._output_root / _job(batch) / id)
        for _ in range(MAX_STARTS):
            code = self._wait(id, run, None) if is_locked(run.lock) else None
            if code is None and not run.success.exists() and not self._is_cancelled(id):
                code = self._wait(id, run, self._start(batch))
            if is_locked(run.lock):  # an earlier server's job was there first
                continue
            if self._is_stopped.is_set():
                return None
            if run.success.exists() and code in (None, *ANSWERED):
                return self._finish(id, run, "completed")
            if self._is_cancelled(id):
                return self._finish(id, run, "cancelled")
            if code != signal.SIGTERM and code not in (None, 75):
                return self._fail(id, _last_error(self._store.log(id)))
        return self._fail(id, "its job was interrupted again and again")

    def _is_cancelled(self, id: str) -> bool:
        record = self._store.batch(id)
        return record is not None and record["status"] == "cancelling"

    def _start(self, batch: Record) -> "subprocess.Popen[bytes]":
        id = str(batch["id"])
        source = self._store.file(str(batch["input_file_id"]))
        if source is None:
            raise ConfigError(f"its file {batch['input_file_id']} is gone")
        own = [
            "dataset=openai_batch",
            f"dataset.path={quoted(str(source['path']))}",
            f"run={id}",
            f"output_root={quoted(str(self._output_root))}",
        ]
        job = _job(batch)
        begun: Record = {"status": "in_progress", "in_progress_at": int(time.time())}
        self._store.change(id, lambda record: begun if record["status"] == "validating" else {})
        log.info("%s begins", id)
        with self._store.log(id).open("ab") as said:
            return subprocess.Popen(
                [sys.executable, "-m", f"jobs.{job}", *settings_of(job, self._settings), *own],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def _wait(self, id: str, run: RunDirectory, job: "subprocess.Popen[bytes] | None") -> int | None:
        """The exit code of `job`; None where it goes on behind a stop, or is an earlier server's, whose end is seen by
        its lock."""
        is_told = False
        while not self._is_stopped.is_set():
            code = job.poll() if job is not None else None
            if code is not None or (job is None and not is_locked(run.lock)):
                return code
            if self._is_cancelled(id) and not is_told:
                is_told = _end(job, run)
            self._is_stopped.wait(POLL_SECONDS)
        return None

    def _finish(self, id: str, run: RunDirectory, status: str) -> None:
        """Makes files of what is done, for the API to give."""
        with suppress(ConfigError):  # nothing is done yet
            if run.manifest.exists():
                write_batch_files(run.path, partial=status == "cancelled")
        found: Record = {}
        counts = {"completed": 0, "failed": 0}
        pairs = {"output": (run.batch_output, "completed"), "errors": (run.batch_errors, "failed")}
        for kind, (path, count) in pairs.items():
            if path.exists() and path.stat().st_size:
                file_id = f"{id.replace('batch_', 'file-')}-{kind}"
                self._store.add_file(file_id, path, f"{id}_{kind}.jsonl", "batch_output")
                found["output_file_id" if kind == "output" else "error_file_id"] = file_id
                with path.open("rb") as lines:
                    counts[count] = sum(1 for _ in lines)
        counts["total"] = max(sum(counts.values()), _total((self._store.batch(id) or {}).get("request_counts")))
        self._store.enter(id, status, request_counts={**counts}, **found)
        log.info("%s is %s", id, status)

    def _fail(self, id: str, message: str) -> None:
        log.error("%s has failed: %s", id, message)
        problem: Record = {"code": "job_failed", "message": message, "line": None, "param": None}
        self._store.enter(id, "failed", errors={"object": "list", "data": [problem]})


def _job(batch: Record) -> str:
    """The job that answers requests to the batch's endpoint; its runs lie in a folder of this name."""
    return "encode" if batch["endpoint"] in ENCODED else "generate"


def _total(counts: object) -> int:
    total = counts.get("total") if isinstance(counts, dict) else 0
    return total if isinstance(total, int) else 0


def _end(job: "subprocess.Popen[bytes] | None", run: RunDirectory) -> bool:
    """Asks a job to stop, which it does behind its pass; False where it cannot be asked yet."""
    if job is not None:
        if not is_locked(run.lock):
            return False  # it has not seen to stop signals yet
        job.terminate()
        return True
    with suppress(OSError, DamagedRunError):
        holder = read_json(run.lock)
        pid = holder.get("pid")
        if holder.get("host") == socket.gethostname() and isinstance(pid, int) and is_locked(run.lock):
            os.kill(pid, signal.SIGTERM)
            return True
    return False


def _last_error(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    found = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return found[-1] if found else f"its job ended, see {path}"
