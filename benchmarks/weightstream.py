"""Measures generation by Weightstream. Imports no optional package."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from runtime.config.settings import (
    Attention,
    DType,
    KVTier,
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
from runtime.errors import WeightstreamError
from runtime.library.api import Runtime
from runtime.plan.cost.rates import MachineRates
from runtime.plan.placement.placement import Budgets
from runtime.plan.placement.placer import choose_placement
from runtime.plan.placement.run_load import least_memory_config, run_load
from runtime.plan.planner import plan_run
from runtime.sequences.sequence import Request
from runtime.stream.host_memory import peak_resident_bytes
from runtime.trace import Trace

from .contenders import OwnContender
from .task import BenchmarkTask, Result, task_prompts

UNLIMITED = Budgets(host_bytes=1 << 60)


def _policy(task: BenchmarkTask) -> PolicyConfig:
    """The policy of the contender. Baselines without a model have Weightstream's usual policy from disk."""
    ours = task.entry if isinstance(task.entry, OwnContender) else OwnContender(tier=Tier.nvme)
    kind, admission, shares = PolicyKind(task.policy), ours.admission, ours.share_prefixes
    if kind is not PolicyKind.fixed:
        return PolicyConfig(kind=kind, admission=admission, share_prefixes=shares)
    return PolicyConfig(
        kind=kind,
        micro_batch_size=task.micro_batch_size,
        num_micro_batches=task.num_micro_batches,
        admission=admission,
        share_prefixes=shares,
        schedule=Order(task.schedule),
        attention=Attention(task.attention),
    )


class RuntimeFactory(Protocol):
    """`Runtime`, or a subclass with a simulated disk or ranks."""

    def __call__(self, config: RuntimeConfig, *, trace: Trace | None) -> Runtime: ...


def open_runtime(
    task: BenchmarkTask, offload: OffloadConfig, trace: Trace | None = None, make: RuntimeFactory = Runtime
) -> tuple[Runtime, list[Request]]:
    """The runtime and the requests of a task; `make` creates the runtime. Raises WeightstreamError if a prompt exceeds
    the model's context."""
    dtype = task.entry.dtype if isinstance(task.entry, OwnContender) else DType.float32
    config = RuntimeConfig(
        model=ModelConfig(name="bench", path=task.path, dtype=dtype),
        offload=offload,
        policy=_policy(task),
        sampling=SamplingConfig(
            max_new_tokens=task.num_new_tokens, ignore_eos=task.ignore_eos, temperature=0.0 if task.ignore_eos else 1.0
        ),
        machine=MachineConfig(num_threads=task.num_threads),
    )
    runtime = make(config, trace=trace)
    ids = task_prompts(task, runtime.model.shape.vocab_size)
    requests, longest = make_requests(runtime, ids), max(map(len, ids))
    if len(requests) < len(ids):
        raise WeightstreamError(
            f"{len(ids) - len(requests)} of {len(ids)} prompts exceed the model's context: the longest has {longest:,} "
            f"tokens, plus num_new_tokens={task.num_new_tokens}; set another tokenizer or other questions"
        )
    return runtime, requests


@dataclass(frozen=True, kw_only=True)
class MeasuredGeneration:
    """The result of a generation, the records of its passes (forwards), and the rates used for predictions."""

    result: Result
    passes: Sequence[PassRecord]
    rates: MachineRates | None


def measure_generation(
    runtime: Runtime,
    requests: Sequence[Request],
    *,
    rates: MachineRates | None = None,
    is_warmed_up: bool = False,
    say: Callable[[str], object] = lambda step: None,
    after_pass: Callable[[], object] = lambda: None,
) -> MeasuredGeneration:
    """Generates, and times passes and `after_pass`. `rates`: of the machine; None: measures them. `is_warmed_up`: first
    generates two tokens of each request, to compile kernels. `say`: called with a line at the start of each step."""
    passes: list[PassRecord] = []
    seconds_between = 0.0

    def on_pass(record: PassRecord) -> None:
        nonlocal seconds_between
        passes.append(record)
        begin = time.monotonic()
        after_pass()
        seconds_between += time.monotonic() - begin

    say("waiting for kernels to compile")
    runtime.wait_for_kernels()
    say("planning and placing weights")
    with runtime.open_with_backoff(requests, rates=rates) as (plan, session):
        if is_warmed_up:
            say("warm-up passes")
            for _ in session.generate([replace(each, max_new_tokens=min(2, each.max_new_tokens)) for each in requests]):
                pass
        say("measured passes")
        completions = [completion for _, completion in session.generate(requests, on_pass)]
    tokens = {int(completion.request.id): list(completion.token_ids) for completion in completions}
    seconds = sum(record.seconds for record in passes) + seconds_between
    result = Result(
        seconds=seconds,
        prefill_seconds=prefill_seconds(passes),
        rate=sum(map(len, tokens.values())) / seconds,
        peak_bytes=peak_resident_bytes(),
        baseline_bytes=runtime.baseline_bytes,
        bytes_read=sum(record.times.bytes_read_disk for record in passes),
        tokens=[tokens[number] for number in sorted(tokens)],
        predicted_prefill_seconds=plan.prediction.prefill_seconds if plan.prediction else 0.0,
        predicted_decode_seconds=plan.prediction.decode_seconds if plan.prediction else 0.0,
        policy=str(plan.searched_policy) if plan.searched_policy is not None else "",
        num_passes=len(passes),
        bytes_copied=sum(record.times.bytes_copied_device for record in passes),
        bytes_returned=sum(record.times.bytes_copied_host for record in passes),
        num_prompt_tokens=sum(record.counts.prompt_tokens for record in passes),
        num_block_rows=plan.block_size,
    )
    return MeasuredGeneration(result=result, passes=passes, rates=plan.rates)


def make_requests(runtime: Runtime, prompts: Iterable[Sequence[int]]) -> list[Request]:
    """Requests with the number of the prompt as id. Prompts that the runtime rejects are left out."""
    requests = [runtime.request(str(number), prompt) for number, prompt in enumerate(prompts)]
    return [request for request in requests if isinstance(request, Request)]


def minimum_host_bytes(runtime: Runtime, requests: Sequence[Request]) -> int:
    """The least host memory with which a CPU runs these requests, with all weights streamed and all KV in memory."""
    shape, sizes = runtime.model.shape, [request.size for request in requests]
    config = replace(runtime.config, kv=replace(runtime.config.kv, tier=KVTier.device))
    plan = plan_run(shape, config, UNLIMITED, sizes)
    chunked = least_memory_config(replace(config, policy=plan.policy))
    load = run_load(shape, chunked, UNLIMITED, plan.blocks, sizes)
    return sum(ledger.total_bytes for ledger in choose_placement(shape, chunked, Budgets(host_bytes=1), load).ledgers)


def prefill_seconds(passes: Iterable[PassRecord]) -> float:
    """Seconds of prefill. Of a pass that also decodes, the fraction of its prompt tokens counts."""
    return sum(p.seconds * p.counts.prompt_tokens / p.counts.real_tokens for p in passes)
