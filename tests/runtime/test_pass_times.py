"""The roofline of a grid: each policy as if alone, hand-worked numbers, and no machine slower for being faster."""

from dataclasses import replace

import numpy as np
import pytest

from jobs.planning.named import build_shapes
from runtime.config.settings import (
    Attention,
    DType,
    FeedForward,
    KVConfig,
    KVTier,
    OffloadConfig,
    Order,
    PolicyConfig,
    RuntimeConfig,
    Tier,
)
from runtime.model.families import FAMILIES
from runtime.plan.cost.rates import MachineRates
from runtime.plan.cost.work import LayerWork, stage_works
from runtime.plan.search.grid import GridAxes, PolicyGrid
from runtime.plan.search.pass_times import Roofline
from runtime.plan.search.policy import Policy
from runtime.plan.search.workload import Workload
from runtime.resources import Resource
from tests.moe_shapes import MIXTRAL
from tests.toy import sizes_of, toy_shape

RATES = MachineRates(
    disk_bytes_per_second=2e9,
    gemm_flops_per_second={1: 1e9, 100: 1e11},
    link_in_bytes_per_second=1e10,
    link_out_bytes_per_second=5e9,
    attention_bytes_per_second=4e10,
    cpu_attention_bytes_per_second=2e10,
    prefill_attention_flops_per_second=1e12,
    cpu_flops_per_second=5e10,
    turn_seconds=1e-4,
    pass_seconds=1e-3,
)
WORKLOAD = Workload.from_sizes(sizes_of([20, 60] * 50, max_new_tokens=33))
CONFIG = RuntimeConfig(
    offload=OffloadConfig(tier=Tier.cpu), kv=KVConfig(tier=KVTier.auto), policy=PolicyConfig(prefill_chunk_tokens=100)
)
EVERY = GridAxes(
    micro_batches=[1, 7, 50],
    counts=[1, 2, 3],
    resident=[0, 4, 8],
    variants=[
        (order, attention, 0.5)
        for order in Order
        for attention in Attention
        if order is not Order.cgopipe or attention is Attention.cpu
    ],
)


def roofline(rates: MachineRates = RATES, *, is_moe: bool = False, has_device: bool = True) -> Roofline:
    work = LayerWork.from_shape(MIXTRAL.shape() if is_moe else toy_shape())
    return Roofline(
        work=work, rates=rates, workload=WORKLOAD, config=CONFIG, has_device=has_device, item_bytes=4,
        in_host=lambda grid: work.num_layers - grid.resident,
    )  # fmt: skip


def only(order: Order = Order.zigzag, attention: Attention = Attention.device, kv_fraction: float = 1.0) -> PolicyGrid:
    """Two blocks of 50 sequences, each in two lanes; two of eight layers stay."""
    policy = Policy(
        micro_batch_size=25,
        num_micro_batches=2,
        attention=attention,
        schedule=order,
        resident_layers=2,
        kv_fraction=kv_fraction,
    )
    return EVERY.grid(100).single(policy)


def test_layers_of_the_toy_model_are_what_it_is_made_of() -> None:
    work = LayerWork.from_shape(toy_shape())
    assert (work.num_layers, work.num_bytes, work.dense_weights) == (8, 4096 * 256 * 4, 4096 * 256)
    assert (work.kv_bytes, work.head_weights, work.flops_per_token) == (1024, 8192 * 256, 2 * 4096 * 256)


def test_layers_of_a_mixture_count_what_a_token_meets() -> None:
    work = LayerWork.from_shape(MIXTRAL.shape())
    assert work.expert_weights == 3 * 4096 * 14336
    assert work.flops_per_token == pytest.approx(MIXTRAL.shape().layers[0].flops_per_token)
    assert work.num_bytes * 32 + work.outer_bytes == pytest.approx(93.4e9, rel=0.01)
    assert work.ffn_flops_per_token / work.ffn_bytes == pytest.approx(2 / 8, rel=0.001)


@pytest.mark.parametrize(("family", "num_experts"), [("mamba-2", 0), ("qwen3-next", 8)])
def test_what_layers_weigh_is_what_lies_in_the_checkpoint(family: str, num_experts: int) -> None:
    """The kernel of a convolution has three dimensions, and is no expert of a layer that has others, or none."""
    found = FAMILIES[family]
    shape = build_shapes(family, {"model_type": found.model_type, **found.overrides})[DType.bfloat16]
    kernels = [p for stage in shape.layers for p in stage.parameters if p.name.endswith("conv1d.weight")]
    assert {len(p.shape) for p in kernels} == {3}
    work = LayerWork.from_shape(shape)
    assert work.num_layers * work.num_bytes + work.outer_bytes == shape.weight_bytes
    assert not {p.name for stage in shape.layers for p in stage.stacks} & {p.name for p in kernels}
    works = stage_works(shape, frozenset())
    weights = [each.dense_weights + each.num_experts * each.expert_weights for each in works if each.kind.is_layer]
    assert sum(weights) / len(weights) == work.dense_weights + work.num_experts * work.expert_weights


