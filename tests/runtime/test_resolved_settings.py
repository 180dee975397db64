"""What is logged and stored of a plan is what was resolved, not what was asked."""

from dataclasses import replace

import pytest

from runtime.batching.prefixes import SharedPrefix
from runtime.config.settings import (
    Admission,
    Attention,
    ExpertPaging,
    KVConfig,
    KVDType,
    KVTier,
    OffloadConfig,
    Order,
    PolicyConfig,
    PolicyKind,
    Prefetch,
    PrefetchConfig,
    RuntimeConfig,
    SharePrefixes,
    Tier,
)
from runtime.plan.cost.rates import MachineRates
from runtime.plan.placement.memory import PAGE_TOKENS
from runtime.plan.placement.placement import Budgets
from runtime.plan.planner import plan_run
from runtime.plan.resolved_settings import ResolvedSettings
from runtime.plan.shape.dtypes import Loss, WeightStorage, with_kv_dtype
from runtime.plan.shape.model import ModelShape
from runtime.plan.shape.shapes import Stage
from runtime.units import GIB
from tests.toy import sizes_of, toy_mixture, toy_shape

POLICY = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=3, num_micro_batches=2)
NVME = RuntimeConfig(policy=POLICY, offload=OffloadConfig(tier=Tier.nvme, resident_layers=2))
PUBLISHED = WeightStorage(formats=("F32",), loss=Loss.exact)
RATES = MachineRates(
    disk_bytes_per_second=1e9, link_in_bytes_per_second=1e10, gemm_flops_per_second={1: 1e9, 16: 1e10, 512: 1e11}
)


def facts(config: RuntimeConfig, shape: ModelShape | None = None, *, has_device: bool = False) -> ResolvedSettings:
    shape, budgets = shape or toy_shape(), Budgets(host_bytes=GIB, device_bytes=GIB if has_device else None)
    plan = plan_run(shape, config, budgets, sizes_of([30] * 10), rates=RATES)
    return ResolvedSettings.from_plan(config, shape, plan, dtype="float32", stored=PUBLISHED)


def test_blocks_and_stages_are_counted() -> None:
    found = facts(NVME)
    assert (found.num_blocks, found.num_lanes, found.lane_size, found.prefill_chunk_tokens) == (2, 2, 3, 512)
    assert "chunks of up to 512 tokens per micro-batch" in str(found)
    assert (found.num_resident_stages, found.num_stages, found.num_slots) == (4, 10, 2)
    in_front = facts(replace(NVME, offload=OffloadConfig(tier=Tier.cpu, resident_layers=2)), has_device=True)
    assert in_front.num_host_stages == 6
    assert "4 of 10 stages resident, 6 in host memory, 2 slots" in str(in_front)


@pytest.mark.parametrize(
    ("prefetch", "resolved", "depth"),
    [
        (PrefetchConfig(kind=Prefetch.off), "off", 0),
        (PrefetchConfig(depth=3), "lookahead", 3),
        (PrefetchConfig(depth=64), "lookahead", 5),  # of six streamed stages five are others
        (PrefetchConfig(kind=Prefetch.block, block_layers=2), "block", 2),
        (PrefetchConfig(kind=Prefetch.cost_aware), "lookahead", 1),
    ],
)
def test_prefetch_is_the_one_that_runs(prefetch: PrefetchConfig, resolved: str, depth: int) -> None:
    found = facts(replace(NVME, prefetch=prefetch))
    assert (found.prefetch, found.prefetch_depth) == (resolved, depth)
    assert f"prefetch={resolved} {depth} ahead" in str(found)


@pytest.mark.parametrize(
    ("kv", "has_device", "tier", "num_travelling"),
    [
        (KVConfig(), False, "device", 0),
        (KVConfig(tier=KVTier.cpu), False, "device", 0),
        (KVConfig(tier=KVTier.cpu, device_fraction=0.25), True, "cpu", 6),
        (KVConfig(tier=KVTier.nvme, device_fraction=0.0), False, "nvme", 8),
    ],
)
def test_keys_and_values_are_where_the_plan_puts_them(
    kv: KVConfig, has_device: bool, tier: str, num_travelling: int
) -> None:
    found = facts(replace(NVME, kv=kv), has_device=has_device)
    assert (found.kv, found.num_travelling_layers, found.num_kv_layers) == (tier, num_travelling, 8)
    assert (f"{tier}: {num_travelling} of 8 layers" in str(found)) == (num_travelling > 0)


