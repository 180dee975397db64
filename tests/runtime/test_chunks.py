"""Chunks of prompts, where nobody says: as large as bringing the weights asks for, no larger than memory allows."""

from dataclasses import replace
from itertools import product

import pytest

from runtime.config.settings import Admission, OffloadConfig, PolicyConfig, PolicyKind, RuntimeConfig, Tier
from runtime.plan.cost.rates import MachineRates
from runtime.plan.placement.defaults import CHUNK_TOKENS
from runtime.plan.placement.memory import pass_tokens
from runtime.plan.placement.placement import Budgets
from runtime.plan.planner import RunPlan, find_policy, plan_policy
from runtime.plan.search.candidate import Problem
from runtime.plan.search.policy import Policy
from runtime.plan.shape.model import ModelShape
from runtime.units import GIB, MIB
from tests.toy import sizes_of, toy_mixture, toy_shape

SIZES = sizes_of([100] * 256)
SLOW = MachineRates(
    disk_bytes_per_second=2e8,
    link_in_bytes_per_second=1e9,
    gemm_flops_per_second={1: 2e10, 200: 4e12},
    prefill_attention_flops_per_second=1e13,
    attention_bytes_per_second=8e10,
    turn_seconds=1e-4,
)
FAST_ROADS = replace(SLOW, disk_bytes_per_second=1e12, link_in_bytes_per_second=1e12, turn_seconds=1e-6)
DEVICE, HOST = Budgets(host_bytes=2 * GIB, device_bytes=200 * MIB), Budgets(host_bytes=200 * MIB)
POLICY = PolicyConfig(micro_batch_size=64)


def model(*, is_packed: bool = True) -> ModelShape:
    """112 MiB of weights, keys and values of 12 MiB."""
    return replace(toy_shape(24, is_packed=is_packed), kv_layer_bytes=(16,) * 24)


def planned(
    budgets: Budgets = DEVICE,
    rates: MachineRates | None = SLOW,
    *,
    policy: PolicyConfig = POLICY,
    shape: ModelShape | None = None,
    resident_layers: int | None = 0,
    num_halvings: int = 0,
) -> RunPlan:
    config = RuntimeConfig(policy=policy, offload=OffloadConfig(tier=Tier.nvme, resident_layers=resident_layers))
    problem = Problem(shape=shape or model(), config=config, budgets=budgets, sizes=SIZES, rates=rates)
    plan = find_policy if policy.kind is PolicyKind.hrm else plan_policy
    return plan(problem, num_halvings=num_halvings)


def chunk(plan: RunPlan) -> int:
    assert plan.policy.prefill_chunk_tokens is not None, "a plan says it"
    return plan.policy.prefill_chunk_tokens


def seconds(plan: RunPlan) -> float:
    assert plan.prediction is not None, "there are rates"
    return plan.prediction.seconds


KINDS = (PolicyKind.auto, PolicyKind.fixed)
WAYS = [(where, *way) for where in (DEVICE, HOST) for way in product((True, False), KINDS, Admission)]


@pytest.mark.dealt(most=6)
@pytest.mark.parametrize(
    ("budgets", "is_packed", "kind", "admission"), [*WAYS, (DEVICE, True, PolicyKind.hrm, Admission.wave)]
)
def test_where_weights_bind_prompts_go_in_fewer_passes(
    budgets: Budgets, is_packed: bool, kind: PolicyKind, admission: Admission
) -> None:
    policy = replace(POLICY, kind=kind, admission=admission)
    found, small = (
        planned(budgets, policy=each, shape=model(is_packed=is_packed))
        for each in (policy, replace(policy, prefill_chunk_tokens=CHUNK_TOKENS))
    )
    assert chunk(found) > CHUNK_TOKENS
    assert found.placement.fits
    assert found.prediction is not None
    assert small.prediction is not None
    assert found.prediction.prefill_seconds < 0.75 * small.prediction.prefill_seconds
    assert found.prediction.seconds < small.prediction.seconds


@pytest.mark.dealt
@pytest.mark.parametrize("disk", [1e8, 1e9, 4e9, 2e10])
@pytest.mark.parametrize("device_mib", [130, 160, 190, 220])
def test_no_chunk_given_by_hand_is_much_faster(device_mib: int, disk: float) -> None:
    """Of the whole run: what chunks take from layers that could stay counts too."""
    budgets, rates = replace(DEVICE, device_bytes=device_mib * MIB), replace(SLOW, disk_bytes_per_second=disk)
    found = planned(budgets, rates, resident_layers=None)
    given = [replace(POLICY, prefill_chunk_tokens=tokens) for tokens in (512, 1024, 2048, 4096, 8192)]
    plans = [planned(budgets, rates, policy=each, resident_layers=None) for each in given]
    alike = [each for each in plans if each.blocks == found.blocks]
    assert alike
    assert seconds(found) <= 1.05 * min(map(seconds, alike))


