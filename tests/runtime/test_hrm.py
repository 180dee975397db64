"""The search: what it chooses fits, more memory or a faster road never makes it worse, and it says why."""

import time
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from runtime.batching.balance import Block
from runtime.config.settings import (
    Attention,
    ExpertPaging,
    KVConfig,
    KVDType,
    KVTier,
    OffloadConfig,
    Order,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    Tier,
)
from runtime.errors import BudgetError
from runtime.plan.cost.machine import Machine
from runtime.plan.cost.predict import Prediction
from runtime.plan.cost.rates import MachineRates
from runtime.plan.placement.defaults import with_chunk_tokens
from runtime.plan.placement.placement import Budgets
from runtime.plan.planner import MIN_SEARCHED_SECONDS, find_policy, plan_policy, plan_run
from runtime.plan.search import hrm
from runtime.plan.search.candidate import PlacedRun, Problem, place_existing_blocks
from runtime.plan.search.grid import GridAxes
from runtime.plan.search.hrm import SearchResult, make_roofline, search, select_fitting
from runtime.plan.search.memory_estimates import MemoryEstimate
from runtime.plan.search.policy import Policy
from runtime.plan.search.workload import Workload
from runtime.plan.shape.model import ModelShape
from runtime.resources import Resource
from runtime.units import GIB, MIB
from tests.moe_shapes import MIXTRAL, Moe
from tests.toy import toy_shape

RATES = MachineRates(
    disk_bytes_per_second=1e9,
    gemm_flops_per_second={1: 2e10, 200: 4e12},
    link_in_bytes_per_second=1e10,
    link_out_bytes_per_second=1e10,
    attention_bytes_per_second=8e10,
    cpu_attention_bytes_per_second=4e10,
    prefill_attention_flops_per_second=1e13,
    cpu_flops_per_second=1e11,
    turn_seconds=1e-5,
    pass_seconds=1e-4,
)
SLOW = replace(  # a thousandth of it: a run of seconds takes an hour
    RATES,
    disk_bytes_per_second=1e6,
    gemm_flops_per_second={1: 2e7, 200: 4e9},
    link_in_bytes_per_second=1e7,
    link_out_bytes_per_second=1e7,
)
FAST = replace(
    RATES, disk_bytes_per_second=1e11, gemm_flops_per_second={1: 2e12, 200: 4e14}, link_in_bytes_per_second=1e12
)
SMALL = Moe(
    name="small", num_layers=6, hidden=512, ffn=1024, num_heads=8, num_kv_heads=2, num_experts=8,
    num_experts_per_token=2, vocab=4096, head_dim=64,
)  # fmt: skip
SHAPES = {"dense": toy_shape(), "padded": toy_shape(is_packed=False), "moe": SMALL.shape()}
WORKLOAD = Workload.from_mean(300, mean=40, longest=120, max_new_tokens=24)
WITH_DEVICE = Machine(name="with", host_bytes=2 * GIB, device_bytes=160 * MIB, rates=RATES)
WITHOUT = Machine(name="without", host_bytes=260 * MIB, device_bytes=None, rates=RATES)


def config(tier: Tier = Tier.nvme, kv: KVTier = KVTier.auto) -> RuntimeConfig:
    return RuntimeConfig(
        offload=OffloadConfig(tier=tier), kv=KVConfig(tier=kv), policy=PolicyConfig(kind=PolicyKind.hrm)
    )


def problem(shape: ModelShape, machine: Machine, asked: RuntimeConfig, workload: Workload = WORKLOAD) -> Problem:
    return Problem(shape=shape, config=asked, budgets=machine.budgets, sizes=workload.sizes(), rates=machine.rates)


def choose(shape: ModelShape, machine: Machine, asked: RuntimeConfig) -> SearchResult:
    return search(problem(shape, machine, asked), workload=WORKLOAD)[0]


