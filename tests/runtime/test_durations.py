"""Every action has its price: worked out by hand for a toy of 8 layers of 1 Mi numbers and a KV of 1 KiB a position."""

from dataclasses import replace

import pytest

from runtime.config.settings import (  # fmt: skip
    Attention,
    ExpertPaging,
    KVConfig,
    KVDType,
    KVTier,
    OffloadConfig,
    Order,
    PolicyConfig,
    RuntimeConfig,
    Tier,
)
from runtime.plan.cost.durations import make_durations
from runtime.plan.cost.lane_work import LaneWork
from runtime.plan.cost.rates import MachineRates
from runtime.plan.cost.simulator import Durations
from runtime.plan.placement.load import Load
from runtime.plan.placement.placement import Budgets, Placement
from runtime.plan.placement.placer import choose_placement
from runtime.plan.schedule.actions import Action, Op
from runtime.plan.shape.dtypes import with_kv_dtype
from runtime.plan.shape.model import ModelShape
from runtime.units import GIB, MIB
from tests.toy import HIDDEN, LAYER_ROWS, sizes_of, toy_mixture, toy_shape

LAYER, HEAD = 4, 9
RATES = MachineRates(
    disk_bytes_per_second=1e6, link_in_bytes_per_second=1e7, link_out_bytes_per_second=2e7,
    gemm_flops_per_second={1: 1e9}, attention_bytes_per_second=1e5, cpu_attention_bytes_per_second=2e5,
    prefill_attention_flops_per_second=1e8, turn_seconds=0.25,
)  # fmt: skip
LANE = LaneWork(num_tokens=4, num_rows=4, kv_positions=100, held_pages=8, changed_pages=4)
PRODUCTS = 2 * 4 * LAYER_ROWS * HIDDEN / 1e9
ATTENTION = 100 * 1024 / 1e5


def placed(config: RuntimeConfig, shape: ModelShape, *, has_device: bool = False) -> Placement:
    load = Load.from_lanes(shape, [sizes_of([20] * 4)] * 2, 512)
    placement = choose_placement(shape, config, Budgets(host_bytes=GIB, device_bytes=GIB if has_device else None), load)
    assert placement.fits
    return placement


def config_of(**changes: object) -> RuntimeConfig:
    return replace(RuntimeConfig(offload=OffloadConfig(tier=Tier.nvme, resident_layers=0)), **changes)


def priced(placement: Placement, shape: ModelShape, lanes: list[LaneWork], rates: MachineRates = RATES) -> Durations:
    return make_durations(shape, placement, placement.decode_walk, lanes, rates)


def test_ranks_exchange_what_they_make_in_each_layer_and_nowhere_else() -> None:
    shape, several = toy_shape(), replace(RATES, exchange_bytes_per_second=1e3, exchange_seconds=0.5)
    placement = placed(config_of(), shape)
    alone, together = priced(placement, shape, [LANE]), priced(placement, shape, [LANE], several)
    exchange = 4 * HIDDEN * shape.compute_dtype_bytes / 1e3 + 0.5
    assert together.run(LAYER, 0) - alone.run(LAYER, 0) == pytest.approx(exchange)
    halves = [together.pre(LAYER, 0) - alone.pre(LAYER, 0), together.post(LAYER, 0) - alone.post(LAYER, 0)]
    assert halves == pytest.approx([exchange / 2, exchange / 2])
    assert together.run(HEAD, 0) == alone.run(HEAD, 0)


def test_a_turn_is_products_attention_and_its_own_time() -> None:
    shape = toy_shape()
    found = priced(placed(config_of(), shape), shape, [LANE, LANE])
    assert found.run(LAYER, 0) == pytest.approx(PRODUCTS + ATTENTION + 0.25)
    assert found.read(LAYER) == pytest.approx(4 * MIB / 1e6)


def test_host_memory_sees_all_bytes_of_disk_and_link_and_what_the_cpu_attends_to() -> None:
    shape = toy_shape(is_packed=True)
    config = config_of(policy=PolicyConfig(attention=Attention.cpu))
    placement = placed(config, shape, has_device=True)
    assert placement.host_layers
    found = priced(placement, shape, [LANE], replace(RATES, host_memory_bytes_per_second=4e6))
    disk, link_in, link_out = found.host_shares.values()
    assert found.read(LAYER) * disk == found.copy(LAYER) * link_in == pytest.approx(4 * MIB / 4e6)
    assert link_out == 2e7 / 4e6
    assert found.host_attend(LAYER, 0) == pytest.approx(100 * 1024 / 4e6)
    unknown = priced(placement, shape, [LANE])
    assert (unknown.host_attend(LAYER, 0), set(unknown.host_shares.values())) == (0, {0})