@pytest.mark.parametrize("admission", Admission)
@pytest.mark.parametrize("budgets", [DEVICE, HOST])
def test_where_compute_binds_or_nothing_was_measured_chunks_stay_small(budgets: Budgets, admission: Admission) -> None:
    policy = replace(POLICY, admission=admission)
    for rates in (FAST_ROADS, None):
        assert chunk(planned(budgets, rates, policy=policy)) == CHUNK_TOKENS


def test_what_each_turn_takes_beside_products_makes_chunks_larger_too() -> None:
    """Launches of a device's kernels, where all weights stay in its memory."""
    device = replace(DEVICE, device_bytes=2 * GIB)
    slow, fast = (
        chunk(planned(device, replace(FAST_ROADS, turn_seconds=seconds), resident_layers=None))
        for seconds in (1e-3, 1e-6)
    )
    assert slow > fast == CHUNK_TOKENS


def test_products_that_are_faster_with_more_rows_make_chunks_larger_too() -> None:
    """Those of experts by the tokens that one of them sees."""
    device, flat = replace(DEVICE, device_bytes=2 * GIB), {1: 2e10, 200: 4e12}
    rising = {**flat, CHUNK_TOKENS: 4e12, 4 * CHUNK_TOKENS: 6e12}
    mixture = toy_mixture(12, num_experts=8)

    def found(rates: MachineRates, shape: ModelShape) -> int:
        return chunk(planned(device, rates, shape=shape, resident_layers=None))

    assert found(replace(FAST_ROADS, gemm_flops_per_second=rising), model()) > CHUNK_TOKENS
    assert found(replace(FAST_ROADS, expert_flops_per_second=rising), model()) == CHUNK_TOKENS
    by_expert = {rows // 4: rate for rows, rate in rising.items() if rows >= 4}
    level = {rows // 4: rate for rows, rate in flat.items() if rows >= 4}
    assert found(replace(FAST_ROADS, expert_flops_per_second=level), mixture) == CHUNK_TOKENS
    assert found(replace(FAST_ROADS, expert_flops_per_second=by_expert), mixture) > CHUNK_TOKENS


def test_a_chunk_that_is_given_stays() -> None:
    assert chunk(planned(policy=replace(POLICY, prefill_chunk_tokens=100))) == 100


def test_after_memory_ran_out_chunks_are_small() -> None:
    assert chunk(planned(num_halvings=1)) == CHUNK_TOKENS


def test_chunks_take_what_room_there_is_and_no_more() -> None:
    plans = [planned(replace(DEVICE, device_bytes=n * MIB)) for n in range(120, 220, 10)]
    assert all(plan.placement.fits for plan in plans)
    assert chunk(plans[0]) < chunk(plans[-1])


def test_no_chunk_is_twice_what_a_lane_has() -> None:
    plan = planned(replace(DEVICE, device_bytes=2 * GIB), replace(SLOW, disk_bytes_per_second=1e6))
    lanes = [[SIZES[i] for i in group] for block in plan.blocks for group in block.micro_batches]
    most = max(pass_tokens(model(), lane, 1 << 30) for lane in lanes)
    assert most <= chunk(plan) < 2 * most


def test_one_lane_of_a_cpu_whose_disk_binds_takes_larger_chunks_too() -> None:
    for rates, at_least in ((SLOW, 4096), (FAST_ROADS, 2048)):
        plan = planned(replace(HOST, host_bytes=300 * MIB), rates, policy=PolicyConfig())
        assert plan.num_lanes == 1
        assert chunk(plan) >= at_least
        assert rates is SLOW or chunk(plan) == at_least


@pytest.mark.slow("runtime/test_chunks.py::test_where_weights_bind_prompts_go_in_fewer_passes")
def test_a_search_says_its_chunks_and_goes_by_them_again() -> None:
    plan = planned(policy=PolicyConfig(kind=PolicyKind.hrm))
    assert plan.searched_policy is not None
    assert plan.searched_policy.prefill_chunk_tokens == chunk(plan)
    assert f"prefill chunks of {chunk(plan):,} tokens" in str(plan.searched_policy)
    again = Policy.from_plain(plan.searched_policy.to_plain())
    assert again == plan.searched_policy
    config = again.apply(RuntimeConfig(policy=PolicyConfig(kind=PolicyKind.hrm)), has_device=True)
    assert config.policy.prefill_chunk_tokens == chunk(plan)
    assert again.halve(1).prefill_chunk_tokens == chunk(plan) // 2


def test_a_policy_from_before_chunks_were_chosen_keeps_its_name() -> None:
    plain: dict[str, object] = {
        "micro_batch_size": 16,
        "num_micro_batches": 3,
        "attention": "device",
        "schedule": "zigzag",
        "resident_layers": 2,
        "kv_fraction": 0.5,
    }
    policy = Policy.from_plain(plain)
    assert policy.digest == "b4c5523a3667"  # as it was kept then
    assert policy.to_plain() == plain
