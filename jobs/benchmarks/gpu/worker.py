"""`python -m jobs.benchmarks.gpu.worker JSON`: all rounds of `suite=gpu`, a line of JSON for each measurement as it is
made, so that what was measured is there whatever happens next."""

import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from runtime.stream.device import ComputeDevice

from .bench import GpuBench
from .messages import GpuTask, Machine, Measurement, as_line
from .ways import ALONE, WAYS, Way

log = logging.getLogger(__name__)


def answers(task: GpuTask, device: ComputeDevice) -> Iterator[Machine | Measurement]:
    """Rounds alternate. A way that cannot run is named once. None begins that took longer than there is time left."""
    end = time.monotonic() + task.seconds
    with tempfile.TemporaryDirectory() as folder:
        bench = GpuBench(task, Path(folder), device)
        yield bench.machine()
        took = dict.fromkeys((ALONE,) if task.is_alone else WAYS, 0.0)
        for _ in range(task.rounds):
            for way in list(took):
                begin = time.monotonic()
                if begin + took[way] >= end:
                    continue
                found = _measured(bench, way)
                took[way] = time.monotonic() - begin
                if found.refusal:
                    del took[way]
                yield found


def _measured(bench: GpuBench, way: Way) -> Measurement:
    """Whatever it raises stops none of the others: the machine may be lent for these minutes alone."""
    if way.missing:
        return Measurement(way=way.name, refusal=f"{', '.join(way.missing)} is not installed")
    try:
        return bench.measure(way)
    except Exception as error:
        log.exception("%s", way.name)
        return Measurement(way=way.name, refusal=f"{type(error).__name__}: {error}")


def main() -> None:
    """Libraries that print do so on stderr."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    task = GpuTask.parse(sys.argv[1])
    if task.gpu.device != "cpu" and not torch.accelerator.is_available():
        sys.exit(f"gpu.device={task.gpu.device}: torch {torch.__version__} finds no accelerator here")
    for answer in answers(task, ComputeDevice(task.gpu.device)):
        out.write(as_line(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
