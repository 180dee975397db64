"""`policy.feedforward=cpu`: some experts are multiplied beside their weights, the others where the model computes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from runtime import OffloadConfig, Runtime, RuntimeConfig
from runtime.config.settings import ExpertPaging, FeedForward, Order, PolicyConfig, PolicyKind, Tier
from runtime.engine.experts import BatchedExperts, CpuExperts, CpuExpertTask
from runtime.engine.monitor import PassMonitor
from runtime.engine.records import PassRecord, Phase
from runtime.errors import ConfigError
from runtime.events import NeedExperts
from runtime.model.loading import LoadedModel
from runtime.plan.cost.rates import MachineRates
from runtime.plan.cost.simulator import Durations, ExpertReads, simulate
from runtime.plan.placement.feedforward import CpuShare, round_trip_size
from runtime.plan.placement.load import Load
from runtime.plan.placement.placement import Budgets, Placement
from runtime.plan.placement.placer import choose_placement
from runtime.plan.planner import RunPlan, find_policy
from runtime.plan.schedule.schedule import make_schedule
from runtime.plan.schedule.walk import Walk
from runtime.plan.search.candidate import Problem
from runtime.plan.shape.model import ModelShape
from runtime.resources import Resource
from runtime.stream.exchange import HostExchange
from runtime.stream.experts import ExpertStream
from runtime.trace import Trace
from runtime.units import GIB
from tests.fake_device import FakeDevice
from tests.overlap import virtual_time
from tests.runtime.test_fidelity import config_for
from tests.runtime.test_mixed_tier import policy_for, requests_of
from tests.support import Reference
from tests.timed_device import TimedDevice, TimedReader
from tests.toy import sizes_of, toy_mixture, toy_shape
from tests.virtual_time import VirtualTime

References = Callable[[str], Reference]


def shared(config: RuntimeConfig) -> RuntimeConfig:
    return replace(config, policy=replace(config.policy, feedforward=FeedForward.cpu))


def most_held(config: RuntimeConfig, ref: Reference) -> RuntimeConfig:
    """Host memory has room for six tenths of what would be held with more."""
    runtime = Runtime(replace(config, offload=replace(config.offload, tier=Tier.cpu)), device=FakeDevice())
    ledger = runtime.plan(requests_of(runtime, ref)).placement.ledgers[-1]
    held = sum(entry.num_bytes for entry in ledger.entries if entry.name in ("weights", "experts"))
    return replace(config, offload=replace(config.offload, host_memory_gib=(ledger.total_bytes - 0.4 * held) / GIB))


CASES = [
    ("mixtral", Order.zigzag, Tier.cpu),
    ("mixtral", Order.cgopipe, Tier.cpu),
    ("mixtral", Order.module_batched, Tier.auto),
    ("qwen2-moe", Order.zigzag, Tier.auto),
    ("qwen2-moe", Order.module_batched, Tier.cpu),
    ("deepseek-v3", Order.flexgen, Tier.cpu),
]


def generated(
    runtime: Runtime, ref: Reference, reading: float = 1.0, multiplying: float = 0.125
) -> tuple[list[list[int]], RunPlan, list[PassRecord]]:
    """With these numbers in the place of those that would follow from the rates of a double."""
    requests, passes = requests_of(runtime, ref), list[PassRecord]()
    plan = runtime.plan(requests)
    assert plan.placement.cpu_share is not None, "else this tests nothing"
    share = replace(plan.placement.cpu_share, reading=reading, multiplying=multiplying)
    plan = replace(plan, placement=replace(plan.placement, cpu_share=share))
    with runtime.session(plan) as session:
        found = {i: list(each.token_ids) for i, each in session.generate(requests, passes.append)}
    return [found[i] for i in range(len(requests))], plan, passes


def num_experts(passes: Sequence[PassRecord], phase: Phase) -> tuple[int, int]:
    """Those that were hit, and those that were brought."""
    times = [record.times for record in passes if record.phase is phase]
    return sum(each.experts_hit for each in times), sum(each.experts_read for each in times)


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize(("family", "order", "tier"), CASES, ids=lambda value: getattr(value, "value", value))
def test_tokens_equal_transformers_wherever_experts_are_multiplied(
    family: str, order: Order, tier: Tier, reference: References
) -> None:
    ref = reference(family)
    config = shared(config_for(ref, tier=tier, policy=policy_for(order)))
    if tier is Tier.auto:
        config = most_held(config, ref)
    tokens, plan, passes = generated(Runtime(config, device=FakeDevice((True, False, True))), ref, reading=0.5)
    assert tokens == ref.expected
    assert bool(plan.placement.walk.from_disk) is (tier is Tier.auto)
    num_hit, num_brought = num_experts(passes, Phase.decode)
    assert 0 < num_brought < num_hit


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_the_same_whatever_the_streams_of_the_device_do(seed: int, reference: References) -> None:
    ref = reference("mixtral")
    config = shared(config_for(ref, tier=Tier.cpu, policy=policy_for(Order.cgopipe)))
    assert generated(Runtime(config, device=FakeDevice(seed=seed)), ref)[0] == ref.expected


def test_the_cpu_may_take_all_experts_of_a_pass_and_the_trace_shows_it_at_them(reference: References) -> None:
    """The trip is then as full as its memory is counted for."""
    ref, trace = reference("qwen2-moe"), Trace()
    config = shared(config_for(ref, tier=Tier.cpu, policy=policy_for(Order.module_batched)))
    runtime = Runtime(config, device=FakeDevice(), trace=trace)
    tokens, _, passes = generated(runtime, ref, reading=0.0, multiplying=0.0)
    assert tokens == ref.expected
    assert num_experts(passes, Phase.decode)[1] == 0
    assert num_experts(passes, Phase.prefill)[1] > 0, "prompts have more tokens"
    spans = [span for span in trace.take() if span.resource is Resource.cpu_attention]
    assert spans
    assert all(" experts " in span.name for span in spans)


def test_the_cpu_takes_the_experts_of_fewest_visits_as_long_as_it_is_done_before_the_link() -> None:
    share = CpuShare(max_tokens=100, reading=0.5, multiplying=0.25)
    visits = {0: 9, 1: 1, 3: 2, 4: 40, 7: 1, 8: 3}
    taken = share.choose_experts(visits, 56)
    assert taken == {1, 7, 3, 8}
    busy = sum(share.cost(visits[expert]) for expert in taken)
    assert busy <= len(visits) - len(taken) + 1
    assert busy + share.cost(9) >= len(visits) - len(taken), "with one more it would be later than the link with it"
    assert share.choose_experts(visits, 101) == frozenset()
    assert CpuShare(max_tokens=9, reading=7.0).choose_experts(visits, 9) == frozenset(), (
        "each takes longer than all others"
    )


IMPOSSIBLE = {
    "offload=auto or cpu": (toy_mixture(), OffloadConfig(tier=Tier.nvme), True),
    "set it to auto or hit": (toy_mixture(), OffloadConfig(expert_paging=ExpertPaging.all), True),
    "set policy.feedforward=null": (toy_mixture(), OffloadConfig(), False),
    "has no experts, or runs them": (toy_shape(), OffloadConfig(), True),
    "experts with biases": (replace(toy_mixture(), has_bare_experts=False), OffloadConfig(), True),
    "encoder-decoder models": (toy_shape(num_encoder_layers=2), OffloadConfig(), True),
}


@pytest.mark.parametrize("text", IMPOSSIBLE)
def test_what_cannot_be_is_refused_with_the_key_to_change(text: str) -> None:
    shape, offload, has_device = IMPOSSIBLE[text]
    with pytest.raises(ConfigError, match=r"^policy\.feedforward=cpu: .*" + text):
        placed(shape, offload, device_bytes=GIB if has_device else None)


def placed(shape: ModelShape, offload: OffloadConfig, *, device_bytes: int | None = GIB) -> Placement:
    config = shared(RuntimeConfig(offload=offload, policy=policy_for(Order.zigzag)))
    budgets = Budgets(host_bytes=GIB, device_bytes=device_bytes)
    return choose_placement(shape, config, budgets, Load.from_lanes(shape, [sizes_of([30, 20]), sizes_of([25])], 512))


def test_ledgers_count_what_goes_to_the_cpu_and_back_and_what_is_made_there() -> None:
    offload = OffloadConfig(tier=Tier.cpu, resident_layers=0)
    placement = placed(toy_mixture(), offload)
    assert placement.cpu_share is not None
    assert placement.cpu_share.max_tokens == 2
    names = [{entry.name: entry.num_bytes for entry in ledger.entries} for ledger in placement.ledgers]
    visits, token_bytes = 2 * 2, 256 * 4
    assert names[0]["experts on the CPU"] == 2 * visits * token_bytes
    assert names[1]["experts on the CPU"] >= round_trip_size(toy_mixture(), placement.cpu_share).round_trip_bytes
    assert round_trip_size(toy_mixture(), placement.cpu_share).round_trip_bytes >= 2 * visits * token_bytes
    assert names[1]["CPU products"] > 0


NUM_EXPERTS = 64
SHAPE = toy_mixture(num_layers=1, num_experts=NUM_EXPERTS)
[LAYER] = SHAPE.layers


class Router(torch.nn.Module):
    """An experts module whose products take no time but the clock's."""

    has_gate, num_experts = True, NUM_EXPERTS