@pytest.mark.parametrize(("is_packed", "attention"), [(True, "cpu"), (False, "device")])
def test_attention_is_where_it_really_runs(is_packed: bool, attention: str) -> None:
    config = replace(NVME, policy=replace(POLICY, attention=Attention.cpu, schedule=Order.flexgen))
    found = facts(config, toy_shape(is_packed=is_packed))
    assert (found.attention, found.schedule) == (attention, "flexgen")


@pytest.mark.parametrize(("paging", "num_paged"), [(ExpertPaging.off, 0), (ExpertPaging.all, 6)])
def test_paged_are_the_streamed_mixtures(paging: ExpertPaging, num_paged: int) -> None:
    config = replace(NVME, offload=OffloadConfig(tier=Tier.nvme, resident_layers=2, expert_paging=paging))
    found = facts(config, toy_mixture())
    assert (found.expert_paging, found.num_paged_stages) == (paging.value, num_paged)


def test_what_prompts_spare_is_said_or_why_they_spare_nothing() -> None:
    prefix = SharedPrefix(num_tokens=20)
    sizes = [size.with_prefix(prefix) for size in sizes_of([30] * 6)]

    def sharing(shape: ModelShape, config: RuntimeConfig = NVME, *, has_rope_lengths: bool = False) -> ResolvedSettings:
        plan = plan_run(shape, config, Budgets(host_bytes=GIB), sizes, rates=RATES)
        return ResolvedSettings.from_plan(
            config, shape, plan, dtype="float32", stored=PUBLISHED, has_rope_lengths=has_rope_lengths
        )

    found = sharing(toy_shape())
    assert (found.sharing, found.num_spared_tokens, found.why_unshared) == ("block", 5 * 20, None)
    assert "shared within each block: saves 100 prompt tokens" in str(found)
    travelling = sharing(toy_shape(), replace(NVME, kv=KVConfig(tier=KVTier.nvme, device_fraction=0.0)))
    assert (travelling.sharing, travelling.num_spared_tokens) == ("micro-batch", 4 * 20)
    continuous = sharing(toy_shape(), replace(NVME, policy=replace(POLICY, admission=Admission.continuous)))
    assert (continuous.sharing, continuous.num_spared_tokens) == ("run", 5 * PAGE_TOKENS)
    assert "shared over the run: saves up to 80 prompt tokens" in str(continuous)
    assert "shared within each block: no common prefixes known" in str(facts(NVME))
    off = {
        "policy.share_prefixes=off": sharing(
            toy_shape(), replace(NVME, policy=replace(POLICY, share_prefixes=SharePrefixes.off))
        ),
        "padded": sharing(replace(toy_shape(), is_packed=False)),
        "rotary": sharing(toy_shape(), has_rope_lengths=True),
    }
    for why, each in off.items():
        assert (each.sharing, each.num_spared_tokens) == ("off", 0)
        assert why in str(each)


def test_keys_and_values_that_lose_something_are_said_to() -> None:
    assert str(facts(NVME)).endswith("KV compute dtype: exact")
    lossy = facts(NVME, with_kv_dtype(toy_shape(is_packed=True), KVDType.int8))
    assert (lossy.numbers["kv_dtype"], lossy.numbers["kv_loss"]) == ("int8", "lossy")
    assert str(lossy).splitlines()[-1].endswith("; KV int8: lossy")


def stored_as(*formats: str, relative_error: float | None = None) -> WeightStorage:
    """The toy's stages, from the first on, in these formats, the others as they are."""
    shape, named = toy_shape(), dict(enumerate(formats))

    def kept(stage: Stage) -> Stage:
        (parameter,) = stage.parameters
        piece = replace(parameter.slices[0], format=named.get(stage.index, ""))
        return replace(stage, parameters=(replace(parameter, pieces=((piece,),)),))

    losses = {"published": Loss.exact, "packed": Loss.lossless, "rounded": Loss.lossy}
    return WeightStorage.from_losses(replace(shape, stages=tuple(map(kept, shape.stages))), losses, relative_error)


def test_a_models_class_of_error_is_the_worst_of_its_matrices() -> None:
    """Two of the toy's stages are twice as large as the others."""
    assert str(stored_as()) == "F32: exact, as published"
    assert str(stored_as("published")) == "F32, published: exact, as published"
    assert str(stored_as("published", "packed")) == "F32, published, packed: lossless, same bits as published"
    found = stored_as("", "rounded", "packed", relative_error=0.00456)
    assert (found.loss, str(found)) == (
        Loss.lossy,
        "F32, rounded, packed: lossy, relative RMS error 0.46%",
    )
    assert str(stored_as("rounded")).endswith("lossy, relative RMS error not measured")


def test_what_is_measured_of_rounding_is_not_said_of_numbers_that_are_not_rounded() -> None:
    assert stored_as("packed", relative_error=0.1).relative_error is None
