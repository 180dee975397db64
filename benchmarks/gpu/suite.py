"""Runs the workers of `suite=gpu` and makes its table."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import islice

from jobs.config.typed import build
from runtime.errors import WeightstreamError

from ..contenders import DEEPSPEED_VARIANT, VARIANTS
from ..report import gpu_table
from ..runner import TimeLimit, WorkerProcess
from ..task import Result, SuiteResult
from .config import GpuConfig
from .device import format_link
from .missing import missing_messages, missing_required
from .task import GpuMachine, GpuTask, VariantMeasurement

Work = Callable[[GpuTask], Iterator[str]]
MIN_SECONDS = 60.0  # that a worker takes to start
# A worker is killed GRACE_SECONDS after its time, or GRACE_SHARE of its time after it, whichever is less.
GRACE_SECONDS, GRACE_SHARE = 45.0, 0.2
INTERRUPTED = VariantMeasurement(variant="the next variant", refusal="the command was interrupted")


def run_gpu(
    gpu: GpuConfig, prompt_tokens: int, rounds: int, say: Callable[[str], object], work: Work | None = None
) -> SuiteResult:
    """Runs all variants in a worker, and DeepSpeed in a second worker. `say` gets progress lines. `work` starts a
    worker. If a worker fails, exceeds its time or is interrupted, the table has the measurements so far. Raises
    WeightstreamError if the first worker fails before it has measured the link."""
    work, start_time = work or read_worker_lines, time.monotonic()
    end = start_time + 60 * gpu.minutes
    for message in missing_messages():
        say(message)
    if names := missing_required():
        raise WeightstreamError(f"suite=gpu: not installed: {', '.join(names)}; install them first")
    task = GpuTask(gpu=gpu, prompt_tokens=prompt_tokens, rounds=rounds, seconds=60 * gpu.minutes, start_time=start_time)
    say("starting the worker; it prints seconds since now")
    lines = work(task)
    machine = build(GpuMachine, json.loads(next(lines)))
    say(f"{machine.device}, {machine.num_layers} layers. {format_link(machine.link)}")
    measurements = list(_measurements("the worker", lines, say))
    alone = DEEPSPEED_VARIANT.name
    if DEEPSPEED_VARIANT.missing:
        measurements.append(VariantMeasurement(variant=alone, refusal="deepspeed is not installed"))
    elif end < time.monotonic() + MIN_SECONDS or measurements[-1:] == [INTERRUPTED]:
        measurements.append(VariantMeasurement(variant=alone, refusal="no time left"))
    else:
        now = time.monotonic()
        lines = work(replace(task, seconds=end - now, start_time=now, is_alone=True))
        measurements += _measurements(alone, islice(lines, 1, None), say)  # the first line is the machine again
    results: dict[str, list[Result]] = {}
    for measurement in measurements:
        if measurement.result is not None:
            results.setdefault(measurement.variant, []).append(measurement.result)
    peers = [variant.name for variant in (*VARIANTS, DEEPSPEED_VARIANT) if variant.is_peer and variant.name in results]
    return SuiteResult(
        table=gpu_table(machine, measurements, gpu.device_memory_gib),
        rounds=results,
        peers=peers,
        is_interrupted=INTERRUPTED in measurements,
    )


def _measurements(name: str, lines: Iterator[str], say: Callable[[str], object]) -> Iterator[VariantMeasurement]:
    """Yields the measurements in the worker's lines. If the worker fails, the last one has the reason as refusal.
    `name`: its variant."""
    try:
        for line in lines:
            measurement = build(VariantMeasurement, json.loads(line))
            result = measurement.result
            say(f"{measurement.variant}: " + (f"{result.seconds:.1f} s" if result else measurement.refusal))
            yield measurement
    except WeightstreamError as error:
        yield VariantMeasurement(variant=name, refusal=str(error))
    except KeyboardInterrupt:
        yield INTERRUPTED


def read_worker_lines(task: GpuTask) -> Iterator[str]:
    """Starts a worker and yields its answers, lines of JSON. Raises WeightstreamError if it fails or exceeds its
    time."""
    grace = min(GRACE_SECONDS, GRACE_SHARE * task.seconds)
    message = f"was killed {grace:.0f} s after its {task.seconds:.0f} s (gpu.minutes); its last line says in which step"
    limit = TimeLimit(seconds=task.seconds + grace, message=message)
    return WorkerProcess(name="the worker", module="benchmarks.gpu.bench", question=asdict(task), limit=limit).lines()