def seconds_of_layer(clock: VirtualTime, share: CpuShare, link: float, cpu: float, patch: pytest.MonkeyPatch) -> float:
    """A layer whose experts have one visit each; `link` and `cpu`: seconds of an expert."""
    device, module = TimedDevice(clock, link * NUM_EXPERTS / LAYER.num_bytes), Router()
    placement = placed(SHAPE, OffloadConfig(tier=Tier.cpu, resident_layers=0))
    streamed = SimpleNamespace(name="layer", inner=module)
    loaded = cast(
        LoadedModel, SimpleNamespace(staged=SimpleNamespace(modules=(streamed,)), weights_of=lambda *_, **__: {})
    )

    def multiply(self: CpuExperts, errand: CpuExpertTask, x_VD: torch.Tensor) -> torch.Tensor:
        clock.sleep(cpu * len(errand.experts))
        return x_VD

    patch.setattr(CpuExperts, "_multiply", multiply)
    patch.setattr("runtime.engine.experts.bound_matrices", lambda *args, **kwargs: {})
    patch.setattr("runtime.engine.experts.expert_output", lambda *args: torch.zeros(1, 4))
    with (
        TimedReader(clock, 1e-12, chunk_bytes=1 << 20) as reader,
        ExpertStream(SHAPE, placement, device, reader, paging=ExpertPaging.hit) as stream,
        HostExchange(round_trip_size(SHAPE, share), device) as round_trips,
    ):
        beside = CpuExperts(
            loaded=loaded,
            share=share,
            host_stages=frozenset({LAYER.index}),
            stream=stream,
            exchange=round_trips,
            monitor=PassMonitor(len(SHAPE.stages), device),
            first_layer=LAYER.index,
        )
        experts = BatchedExperts(loaded, frozenset({LAYER.index}), stream, is_grouped=True, cpu=beside)
        index_TK = torch.arange(NUM_EXPERTS).view(-1, 2)
        asked = NeedExperts(module, torch.zeros(len(index_TK), 4), index_TK, torch.ones(len(index_TK), 2))
        begin = clock.now
        experts.run(LAYER.index, [asked])
        device.wait_for_compute()
        return clock.now - begin


