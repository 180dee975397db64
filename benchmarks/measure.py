"""One measurement of one contender, in a separate process.

Times generation (prefill and decode), not loading. Peak memory excludes the libraries, which are loaded before. The
checkpoint is dropped from the page cache first.
"""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from jobs.pictures.trace_file import tracing
from runtime.config.settings import OffloadConfig, PolicyKind, Tier
from runtime.library.api import Runtime
from runtime.plan.placement.defaults import block_size
from runtime.plan.planner import plan_run
from runtime.sequences.sequence import Request
from runtime.stream.host_memory import disk_read_bytes
from runtime.trace import Trace
from runtime.units import GIB, format_bytes

from .contenders import AttentionBaseline, OwnContender, Peer, ReadBaseline
from .peers import hugging_face
from .reading import read_layers, sweep
from .task import BenchmarkTask, Result, drop_page_cache
from .weightstream import measure_generation, minimum_host_bytes, open_runtime

ALL_PROMPTS = 1 << 30  # more than any file has
EMPTY_RESULT = Result(
    seconds=0.0, prefill_seconds=0.0, rate=0.0, peak_bytes=0, baseline_bytes=0, bytes_read=0, tokens=[]
)


def measure(task: BenchmarkTask) -> Result:
    torch.set_num_threads(task.num_threads)
    drop_page_cache(Path(task.path))
    match task.entry:
        case OwnContender() as ours:
            with tempfile.TemporaryDirectory() as folder:
                return _weightstream(task, ours, folder)
        case Peer() as peer:
            return hugging_face.generate(peer, task)
        case ReadBaseline() as reading:
            runtime, requests = _open_within_budget(task, OffloadConfig(tier=Tier.nvme, resident_layers=0))
            return read_layers(runtime, requests, is_plain=reading.is_plain)
        case AttentionBaseline() as entry:
            return sweep(entry)


def _open_within_budget(
    task: BenchmarkTask, offload: OffloadConfig, trace: Trace | None = None
) -> tuple[Runtime, list[Request]]:
    """Opens the runtime of a task. Its host memory is limited with offload=nvme only.

    The limit is `host_memory_gib` of the task. If that is None, it is `weight_share` of the weights plus the KV of one
    block of the longest requests. Unless policy=hrm, it is raised to the minimum of a run. With a file of prompts, the
    longest requests of the whole file count, so that all contenders have the same budget.
    """
    if task.host_memory_gib is not None and offload.tier is Tier.nvme:
        return open_runtime(task, replace(offload, host_memory_gib=task.host_memory_gib), trace)
    runtime, requests = open_runtime(task, offload, trace)
    if offload.tier is not Tier.nvme:
        return runtime, requests
    shape = runtime.model.shape
    num_sequences = task.num_kv_slots or block_size(runtime.config.policy)  # whose KV counts in the budget
    candidates = (
        requests if task.prompts_file is None else open_runtime(replace(task, num_prompts=ALL_PROMPTS), offload)[1]
    )
    longest = sorted(candidates, key=lambda request: -request.size.capacity_tokens)[:num_sequences]
    positions = sum(request.size.capacity_tokens for request in longest)
    budget = int(task.weight_share * shape.weight_bytes + positions * shape.kv_bytes_per_token)
    # policy=auto fits its blocks to the memory, so one block of the longest requests is the most that must fit.
    needed = longest if task.policy == PolicyKind.auto.value else requests
    if task.policy != PolicyKind.hrm.value and (minimum := minimum_host_bytes(runtime, needed)) > budget:
        line = f"{task.contender}: weight_share={task.weight_share:g} is {format_bytes(budget)} of host memory"
        sys.stderr.write(f"{line}; raised to {format_bytes(minimum)}, the minimum of a run\n")
        budget = minimum
    return open_runtime(task, replace(offload, host_memory_gib=budget / GIB), trace)


def _weightstream(task: BenchmarkTask, ours: OwnContender, folder: str) -> Result:
    """Measures generation, including the trace that is written after each pass. `folder`: a temporary directory for the
    trace and for a searched policy."""
    trace = Trace() if ours.is_traced else None
    cache_dir = folder if task.policy != PolicyKind.fixed.value else None
    runtime, requests = _open_within_budget(task, OffloadConfig(tier=ours.tier, cache_dir=cache_dir), trace)
    if task.is_check:
        sizes = [request.size for request in requests]
        plan_run(runtime.model.shape, runtime.config, runtime.budgets(), sizes)
        return EMPTY_RESULT
    read_before = disk_read_bytes()
    with tracing(Path(folder) / "trace", trace) as write_trace:
        result = measure_generation(runtime, requests, after_pass=write_trace).result
    return replace(result, bytes_read=disk_read_bytes() - read_before)  # counted by the kernel, as for peers


def answers(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker's entry point (`benchmarks.worker`)."""
    yield asdict(measure(BenchmarkTask(**question)))
