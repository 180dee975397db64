"""Blocks and prefetch are chosen by what fits and what is fast; the same inputs give the same plan."""

from dataclasses import replace

import pytest

from runtime.config.settings import (
    KVConfig,
    KVTier,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    Prefetch,
    PrefetchConfig,
    RuntimeConfig,
    Tier,
)
from runtime.errors import BudgetError
from runtime.plan.cost.rates import MachineRates
from runtime.plan.placement.load import Load
from runtime.plan.placement.memory import PAGE_TOKENS, SequenceSize
from runtime.plan.placement.placement import Budgets
from runtime.plan.placement.placer import choose_placement
from runtime.plan.placement.run_load import block_lanes
from runtime.plan.planner import RunPlan, plan_run
from runtime.units import GIB, MIB
from tests.toy import sizes_of, toy_shape

SIZES = sizes_of([16 + 7 * n % 90 for n in range(100)])
RATES = MachineRates(
    disk_bytes_per_second=1e9, link_in_bytes_per_second=1e10, gemm_flops_per_second={1: 1e9, 16: 1e10, 512: 1e11}
)


def plan(
    budget: int,
    *,
    kind: PolicyKind = PolicyKind.auto,
    prefetch: PrefetchConfig | None = None,
    is_packed: bool = True,
    rates: MachineRates | None = None,
    num_halvings: int = 0,
    sizes: list[SequenceSize] = SIZES,
) -> RunPlan:
    config = RuntimeConfig(
        offload=OffloadConfig(tier=Tier.nvme),
        policy=PolicyConfig(kind=kind, micro_batch_size=16, num_micro_batches=4),
        prefetch=prefetch or PrefetchConfig(),
    )
    shape = toy_shape(is_packed=is_packed)
    return plan_run(shape, config, Budgets(host_bytes=budget), sizes, rates=rates, num_halvings=num_halvings)


def largest_block(found: RunPlan) -> int:
    return max(len(block.members) for block in found.blocks)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("kind", PolicyKind)
def test_with_room_blocks_are_as_configured(kind: PolicyKind, is_packed: bool) -> None:
    found = plan(8 * GIB, kind=kind, is_packed=is_packed)
    assert len(found.blocks) == 2
    assert all(len(micro_batch) <= 16 for block in found.blocks for micro_batch in block.micro_batches)
    assert sorted(i for block in found.blocks for i in block.members) == list(range(100))


@pytest.mark.parametrize("is_packed", [True, False])
def test_auto_takes_larger_blocks_with_more_memory_down_to_one_sequence(is_packed: bool) -> None:
    counts = []
    for budget in range(92 * MIB, 190 * MIB, 2 * MIB):
        try:
            counts.append(largest_block(plan(budget, is_packed=is_packed)))
        except BudgetError:
            counts.append(0)
    assert counts == sorted(counts)
    assert len(set(counts)) > 4


def test_fixed_is_taken_as_given_or_refused() -> None:
    with pytest.raises(BudgetError, match="KV cache"):
        plan(80 * MIB, kind=PolicyKind.fixed)
    assert plan(100 * MIB).placement.fits


@pytest.mark.parametrize("prefetch", Prefetch)
def test_the_same_inputs_give_the_same_plan(prefetch: Prefetch) -> None:
    first, second = (plan(200 * MIB, prefetch=PrefetchConfig(kind=prefetch), rates=RATES) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("num_sequences", [1, 2, 20, 33, 64, 100])
def test_a_halving_halves_the_blocks(num_sequences: int, is_packed: bool) -> None:
    before = largest_block(plan(8 * GIB, is_packed=is_packed, sizes=SIZES[:num_sequences]))
    after = largest_block(plan(8 * GIB, is_packed=is_packed, sizes=SIZES[:num_sequences], num_halvings=1))
    assert after <= max(1, -(-before // 2) + 1)


@pytest.mark.parametrize("budget", range(140 * MIB, 320 * MIB, 20 * MIB))
def test_cost_aware_stays_within_the_budget_and_is_no_slower_than_depth_one(budget: int) -> None:
    aware = plan(budget, prefetch=PrefetchConfig(kind=Prefetch.cost_aware), rates=RATES)
    plain = plan(budget, prefetch=PrefetchConfig(depth=1), rates=RATES)
    assert aware.placement.fits
    assert aware.prefetch.kind is Prefetch.lookahead
    assert aware.blocks == plain.blocks
    assert aware.prediction is not None
    assert plain.prediction is not None
    assert aware.prediction.decode_seconds <= plain.prediction.decode_seconds * 1.001


def test_every_block_of_a_plan_fits_and_not_only_the_one_with_most_tokens() -> None:
    """Two blocks of nearly the same number of tokens, of which one holds the longest sequence and its large scores."""
    sizes = sizes_of([1500, 1000, 1000, 480], max_new_tokens=4)
    config = RuntimeConfig(
        offload=OffloadConfig(tier=Tier.nvme, resident_layers=0),
        policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=1),
    )
    shape = toy_shape()
    found = plan_run(shape, config, Budgets(host_bytes=GIB), sizes)
    loads = [Load.from_lanes(shape, block_lanes(block, sizes), 512) for block in found.blocks]
    num_pages = max(load.num_kv_pages for load in loads)
    needed = [
        choose_placement(shape, config, Budgets(host_bytes=GIB), replace(load, num_kv_pages=num_pages))
        for load in loads
    ]
    totals = [placement.ledgers[0].total_bytes for placement in needed]
    assert len(set(totals)) == 2
    assert found.placement.ledgers[0].total_bytes == max(totals)


def test_no_requests_make_a_plan_without_blocks() -> None:
    found = plan(200 * MIB, sizes=[], rates=RATES)
    assert found.blocks == ()
    assert found.prediction is not None
    assert found.prediction.decode_seconds == 0


def test_a_resumed_run_keeps_its_blocks() -> None:
    before = plan(8 * GIB)
    config = RuntimeConfig(
        offload=OffloadConfig(tier=Tier.nvme), policy=PolicyConfig(kind=PolicyKind.auto, micro_batch_size=3)
    )
    after = plan_run(toy_shape(), config, Budgets(host_bytes=GIB), SIZES, blocks=before.blocks)
    assert after.blocks == before.blocks


def test_slots_of_keys_and_values_hold_the_lanes_of_every_block() -> None:
    """The block that takes most has lanes of 144 positions, the other one a lane of 160."""
    sizes = sizes_of([156, 140, 140, 92], max_new_tokens=4)
    config = RuntimeConfig(
        offload=OffloadConfig(tier=Tier.nvme),
        kv=KVConfig(tier=KVTier.nvme, device_fraction=0.0),
        policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=1, num_micro_batches=2),
    )
    found = plan_run(toy_shape(), config, Budgets(host_bytes=GIB), sizes)
    lanes = [lane for block in found.blocks for lane in block_lanes(block, sizes)]
    assert found.placement.kv.slot_pages == max(lane[0].capacity_tokens for lane in lanes) // PAGE_TOKENS == 10
