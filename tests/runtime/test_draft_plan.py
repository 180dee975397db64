"""Tokens are guessed where passes wait for weights and memory is left, and nowhere else."""

from dataclasses import replace

import pytest

from runtime.config.settings import (
    Admission,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    SamplingConfig,
    Tier,
)
from runtime.devices.messages import config_for_ranks
from runtime.errors import ConfigError
from runtime.plan.cost.lane_work import decode_work, with_drafts
from runtime.plan.cost.rates import MachineRates
from runtime.plan.placement.memory import draft_bytes
from runtime.plan.placement.placement import Budgets
from runtime.plan.planner import RunPlan, find_policy, plan_policy, plan_run
from runtime.plan.resolved_settings import ResolvedSettings
from runtime.plan.search.candidate import Problem
from runtime.plan.search.drafts import MAX_FREE, MAX_LOSS
from runtime.plan.shape.dtypes import Loss, WeightStorage
from runtime.plan.shape.model import ModelShape
from runtime.units import GIB, MIB
from tests.toy import sizes_of, toy_shape

POLICY = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=8, num_micro_batches=2)
NVME = RuntimeConfig(policy=POLICY, offload=OffloadConfig(tier=Tier.nvme, resident_layers=0))
STORED = WeightStorage(formats=("F32",), loss=Loss.exact)


def rates(disk_bytes_per_second: float) -> MachineRates:
    return MachineRates(
        disk_bytes_per_second=disk_bytes_per_second,
        link_in_bytes_per_second=1e10,
        gemm_flops_per_second={1: 2e10, 16: 1e11, 512: 1e11},
    )


def planned(
    config: RuntimeConfig = NVME,
    shape: ModelShape | None = None,
    *,
    disk: float | None = 1e8,
    host_bytes: int = GIB,
    max_new_tokens: int = 16,
) -> RunPlan:
    sizes = sizes_of([30] * 16, max_new_tokens)
    found = rates(disk) if disk is not None else None
    return plan_run(shape or toy_shape(), config, Budgets(host_bytes=host_bytes), sizes, rates=found)


def test_a_slow_disk_leaves_time_for_guesses_and_a_fast_one_does_not() -> None:
    counts = [planned(disk=disk).policy.draft_tokens for disk in (1e7, 1e9, 4e9, 1e12)]
    assert counts[0] == MAX_FREE
    assert counts == sorted(counts, key=lambda count: -(count or 0))
    assert counts[-1] == 0


def test_resident_weights_and_unknown_rates_leave_none() -> None:
    assert planned(RuntimeConfig(policy=POLICY, offload=OffloadConfig(tier=Tier.none))).policy.draft_tokens == 0
    assert planned(disk=None).policy.draft_tokens == 0


def test_what_is_set_is_what_is_guessed_if_memory_allows() -> None:
    config = replace(NVME, policy=replace(POLICY, draft_tokens=5))
    assert planned(config, disk=1e12).policy.draft_tokens == 5
    assert planned(config, disk=None).policy.draft_tokens == 5
    assert planned(replace(NVME, policy=replace(POLICY, draft_tokens=0)), disk=1e7).policy.draft_tokens == 0


def test_guesses_take_what_a_prefill_pass_and_the_ledger_leave() -> None:
    lanes = [sizes_of([4] * 8), sizes_of([4] * 8)]
    found = [draft_bytes(toy_shape(), lanes, 1, count) for count in range(16)]
    assert found[0] == 0
    assert found == sorted(found)
    assert 0 < found[1] < found[15] < GIB
    lanes = [sizes_of([200] * 8)]
    alone, beside = (draft_bytes(toy_shape(), lanes, 512, 2, beside_prompts=each) for each in (False, True))
    assert alone < draft_bytes(toy_shape(), lanes, 1, 2), "what a prefill pass of more tokens takes"
    assert alone < beside


@pytest.mark.parametrize("mib", range(92, 126, 2))
def test_memory_is_kept_for_guesses_that_cost_little(mib: int) -> None:
    """Whatever part of a layer the budget would leave. With admission=continuous, which needs most."""
    config = replace(NVME, offload=OffloadConfig(tier=Tier.nvme))
    config = replace(config, policy=replace(POLICY, admission=Admission.continuous))
    plan = planned(config, disk=1e7, host_bytes=mib * MIB)
    assert (plan.policy.draft_tokens or 0) >= 4
    assert plan.placement.fits
    assert plan.placement.compute_ledger.budget_bytes == mib * MIB
    plain = planned(replace(config, policy=replace(config.policy, draft_tokens=0)), disk=1e7, host_bytes=mib * MIB)
    assert plan.prediction is not None
    assert plain.prediction is not None
    assert plan.prediction.seconds <= (1 + MAX_LOSS) * plain.prediction.seconds


