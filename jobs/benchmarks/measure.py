"""One measurement of one contender, in a process of its own: `python -m jobs.benchmarks.measure JSON` answers in JSON.

Timed is generation alone, prefill and decode; loading what stays in memory is not. Peak memory counts from after
the libraries are loaded. The checkpoint's pages are dropped from the page cache first, so that nobody reads from
memory what is on disk.
"""

import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

from runtime.api import Runtime
from runtime.config import (
    Admission,
    Attention,
    DType,
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    Order,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    SamplingConfig,
    Tier,
)
from runtime.engine.records import PassRecord
from runtime.engine.sequence import Request
from runtime.errors import MillraceError
from runtime.plan.placement.defaults import block_size
from runtime.plan.planner import plan_run
from runtime.plan.schedule.actions import WEIGHT_OPS
from runtime.plan.schedule.schedule import make_schedule
from runtime.plan.shape.extents import slot_layout
from runtime.stream.host_memory import disk_read_bytes, peak_resident_bytes, resident_bytes
from runtime.stream.weights import WeightStream
from runtime.trace import Trace
from runtime.units import GIB, format_bytes

from ..report.trace_file import tracing
from . import peers
from .attention import sweep
from .contenders import Ours, Peer, Reading, Sweep
from .millrace import least_bytes, prefill_seconds, requests_of
from .reading import read_plainly
from .task import REFUSED, Result, Task, forget_pages, prompts

READ_PASSES = 4
NOTHING = Result(seconds=0.0, prefill_seconds=0.0, rate=0.0, peak_bytes=0, baseline_bytes=0, bytes_read=0, tokens=[])


def measure(task: Task) -> Result:
    torch.set_num_threads(task.num_threads)
    forget_pages(Path(task.path))
    match task.entry:
        case Ours() as ours:
            return _millrace(task, ours)
        case Peer() as peer:
            return peers.generated_by(peer, task)
        case Reading() as reading:
            return _read(task, reading)
        case Sweep() as over:
            return _sweep(over)


def _runtime(
    task: Task,
    tier: Tier,
    admission: Admission = Admission.wave,
    resident_layers: int | None = None,
    trace: Trace | None = None,
    cache_dir: str | None = None,
) -> tuple[Runtime, list[Request]]:
    """For nvme the host budget is `weight_share` of the weights plus the KV of the longest requests that have seats,
    however they are admitted; of a model so small that this is less than what a run takes at least, that."""

    def make(host_memory_gib: float | None) -> tuple[Runtime, list[Request]]:
        config = RuntimeConfig(
            model=ModelConfig(name="bench", path=task.path, dtype=DType.float32),
            offload=OffloadConfig(
                tier=tier, host_memory_gib=host_memory_gib, resident_layers=resident_layers, cache_dir=cache_dir
            ),
            policy=PolicyConfig(
                kind=PolicyKind(task.policy),
                micro_batch_size=task.micro_batch_size,
                num_micro_batches=task.num_micro_batches,
                admission=admission,
                schedule=Order(task.schedule),
                attention=Attention(task.attention),
            ),
            sampling=SamplingConfig(
                max_new_tokens=task.num_new_tokens,
                ignore_eos=task.ignore_eos,
                temperature=0.0 if task.ignore_eos else 1.0,
            ),
            machine=MachineConfig(num_threads=task.num_threads),
        )
        runtime = Runtime(config, trace=trace)
        ids = prompts(task.num_prompts, runtime.model.shape.vocab_size, task.prompt_tokens)
        return runtime, requests_of(runtime, ids)

    runtime, requests = make(None)
    if tier is not Tier.nvme:
        return runtime, requests
    shape = runtime.model.shape
    num_seats = task.num_kv_seats or block_size(runtime.config.policy)
    positions = sum(sorted((request.size.capacity_tokens for request in requests), reverse=True)[:num_seats])
    budget = int(task.weight_share * shape.weight_bytes + positions * shape.kv_bytes_per_token)
    if task.policy == PolicyKind.fixed.value and (least := least_bytes(runtime, requests)) > budget:
        said = f"{task.contender}: weight_share={task.weight_share:g} comes to {format_bytes(budget)} of host memory"
        sys.stderr.write(f"{said}; it has the least that a run takes, {format_bytes(least)}\n")
        budget = least
    return make(budget / GIB)


