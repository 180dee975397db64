"""`offload=auto`: layers in the device's memory, in host memory and on disk, in one run."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from runtime import OffloadConfig, Runtime, RuntimeConfig
from runtime.config.settings import (
    Attention,
    ExpertPaging,
    KVConfig,
    KVTier,
    Order,
    PolicyConfig,
    PolicyKind,
    Prefetch,
    PrefetchConfig,
    Tier,
)
from runtime.engine.records import PassRecord
from runtime.plan.cost.rates import MachineRates
from runtime.plan.placement.load import Load
from runtime.plan.placement.placement import Budgets, Placement
from runtime.plan.placement.placer import choose_placement
from runtime.plan.planner import plan_run
from runtime.plan.shape.extents import pinned_bytes
from runtime.plan.shape.model import ModelShape
from runtime.sequences.sequence import Request
from runtime.units import GIB, MIB
from tests.fake_device import FakeDevice
from tests.runtime.test_fidelity import config_for, tokens_of
from tests.support import Reference
from tests.toy import sizes_of, toy_mixture, toy_shape

References = Callable[[str], Reference]
PREFETCHES = {
    "off": PrefetchConfig(kind=Prefetch.off),
    "lookahead": PrefetchConfig(depth=1),
    "far": PrefetchConfig(depth=2),
    "block": PrefetchConfig(kind=Prefetch.block, block_layers=2),
}


def policy_for(order: Order) -> PolicyConfig:
    return PolicyConfig(
        kind=PolicyKind.fixed,
        micro_batch_size=2,
        num_micro_batches=2,
        schedule=order,
        attention=Attention.cpu if order.style.needs_cpu_attention else Attention.device,
    )


def requests_of(runtime: Runtime, ref: Reference) -> list[Request]:
    found = [runtime.request(str(n), prompt) for n, prompt in enumerate(ref.prompts)]
    return [each for each in found if isinstance(each, Request)]


def halfway(config: RuntimeConfig, ref: Reference) -> RuntimeConfig:
    """Host memory between what it takes to hold no weights and to hold all."""

    runtime = Runtime(config, device=FakeDevice())

    def total(tier: Tier) -> int:
        runtime.config = replace(config, offload=replace(config.offload, tier=tier))
        return runtime.plan(requests_of(runtime, ref)).placement.ledgers[-1].total_bytes

    least, most = total(Tier.nvme), total(Tier.cpu)
    offload = replace(config.offload, tier=Tier.auto, host_memory_gib=(least + 0.6 * (most - least)) / GIB)
    return replace(config, offload=offload)


CASES = [
    *(("llama", order, name, ExpertPaging.off) for order, name in product(Order, PREFETCHES)),
    ("mixtral", Order.zigzag, "lookahead", ExpertPaging.hit),
    ("mixtral", Order.module_batched, "far", ExpertPaging.all),
    ("t5", Order.zigzag, "lookahead", ExpertPaging.off),
]


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize(
    ("family", "order", "prefetch", "paging"),
    [case for case in CASES if case[2] != "off" or case[1].style.num_slots == 1],
    ids=lambda value: getattr(value, "value", value),
)
def test_tokens_equal_transformers_and_each_stage_comes_from_where_it_lives(
    family: str, order: Order, prefetch: str, paging: ExpertPaging, reference: References
) -> None:
    ref = reference(family)
    config = config_for(ref, policy=policy_for(order), prefetch=PREFETCHES[prefetch])
    config = halfway(replace(config, offload=replace(config.offload, expert_paging=paging)), ref)
    runtime = Runtime(config, device=FakeDevice((True, False, True)))
    requests, passes = requests_of(runtime, ref), list[PassRecord]()
    with runtime.open_with_backoff(requests) as (plan, session):
        found = {requests[i].key: list(each.token_ids) for i, each in session.generate(requests, passes.append)}
    assert [found[request.key] for request in requests] == ref.expected
    walk, sizes = plan.placement.decode_walk, runtime.model.shape.stages
    assert walk.in_host, "else this tests nothing"
    assert walk.from_disk, "else this tests nothing"
    if paging is ExpertPaging.off:
        steady = passes[-2].times
        assert steady.bytes_read_disk >= sum(sizes[stage].num_bytes for stage in walk.from_disk)
        assert steady.bytes_read_disk < sum(sizes[stage].num_bytes for stage in walk.streamed)


def placed(
    shape: ModelShape, budgets: Budgets, tier: Tier = Tier.auto, resident_layers: int | None = None
) -> Placement:
    offload = OffloadConfig(tier=tier, resident_layers=resident_layers)
    config = RuntimeConfig(offload=offload, policy=policy_for(Order.zigzag))
    return choose_placement(shape, config, budgets, Load.from_lanes(shape, [sizes_of([30, 20]), sizes_of([25])], 512))


def in_front(host_bytes: int) -> Budgets:
    return Budgets(host_bytes=host_bytes, device_bytes=GIB)


@pytest.mark.parametrize("shape", [toy_shape(), toy_mixture()], ids=["dense", "mixture"])
def test_host_memory_holds_as_many_stages_as_it_has_room_for(shape: ModelShape) -> None:
    nothing, everything = (placed(shape, in_front(GIB), tier, 2) for tier in (Tier.nvme, Tier.cpu))
    least, most = (each.ledgers[-1].total_bytes for each in (nothing, everything))
    counts = []
    for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        budget = round(least + share * (most - least))
        found = placed(shape, in_front(budget), resident_layers=2)
        assert found.fits
        assert found.resident == everything.resident, "the device's memory comes first"
        held, ledger = found.walk.in_host, found.ledgers[-1]
        counts.append(len(held))
        if found.walk.from_disk:
            smallest = min(shape.sizes.slot_bytes(found.paged)[stage] for stage in found.walk.from_disk)
            assert ledger.total_bytes + pinned_bytes(smallest) > budget, "one more has no room"
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, len(everything.walk.streamed))
    assert 0 < counts[2] < counts[-1]
    assert placed(shape, in_front(least), resident_layers=2).walk == nothing.walk
    assert placed(shape, in_front(most), resident_layers=2).walk == everything.walk


def test_without_a_device_it_is_the_disk_beside_what_stays() -> None:
    for host_bytes in (90 * MIB, 120 * MIB, GIB):
        budgets = Budgets(host_bytes=host_bytes)
        assert placed(toy_shape(), budgets) == placed(toy_shape(), budgets, Tier.nvme)


def test_it_is_predicted_no_slower_than_either_tier_alone_and_faster_between_them() -> None:
    shape = toy_shape(24)
    rates = MachineRates(
        disk_bytes_per_second=1e9,
        gemm_flops_per_second={1: 1e12, 256: 1e14},
        link_in_bytes_per_second=1e10,
        link_out_bytes_per_second=1e10,
        attention_bytes_per_second=1e12,
        cpu_attention_bytes_per_second=4e10,
        prefill_attention_flops_per_second=1e13,
        turn_seconds=1e-6,
        pass_seconds=1e-6,
    )
    sizes = sizes_of([40] * 32)
    config = replace(RuntimeConfig(), policy=PolicyConfig(kind=PolicyKind.hrm))

    def seconds(tier: Tier, host_bytes: int) -> float:
        asked = replace(config, offload=replace(config.offload, tier=tier, resident_layers=0))
        plan = plan_run(shape, asked, Budgets(host_bytes=host_bytes, device_bytes=GIB), sizes, rates=rates)
        assert plan.prediction is not None
        return plan.prediction.seconds

    slow, fast = seconds(Tier.nvme, 2 * GIB), seconds(Tier.cpu, 2 * GIB)
    assert seconds(Tier.auto, 2 * GIB) == pytest.approx(fast)
    between = [seconds(Tier.auto, budget * MIB) for budget in (60, 80, 100, 120)]
    assert between == sorted(between, reverse=True)
    assert slow >= between[0] > between[-1] >= fast


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize(("family", "paging"), [("llama", ExpertPaging.off), ("mixtral", ExpertPaging.all)])
def test_an_open_runtime_keeps_what_each_call_holds(family: str, paging: ExpertPaging, reference: References) -> None:
    """The calls differ in what they take beside the weights, and so in the stages that host memory has room for."""
    ref = reference(family)
    config = config_for(ref, policy=policy_for(Order.zigzag))
    config = replace(config, kv=KVConfig(tier=KVTier.cpu, device_fraction=0.0))
    config = halfway(replace(config, offload=replace(config.offload, expert_paging=paging)), ref)
    with Runtime(config, device=FakeDevice((True, False, True))) as runtime:
        held = []
        for count in (len(ref.prompts), 1, len(ref.prompts)):
            assert tokens_of(runtime, ref.prompts[:count]) == ref.expected[:count]
            held.append(runtime.plan(requests_of(runtime, ref)[:count]).placement.walk.in_host)
    assert held[0] == held[2]
    assert held[0]