@pytest.mark.parametrize("attention", Attention)
def test_a_decode_pass_worked_by_hand(attention: Attention) -> None:
    """25 rows multiply at 25e9 FLOP/s: a layer takes a lane 2 x 25 x 2^20 / 25e9 s, the head twice that. Keys and
    values: 50 sequences at 40 + 16.5 positions of 1 KiB in 8 layers."""
    busy = roofline().decode_pass(only(attention=attention, kv_fraction=0.5)).busy
    layer, head = 2 * 2**20 / 1e9, 2 * 2**21 / 1e9
    kv = 8 * 50 * 56.5 * 1024
    products = 2 * (8 * (layer + 1e-4) + head) + 1e-3
    weights = 6 * 2**22
    if attention is Attention.device:
        assert busy[Resource.compute][0] == pytest.approx(products + kv / 4e10)
        assert busy[Resource.host_to_device][0] == pytest.approx((weights + kv / 2) / 1e10)
        assert busy[Resource.device_to_host][0] == pytest.approx(8 * 50 * 1024 / 2 / 5e9)
        assert busy[Resource.cpu_attention][0] == 0
    else:
        assert busy[Resource.compute][0] == pytest.approx(products)
        assert busy[Resource.cpu_attention][0] == pytest.approx(kv / 2e10)
        assert busy[Resource.host_to_device][0] == pytest.approx((weights + 8 * 50 * 4 * 64 * 4) / 1e10)
    assert busy[Resource.disk][0] == 0


@pytest.mark.parametrize("attention", Attention)
def test_host_memory_hands_on_what_the_link_moves_and_what_the_cpu_reads(attention: Attention) -> None:
    """A host memory that takes four times as long for these bytes as a pass takes without."""
    grid = only(Order.cgopipe, attention)
    free = roofline().decode_pass(grid)
    rates = {Resource.host_to_device: 1e10, Resource.device_to_host: 5e9, Resource.cpu_attention: 2e10}
    through = sum(free.busy[resource][0] * rate for resource, rate in rates.items())
    slow = through / (4 * free.seconds[0])
    times = roofline(replace(RATES, host_memory_bytes_per_second=slow)).decode_pass(grid)
    assert times.seconds[0] == times.busy[Resource.host_memory][0] == pytest.approx(4 * free.seconds[0])
    assert free.busy[Resource.host_memory][0] == 0


def test_a_prefill_pass_worked_by_hand() -> None:
    """25 prompts of 40 tokens in the mean go in ten passes of 100 tokens. Each pass has a tenth of the pairs, and
    of the logits: rows of 2.5 multiply at 2.5e9 FLOP/s."""
    grid = only()
    assert roofline().prefill_passes(grid)[0] == pytest.approx(10)
    busy = roofline().prefill_pass(grid).busy
    pairs = 50 * (20**2 + 60**2) / 2 / 2 / 10
    layer, head = 2 * 100 * 2**20 / 1e11, 2 * 2**21 / 1e9
    assert busy[Resource.host_to_device][0] == pytest.approx(6 * 2**22 / 1e10)
    attention = 8 * pairs * 4 * 256 / 1e12
    assert busy[Resource.compute][0] == pytest.approx(2 * (8 * (layer + 1e-4) + head) + 1e-3 + attention)


def test_experts_of_a_module_batched_pass_see_all_lanes_at_once() -> None:
    """50 tokens hit each of eight experts with 12.5 rows, two lanes of 25 with 6.25 rows each: where rates are
    proportional to rows, half the time."""
    times = roofline(is_moe=True)
    alone, together = (
        times.decode_pass(only(order)).busy[Resource.compute][0] for order in Order if order.value[0] in "zm"
    )
    experts = 2 * 32 * 8 * 2 * 3 * 4096 * 14336 / 1e9
    assert alone - together == pytest.approx(experts / 2, rel=0.01)