def test_a_searched_policy_knows_the_chunk_beside_guesses() -> None:
    """A resumed run follows its policy, and must not prefill in other chunks."""
    policy = replace(POLICY, kind=PolicyKind.hrm, admission=Admission.continuous)
    config = RuntimeConfig(policy=policy, offload=OffloadConfig(tier=Tier.nvme))
    sizes, chunks = sizes_of([30] * 16, 16), set[int | None]()
    for mib in (96, 98, 102, 106):
        problem = Problem(
            shape=toy_shape(), config=config, budgets=Budgets(host_bytes=mib * MIB), sizes=sizes, rates=rates(1e7)
        )
        plan = find_policy(problem)
        assert plan.searched_policy is not None
        again = plan_policy(problem.with_policy(plan.searched_policy), blocks=plan.blocks)
        assert again.policy == plan.policy
        chunks.add(plan.policy.prefill_chunk_tokens)
    assert chunks == {256, 512}


def test_a_chunk_that_is_set_stays() -> None:
    policy = replace(POLICY, admission=Admission.continuous, prefill_chunk_tokens=512)
    config = replace(NVME, policy=policy, offload=OffloadConfig(tier=Tier.nvme))
    counts = {planned(config, disk=1e7, host_bytes=mib * MIB).policy.draft_tokens for mib in (94, 96)}
    assert counts == {2, 4}


@pytest.mark.parametrize(
    ("config", "shape", "reason"),
    [
        (NVME, toy_shape(is_packed=False), "padded lanes"),
        (NVME, replace(toy_shape(), restart_tokens=99), "rotary embeddings depend on the length"),
        (NVME, replace(toy_shape(), compute_dtype_bytes=2), "16-bit results"),
        (replace(NVME, sampling=SamplingConfig(num_beams=2)), None, "beam search"),
        (replace(NVME, policy=replace(POLICY, draft_tokens=0)), None, "policy.draft_tokens=0"),
    ],
)
def test_the_plan_says_why_there_are_none(config: RuntimeConfig, shape: ModelShape | None, reason: str) -> None:
    shape = shape or toy_shape()
    plan = planned(config, shape, disk=1e7)
    assert plan.policy.draft_tokens == 0
    has_lengths = shape.restart_tokens is not None
    found = ResolvedSettings.from_plan(
        config, shape, plan, dtype="float32", stored=STORED, has_rope_lengths=has_lengths
    )
    assert f"drafts    none: {reason}" in str(found) or reason in str(found)


def test_the_plan_says_how_many() -> None:
    found = ResolvedSettings.from_plan(NVME, toy_shape(), planned(disk=1e7), dtype="float32", stored=STORED)
    assert "drafts    up to 8 tokens of each sequence guessed per decode pass" in str(found)
    found = ResolvedSettings.from_plan(NVME, toy_shape(), planned(disk=1e12), dtype="float32", stored=STORED)
    assert "drafts    none: decode passes have no time or memory to spare" in str(found)


def test_16_bit_compute_guesses_if_it_is_asked_to() -> None:
    config = replace(NVME, policy=replace(POLICY, draft_tokens=3))
    assert planned(config, replace(toy_shape(), compute_dtype_bytes=2)).policy.draft_tokens == 3


def test_a_single_new_token_needs_no_guess() -> None:
    assert planned(disk=1e7, max_new_tokens=2).policy.draft_tokens == 0


def test_ranks_guess_nothing_and_say_so() -> None:
    assert config_for_ranks(NVME).policy.draft_tokens == 0
    with pytest.raises(ConfigError, match=r"does not support policy.draft_tokens=3: set policy.draft_tokens=null"):
        config_for_ranks(replace(NVME, policy=replace(POLICY, draft_tokens=3)))


def test_the_work_of_a_pass_with_guesses_is_that_of_more_rows() -> None:
    work = decode_work(toy_shape(), sizes_of([10, 20]), 3)
    assert work is not None
    more = with_drafts(work, 2)
    assert (more.num_tokens, more.num_rows) == (6, 6)
    assert more.kv_positions == sum(past + 1 + i for past in (13, 23) for i in range(3))
    assert (more.held_pages, more.changed_pages) == (work.held_pages, work.changed_pages)
