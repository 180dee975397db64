"""Greedy tokens equal `transformers.generate` whatever the schedule, the tier of keys and values, the place of
attention and the admission; and each of these roads is really taken.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import combinations, product

import pytest

from runtime import OffloadConfig, PolicyConfig, Runtime, SamplingConfig
from runtime.config.settings import (
    Admission,
    Attention,
    DType,
    KVConfig,
    KVTier,
    ModelConfig,
    Order,
    PolicyKind,
    RuntimeConfig,
    Tier,
)
from runtime.engine.records import PassRecord, Phase
from runtime.errors import Interrupted
from runtime.events import LaneRun
from runtime.plan.schedule.actions import Op
from runtime.plan.schedule.schedule import make_schedule
from runtime.resources import Resource
from runtime.sequences.sequence import Completion, Request
from runtime.trace import Trace
from tests.dealt import with_slow_others
from tests.support import Reference

References = Callable[[str], Reference]
FAMILIES = ("llama", "mixtral", "qwen3-moe", "gpt2", "deepseek-v3", "qwen3-next")
PADDED = ("qwen3-next",)
MIXTURES = ("mixtral", "qwen3-moe", "deepseek-v3", "qwen3-next")
NUM_NEW_TOKENS = 7  # two of the prompts grow into another page


@dataclass(frozen=True, kw_only=True)
class Road:
    """What leads to the same tokens by another way."""

    order: Order
    tier: KVTier
    attention: Attention
    admission: Admission

    def __str__(self) -> str:
        return f"{self.order.value} kv={self.tier.value} attention={self.attention.value} {self.admission.value}"

    @property
    def pairs(self) -> set[tuple[Enum, ...]]:
        return {*combinations((self.order, self.tier, self.attention, self.admission), 2)}

    def changed(self, config: RuntimeConfig) -> RuntimeConfig:
        policy = replace(config.policy, schedule=self.order, attention=self.attention, admission=self.admission)
        return replace(config, policy=policy, kv=KVConfig(tier=self.tier, device_fraction=0.0, num_slots=2))


TIERS = (KVTier.device, KVTier.cpu, KVTier.nvme)
ROADS = [
    Road(order=order, tier=tier, attention=attention, admission=admission)
    for order, tier, attention, admission in product(Order, TIERS, Attention, Admission)
    if order is not Order.cgopipe or attention is Attention.cpu
]


def shared_out(roads: Sequence[Road]) -> dict[str, list[Road]]:
    """Roads of each family in which every pair of settings occurs; each road is some family's."""
    shares: dict[str, list[Road]] = {}
    for family in FAMILIES:
        shares[family], left = [], {pair for road in roads for pair in road.pairs}
        taken = {road for share in shares.values() for road in share}
        while left:
            best = max(roads, key=lambda road: (len(road.pairs & left), road not in taken))
            shares[family].append(best)
            left -= best.pairs
            taken.add(best)
    missing = [road for road in roads if not any(road in share for share in shares.values())]
    for number, road in enumerate(missing):
        shares[FAMILIES[number % len(FAMILIES)]].append(road)
    return shares


