"""What all measurements of Millrace itself have in common."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from runtime.api import Runtime
from runtime.config import KVTier
from runtime.engine.records import PassRecord
from runtime.engine.sequence import Request
from runtime.plan.placement.placement import Budgets
from runtime.plan.placement.placer import place
from runtime.plan.placement.run_load import bare, run_load
from runtime.plan.planner import plan_run

AMPLE = Budgets(host_bytes=1 << 60)


def requests_of(runtime: Runtime, prompts: Iterable[Sequence[int]]) -> list[Request]:
    """By their numbers; what the runtime rejects is left out."""
    made = [runtime.request(str(number), prompt) for number, prompt in enumerate(prompts)]
    return [request for request in made if isinstance(request, Request)]


def least_bytes(runtime: Runtime, requests: Sequence[Request]) -> int:
    """Of host memory that the runtime's config takes for these requests on a CPU, with no weights that stay and all
    keys and values in memory."""
    shape, sizes = runtime.model.shape, [request.size for request in requests]
    config = replace(runtime.config, kv=replace(runtime.config.kv, tier=KVTier.device))
    plan = plan_run(shape, config, AMPLE, sizes)
    chunked = bare(replace(config, policy=plan.policy))
    load = run_load(shape, chunked, AMPLE, plan.blocks, sizes)
    return sum(ledger.total_bytes for ledger in place(shape, chunked, Budgets(host_bytes=1), load).ledgers)


def prefill_seconds(passes: Iterable[PassRecord]) -> float:
    """Of a pass the share that the tokens of prompts have in it."""
    return sum(p.seconds * p.counts.prompt_tokens / p.counts.real_tokens for p in passes)
