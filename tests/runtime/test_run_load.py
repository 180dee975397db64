"""As many pages of keys and values as the memory holds where they are kept, to the last one."""

from dataclasses import replace

import pytest

from runtime.batching.prefixes import SharedPrefix
from runtime.config.settings import (
    Admission,
    Attention,
    KVConfig,
    KVTier,
    OffloadConfig,
    Order,
    PolicyConfig,
    PolicyKind,
    Prefetch,
    PrefetchConfig,
    RuntimeConfig,
    Tier,
)
from runtime.plan.placement.load import Load
from runtime.plan.placement.memory import PAGE_TOKENS
from runtime.plan.placement.placement import Budgets, Placement
from runtime.plan.placement.placer import choose_placement
from runtime.plan.placement.run_load import least_memory_config
from runtime.plan.planner import plan_run
from runtime.units import GIB, MIB
from tests.toy import sizes_of, toy_shape

SHAPE = toy_shape()
SIZES = sizes_of([1000] * 64, max_new_tokens=24)  # 64 pages each, of 128 KiB over all layers: 512 MiB
FULL = 64 * 64
CONTINUOUS = RuntimeConfig(
    offload=OffloadConfig(tier=Tier.nvme),
    policy=PolicyConfig(
        kind=PolicyKind.fixed, admission=Admission.continuous, micro_batch_size=16, num_micro_batches=4
    ),
)


def planned(budgets: Budgets, tier: KVTier, kind: PolicyKind = PolicyKind.fixed) -> Placement:
    policy = replace(CONTINUOUS.policy, kind=kind)
    config = replace(CONTINUOUS, kv=KVConfig(tier=tier), policy=policy)
    return plan_run(SHAPE, config, budgets, SIZES).placement


def load_of(num_pages: int) -> Load:
    whole = sizes_of([size.capacity_tokens for size in SIZES], max_new_tokens=0)
    full = Load.from_lanes(SHAPE, [whole[i : i + 16] for i in range(0, 64, 16)], 512)
    return replace(full, num_kv_pages=num_pages)


@pytest.mark.parametrize(
    ("tier", "budgets"),
    [
        (KVTier.device, Budgets(host_bytes=400 * MIB)),
        (KVTier.device, Budgets(host_bytes=GIB, device_bytes=400 * MIB)),
        (KVTier.cpu, Budgets(host_bytes=300 * MIB, device_bytes=300 * MIB)),
        (KVTier.cpu, Budgets(host_bytes=100 * MIB, device_bytes=300 * MIB)),
        (KVTier.nvme, Budgets(host_bytes=210 * MIB)),
    ],
)
def test_one_page_more_would_not_fit(tier: KVTier, budgets: Budgets) -> None:
    placement = planned(budgets, tier)
    config = least_memory_config(replace(CONTINUOUS, kv=KVConfig(tier=tier)))
    num_pages = placement.kv.num_pages
    assert placement.fits
    assert num_pages == FULL or not choose_placement(SHAPE, config, budgets, load_of(num_pages + 1)).fits
    assert tier is KVTier.nvme or num_pages < FULL


def test_pages_on_disk_are_not_paid_for_in_memory() -> None:
    """Slots hold one lane's pages of one layer each, however many lie on disk."""
    assert planned(Budgets(host_bytes=250 * MIB), KVTier.nvme).kv.num_pages == FULL


@pytest.mark.parametrize(("share", "tier"), [(0.9, KVTier.device), (0.55, KVTier.device), (0.45, KVTier.nvme)])
def test_disk_is_taken_only_where_memory_has_not_half_the_pages(share: float, tier: KVTier) -> None:
    without = (
        choose_placement(SHAPE, least_memory_config(CONTINUOUS), Budgets(host_bytes=GIB), load_of(0))
        .ledgers[0]
        .total_bytes
    )
    pages_bytes = int(share * FULL) * PAGE_TOKENS * SHAPE.kv_bytes_per_token
    placement = planned(Budgets(host_bytes=without + pages_bytes), KVTier.auto)
    assert placement.fits
    assert bool(placement.kv.page_bytes) == (tier is KVTier.nvme)
    if tier is KVTier.device:
        assert placement.kv.num_pages >= int(share * FULL)  # embeddings and head may make room for more


BLOCKS = {
    "many short rows": [sizes_of([40] * 96, max_new_tokens=8)],
    "few long rows": [sizes_of([1800] * 8, max_new_tokens=200)],
    "one row in each lane": [sizes_of([500])] * 6,
    "nothing": [],
}


@pytest.mark.parametrize("order", [Order.zigzag, Order.module_batched])
@pytest.mark.parametrize("name", BLOCKS)
def test_each_of_a_runs_blocks_finds_the_memory_it_takes(name: str, order: Order) -> None:
    """Beside the pool of pages, which is as large as the block with most pages needs it: many rows take logits, long
    ones scores."""
    config = least_memory_config(replace(CONTINUOUS, policy=PolicyConfig(schedule=order, attention=Attention.cpu)))
    budgets = Budgets(host_bytes=8 * GIB, device_bytes=8 * GIB)
    together = Load.from_blocks(SHAPE, BLOCKS.values(), 512)
    alone = replace(Load.from_lanes(SHAPE, BLOCKS[name], 512), num_kv_pages=together.num_kv_pages)
    for mine, all_of_them in zip(
        *(choose_placement(SHAPE, config, budgets, load).ledgers for load in (alone, together)), strict=True
    ):
        assert mine.total_bytes <= all_of_them.total_bytes


