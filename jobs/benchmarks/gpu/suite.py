"""`suite=gpu`: its workers, and what they say."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from threading import Timer

from runtime.errors import MillraceError

from ...config.process import settled
from ..task import Result
from .config import GpuConfig
from .link import described
from .messages import GpuTask, Machine, Measurement, as_line
from .missing import complaints, vital
from .report import gpu_table
from .ways import ALONE, WAYS

Work = Callable[[GpuTask], Iterator[str]]
LEAST_SECONDS = 60.0  # that a worker needs before it measures
GRACE_SECONDS = 45.0  # beyond its minutes, for what is being measured; then the worker is stopped


@dataclass(frozen=True, kw_only=True)
class GpuMeasured:
    table: str
    rounds: dict[str, list[Result]]

    @property
    def peers(self) -> list[str]:
        """Of what was measured."""
        return [way.name for way in (*WAYS, ALONE) if way.is_peer and way.name in self.rounds]


def run_gpu(
    gpu: GpuConfig, prompt_tokens: int, rounds: int, say: Callable[[str], object], work: Work | None = None
) -> GpuMeasured:
    """`say` is told what is missing, and how each measurement went. Raises MillraceError where nothing could
    be measured."""
    work, end = work or lines_of, time.monotonic() + 60 * gpu.minutes
    for complaint in complaints():
        say(complaint)
    if names := vital():
        raise MillraceError(f"suite=gpu: {', '.join(names)} not installed, see above: nothing can be measured")
    task = GpuTask(gpu=gpu, prompt_tokens=prompt_tokens, rounds=rounds, seconds=60 * gpu.minutes)
    lines = work(task)
    machine = Machine.parse(next(lines))
    say(f"{machine.device}, {machine.num_layers} layers. {described(machine.link)}")
    found = list(_told("the worker", lines, say))
    if ALONE.missing:
        found.append(Measurement(way=ALONE.name, refusal="it is not installed"))
    elif end < time.monotonic() + LEAST_SECONDS:
        found.append(Measurement(way=ALONE.name, refusal="no time is left for it"))
    else:
        lines = work(replace(task, seconds=end - time.monotonic(), is_alone=True))
        found += _told(ALONE.name, islice(lines, 1, None), say)
    results: dict[str, list[Result]] = {}
    for each in found:
        if each.result is not None:
            results.setdefault(each.way, []).append(each.result)
    return GpuMeasured(table=gpu_table(machine, found, gpu.device_memory_gib), rounds=results)


def _told(name: str, lines: Iterator[str], say: Callable[[str], object]) -> Iterator[Measurement]:
    """Where the worker fails, what it said before counts, and the table says why there is no more."""
    try:
        for line in lines:
            found = Measurement.parse(line)
            say(f"{found.way}: " + (f"{found.result.seconds:.1f} s" if found.result else found.refusal))
            yield found
    except MillraceError as error:
        yield Measurement(way=name, refusal=str(error))


def lines_of(task: GpuTask) -> Iterator[str]:
    """What the worker says, line by line. Raises MillraceError where it fails or outlasts its time."""
    command = [sys.executable, "-m", "jobs.benchmarks.gpu.worker", as_line(task)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=settled(os.environ)) as worker:
        timer = Timer(task.seconds + GRACE_SECONDS, worker.kill)
        timer.start()
        assert worker.stdout is not None, "it is a pipe"
        try:
            yield from worker.stdout
        finally:
            timer.cancel()
    if worker.returncode:
        raise MillraceError(
            f"the worker ended with exit code {worker.returncode}, see above; -9: it was stopped, "
            f"{GRACE_SECONDS:.0f} s beyond its {task.seconds:.0f} s (gpu.minutes)"
        )