def _millrace(task: Task, ours: Ours) -> Result:
    """Writing a trace counts too, though it happens between passes."""
    with tempfile.TemporaryDirectory() as folder:
        return _generated(task, ours, folder)


def _generated(task: Task, ours: Ours, folder: str) -> Result:
    """What a search chooses is kept in `folder`: the next measurement searches anew."""
    trace = Trace() if ours.is_traced else None
    cache_dir = folder if task.policy == PolicyKind.hrm.value else None
    runtime, requests = _runtime(task, ours.tier, ours.admission, trace=trace, cache_dir=cache_dir)
    if task.is_check:
        sizes = [request.size for request in requests]
        plan_run(runtime.model.shape, runtime.config, runtime.budgets(), sizes)
        return NOTHING
    passes: list[PassRecord] = []
    writing_seconds: list[float] = []
    read_before = disk_read_bytes()

    def on_pass(record: PassRecord) -> None:
        passes.append(record)
        begin = time.monotonic()
        write_trace()
        writing_seconds.append(time.monotonic() - begin)

    with (
        tracing(Path(folder) / "trace", trace) as write_trace,
        runtime.confirmed_session(requests) as (plan, session),
    ):
        completions = [completion for _, completion in session.generate(requests, on_pass)]
    tokens = {int(completion.request.id): list(completion.token_ids) for completion in completions}
    seconds = sum(record.seconds for record in passes) + sum(writing_seconds)
    return Result(
        seconds=seconds,
        prefill_seconds=prefill_seconds(passes),
        rate=sum(map(len, tokens.values())) / seconds,
        peak_bytes=peak_resident_bytes(),
        baseline_bytes=runtime.baseline_bytes,
        bytes_read=disk_read_bytes() - read_before,
        tokens=[tokens[index] for index in sorted(tokens)],
        predicted_prefill_seconds=plan.prediction.prefill_seconds if plan.prediction else 0.0,
        predicted_decode_seconds=plan.prediction.decode_seconds if plan.prediction else 0.0,
        policy=str(plan.searched) if plan.searched is not None else "",
        num_passes=len(passes),
    )


def _read(task: Task, reading: Reading) -> Result:
    """The schedule without its `run` actions, against a plain reader of the same file ranges with as many threads:
    every layer streamed."""
    runtime, requests = _runtime(task, Tier.nvme, resident_layers=0)
    plan = runtime.plan(requests)
    shape, walk = runtime.model.shape, plan.placement.walk
    with runtime.reader() as reader:
        if reading.is_plain:
            extents = [e for stage in walk.streamed for e in slot_layout(shape.stages[stage]).extents]
            seconds, num_bytes = read_plainly(extents, runtime.config.offload, READ_PASSES)
        else:
            schedule = make_schedule(walk, 1)
            cycle_ = [action for action in schedule.cycle if action.op in WEIGHT_OPS]
            with WeightStream(shape, plan.placement, runtime.device, reader) as stream:
                begin = time.monotonic()
                for action in [*schedule.prologue, *cycle_ * READ_PASSES]:
                    getattr(stream, action.op.value)(action.stage)
                seconds = time.monotonic() - begin
                num_bytes = stream.take_counters().bytes_read
    return Result(
        seconds=seconds,
        prefill_seconds=0.0,
        rate=num_bytes / seconds,
        peak_bytes=peak_resident_bytes(),
        baseline_bytes=runtime.baseline_bytes,
        bytes_read=num_bytes,
        tokens=[],
    )


def _sweep(over: Sweep) -> Result:
    baseline, sweeps = resident_bytes(), sweep(over)
    return Result(
        seconds=sweeps.seconds,
        prefill_seconds=0.0,
        rate=sweeps.num_bytes / sweeps.seconds,
        peak_bytes=peak_resident_bytes(),
        baseline_bytes=baseline,
        bytes_read=sweeps.num_bytes,
        tokens=[],
    )


if __name__ == "__main__":
    try:
        sys.stdout.write(json.dumps(asdict(measure(Task(**json.loads(sys.argv[1]))))) + "\n")
    except MillraceError as error:
        sys.stderr.write(f"{REFUSED}{error}\n")
        sys.exit(error.exit_code)