@pytest.mark.parametrize("ratio", [0.25, 1.0, 3.0])
def test_the_cpu_multiplies_while_the_link_brings_the_others(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each does its share in the time of the other: 1 / (1 + 1 / ratio) of what the link takes alone."""
    with virtual_time() as clock:
        share = CpuShare(max_tokens=NUM_EXPERTS, reading=ratio)
        found = clock.run(lambda: seconds_of_layer(clock, share, 1.0, ratio, monkeypatch))
    assert found <= 1.05 * NUM_EXPERTS * ratio / (1 + ratio) + 1.0


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize(
    ("cpu_flops", "place"), [(1e12, FeedForward.cpu), (1e6, FeedForward.device), (None, FeedForward.device)]
)
def test_a_search_has_the_cpu_multiply_where_that_is_predicted_to_be_faster(
    cpu_flops: float | None, place: FeedForward
) -> None:
    rates = MachineRates(
        disk_bytes_per_second=1e9,
        gemm_flops_per_second={1: 1e12, 256: 1e14},
        link_in_bytes_per_second=1e9,
        link_out_bytes_per_second=1e9,
        attention_bytes_per_second=1e12,
        cpu_attention_bytes_per_second=4e9,
        prefill_attention_flops_per_second=1e13,
        cpu_flops_per_second=cpu_flops,
    )
    offload = OffloadConfig(tier=Tier.cpu, resident_layers=0)
    budgets, sizes = Budgets(host_bytes=GIB, device_bytes=GIB), sizes_of([40] * 4)
    shape, policy = toy_mixture(num_experts=64), PolicyConfig(kind=PolicyKind.hrm)

    def plan(asked: FeedForward | None) -> RunPlan:
        config = RuntimeConfig(offload=offload, policy=replace(policy, feedforward=asked))
        return find_policy(Problem(shape=shape, config=config, budgets=budgets, sizes=sizes, rates=rates))

    found = {asked: plan(asked) for asked in (None, *FeedForward)}
    assert found[None].policy.feedforward is place
    assert bool(found[None].placement.cpu_expert_stages) is (place is FeedForward.cpu)
    seconds = {asked: plan.prediction.seconds for asked, plan in found.items() if plan.prediction is not None}
    known = FeedForward if cpu_flops is not None else [FeedForward.device]  # nothing is chosen by a guess
    assert seconds[None] == pytest.approx(min(seconds[each] for each in known))
    if place is FeedForward.cpu:
        assert seconds[FeedForward.cpu] < 0.6 * seconds[FeedForward.device], "of which prompts are a part"


def test_a_simulated_layer_is_done_when_link_and_cpu_are() -> None:
    """The CPU begins when the tokens are routed, and is one of those that a pass is busy with."""
    schedule = make_schedule(Walk(num_stages=1, streamed=(), num_slots=0), 1)
    for cpu_seconds in (0.0, 2.0, 9.0):
        reads = ExpertReads(
            num_experts=4,
            read_seconds=0.0,
            copy_seconds=4.0,
            dense_seconds=1.0,
            lead_seconds=0.0,
            cpu_seconds=cpu_seconds,
        )
        durations = Durations(run=lambda *turn: 1.0, expert_reads=lambda action, reads=reads: reads)
        found = simulate(schedule, 1, durations)
        assert found.seconds == pytest.approx(1.0 + max(4.0, cpu_seconds))
        assert found.busy_seconds[Resource.cpu_attention] == cpu_seconds
    alone = replace(reads, num_experts=0, copy_seconds=0.0, cpu_seconds=2.0)
    durations = Durations(run=lambda *turn: 1.0, expert_reads=lambda action: alone)
    assert simulate(schedule, 1, durations).seconds == pytest.approx(3.0)
