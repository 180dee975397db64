"""Continuous admission in ranks that have all rows, and unequal room for them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

from runtime import Runtime, RuntimeConfig
from runtime.batching.admission import plan_pass
from runtime.config.settings import Admission
from runtime.devices import messages
from runtime.engine import batcher
from runtime.plan.planner import RunPlan, plan_policy
from runtime.ranks.ranks import Ranks
from tests.runtime.rank_runs import completed
from tests.support import NUM_NEW_TOKENS

NUM_PAGES = 7  # of the last rank


class Admitted(NamedTuple):
    """What a rank has come to: the tokens of a run, and for each pass who entered which lane, who gave way, and how
    many tokens each row brought along."""

    tokens: Sequence[Sequence[int]]
    passes: Sequence[tuple[Any, ...]]

    @property
    def num_preempted(self) -> int:
        return sum(len(preempted) for _, preempted, _ in self.passes)


def continuous(config: RuntimeConfig, num_new_tokens: int = NUM_NEW_TOKENS) -> RuntimeConfig:
    """Two lanes of two seats, and prompts in pieces."""
    policy = replace(
        config.policy,
        admission=Admission.continuous,
        micro_batch_size=2,
        num_micro_batches=2,
        prefill_chunk_tokens=24,
    )
    return replace(config, policy=policy, sampling=replace(config.sampling, max_new_tokens=num_new_tokens))


def admitted(ranks: Ranks, config: RuntimeConfig, prompts: Sequence[Sequence[int]]) -> Admitted:
    """Of a run in which the last rank has `NUM_PAGES` of keys and values, and the others as many as they planned."""
    passes = list[tuple[Any, ...]]()

    def planned(*arguments: Any, **more: Any) -> RunPlan:
        plan = plan_policy(*arguments, **more)
        if ranks.rank < ranks.size - 1:
            return plan
        kv = replace(plan.placement.kv, num_pages=NUM_PAGES)
        return replace(plan, placement=replace(plan.placement, kv=kv))

    def noted(*arguments: Any) -> Any:
        plan = plan_pass(*arguments)
        passes.append((plan.admitted, plan.preempted, dict(plan.new_tokens)))
        return plan

    with mock.patch.object(messages, "plan_policy", planned), mock.patch.object(batcher, "plan_pass", noted):
        return Admitted(completed(Runtime(config, ranks=ranks), prompts), passes)