@cache
def usual_choice() -> SearchResult:
    return choose(SHAPES["moe"], WITH_DEVICE, config())


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("machine", [WITH_DEVICE, WITHOUT], ids=lambda machine: machine.name)
@pytest.mark.parametrize("tier", [Tier.nvme, Tier.cpu])
def test_what_is_chosen_fits_and_is_the_fastest_of_what_was_simulated(
    name: str, machine: Machine, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[PlacedRun] = []

    def timed(asked: Problem, run: PlacedRun) -> Prediction | None:
        made.append(run)
        return predicted(asked, run)

    predicted = Problem.predict
    monkeypatch.setattr(Problem, "predict", timed)
    asked = problem(SHAPES[name], machine, config(tier))
    choice, run, prediction = search(asked, workload=WORKLOAD)
    assert made
    assert all(each.placement.fits for each in made)
    assert [each.seconds for each in choice.table] == sorted(each.seconds for each in choice.table)
    again = plan_policy(asked.with_policy(choice.best.policy))
    assert again.prediction is not None
    assert again.prediction.prefill_seconds + again.prediction.decode_seconds == choice.best.seconds
    assert (again.placement, again.prediction) == (run.placement, prediction)
    assert choice.best.tokens_per_second == pytest.approx(300 * 24 / choice.best.seconds)


def roofline_seconds(shape: ModelShape, machine: Machine, asked: RuntimeConfig) -> float:
    grid = GridAxes.from_config(shape, asked, 300, has_device=machine.device_bytes is not None).grid(300)
    within = select_fitting(shape, machine, WORKLOAD, asked, grid)
    return float(np.min(make_roofline(shape, machine, WORKLOAD, asked).seconds(within)))


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("has_device", [True, False])
def test_more_memory_never_gives_a_slower_choice(name: str, has_device: bool) -> None:
    base = WITH_DEVICE if has_device else WITHOUT
    key = "device_bytes" if has_device else "host_bytes"
    budgets = [size * MIB for size in (96, 120, 160, 240, 400, 900)]
    machines = [replace(base, **{key: budget}) for budget in budgets]
    by_roofline = [roofline_seconds(SHAPES[name], machine, config()) for machine in machines]
    assert by_roofline == sorted(by_roofline, reverse=True)
    assert by_roofline[0] > by_roofline[-1]
    simulated = [choose(SHAPES[name], machine, config()).best.seconds for machine in machines[1::4]]
    assert all(more <= 1.02 * less for less, more in pairwise(simulated))


@pytest.mark.parametrize("key", ["disk_bytes_per_second", "link_in_bytes_per_second", "cpu_attention_bytes_per_second"])
def test_a_faster_road_never_gives_a_slower_choice(key: str) -> None:
    seconds = [
        roofline_seconds(
            SHAPES["moe"], replace(WITH_DEVICE, rates=replace(RATES, **{key: share * getattr(RATES, key)})), config()
        )
        for share in (0.1, 0.5, 1.0, 4.0)
    ]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.dealt
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("has_device", "chunk", "num_sharers"),
    [(True, 512, 1), (False, 512, 1), (True, 2048, 1), (True, 512, 3), (False, 512, 3)],
)
def test_the_grids_memory_is_the_ledgers(name: str, has_device: bool, chunk: int, num_sharers: int) -> None:
    """Of sequences that are all alike, to a twentieth: alignment, and tables that grow with neither layers nor rows."""
    shape, workload = SHAPES[name], Workload.from_mean(192, mean=64, longest=64, max_new_tokens=32)
    device_bytes = 64 * GIB if has_device else None
    huge = Machine(name="huge", host_bytes=64 * GIB, device_bytes=device_bytes, rates=RATES, num_sharers=num_sharers)
    tier = Tier.cpu if has_device else Tier.nvme
    asked = replace(with_chunk_tokens(config(), chunk), offload=OffloadConfig(tier=tier, resident_layers=2))
    alone = problem(shape, huge, asked, workload)
    choices = GridAxes(
        micro_batches=[8, 32],
        counts=[1, 3],
        resident=[2],
        variants=GridAxes.from_config(shape, asked, 192, has_device=has_device).variants,
    )
    grid = choices.grid(192)
    need = MemoryEstimate(shape, asked, workload, grid, huge.budgets, is_paged=False)
    for at in range(len(grid.micro_batch)):
        policy = grid.policy(at)
        if policy.kv_fraction not in (0.0, 1.0):
            continue  # how many of six layers are a quarter is rounded
        fixed = policy.apply(asked, has_device=has_device)
        fixed = replace(fixed, offload=replace(fixed.offload, expert_paging=fixed.offload.expert_paging.off))
        ledgers = plan_policy(replace(alone, config=fixed)).placement.ledgers
        assert need.compute_bytes[at] == pytest.approx(ledgers[0].total_bytes, rel=0.05), policy
        if has_device:
            assert need.host_bytes[at] == pytest.approx(ledgers[1].total_bytes, rel=0.05), policy


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("has_device", [True, False])
def test_the_grid_lets_through_what_fits_with_no_stage_resident(is_tied: bool, has_device: bool) -> None:
    """Embeddings and head, which here are larger than a layer, then pass through the slots like layers, or lie in
    memory once for both."""
    shape, workload = toy_shape(is_tied=is_tied), Workload.from_mean(8, mean=64, longest=64, max_new_tokens=32)
    tight = replace(config(), offload=OffloadConfig(tier=Tier.nvme, resident_layers=0))
    grid = GridAxes(micro_batches=[8], counts=[1], resident=[0], variants=[(Order.zigzag, Attention.device, 1.0)]).grid(
        8
    )
    fixed = grid.policy(0).apply(tight, has_device=has_device)
    fitting: list[Budgets] = []
    for mib in range(64, 128):
        compute = {"device_bytes": mib * MIB, "host_bytes": 64 * GIB} if has_device else {"host_bytes": mib * MIB}
        budgets = Budgets(**compute)
        try:
            plan_run(shape, fixed, budgets, workload.sizes())
        except BudgetError:
            continue
        fitting.append(budgets)
    assert fitting
    need = MemoryEstimate(shape, tight, workload, grid, fitting[0], is_paged=False)
    assert need.fits(fitting[0]).all()