@pytest.mark.parametrize("is_moe", [False, True])
@pytest.mark.parametrize("has_device", [False, True])
def test_every_policy_of_a_grid_has_the_times_that_it_has_alone(is_moe: bool, has_device: bool) -> None:
    times, grid = roofline(is_moe=is_moe, has_device=has_device), EVERY.grid(100)
    together = times.seconds(grid)
    alone = [float(times.seconds(grid.select(np.array([at])))[0]) for at in range(len(grid.micro_batch))]
    assert list(together) == alone
    assert len(set(alone)) > 15


@pytest.mark.parametrize("key", [key for key, value in vars(RATES).items() if isinstance(value, float)])
@pytest.mark.parametrize("feedforward", FeedForward)
def test_no_policy_is_slower_on_a_faster_machine(key: str, feedforward: FeedForward) -> None:
    """The CPU's share of experts goes by the link alone: in front of an accelerator, which is faster than both."""
    products = {1: 1e12, 100: 1e14} if feedforward is FeedForward.cpu else RATES.gemm_flops_per_second
    rates = replace(RATES, gemm_flops_per_second=products)
    factor = 0.5 if key.endswith("_seconds") and "per" not in key else 2.0
    faster = replace(rates, **{key: factor * getattr(rates, key)})
    grid = replace(EVERY, feedforwards=[feedforward]).grid(100)
    before, after = (roofline(rates, is_moe=True).seconds(grid) for rates in (rates, faster))
    assert (after <= before * (1 + 1e-12)).all()


def test_orders_overlap_attention_more_and_more() -> None:
    """With compute and attention alike, flexgen takes both, zigzag leaves one lane of two, cgopipe nothing."""
    times = roofline(replace(RATES, link_in_bytes_per_second=1e15, link_out_bytes_per_second=1e15))
    busy = times.decode_pass(only(attention=Attention.cpu)).busy
    compute, attend = busy[Resource.compute][0], busy[Resource.cpu_attention][0]
    seconds = {
        order: times.decode_pass(only(order, Attention.cpu)).seconds[0]
        for order in (Order.flexgen, Order.zigzag, Order.cgopipe)
    }
    assert seconds[Order.flexgen] == pytest.approx(compute + attend)
    assert seconds[Order.zigzag] == pytest.approx(max(compute, attend) + attend / 2)
    assert seconds[Order.cgopipe] == pytest.approx(max(compute, attend))


def test_without_an_accelerator_attention_takes_computes_time() -> None:
    times = roofline(has_device=False)
    busy = times.decode_pass(only(Order.cgopipe, Attention.cpu)).busy
    seconds = times.decode_pass(only(Order.cgopipe, Attention.cpu)).seconds[0]
    assert seconds == pytest.approx(busy[Resource.compute][0] + busy[Resource.cpu_attention][0])
    assert busy[Resource.host_to_device][0] == busy[Resource.device_to_host][0] == 0


def test_rates_of_many_rows_are_those_of_each() -> None:
    rows = np.array([0.5, 1, 1.5, 50, 100, 1000])
    by_expert = replace(RATES, expert_flops_per_second={2: 3e9, 70: 4e10})
    for rates in (RATES, by_expert):
        assert list(rates.gemm_rate(rows)) == pytest.approx([rates.gemm_rate(float(each)) for each in rows])
        assert list(rates.expert_rate(rows)) == pytest.approx([rates.expert_rate(float(each)) for each in rows])


def test_the_cpu_takes_off_the_link_what_it_multiplies_itself() -> None:
    """Two of eight layers stay; of a lane's 25 rows each expert has 25 x 2 / 8 visits, nearly. The CPU takes as many
    experts as it is done with when the link is."""
    grid = replace(EVERY, feedforwards=[FeedForward.cpu], micro_batches=[25], counts=[2], resident=[2]).grid(100)
    rates = replace(RATES, cpu_flops_per_second=1e15)
    alone, shared = (
        roofline(rates, is_moe=True).decode_pass(each).busy
        for each in (replace(grid, shares_experts=np.zeros_like(grid.shares_experts)), grid)
    )
    work = LayerWork.from_shape(MIXTRAL.shape())
    experts = 30 * work.hits(25) * work.expert_bytes * 2 / 1e10  # of two lanes, where they are not batched
    zigzag = grid.order == list(Order).index(Order.zigzag)
    saved = (alone[Resource.host_to_device] - shared[Resource.host_to_device])[zigzag]
    assert saved == pytest.approx(experts / 2), "host memory is twice as fast as the link, which reads there too"
    added = (shared[Resource.cpu_attention] - alone[Resource.cpu_attention])[zigzag]
    assert added == pytest.approx(experts / 2)
