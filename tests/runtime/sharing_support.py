"""Prompts that begin alike, and what transformers' `generate` says to each of them alone."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from runtime import Runtime, RuntimeConfig
from runtime.batching.admission import AdmissionLimits
from runtime.batching.prefixes import num_spared
from runtime.config.settings import Admission, SharePrefixes
from runtime.engine.records import PassRecord
from runtime.plan.cost.lane_work import block_prefills
from runtime.plan.cost.mixed_passes import mixed_passes
from runtime.plan.placement.defaults import chunk_tokens
from runtime.plan.placement.memory import PAGE_TOKENS
from runtime.plan.planner import RunPlan
from runtime.sequences.sequence import Completion, Request
from tests.support import clear_tokens, made_once, transformers_model

STEM, BRANCH = 21, 20  # tokens; neither ends at the end of a page
LENGTHS = ((0, 12), (1, 3), (2, 1), (2, 3), (2, 25), (1, 30), (2, 2))  # of the stems before it, and of its own


@dataclass(frozen=True, kw_only=True)
class Alike:
    """`expected[i]` are the greedy tokens for `prompts[i]`, the last of which are the same prompt again."""

    directory: Path
    prompts: list[list[int]]
    expected: list[list[int]]

    @staticmethod
    def shared(directory: Path, home: Path) -> "Alike":
        """Made once in `home`, for the checkpoint at `directory`."""

        def make(home: Path) -> None:
            made = _clear_prompts(directory)
            (home / "alike.json").write_text(json.dumps(list(zip(*made, strict=True))))

        prompts, expected = json.loads((made_once(home, make) / "alike.json").read_text())
        return Alike(directory=directory, prompts=prompts, expected=expected)


def _clear_prompts(directory: Path) -> list[tuple[list[int], list[int]]]:
    model, random = transformers_model(directory), Random(0)
    stem, branch = random.choices(range(5, 600), k=STEM), random.choices(range(5, 600), k=BRANCH)
    stems = ([], stem, stem + branch)
    pairs = list[tuple[list[int], list[int]]]()
    for which, num_own in LENGTHS:
        answer = None
        while answer is None:
            prompt = [*stems[which], *random.choices(range(5, 600), k=num_own)]
            answer = clear_tokens(model, prompt)
        pairs.append((prompt, answer))
    return [*pairs, pairs[-1], pairs[-1]]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a run of all prompts came to."""

    tokens: list[list[int]]
    num_computed: int  # tokens of prompts
    num_spared: int
    num_pages_left: int


def run_alike(runtime: Runtime, prompts: list[list[int]], *, num_kv_pages: int | None = None) -> Ran:
    """All blocks of the prompts, and what became of the pages, of which there are as many as planned or so many."""
    requests_or_errors = [runtime.request(str(index), prompt) for index, prompt in enumerate(prompts)]
    requests = [each for each in requests_or_errors if isinstance(each, Request)]
    assert len(requests) == len(prompts), requests_or_errors
    plan, passes, completions = runtime.plan(requests), list[PassRecord](), dict[int, Completion]()
    if num_kv_pages is not None:
        placement = plan.placement
        plan = replace(plan, placement=replace(placement, kv=replace(placement.kv, num_pages=num_kv_pages)))
    with runtime.session(plan) as session:
        completions |= dict(session.generate(requests, passes.append))
        pool = session._engine.lanes.pages.pool
    _require_as_planned(runtime, plan, requests, passes)
    assert all(completion.is_ok for completion in completions.values()), completions
    return Ran(
        tokens=[list(completions[i].token_ids) for i in range(len(prompts))],
        num_computed=sum(record.counts.prompt_tokens for record in passes),
        num_spared=sum(record.counts.spared_tokens for record in passes),
        num_pages_left=pool.num_pages - pool.num_free,
    )


def _require_as_planned(runtime: Runtime, plan: RunPlan, requests: list[Request], passes: list[PassRecord]) -> None:
    """What is spared, and what is computed in how many passes, is what the plan says."""
    sizes, rule = runtime.sizes(requests), plan.placement.sharing_rule
    if plan.policy.admission is Admission.continuous:
        order = [sizes[i] for block in plan.blocks for i in block.members]
        limits = AdmissionLimits.from_lanes(
            rule,
            num_lanes=plan.num_lanes,
            lane_size=plan.lane_size,
            chunk_tokens=chunk_tokens(plan.policy),
            page_tokens=PAGE_TOKENS,
        )
        played = mixed_passes(order, limits, plan.placement.kv.num_pages)
        assert [sum(work.num_tokens for work in each.lanes) for each in played] == [
            record.counts.real_tokens for record in passes
        ]
        return
    spared = num_spared([block.micro_batches for block in plan.blocks], plan.prefixes, rule)
    assert sum(record.counts.spared_tokens for record in passes) == spared
    prefills = [
        block_prefills(
            runtime.model.shape,
            [[sizes[i] for i in group] for group in block.micro_batches],
            chunk_tokens(plan.policy),
            rule,
        )
        for block in plan.blocks
    ]
    computed = [work.num_tokens for lanes in prefills for lane in lanes for work in lane if work is not None]
    assert sum(record.counts.prompt_tokens for record in passes) == sum(computed)
    assert sum(record.counts.prompt_tokens > 0 for record in passes) == sum(max(map(len, lanes)) for lanes in prefills)


def unshared(config: RuntimeConfig) -> RuntimeConfig:
    return replace(config, policy=replace(config.policy, share_prefixes=SharePrefixes.off))
