"""Every stage is resident or streamed; the budget decides how many, and more of it is never worse."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from runtime.config.orders import PLAIN
from runtime.config.settings import (
    ExpertPaging,
    KVConfig,
    KVTier,
    OffloadConfig,
    Prefetch,
    PrefetchConfig,
    RuntimeConfig,
    Tier,
)
from runtime.errors import BudgetError
from runtime.plan.placement.experts import EXPERT_SLOTS, EXPERT_SLOTS_BYTES
from runtime.plan.placement.kv import evenly_spaced
from runtime.plan.placement.load import Load
from runtime.plan.placement.placement import Budgets, Placement
from runtime.plan.placement.placer import choose_placement
from runtime.plan.placement.walks import num_weight_slots
from runtime.plan.schedule.check import check_schedule
from runtime.plan.schedule.schedule import make_schedule
from runtime.plan.shape.model import ModelShape
from runtime.units import GIB, MIB
from tests.toy import sizes_of, toy_mixture, toy_shape

BLOCK = [sizes_of([30, 20]), sizes_of([25])]
PREFETCHES = [
    PrefetchConfig(kind=kind, depth=depth, block_layers=block)
    for kind, depth, block in [
        (Prefetch.off, 1, 2), (Prefetch.lookahead, 1, 2), (Prefetch.lookahead, 3, 2), (Prefetch.block, 1, 2),
        (Prefetch.block, 1, 3), (Prefetch.block, 1, 64), (Prefetch.lookahead, 64, 2), (Prefetch.cost_aware, 2, 2),
    ]
]  # fmt: skip
HOST, DEVICE = Budgets(host_bytes=GIB), Budgets(host_bytes=GIB, device_bytes=GIB)


def placed(
    shape: ModelShape,
    budgets: Budgets,
    *,
    tier: Tier = Tier.nvme,
    prefetch: PrefetchConfig | None = None,
    resident_layers: int | None = None,
) -> Placement:
    config = RuntimeConfig(
        offload=OffloadConfig(tier=tier, resident_layers=resident_layers),
        prefetch=prefetch or PrefetchConfig(),
        kv=KVConfig(tier=KVTier.device),
    )
    return choose_placement(shape, config, budgets, Load.from_lanes(shape, BLOCK, 512))


def terms(placement: Placement, memory: str) -> dict[str, int]:
    return {e.name: e.num_bytes for ledger in placement.ledgers if ledger.memory == memory for e in ledger.entries}


@pytest.mark.dealt("resident_layers", "prefetch", "budgets", "tier", by=2)
@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("budgets", [HOST, DEVICE], ids=["cpu", "accelerator"])
@pytest.mark.parametrize("prefetch", PREFETCHES, ids=lambda p: f"{p.kind.value} {p.depth} {p.block_layers}")
@pytest.mark.parametrize("resident_layers", [0, 1, 5, 8, 100])
def test_streamed_and_resident_are_all_stages_and_the_walk_can_be_scheduled(
    resident_layers: int, prefetch: PrefetchConfig, budgets: Budgets, tier: Tier
) -> None:
    shape = toy_shape()
    placement = placed(shape, budgets, tier=tier, prefetch=prefetch, resident_layers=resident_layers)
    walk = placement.walk
    assert sorted([*walk.streamed, *placement.resident]) == [stage.index for stage in shape.stages]
    assert walk.num_slots <= min(len(walk.streamed), num_weight_slots(prefetch, PLAIN))
    assert walk.num_staging_slots <= len(walk.streamed)
    check_schedule(make_schedule(walk, 2), walk, 2)


@pytest.mark.dealt("resident_layers", "prefetch", "budgets", "tier", by=2)
@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("budgets", [HOST, DEVICE], ids=["cpu", "accelerator"])
@pytest.mark.parametrize("prefetch", PREFETCHES, ids=lambda p: f"{p.kind.value} {p.depth} {p.block_layers}")
@pytest.mark.parametrize("resident_layers", [0, 2, 4, 5, 6, 7])
def test_decode_passes_leave_out_the_encoder_and_need_no_more_slots(
    resident_layers: int, prefetch: PrefetchConfig, budgets: Budgets, tier: Tier
) -> None:
    """Stages: embeddings, encoder layers 1 to 3, bridge 4, decoder layers 5 to 8, head 9."""
    shape = toy_shape(4, num_encoder_layers=3, is_packed=False)
    placement = placed(shape, budgets, tier=tier, prefetch=prefetch, resident_layers=resident_layers)
    walk, decode = placement.walk, placement.decode_walk
    assert list(decode.stages) == list(range(4, 10))
    assert decode.streamed == tuple(stage for stage in walk.streamed if stage >= 4)
    assert decode.num_slots <= walk.num_slots
    assert decode.num_staging_slots <= walk.num_staging_slots
    for each in (walk, decode):
        check_schedule(make_schedule(each, 2), each, 2)


def test_decoder_layers_stay_resident_before_those_of_an_encoder() -> None:
    shape = toy_shape(4, num_encoder_layers=3, is_packed=False)
    kept = [placed(shape, HOST, resident_layers=n).resident & set(range(1, 9)) - {4} for n in range(8)]
    assert [len(layers) for layers in kept] == list(range(8))
    assert all(layers <= {5, 6, 7, 8} for layers in kept[:5])
    assert all(layers >= {5, 6, 7, 8} for layers in kept[4:])


def test_without_an_encoder_every_pass_walks_alike() -> None:
    placement = placed(toy_shape(), HOST, resident_layers=3)
    assert placement.decode_walk == placement.walk


def test_more_budget_never_means_fewer_resident_layers() -> None:
    counts = []
    for budget in range(60 * MIB, 260 * MIB, 2 * MIB):
        placement = placed(toy_shape(), Budgets(host_bytes=budget))
        counts.append(len(placement.resident) if placement.fits else -1)
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (-1, 10)
    assert len(set(counts)) > 5


@pytest.mark.parametrize("budget", range(60 * MIB, 260 * MIB, 10 * MIB))
def test_the_choice_is_the_most_layers_that_fit(budget: int) -> None:
    """What automatic residency finds is what a search by hand over `resident_layers` finds."""
    automatic = placed(toy_shape(), Budgets(host_bytes=budget))
    by_hand = [placed(toy_shape(), Budgets(host_bytes=budget), resident_layers=n) for n in range(9)]
    most = max((len(p.resident) for p in by_hand if p.fits), default=None)
    assert (len(automatic.resident) if automatic.fits else None) == most


@pytest.mark.parametrize("num_layers", [1, 7, 32])
def test_resident_layers_are_spread_evenly(num_layers: int) -> None:
    for count in range(1, num_layers + 1):
        places = evenly_spaced(num_layers, count)
        gaps = [b - a for a, b in pairwise(places)]
        assert len(set(places)) == count
        assert places[0] >= 0
        assert places[-1] < num_layers
        assert max(gaps, default=0) - min(gaps, default=0) <= 1
    assert evenly_spaced(num_layers, 0) == ()


def test_tied_weights_count_once() -> None:
    tied, plain = (
        terms(placed(toy_shape(is_tied=is_tied), HOST, resident_layers=0), "host") for is_tied in (True, False)
    )
    assert plain["resident weights"] == 2 * tied["resident weights"] == 16 * MIB


def test_slots_are_as_large_as_the_largest_streamed_stage() -> None:
    placement = placed(toy_shape(), HOST, resident_layers=0, prefetch=PrefetchConfig(depth=2))
    assert terms(placement, "host")["weight slots"] == 3 * placement.slot_bytes == 3 * 4 * MIB


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_experts_have_a_slot_for_each_that_is_read_ahead_and_one_for_that_which_computes(depth: int) -> None:
    """And further ones in what is left of a CPU's memory, unless nothing is to be read ahead."""
    shape, load = toy_mixture(), Load.from_lanes(toy_mixture(), [], 512)
    offload = OffloadConfig(tier=Tier.nvme, resident_layers=0, expert_paging=ExpertPaging.hit)
    config = RuntimeConfig(offload=offload, prefetch=PrefetchConfig(depth=depth))
    device = Budgets(host_bytes=GIB, device_bytes=GIB)
    staged, rich = (choose_placement(shape, config, budgets, load) for budgets in (device, Budgets(host_bytes=GIB)))
    assert staged.paged == rich.paged
    [size] = {shape.sizes.experts[stage].slot_bytes for stage in rich.paged}
    assert staged.num_expert_slots == depth + 1
    assert rich.num_expert_slots == min(EXPERT_SLOTS, EXPERT_SLOTS_BYTES // size)
    least = rich.ledgers[0].total_bytes - (rich.num_expert_slots - depth - 1) * size
    for more, num_slots in ((0, depth + 1), (2 * size, depth + 3)):
        scarce = choose_placement(shape, config, Budgets(host_bytes=least + more), load)
        assert scarce.fits
        assert scarce.num_expert_slots == num_slots
    eager = replace(config, prefetch=PrefetchConfig(kind=Prefetch.off))
    assert choose_placement(shape, eager, Budgets(host_bytes=GIB), load).num_expert_slots == 2


def test_embeddings_and_head_are_streamed_where_they_do_not_fit_and_resident_layers_are_kept() -> None:
    full = (
        placed(toy_shape(), HOST, resident_layers=0, prefetch=PrefetchConfig(kind=Prefetch.off)).ledgers[0].total_bytes
    )
    for resident_layers in (0, 1):
        placement = placed(
            toy_shape(),
            Budgets(host_bytes=full - MIB),
            resident_layers=resident_layers,
            prefetch=PrefetchConfig(kind=Prefetch.off),
        )
        assert placement.fits
        assert len(placement.resident) == resident_layers
        assert {0, 9} <= set(placement.walk.streamed)


@pytest.mark.parametrize(
    ("tier", "host"),
    [
        (Tier.none, {"staging slots": 0, "load buffer": 32 * MIB}),
        (Tier.auto, {"staging slots": 0, "load buffer": 16 * MIB, "weights": 8 * 4 * MIB}),
        (Tier.cpu, {"staging slots": 0, "load buffer": 16 * MIB, "weights": 8 * 4 * MIB}),
        (Tier.nvme, {"staging slots": 2 * 4 * MIB, "load buffer": 16 * MIB}),
    ],
)
def test_an_accelerators_host_memory_holds_what_the_tier_says(tier: Tier, host: dict[str, int]) -> None:
    assert terms(placed(toy_shape(), DEVICE, tier=tier, resident_layers=0), "host") == host


def test_what_does_not_fit_is_refused_with_the_equation_and_the_key() -> None:
    with pytest.raises(BudgetError, match=r"(?s)KV cache.*positions x.*total.*offload\.host_memory_gib.*kv=nvme"):
        placed(toy_shape(), Budgets(host_bytes=MIB)).require_fit()
    with pytest.raises(BudgetError, match=r"(?s)device memory:.*\(offload\.device_memory_gib\)"):
        placed(toy_shape(), Budgets(host_bytes=GIB, device_bytes=MIB)).require_fit()


LANES = {"policy.micro_batch_size", "policy.num_micro_batches", "policy.prefill_chunk_tokens"}
DEEP = LANES | {"prefetch.depth"}
SMALL, SMALL_HOST = Budgets(host_bytes=MIB), Budgets(host_bytes=MIB, device_bytes=GIB)


@pytest.mark.parametrize(
    ("budgets", "offload", "kv", "prefetch", "keys"),
    [
        (SMALL, Tier.nvme, KVTier.device, Prefetch.lookahead, DEEP | {"sampling.max_new_tokens", "kv=nvme"}),
        (SMALL, Tier.nvme, KVTier.device, Prefetch.off, LANES | {"sampling.max_new_tokens", "kv=nvme"}),
        (SMALL, Tier.nvme, KVTier.nvme, Prefetch.lookahead, DEEP | {"sampling.max_new_tokens", "kv.num_slots"}),
        (SMALL, Tier.none, KVTier.device, Prefetch.lookahead,
         LANES | {"sampling.max_new_tokens", "kv=nvme", "offload=nvme"}),
        (SMALL_HOST, Tier.nvme, KVTier.device, Prefetch.lookahead, set()),
        (SMALL_HOST, Tier.cpu, KVTier.device, Prefetch.lookahead, {"offload=nvme"}),
        (SMALL_HOST, Tier.nvme, KVTier.cpu, Prefetch.lookahead,
         {"policy.micro_batch_size", "policy.num_micro_batches", "sampling.max_new_tokens", "kv=nvme"}),
    ],
)  # fmt: skip
def test_only_keys_that_can_help_are_named(
    budgets: Budgets, offload: Tier, kv: KVTier, prefetch: Prefetch, keys: set[str]
) -> None:
    config = RuntimeConfig(
        offload=OffloadConfig(tier=offload, resident_layers=0),
        prefetch=PrefetchConfig(kind=prefetch),
        kv=KVConfig(tier=kv, device_fraction=0.0),
    )
    placement = choose_placement(toy_shape(), config, budgets, Load.from_lanes(toy_shape(), BLOCK, 512))
    with pytest.raises(BudgetError) as error:
        placement.require_fit()
    advice = str(error.value).splitlines()[-1]
    assert set(re.findall(r"[a-z_]+(?:\.[a-z_]+|=[a-z]+)", advice)) - {"offload.host_memory_gib"} == keys


@pytest.mark.parametrize("budgets", [SMALL, SMALL_HOST])
@pytest.mark.parametrize("asked_gib", [None, 0.001])
def test_who_gave_no_budget_of_pinned_memory_hears_what_it_is(budgets: Budgets, asked_gib: float | None) -> None:
    config = RuntimeConfig(offload=OffloadConfig(tier=Tier.cpu, resident_layers=0, host_memory_gib=asked_gib))
    placement = choose_placement(toy_shape(), config, budgets, Load.from_lanes(toy_shape(), BLOCK, 512))
    with pytest.raises(BudgetError) as error:
        placement.require_fit(config)
    said = "Its default is at most 75% of host memory" in str(error.value)
    assert said is (budgets is SMALL_HOST and asked_gib is None)


def test_a_plan_of_single_sequences_is_told_the_least_budget_that_it_takes() -> None:
    shape, lanes = toy_shape(), [sizes_of([9])]
    config = RuntimeConfig(offload=OffloadConfig(tier=Tier.nvme, resident_layers=0), kv=KVConfig(tier=KVTier.nvme))
    with pytest.raises(BudgetError) as error:
        choose_placement(shape, config, SMALL, Load.from_lanes(shape, lanes, 1)).require_fit()
    advice = str(error.value).splitlines()[-1]
    assert not any(key in advice for key in LANES)
    found = re.match(r"raise offload\.host_memory_gib to ([\d.]+)", advice)
    assert found is not None
    least = float(found[1])
    assert choose_placement(shape, config, Budgets(host_bytes=int(least * GIB)), Load.from_lanes(shape, lanes, 1)).fits
    assert not choose_placement(
        shape, config, Budgets(host_bytes=int((least - 0.002) * GIB)), Load.from_lanes(shape, lanes, 1)
    ).fits


def test_keys_and_values_go_to_disk_where_neither_memory_has_room() -> None:
    shape = toy_shape()
    config = RuntimeConfig(offload=OffloadConfig(tier=Tier.nvme, resident_layers=0), kv=KVConfig(tier=KVTier.auto))
    load = Load.from_lanes(shape, [sizes_of([2000] * 4) for _ in range(8)], 512)
    roomy = choose_placement(shape, config, Budgets(host_bytes=8 * GIB, device_bytes=8 * GIB), load)
    device_bytes = roomy.ledgers[0].total_bytes * 2 // 3
    tight = choose_placement(shape, config, Budgets(host_bytes=150 * MIB, device_bytes=device_bytes), load)
    assert (roomy.kv.tier, tight.kv.tier) == (KVTier.device, KVTier.nvme)
    assert tight.fits
