"""`suite=gpu`: its workers, and what becomes of their answers."""

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
MIN_SECONDS = 60.0  # that a worker needs before it measures
GRACE_SECONDS, GRACE_SHARE = 45.0, 0.2  # beyond its time, the smaller of both, for what is being measured: then it ends
INTERRUPTED = VariantMeasurement(variant="what came next", refusal="the command was interrupted")


def run_gpu(
    gpu: GpuConfig, prompt_tokens: int, rounds: int, say: Callable[[str], object], work: Work | None = None
) -> SuiteResult:
    """`say` is told what is missing, and how each measurement went. A worker that fails, runs out of time or is
    interrupted ends nothing but itself: the table has what there is. Raises WeightstreamError where not even the
    machine is known."""
    work, start_time = work or read_worker_lines, time.monotonic()
    end = start_time + 60 * gpu.minutes
    for complaint in missing_messages():
        say(complaint)
    if names := missing_required():
        raise WeightstreamError(f"suite=gpu: {', '.join(names)} not installed, see above: nothing can be measured")
    task = GpuTask(gpu=gpu, prompt_tokens=prompt_tokens, rounds=rounds, seconds=60 * gpu.minutes, start_time=start_time)
    say("starting the worker, which imports torch and transformers; its seconds are those since now")
    lines = work(task)
    machine = build(GpuMachine, json.loads(next(lines)))
    say(f"{machine.device}, {machine.num_layers} layers. {format_link(machine.link)}")
    measurements = list(_measurements("the worker", lines, say))
    alone = DEEPSPEED_VARIANT.name
    if DEEPSPEED_VARIANT.missing:
        measurements.append(VariantMeasurement(variant=alone, refusal="it is not installed"))
    elif end < time.monotonic() + MIN_SECONDS or measurements[-1:] == [INTERRUPTED]:
        measurements.append(VariantMeasurement(variant=alone, refusal="no time is left for it"))
    else:
        now = time.monotonic()
        lines = work(replace(task, seconds=end - now, start_time=now, is_alone=True))
        measurements += _measurements(alone, islice(lines, 1, None), say)
    results: dict[str, list[Result]] = {}
    for each in measurements:
        if each.result is not None:
            results.setdefault(each.variant, []).append(each.result)
    peers = [each.name for each in (*VARIANTS, DEEPSPEED_VARIANT) if each.is_peer and each.name in results]
    return SuiteResult(
        table=gpu_table(machine, measurements, gpu.device_memory_gib),
        rounds=results,
        peers=peers,
        is_interrupted=INTERRUPTED in measurements,
    )


def _measurements(name: str, lines: Iterator[str], say: Callable[[str], object]) -> Iterator[VariantMeasurement]:
    """The worker's measurements. Where it fails, those before count, and the last says why there are no more."""
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
    """The answers of the worker. Raises WeightstreamError where it fails or outlasts its time."""
    grace = min(GRACE_SECONDS, GRACE_SHARE * task.seconds)
    complaint = f"was stopped {grace:.0f} s beyond its {task.seconds:.0f} s (gpu.minutes), in what it said last"
    limit = TimeLimit(seconds=task.seconds + grace, message=complaint)
    return WorkerProcess(name="the worker", module="benchmarks.gpu.bench", question=asdict(task), limit=limit).lines()
