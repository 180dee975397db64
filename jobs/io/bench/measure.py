"""One measurement of one contender, in a process of its own: `python -m jobs.io.bench.measure JSON` answers in JSON.

Timed is generation alone, prefill and decode; loading what stays in memory is not. Peak memory counts from after
the libraries are loaded. The checkpoint's pages are dropped from the page cache first, so that nobody reads from
memory what is on disk.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from threading import Event, Thread

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from runtime.api import Runtime
from runtime.config import (
    DType,
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    SamplingConfig,
    Tier,
)
from runtime.engine.sequence import Request
from runtime.plan.actions import WEIGHT_OPS
from runtime.plan.extents import Extent, slot_layout
from runtime.plan.memory import SequenceSize
from runtime.plan.schedule import make_schedule
from runtime.stream.host_memory import disk_read_bytes, peak_resident_bytes, reset_peak, resident_bytes
from runtime.stream.weights import WeightStream
from runtime.units import GIB

from .attention import DTYPES, sweep

READ_PASSES = 4
FORGET_SECONDS = 0.5  # less than a step of any peer takes


@dataclass(frozen=True, kw_only=True)
class Task:
    contender: str
    path: str
    num_prompts: int
    num_new_tokens: int
    batch_size: int
    micro_batch_size: int
    weight_share: float
    num_threads: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """`tokens` is empty for the contenders that only read; their `rate` is bytes per second."""

    seconds: float
    prefill_seconds: float
    rate: float
    peak_bytes: int
    baseline_bytes: int
    bytes_read: int
    tokens: list[list[int]]


def prompts(num_prompts: int, vocab_size: int) -> list[list[int]]:
    random = np.random.default_rng(77)
    lengths = np.clip(np.round(np.exp(random.normal(np.log(60), 0.7, num_prompts))), 16, 256).astype(int)
    return [random.integers(10, vocab_size - 10, size=int(length)).tolist() for length in lengths]


def measure(task: Task) -> Result:
    torch.set_num_threads(task.num_threads)
    forget_pages(Path(task.path))
    kinds: dict[str, Callable[[Task], Result]] = {
        "transformers": _transformers,
        "accelerate": _accelerate,
        "read": _read,
        "plain_read": _read,
    }
    if task.contender in DTYPES:
        return _sweep(task)
    return kinds.get(task.contender, _millrace)(task)


def forget_pages(directory: Path) -> None:
    for file in directory.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _runtime(task: Task, tier: Tier, resident_layers: int | None = None) -> tuple[Runtime, list[Request]]:
    """For nvme the host budget is `weight_share` of the weights plus the KV that the prompts reserve."""

    def make(host_memory_gib: float | None) -> tuple[Runtime, list[Request]]:
        config = RuntimeConfig(
            model=ModelConfig(name="bench", path=task.path, dtype=DType.float32),
            offload=OffloadConfig(tier=tier, host_memory_gib=host_memory_gib, resident_layers=resident_layers),
            policy=PolicyConfig(
                kind=PolicyKind.fixed,
                micro_batch_size=task.micro_batch_size,
                num_micro_batches=-(-task.num_prompts // task.micro_batch_size),
            ),
            sampling=SamplingConfig(max_new_tokens=task.num_new_tokens, ignore_eos=True),
            machine=MachineConfig(num_threads=task.num_threads),
        )
        runtime = Runtime(config)
        ids = prompts(task.num_prompts, runtime.model.shape.vocab_size)
        made = [runtime.request(str(index), prompt) for index, prompt in enumerate(ids)]
        return runtime, [request for request in made if isinstance(request, Request)]

    runtime, requests = make(None)
    if tier is not Tier.nvme:
        return runtime, requests
    shape = runtime.model.shape
    sizes = [SequenceSize(num_prompt_tokens=len(r.prompt_ids), max_new_tokens=r.max_new_tokens) for r in requests]
    positions = sum(size.capacity_tokens for size in sizes)
    budget = task.weight_share * shape.weight_bytes + positions * shape.kv_bytes_per_token
    return make(budget / GIB)


def _millrace(task: Task) -> Result:
    runtime, requests = _runtime(task, Tier(task.contender))
    passes, tokens, read_before = [], {}, disk_read_bytes()
    with runtime.confirmed_session(requests) as (plan, session):
        for block in plan.blocks:
            tokens |= {int(c.request.id): list(c.token_ids) for c in session.run(block, requests, passes.append)}
    seconds = sum(record.seconds for record in passes)
    return Result(
        seconds=seconds,
        prefill_seconds=sum(record.seconds for record in passes if record.phase.value == "prefill"),
        rate=sum(map(len, tokens.values())) / seconds,
        peak_bytes=peak_resident_bytes(),
        baseline_bytes=runtime.baseline_bytes,
        bytes_read=disk_read_bytes() - read_before,
        tokens=[tokens[index] for index in sorted(tokens)],
    )


def _transformers(task: Task) -> Result:
    model = AutoModelForCausalLM.from_pretrained(task.path, dtype=torch.float32).eval()
    return _generate(task, model)


def _accelerate(task: Task) -> Result:
    """Every decoder layer on disk, embeddings and head in memory: what its users get for a model that does not fit.
    Nor would such a model stay in the page cache from one step to the next, so its pages are dropped all along."""
    from accelerate import disk_offload

    with tempfile.TemporaryDirectory(dir=Path(task.path).parent) as folder:
        model = AutoModelForCausalLM.from_pretrained(task.path, dtype=torch.float32).eval()
        disk_offload(model, offload_dir=folder, execution_device=torch.device("cpu"))
        is_done = Event()
        cleaner = Thread(target=_forget_until, args=(is_done, Path(folder)))
        cleaner.start()
        try:
            return _generate(task, model)
        finally:
            is_done.set()
            cleaner.join()


def _forget_until(is_done: Event, directory: Path) -> None:
    while not is_done.wait(FORGET_SECONDS):
        forget_pages(directory)


@torch.inference_mode()
def _generate(task: Task, model: PreTrainedModel) -> Result:
    """Batches of neighbours in length, left-padded, longest first."""
    ids = prompts(task.num_prompts, model.config.get_text_config().vocab_size)
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    config = GenerationConfig(max_new_tokens=task.num_new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None)
    tokens: dict[int, list[int]] = {}
    baseline, read_before = resident_bytes(), disk_read_bytes()
    reset_peak()
    begin = time.monotonic()
    for start in range(0, len(order), task.batch_size):
        members = order[start : start + task.batch_size]
        width = max(len(ids[i]) for i in members)
        rows = torch.tensor([[0] * (width - len(ids[i])) + ids[i] for i in members])
        mask = torch.tensor([[0] * (width - len(ids[i])) + [1] * len(ids[i]) for i in members])
        out = model.generate(rows, attention_mask=mask, generation_config=config)  # pyright: ignore[reportCallIssue]
        tokens |= {i: row[width:].tolist() for i, row in zip(members, out, strict=True)}
    seconds = time.monotonic() - begin
    return Result(
        seconds=seconds,
        prefill_seconds=0.0,
        rate=sum(map(len, tokens.values())) / seconds,
        peak_bytes=peak_resident_bytes(),
        baseline_bytes=baseline,
        bytes_read=disk_read_bytes() - read_before,
        tokens=[tokens[i] for i in sorted(tokens)],
    )


def _read(task: Task) -> Result:
    """The schedule without its `run` actions, against a plain reader of the same file ranges with as many threads:
    every layer streamed."""
    runtime, requests = _runtime(task, Tier.nvme, resident_layers=0)
    plan = runtime.plan(requests)
    shape, walk = runtime.model.shape, plan.placement.walk
    with runtime.reader() as reader:
        if task.contender == "plain_read":
            extents = [e for stage in walk.streamed for e in slot_layout(shape.stages[stage]).extents]
            seconds, num_bytes = _read_plainly(extents, runtime.config.offload)
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


def _sweep(task: Task) -> Result:
    baseline, sweeps = resident_bytes(), sweep(task.contender)
    return Result(
        seconds=sweeps.seconds,
        prefill_seconds=0.0,
        rate=sweeps.num_bytes / sweeps.seconds,
        peak_bytes=peak_resident_bytes(),
        baseline_bytes=baseline,
        bytes_read=sweeps.num_bytes,
        tokens=[],
    )


def _read_plainly(extents: Sequence[Extent], offload: OffloadConfig) -> tuple[float, int]:
    """Threads that each read the next chunk into a buffer of their own: what the disk gives without our machinery."""
    import mmap
    from concurrent.futures import ThreadPoolExecutor
    from threading import local

    chunk = offload.read_chunk_mib * 2**20
    files = {e.file: os.open(e.file, os.O_RDONLY | os.O_DIRECT) for e in extents}
    jobs = [
        (files[e.file], e.offset + at, min(chunk, e.num_bytes - at))
        for e in extents
        for at in range(0, e.num_bytes, chunk)
    ]
    mine = local()

    def read(job: tuple[int, int, int]) -> int:
        if not hasattr(mine, "buffer"):
            mine.buffer = mmap.mmap(-1, chunk)
        return os.preadv(job[0], [memoryview(mine.buffer)[: job[2]]], job[1])

    begin = time.monotonic()
    with ThreadPoolExecutor(offload.reader_threads) as pool:
        num_bytes = sum(pool.map(read, islice(cycle(jobs), READ_PASSES * len(jobs))))
    seconds = time.monotonic() - begin
    for descriptor in files.values():
        os.close(descriptor)
    return seconds, num_bytes


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure(Task(**json.loads(sys.argv[1]))))) + "\n")