@pytest.mark.parametrize("paging", [ExpertPaging.off, ExpertPaging.hit])
@pytest.mark.parametrize("has_device", [False, True])
@pytest.mark.parametrize("num_kept", [0, 16])
def test_experts_that_are_read_by_themselves_are_launched_by_themselves(
    paging: ExpertPaging, has_device: bool, num_kept: int
) -> None:
    """A CPU multiplies by those that stay in memory in a group."""
    shape = toy_mixture()
    offload = OffloadConfig(tier=Tier.nvme, resident_layers=0, expert_paging=paging)
    placement = placed(config_of(offload=offload), shape, has_device=has_device)
    placement = replace(placement, num_kept_experts=num_kept)
    free, launched = (
        priced(placement, shape, [LANE], replace(RATES, hit_seconds=seconds)).run(LAYER, 0) for seconds in (0.0, 0.5)
    )
    hits = 8 * (1 - (6 / 8) ** 4) if paging is ExpertPaging.hit else 0
    others = 1 - num_kept / (8 * len(placement.paged)) if placement.paged and not has_device else 1
    assert launched - free == pytest.approx(others * hits * 0.5)


def test_of_quantised_pages_those_go_back_that_tokens_have_filled() -> None:
    exact = toy_shape(is_packed=True)
    kept = with_kv_dtype(exact, KVDType.int8)
    config = config_of(kv=KVConfig(tier=KVTier.nvme, device_fraction=0.0))
    pages = {
        shape.kv_dtype: priced(placement, shape, [LANE]).store(LAYER, 0) * 1e6 / placement.kv.stride_bytes(LAYER - 1)
        for shape, placement in ((shape, placed(config, shape)) for shape in (exact, kept))
    }
    assert pages == {KVDType.auto: pytest.approx(LANE.changed_pages), KVDType.int8: pytest.approx(4 / 16)}


def test_prompts_attend_by_pairs_and_only_asking_rows_have_logits() -> None:
    shape = toy_shape()
    prompt = LaneWork(num_tokens=4, num_rows=1, prefill_pairs=10)
    found = priced(placed(config_of(), shape), shape, [prompt])
    assert found.run(LAYER, 0) == pytest.approx(PRODUCTS + 4 * 4 * 64 * 10 / 1e8 + 0.25)
    assert found.run(HEAD, 0) == pytest.approx(2 * 1 * 8192 * HIDDEN / 1e9 + 0.25)


def test_in_the_last_layer_of_packed_lanes_only_asking_rows_go_on_behind_keys_and_values() -> None:
    """The weights in front of attention meet all tokens, and the asking ones again."""
    shape, last = toy_shape(), HEAD - 1
    prompt = LaneWork(num_tokens=4, num_rows=1, prefill_pairs=10, selected_positions=30)
    found = priced(placed(config_of(), shape), shape, [prompt])
    early = (4 + 2 * 2) * 64 * HIDDEN  # queries, keys and values
    products = 2 * (4 * early + LAYER_ROWS * HIDDEN) / 1e9
    assert found.run(last, 0) == pytest.approx(products + 30 * 1024 / 1e5 + 0.25)
    assert found.pre(last, 0) + found.post(last, 0) == pytest.approx(products + 0.25)
    assert found.attend(last, 0) == pytest.approx(30 * 1024 / 2e5)
    few = replace(prompt, num_tokens=4, num_rows=3)  # too few to spare
    assert priced(placed(config_of(), shape), shape, [few]).run(last, 0) == pytest.approx(found.run(LAYER, 0))
    padded = toy_shape(is_packed=False)
    assert priced(placed(config_of(), padded), padded, [prompt]).run(last, 0) == pytest.approx(found.run(LAYER, 0))


def test_attention_on_the_cpu_takes_nothing_from_a_turn_but_itself() -> None:
    """`pre`, `attend` and `post` together are `run`, at the CPU's own rate."""
    shape = toy_shape()
    found = priced(placed(config_of(policy=PolicyConfig(attention=Attention.cpu)), shape), shape, [LANE])
    assert found.attend(LAYER, 0) == pytest.approx(ATTENTION / 2)
    assert found.pre(LAYER, 0) + found.post(LAYER, 0) == pytest.approx(PRODUCTS + 0.25)
    assert found.links.cpu_is_compute