@pytest.mark.parametrize("paging", [ExpertPaging.off, ExpertPaging.hit])
def test_the_grid_lets_through_what_host_memory_has_staging_for(paging: ExpertPaging) -> None:
    """On its way from the disk to a device only what is under way: not all experts of a layer."""
    shape, workload = SHAPES["moe"], Workload.from_mean(8, mean=64, longest=64, max_new_tokens=32)
    tight = replace(config(), offload=OffloadConfig(tier=Tier.nvme, resident_layers=0, expert_paging=paging))
    grid = GridAxes(micro_batches=[8], counts=[1], resident=[0], variants=[(Order.zigzag, Attention.device, 1.0)]).grid(
        8
    )
    fixed = grid.policy(0).apply(tight, has_device=True)
    budgets = Budgets(host_bytes=GIB, device_bytes=144 * MIB)
    host = plan_run(shape, fixed, budgets, workload.sizes()).placement.ledgers[1].total_bytes
    need = MemoryEstimate(shape, tight, workload, grid, budgets, is_paged=paging is ExpertPaging.hit)
    assert need.fits(replace(budgets, host_bytes=host)).all()


def test_where_the_grid_lets_through_too_much_the_block_shrinks_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at once to the smallest of all."""

    def strict(asked: Problem, blocks: tuple[Block, ...]) -> PlacedRun:
        if max(len(block.members) for block in blocks) > 20:
            raise BudgetError("more than the grid knows of")
        return place_existing_blocks(asked, blocks)

    monkeypatch.setattr(hrm, "place_existing_blocks", strict)
    best = choose(SHAPES["dense"], WITH_DEVICE, config()).best.policy
    assert 10 <= best.num_sequences <= 20


def test_when_nothing_fits_the_equation_says_why() -> None:
    with pytest.raises(BudgetError, match="host memory than its budget"):
        choose(SHAPES["dense"], replace(WITHOUT, host_bytes=60 * MIB), config())


@pytest.mark.slow("runtime/test_hrm.py::test_a_search_keeps_to_what_is_set")
def test_settings_of_the_config_are_kept() -> None:
    """Only the policy is searched; a tier of keys and values that is asked for stays."""
    every = [
        (choose(SHAPES["moe"], WITH_DEVICE, config(kv=tier)).best.policy, tier)
        for tier in (KVTier.device, KVTier.nvme, KVTier.cpu)
    ]
    for policy, tier in every:
        applied = policy.apply(config(kv=tier), has_device=True)
        assert applied.policy.kind is PolicyKind.fixed
        assert applied.offload == config().offload
        assert applied.kv.tier is tier or policy.kv_fraction == 1
        assert policy.attention is Attention.device or tier is KVTier.cpu


def test_why_names_policy_runner_up_binding_resource_and_turning_points() -> None:
    choice = usual_choice()
    text = "\n".join(choice.why)
    assert choice.best.policy.digest in text
    assert choice.runner_up is not None
    assert choice.runner_up.policy != choice.best.policy
    assert str(choice.runner_up.policy) in text
    assert f"{choice.binding.value} is the limit" in text
    assert "P1" in text
    assert choice.roofline_binding is max(choice.busy_seconds, key=lambda resource: choice.busy_seconds[resource])


def test_where_simulator_and_roofline_differ_both_are_named() -> None:
    choice = usual_choice()
    other = Resource.device_to_host
    assert choice.roofline_binding is not other
    differing = replace(choice, table=(replace(choice.best, binding=other), *choice.table[1:]))
    assert differing.binding is other
    text = "\n".join(differing.why)
    assert "device-to-host is the limit; by the roofline" in text
    assert f"limited by {choice.roofline_binding.value}" in text


def test_a_slow_disk_binds_until_compute_does() -> None:
    def binding(factor: float) -> Resource:
        rates = replace(RATES, disk_bytes_per_second=factor * 1e9)
        return choose(SHAPES["dense"], replace(WITHOUT, host_bytes=110 * MIB, rates=rates), config()).binding

    assert binding(0.001) is Resource.disk
    assert binding(1000.0) is Resource.compute


SET = {
    "micro_batch_size": 7,
    "num_micro_batches": 3,
    "schedule": Order.flexgen,
    "attention": Attention.cpu,
    "prefill_chunk_tokens": 96,
}


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize(
    ("kind", "key"),
    [*((PolicyKind.hrm, key) for key in SET), (PolicyKind.auto, "schedule"), (PolicyKind.auto, "attention")],
)
def test_a_search_keeps_to_what_is_set(kind: PolicyKind, key: str) -> None:
    asked = replace(config(), policy=replace(PolicyConfig(kind=kind), **{key: SET[key]}))
    found = find_policy(problem(SHAPES["moe"], replace(WITH_DEVICE, rates=SLOW), asked))
    assert found.choice is not None
    for candidate in found.choice.table:
        value = getattr(candidate.policy, key)
        assert value <= SET[key] if key.endswith("es") or key == "micro_batch_size" else value == SET[key]


def test_cgopipe_where_the_cpu_cannot_attend_is_the_plain_order() -> None:
    policy = PolicyConfig(kind=PolicyKind.hrm, schedule=Order.cgopipe, attention=Attention.cpu)
    found = find_policy(problem(SHAPES["padded"], WITH_DEVICE, replace(config(), policy=policy)))
    assert found.placement.fits
    assert not found.placement.decode_walk.cpu_attention


@pytest.mark.slow("runtime/test_hrm.py::test_a_search_keeps_to_what_is_set")
def test_the_default_is_searched_where_its_run_takes_long_and_never_slower_than_by_rule() -> None:
    auto = replace(config(), policy=PolicyConfig())
    for rates, is_searched in ((FAST, False), (SLOW, True)):
        asked = problem(SHAPES["moe"], replace(WITH_DEVICE, rates=rates), auto)
        found, by_rule, searched = find_policy(asked), plan_policy(asked), find_policy(replace(asked, config=config()))
        assert by_rule.prediction is not None
        assert found.prediction is not None
        assert searched.prediction is not None
        assert (by_rule.prediction.seconds >= MIN_SEARCHED_SECONDS) is is_searched, "else this tests nothing"
        assert (found.choice is not None) is is_searched
        if is_searched:
            assert found.prediction == searched.prediction
        else:
            assert found == by_rule


@pytest.mark.slow("runtime/test_hrm.py::test_a_search_keeps_to_what_is_set")
def test_the_usual_policy_stays_where_another_is_faster_by_a_hair_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(SHAPES["moe"], WITH_DEVICE, config())
    table = usual_choice().table
    usual = next(each.policy for each in table[1:] if each.policy != table[0].policy)
    for share, expected in ((1.0, usual), (0.0, table[0].policy)):
        monkeypatch.setattr(hrm, "NOTABLE", share)
        assert search(asked, default=replace(usual, prefill_chunk_tokens=None))[0].best.policy == expected


@pytest.mark.parametrize("num_halvings", range(8))
def test_a_halved_policy_has_half_the_sequences(num_halvings: int) -> None:
    policy = Policy(
        micro_batch_size=16, num_micro_batches=4, attention=Attention.device, schedule=Order.zigzag, resident_layers=0,
        kv_fraction=1.0,
    )  # fmt: skip
    assert policy.halve(num_halvings).num_sequences == max(1, 64 >> num_halvings) or num_halvings > 2
    assert policy.halve(num_halvings).num_sequences <= max(1, 64 >> num_halvings)


def test_a_found_policy_is_a_fixed_one_and_a_resumed_run_keeps_its_blocks() -> None:
    first = find_policy(problem(SHAPES["moe"], WITH_DEVICE, config()))
    assert first.choice is not None
    assert first.policy.kind is PolicyKind.fixed
    best = first.choice.best.policy
    assert (first.policy.schedule, first.policy.attention) == (best.schedule, best.attention)
    slower = replace(RATES, link_in_bytes_per_second=1e8)
    again = find_policy(problem(SHAPES["moe"], replace(WITH_DEVICE, rates=slower), config()), blocks=first.blocks)
    assert again.blocks == first.blocks
    assert again.choice is not None


def test_attention_on_the_cpu_is_not_tried_with_a_rounded_cache_before_an_accelerator() -> None:
    exact, rounded = (replace(SHAPES["moe"], kv_dtype=dtype) for dtype in (KVDType.auto, KVDType.int8))
    tried = [
        {variant[1] for variant in GridAxes.from_config(shape, config(), 4, has_device=True).variants}
        for shape in (exact, rounded)
    ]
    assert tried == [{Attention.device, Attention.cpu}, {Attention.device}]


def test_the_whole_grid_takes_less_than_a_second() -> None:
    shape, workload = MIXTRAL.shape(), Workload.from_mean(10_000, mean=77, longest=418, max_new_tokens=128)
    machine = Machine(name="t4", host_bytes=170 * GIB, device_bytes=14 * GIB, rates=RATES)
    asked, begin = config(Tier.cpu), time.process_time()
    grid = GridAxes.from_config(shape, asked, 10_000, has_device=True).grid(10_000)
    make_roofline(shape, machine, workload, asked).seconds(select_fitting(shape, machine, workload, asked, grid))
    assert len(grid.micro_batch) > 50_000
    assert time.process_time() - begin < 1.0
