"""Single requests on the server's side: passes them to the process that holds the open model, and its messages back.

The model is opened at the first request, once no batch runs: batches and single requests take turns, since each plans
with all memory. A running batch is interrupted, losing nothing, and goes on after the model has been closed.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from ..config.settings import GenerateConfig
from ..config.typed import to_settings
from .config import ServeConfig
from .keeper import Keeper, job_environment, last_error

log = logging.getLogger(__name__)
POLL_SECONDS = 0.2
CLOSE_SECONDS = 30.0  # until a process without requests is killed
LINE_BYTES = 1 << 26  # limit of a message, such as a long text with log-probabilities
Json = dict[str, Any]


class AnswerError(Exception):
    """A request that gets an error response."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Answers:
    """Answers single requests. Belongs to the event loop of the server."""

    def __init__(self, config: ServeConfig, job: GenerateConfig, folder: Path, keeper: Keeper):
        """`job`: the settings of the open model."""
        self._config, self._job, self._folder, self._keeper = config, job, folder, keeper
        self._queues: dict[str, asyncio.Queue[Json]] = {}  # messages for each request in progress
        self._sent = set[str]()  # requests that the running process has got
        self._process: asyncio.subprocess.Process | None = None
        self._opening: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._tasks = set[asyncio.Task[None]]()  # of the running process; the event loop keeps weak references only
        self.counts = Counter[str]()  # requests by result, passes, rows of all passes
        self.num_pass_rows = 0  # of the latest pass

    @property
    def num_waiting(self) -> int:
        return len(self._queues)

    async def messages(self, url: str, body: Mapping[str, Any], *, streams: bool) -> AsyncGenerator[Json]:
        """Yields the messages of one request; the last one is its response. Closing the iterator earlier cancels the
        request. Raises AnswerError."""
        if len(self._queues) >= self._config.max_requests:
            self.counts["rejected"] += 1
            raise AnswerError(429, f"max_requests={self._config.max_requests:,} requests are in progress: try later")
        id, queue = token_hex(12), asyncio.Queue[Json]()
        self._queues[id] = queue
        is_done = False
        try:
            await self._send({"id": id, "url": url, "body": dict(body), "streams": streams})
            while not is_done:
                message = await queue.get()
                if (error := message.get("error")) is not None:
                    is_done = True
                    self.counts["rejected" if error["status"] < 500 else "failed"] += 1
                    raise AnswerError(error["status"], error["message"])
                is_done = "response" in message
                if is_done:
                    self.counts["answered"] += 1
                yield message
        finally:
            self._queues.pop(id, None)
            self._sent.discard(id)
            if not is_done:
                self.counts["cancelled"] += 1
                self._write({"cancel": id})

    async def _send(self, message: Json) -> None:
        """Opens the model if it is not, and sends a message. Raises AnswerError."""
        if self._process is None or self._process.returncode is not None:
            if self._opening is None or self._opening.done():
                self._opening = asyncio.create_task(self._open())
            await asyncio.shield(self._opening)  # others wait for it too: a client that leaves must not end it
        if not self._write(message):
            raise AnswerError(503, "the model's process has ended: try again")
        self._sent.add(message["id"])

    def _write(self, message: Json) -> bool:
        process = self._process
        if process is None or process.returncode is not None or process.stdin is None or process.stdin.is_closing():
            return False
        process.stdin.write(json.dumps(message).encode() + b"\n")
        return True

    async def _open(self) -> None:
        """Waits until no batch runs, and starts the process. Raises AnswerError."""
        if self._closing is not None:
            await asyncio.wait([self._closing])
        self._keeper.claim()
        while not self._keeper.has_yielded:
            await asyncio.sleep(POLL_SECONDS)
        log_path = self._folder / "answers.log"
        try:
            with log_path.open("ab") as log_file:
                start = log_file.tell()
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",
                    "-m",
                    "jobs.serving.answering",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log_file,
                    start_new_session=True,
                    cwd=self._folder,
                    env=job_environment(),
                    limit=LINE_BYTES,
                )
        except OSError as error:
            self._keeper.release()
            raise AnswerError(503, f"the model's process cannot be started: {error}") from error
        capacity = {
            "num_rows": self._config.max_rows,
            "num_tokens": self._config.max_request_tokens,
            "gather_seconds": self._config.max_wait_seconds,
        }
        assert process.stdin is not None, "it is a pipe"
        first = {"config": to_settings(self._job), "capacity": capacity}
        process.stdin.write(json.dumps(first).encode() + b"\n")
        log.info("opening the model for single requests")
        assert process.stdout is not None, "it is a pipe"
        ready = await process.stdout.readline()
        if not ready:
            code = await process.wait()
            self._keeper.release()
            reason = last_error(log_path, start) or f"exit code {code}, see {log_path}"
            log.error("the model cannot be opened: %s", reason)
            raise AnswerError(503, f"the model cannot be opened: {reason}")
        self._process, size = process, json.loads(ready)["ready"]
        log.info("open: up to %s rows at a time, of up to %s tokens each", f"{size['rows']:,}", f"{size['tokens']:,}")
        for work in (self._read(process, process.stdout, log_path, start), self._close_when_idle(process)):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _read(
        self, process: asyncio.subprocess.Process, output: asyncio.StreamReader, log_path: Path, start: int
    ) -> None:
        """Passes messages on until the process ends; requests in progress then fail."""
        with suppress(ValueError):  # a message above the limit
            async for line in output:
                message = json.loads(line)
                if (each := message.get("pass")) is not None:
                    self.num_pass_rows = each["rows"]
                    self.counts.update(passes=1, pass_rows=each["rows"], tokens=each["tokens"])
                elif (queue := self._queues.get(message["id"])) is not None:
                    queue.put_nowait(message)
        is_closing = self._process is not process  # `_close` waits for it, and kills it if it takes too long
        if not is_closing:
            _kill(process)
        code = await process.wait()
        self.num_pass_rows = 0
        if self._process is process:
            self._process = None
            self._keeper.release()
        failed, self._sent = self._sent, set()  # others wait until the model is open again
        if failed or (code and not is_closing):
            reason = last_error(log_path, start) or (f"signal {-code}" if code < 0 else f"exit code {code}")
            log.error("the model's process has ended: %s", reason)
            for id in failed:
                message = f"the model's process has ended ({reason})"
                self._queues[id].put_nowait({"error": {"status": 503, "message": message}})

    async def _close_when_idle(self, process: asyncio.subprocess.Process) -> None:
        """Closes the model for waiting batches once no request has been in progress for `idle_seconds`."""
        idle_seconds = 0.0
        while process.returncode is None:
            await asyncio.sleep(POLL_SECONDS)
            idle_seconds = 0.0 if self._queues else idle_seconds + POLL_SECONDS
            if idle_seconds >= self._config.idle_seconds and self._keeper.has_work:
                log.info("closing the model: batches wait")
                self._process = None
                self._closing = asyncio.create_task(self._close(process))
                return

    async def _close(self, process: asyncio.subprocess.Process) -> None:
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await process.wait()
        except TimeoutError:
            _kill(process)
            await process.wait()
        self._keeper.release()

    def stop(self) -> None:
        """Ends the process at once; requests in progress fail."""
        if self._process is not None:
            _kill(self._process)


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