def test_keys_and_values_travel_in_pages_over_the_disk_or_the_link() -> None:
    shape = toy_shape()
    kv = KVConfig(tier=KVTier.nvme, device_fraction=0.0)
    on_disk = priced(placed(config_of(kv=kv), shape), shape, [LANE])
    stride = 16 * 1024
    assert on_disk.links.is_kv_on_disk
    assert on_disk.fetch(LAYER, 0) == pytest.approx(8 * stride / 1e6)
    assert on_disk.store(LAYER, 0) == pytest.approx(4 * stride / 1e6)
    beside = placed(config_of(kv=replace(kv, tier=KVTier.cpu)), shape, has_device=True)
    over_link = priced(beside, shape, [LANE])
    assert over_link.fetch(LAYER, 0) == pytest.approx(8 * stride / 1e7)
    assert over_link.store(LAYER, 0) == pytest.approx(4 * stride / 2e7)


def test_behind_an_accelerator_pages_on_disk_travel_over_the_link_too_each_way_at_its_own_rate() -> None:
    shape, stride = toy_shape(), 16 * 1024
    config = config_of(kv=KVConfig(tier=KVTier.nvme, device_fraction=0.0))
    found = priced(placed(config, shape, has_device=True), shape, [LANE])
    assert (found.fetch(LAYER, 0), found.store(LAYER, 0)) == pytest.approx((8 * stride / 1e6, 4 * stride / 1e6))
    assert (found.fetch_copy(LAYER, 0), found.store_copy(LAYER, 0)) == pytest.approx(
        (8 * stride / 1e7, 4 * stride / 2e7)
    )
    alone = priced(placed(config, shape), shape, [LANE])
    assert (alone.fetch_copy(LAYER, 0), alone.store_copy(LAYER, 0)) == (0.0, 0.0)


def test_experts_multiply_their_share_of_the_tokens() -> None:
    """At one rate for all M time goes with the tokens, each of which visits 2 of 8 experts of 1/8 of the layer."""
    shape = toy_mixture()
    work = LaneWork(num_tokens=16, num_rows=16)
    lane, batched = (
        priced(placed(config_of(policy=PolicyConfig(schedule=order)), shape), shape, [work, work])
        for order in (Order.zigzag, Order.module_batched)
    )
    stage = shape.layers[0]
    once = lane.run(stage.index, 0) - batched.route(stage.index, 0)
    assert once == pytest.approx(2 * 16 * 2 * LAYER_ROWS * HIDDEN / 8 / 1e9)
    assert batched.experts(stage.index) == pytest.approx(2 * once)


def test_an_expert_that_is_hit_by_few_takes_as_long_as_for_one_row() -> None:
    """Below the first measured M a product takes its weights' time: 4 tokens cost as many rows as they hit experts."""
    shape = toy_mixture()
    stage, rates = shape.layers[0].index, replace(RATES, expert_flops_per_second={64: 64e6})
    placement = placed(config_of(), shape)
    found = make_durations(shape, placement, placement.decode_walk, [LaneWork(num_tokens=4, num_rows=4)], rates)
    hits = 8 * (1 - (6 / 8) ** 4)
    assert found.run(stage, 0) == pytest.approx(0.25 + hits * 2 * LAYER_ROWS * HIDDEN / 8 / 1e6)


def test_paged_experts_are_read_by_the_action_that_meets_them() -> None:
    shape = toy_mixture()
    offload = OffloadConfig(tier=Tier.nvme, resident_layers=0, expert_paging=ExpertPaging.hit)
    placement = placed(config_of(offload=offload), shape)
    stage = next(iter(sorted(placement.paged)))
    found = priced(placement, shape, [LaneWork(num_tokens=1, num_rows=1)])
    assert found.expert_reads is not None
    reads = found.expert_reads(Action(Op.run, stage, 0))
    assert reads is not None
    whole = shape.stages[stage]
    share = whole.num_experts_per_token / whole.num_experts
    assert reads.read_seconds == pytest.approx(share * (whole.num_bytes - whole.dense.num_bytes) / 1e6)
    assert found.read(stage) == pytest.approx(whole.dense.num_bytes / 1e6)
    assert found.expert_reads(Action(Op.free, stage)) is None
