"""Work done in processes of its own: what ends or hangs there is an answer, and spoils no other."""

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import TypeVar

Answer = TypeVar("Answer")
_CONTEXT = multiprocessing.get_context("spawn")  # a fork would share the threads of torch


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The process gave no answer: `why`. `is_late`: within its time, of which a slow machine wants more."""

    why: str
    is_late: bool = False


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    task: str | None = None
    began: float = field(default_factory=time.monotonic)


def each_isolated(
    work: Callable[[str], Answer], tasks: Sequence[str], *, num_processes: int, limit_seconds: float
) -> Iterator[tuple[str, Answer | Ended]]:
    """`work(task)` of each, as they come. Processes go on to the next task, but for one that ended or took too long:
    a new one comes in its place."""
    waiting, workers = list(reversed(tasks)), list[_Worker]()
    try:
        while waiting or workers:
            while waiting and len(workers) < num_processes:
                workers.append(_start(work))
                _give(workers[-1], waiting.pop())
            wait([worker.pipe for worker in workers], timeout=0.5)
            for worker in list(workers):
                answer = _answer(worker, limit_seconds)
                if answer is None:
                    continue
                assert worker.task is not None, "it was given one"
                yield worker.task, answer
                if isinstance(answer, Ended) or not waiting:
                    _stop(worker)
                    workers.remove(worker)
                else:
                    _give(worker, waiting.pop())
    finally:
        for worker in workers:
            _stop(worker)


def _start(work: Callable[[str], object]) -> _Worker:
    here, there = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_serve, args=(there, work), daemon=True)
    process.start()
    there.close()
    return _Worker(process, here)


def _serve(pipe: Connection, work: Callable[[str], object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(work(task))


def _give(worker: _Worker, task: str) -> None:
    worker.task, worker.began = task, time.monotonic()
    worker.pipe.send(task)


def _answer(worker: _Worker, limit_seconds: float) -> object | Ended | None:
    """None: not yet."""
    try:
        if worker.pipe.poll():
            return worker.pipe.recv()
    except EOFError:
        worker.process.join()
        return Ended(why=f"its process ended with exit code {worker.process.exitcode}")
    if time.monotonic() - worker.began > limit_seconds:
        return Ended(why=f"within {limit_seconds:.0f} s (seconds=...)", is_late=True)
    return None


def _stop(worker: _Worker) -> None:
    worker.pipe.close()
    worker.process.kill()
    worker.process.join()