SHARES = shared_out(ROADS)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a road came to: tokens by prompt, the passes, and how many attentions the workers ran."""

    tokens: list[list[int]]
    passes: list[PassRecord]
    num_attended: int


def runtime_for(reference: Reference, num_new_tokens: int = NUM_NEW_TOKENS) -> Runtime:
    """3 lanes of 3 sequences at most, prompts in chunks, nothing resident."""
    return Runtime(
        RuntimeConfig(
            model=ModelConfig(name="test", path=str(reference.directory), dtype=DType.float32),
            offload=OffloadConfig(tier=Tier.nvme, resident_layers=0, read_chunk_mib=1),
            policy=PolicyConfig(
                kind=PolicyKind.fixed, micro_batch_size=2, num_micro_batches=3, prefill_chunk_tokens=16
            ),
            sampling=SamplingConfig(max_new_tokens=num_new_tokens, ignore_eos=True),
        ),
        trace=Trace(),
    )


def expected(reference: Reference) -> list[list[int]]:
    return [tokens[:NUM_NEW_TOKENS] for tokens in reference.expected]


def requests_of(runtime: Runtime, prompts: list[list[int]]) -> list[Request]:
    made = [runtime.request(str(n), prompt) for n, prompt in enumerate(prompts)]
    assert all(isinstance(item, Request) for item in made)
    return [item for item in made if isinstance(item, Request)]


def take(runtime: Runtime, road: Road, prompts: list[list[int]], *, num_kv_pages: int | None = None) -> Taken:
    """The model is loaded once for all roads."""
    runtime.config = road.changed(runtime.config)
    requests = requests_of(runtime, prompts)
    plan = runtime.plan(requests)
    if num_kv_pages is not None:
        placement = plan.placement
        plan = replace(plan, placement=replace(placement, kv=replace(placement.kv, num_pages=num_kv_pages)))
    passes: list[PassRecord] = []
    found: dict[int, Completion] = {}
    with runtime.session(plan) as session:
        if road.admission is Admission.continuous:
            order = [i for block in plan.blocks for i in block.members]
            found |= dict(session.stream(order, requests, {}, passes.append))
        else:
            for block in plan.blocks:
                found |= dict(zip(block.members, session.run(block, requests, passes.append), strict=True))
    assert runtime.trace is not None
    num_attended = sum(span.resource is Resource.cpu_attention for span in runtime.trace.take())
    tokens = [list(found[i].token_ids) for i in range(len(prompts))]
    return Taken(tokens=tokens, passes=passes, num_attended=num_attended)


@pytest.fixture(scope="module")
def runtimes(reference: References) -> Callable[[str], Runtime]:
    made: dict[str, Runtime] = {}

    def get(family: str) -> Runtime:
        if family not in made:
            made[family] = runtime_for(reference(family))
        return made[family]

    return get


def test_each_family_takes_every_pair_of_settings_and_each_road_is_taken() -> None:
    every = set[tuple[Enum, ...]]().union(*(road.pairs for road in ROADS))
    for family in FAMILIES:
        assert set[tuple[Enum, ...]]().union(*(road.pairs for road in SHARES[family])) == every
        assert len(SHARES[family]) == len({*SHARES[family]})
    assert {road for share in SHARES.values() for road in share} == {*ROADS}


@pytest.mark.dealt(most=6)
@pytest.mark.parametrize(
    ("family", "road"),
    with_slow_others(
        [(family, road) for family in FAMILIES for road in SHARES[family]],
        [(family, road) for turn, family in enumerate(FAMILIES) for road in SHARES[family][turn % 3 :: 3]],
    ),
    ids=str,
)
def test_every_road_leads_to_the_tokens_of_transformers(
    family: str, road: Road, reference: References, runtimes: Callable[[str], Runtime]
) -> None:
    ref = reference(family)
    taken = take(runtimes(family), road, ref.prompts)
    assert taken.tokens == expected(ref)
    written = sum(record.times.bytes_written_disk for record in taken.passes)
    assert (written > 0) == (road.tier is KVTier.nvme)
    assert (taken.num_attended > 0) == (road.attention is Attention.cpu and family not in PADDED)
    if road.admission is Admission.continuous and family not in PADDED:
        assert Phase.mixed in {record.phase for record in taken.passes}


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_schedule_of_a_decode_pass_is_of_the_order_asked_for(
    family: str, order: Order, reference: References, runtimes: Callable[[str], Runtime]
) -> None:
    runtime = runtimes(family)
    road = Road(order=order, tier=KVTier.device, attention=Attention.cpu, admission=Admission.wave)
    runtime.config = road.changed(runtime.config)
    plan = runtime.plan(requests_of(runtime, reference(family).prompts))
    walk = plan.placement.decode_walk
    ops = {action.op for action in make_schedule(walk, plan.num_lanes).cycle}
    assert (Op.attend in ops) == (family not in PADDED)
    assert (Op.sync in ops) == (order is Order.flexgen)
    assert (Op.experts in ops) == (order is Order.module_batched and family in MIXTURES)
    assert (walk.num_pages > 1) == (order in (Order.cgopipe, Order.flexgen))
    assert walk.num_pages == 1 or walk.num_pages % plan.num_lanes == 0


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek-v3", marks=pytest.mark.slow)])
def test_sequences_that_gave_way_for_lack_of_pages_come_to_the_same_tokens(family: str, reference: References) -> None:
    """Four pages hold the longest sequence alone; what gave way is computed again."""
    ref = reference(family)
    runtime = runtime_for(ref, num_new_tokens=24)
    road = Road(order=Order.zigzag, tier=KVTier.device, attention=Attention.device, admission=Admission.continuous)
    plain, *tight = (take(runtime, road, ref.prompts, num_kv_pages=pages) for pages in (None, 4))
    assert [tokens[:NUM_NEW_TOKENS] for tokens in plain.tokens] == expected(ref)
    for taken in tight:
        assert taken.tokens == plain.tokens
        assert sum(r.counts.prompt_tokens for r in taken.passes) > sum(r.counts.prompt_tokens for r in plain.passes)


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("family", ["llama", *PADDED])
def test_passes_count_the_tokens_of_prompts_and_of_answers_and_not_padding(
    family: str, reference: References, runtimes: Callable[[str], Runtime]
) -> None:
    ref = reference(family)
    road = Road(order=Order.zigzag, tier=KVTier.device, attention=Attention.device, admission=Admission.wave)
    passes = [record.counts for record in take(runtimes(family), road, ref.prompts).passes]
    assert sum(counts.prompt_tokens for counts in passes) == sum(map(len, ref.prompts))
    decoded = len(ref.prompts) * (NUM_NEW_TOKENS - 1)
    assert sum(counts.real_tokens for counts in passes) == sum(map(len, ref.prompts)) + decoded


def test_behind_an_encoder_lanes_that_enter_later_pass_it_by_themselves(reference: References) -> None:
    """Answers of three lengths: lanes end at different times, and the next ones enter beside those that decode."""
    ref = reference("t5")
    runtime = runtime_for(ref)
    road = Road(order=Order.zigzag, tier=KVTier.nvme, attention=Attention.device, admission=Admission.continuous)
    runtime.config = road.changed(runtime.config)
    runtime.config = replace(
        runtime.config, policy=replace(runtime.config.policy, micro_batch_size=1, num_micro_batches=2)
    )
    limits = [3, 7, 5, 6, 7, 1, 4]
    requests = [
        replace(request, max_new_tokens=limit)
        for request, limit in zip(requests_of(runtime, ref.prompts), limits, strict=True)
    ]
    with runtime.session(runtime.plan(requests)) as session:
        found = dict(session.stream(range(len(requests)), requests, {}))
    assert [list(found[i].token_ids) for i in range(7)] == [
        tokens[:limit] for tokens, limit in zip(ref.expected, limits, strict=True)
    ]


def test_an_interrupted_pass_lets_go_of_its_lanes_and_another_session_goes_on(reference: References) -> None:
    ref = reference("mixtral")
    stops = iter([False] * 20 + [True] + [False] * 100_000)
    runtime = Runtime(runtime_for(ref).config, should_stop=lambda: next(stops), trace=Trace())
    road = Road(order=Order.module_batched, tier=KVTier.nvme, attention=Attention.cpu, admission=Admission.wave)
    runtime.config = road.changed(runtime.config)
    requests = requests_of(runtime, ref.prompts)
    plan = runtime.plan(requests)
    with runtime.session(plan) as session:
        with pytest.raises(Interrupted):
            session.run(plan.blocks[0], requests)
        with pytest.raises(AssertionError, match="open another session"):
            session.run(plan.blocks[0], requests)
    assert not gc_lanes(), "greenlets that are parked are never collected"
    assert take(runtime, road, ref.prompts).tokens == expected(ref)


def gc_lanes() -> list[LaneRun]:
    """Asks for types alone: a weak proxy of what is gone would be asked for more."""
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), LaneRun) and not thing.dead]