def test_auto_seats_so_many_that_half_of_what_they_may_come_to_fits() -> None:
    placement = planned(Budgets(host_bytes=300 * MIB), KVTier.device, PolicyKind.auto)
    assert placement.fits
    assert 0 < placement.kv.num_pages < FULL // 2
    fewest = planned(Budgets(host_bytes=300 * MIB), KVTier.device)
    assert placement.kv.num_pages > fewest.kv.num_pages


def test_fixed_resident_layers_stay_and_the_block_becomes_smaller() -> None:
    config = RuntimeConfig(
        offload=OffloadConfig(tier=Tier.nvme, resident_layers=6),
        policy=PolicyConfig(kind=PolicyKind.auto, micro_batch_size=16, num_micro_batches=4),
    )
    blocks = {}
    for resident_layers in (None, 6):
        each = replace(config, offload=replace(config.offload, resident_layers=resident_layers))
        found = plan_run(SHAPE, each, Budgets(host_bytes=180 * MIB), SIZES)
        blocks[resident_layers] = max(len(block.members) for block in found.blocks)
        assert found.placement.fits
    assert len(found.placement.resident) >= 6
    assert blocks[6] < blocks[None]


@pytest.mark.parametrize("kind", PolicyKind)
def test_what_is_aware_of_costs_reads_one_stage_ahead_while_nothing_is_measured(kind: PolicyKind) -> None:
    config = RuntimeConfig(
        offload=OffloadConfig(tier=Tier.nvme, resident_layers=0),
        policy=PolicyConfig(kind=kind),
        prefetch=PrefetchConfig(kind=Prefetch.cost_aware, depth=5),
    )
    found = plan_run(SHAPE, config, Budgets(host_bytes=4 * GIB), SIZES[:4])
    assert found.prefetch == PrefetchConfig(kind=Prefetch.lookahead, depth=1)
    assert found.placement.walk.num_slots == 2


@pytest.mark.parametrize(
    ("kv", "num_copies"), [(KVConfig(tier=KVTier.device), 1), (KVConfig(tier=KVTier.nvme, device_fraction=0.0), 4)]
)
def test_a_block_has_pages_for_a_prefix_once_where_its_lanes_share_it(kv: KVConfig, num_copies: int) -> None:
    prefix = SharedPrefix(num_tokens=400)
    sizes = [size.with_prefix(prefix) for size in sizes_of([410] * 16, max_new_tokens=6)]
    policy = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=4, num_micro_batches=4)
    plan = plan_run(toy_shape(), RuntimeConfig(policy=policy, kv=kv), Budgets(host_bytes=GIB), sizes)
    assert (plan.block_size, plan.num_lanes) == (16, 4)
    assert plan.placement.kv.num_pages == num_copies * 400 // PAGE_TOKENS + 16


@pytest.mark.parametrize(("kv", "num_copies"), [(KVTier.device, 1), (KVTier.nvme, 4)])
def test_all_seats_have_the_pages_of_a_prefix_once_where_lanes_share_it(kv: KVTier, num_copies: int) -> None:
    prefix = SharedPrefix(num_tokens=400)
    sizes = [size.with_prefix(prefix) for size in sizes_of([410] * 64, max_new_tokens=6)]
    policy = replace(CONTINUOUS.policy, micro_batch_size=4)
    tier = KVConfig(tier=kv, device_fraction=None if kv is KVTier.device else 0.0)
    config = replace(CONTINUOUS, policy=policy, kv=tier)
    found = plan_run(SHAPE, config, Budgets(host_bytes=GIB), sizes).placement.kv
    assert found.num_pages == num_copies * 400 // PAGE_TOKENS + 16
    assert kv is KVTier.device or found.slot_pages == 400 // PAGE_TOKENS + 4


def test_a_slot_has_room_for_any_sequences_that_come_to_share_a_lane() -> None:
    """Also for those that begin like nobody, though the longest begin alike."""
    prefix = SharedPrefix(num_tokens=400)
    alike = [size.with_prefix(prefix) for size in sizes_of([480] * 8, max_new_tokens=0)]
    sizes = [*alike, *sizes_of([320] * 8, max_new_tokens=0)]
    config = replace(CONTINUOUS, policy=replace(CONTINUOUS.policy, micro_batch_size=4, num_micro_batches=2))
    config = replace(config, kv=KVConfig(tier=KVTier.nvme, device_fraction=0.0))
    found = plan_run(SHAPE, config, Budgets(host_bytes=GIB), sizes).placement.kv
    assert found.slot_pages >= 4 * 320 // PAGE_TOKENS
