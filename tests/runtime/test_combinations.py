"""Every combination that a search may choose in front of an accelerator gives transformers' tokens or is refused, for a
reason that is written down here; and they are counted, so that none disappears without a word.

All of them are planned. Run are those in which some pair of settings occurs for the first time with its order and
attention, and with `--product` every one that does not come to the same as another.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from runtime import Runtime
from runtime.config.settings import (
    Admission,
    Attention,
    DType,
    KVConfig,
    KVTier,
    ModelConfig,
    OffloadConfig,
    Order,
    Prefetch,
    RuntimeConfig,
    SamplingOverrides,
)
from runtime.errors import ConfigError
from runtime.model.families import FAMILIES
from runtime.plan.placement import placer
from runtime.plan.placement.kv import offloaded_kv_layers
from runtime.plan.planner import RunPlan
from runtime.plan.search.grid import GridAxes
from runtime.sequences.sequence import Request
from tests.fake_device import FakeDevice
from tests.late_reads import files_are_read
from tests.runtime.combination_support import (
    BESIDE,
    CGOPIPE,
    KINDS,
    NUM_NEW_TOKENS,
    PREFETCHES,
    PROMPTS,
    RATES,
    TIERS,
    Combination,
    Kind,
    Pair,
    combinations,
)
from tests.support import Reference

DEVICES: Sequence[Callable[[int], FakeDevice]] = (  # of a combination by its number; streams late, compute first
    lambda _: FakeDevice((True,) * 5),
    lambda _: FakeDevice((False,) * 5),
    lambda _: FakeDevice((True, False, False, False, False)),
    lambda number: FakeDevice(seed=number),
)


class Bench:
    """A model that is opened once, with some requests and the tokens that transformers has for them."""

    def __init__(self, reference: Reference):
        self.directory = reference.directory
        config = RuntimeConfig(model=ModelConfig(name="test", path=str(self.directory), dtype=DType.float32))
        self.runtime = Runtime(config, device=FakeDevice())
        self._requests = [
            self._request(reference.prompts[place], num) for place, num in zip(PROMPTS, NUM_NEW_TOKENS, strict=True)
        ]
        self._expected = [reference.expected[place][:num] for place, num in zip(PROMPTS, NUM_NEW_TOKENS, strict=True)]

    def _request(self, prompt: list[int], num_new_tokens: int) -> Request:
        made = self.runtime.request(str(prompt), prompt, overrides=SamplingOverrides(max_new_tokens=num_new_tokens))
        assert isinstance(made, Request), made
        return made

    def plan(self, combination: Combination) -> RunPlan:
        """Raises ConfigError where the combination is refused."""
        self.runtime.config = combination.config(self.directory)
        return self.runtime.plan(self._requests, rates=RATES)

    def is_exact(self, plan: RunPlan, number: int) -> bool:
        """Of the combination that was planned last, on a device whose streams run as `number` has it, and files too."""
        self.runtime.device = DEVICES[number % len(DEVICES)](number)
        with files_are_read(is_late=number % len(DEVICES) != 1), self.runtime.session(plan) as session:
            if plan.policy.admission is Admission.continuous:
                order = [index for block in plan.blocks for index in block.members]
                found = dict(session.stream(order, self._requests, {}))
            else:
                done = [(block.members, session.run(block, self._requests)) for block in plan.blocks]
                found = dict(pair for members, made in done for pair in zip(members, made, strict=True))
        return [list(found[index].token_ids) for index in sorted(found)] == self._expected


@pytest.fixture(scope="module")
def bench(reference: Callable[[str], Reference], shared_home: Path) -> Callable[[Kind], Bench]:
    def get(kind: Kind) -> Bench:
        if not kind.has_few_layers:
            return Bench(reference(kind.family))
        family = FAMILIES[kind.family]
        few = replace(family, overrides={**family.overrides, "num_hidden_layers": 2})
        return Bench(Reference.shared(few, shared_home / "few layers" / kind.family))

    return cache(get)


def nothing_stays(placer: placer._Placer) -> Iterable[tuple[frozenset[int], int]]:
    """As where not even embeddings and head fit."""
    return RESIDENTS(placer) if placer._keeps_all else [(frozenset[int](), 0)]


RESIDENTS = placer._Placer._resident_sets


def what_is_done(plan: RunPlan) -> str:
    """Of combinations that come to the same, one is run."""
    return str((replace(plan.placement, ledgers=()), plan.policy, plan.blocks))


Z, F, C, M = Order.zigzag, Order.flexgen, Order.cgopipe, Order.module_batched
DEVICE, CPU = Attention.device, Attention.cpu
COUNTS = {  # unlike those before; the same as one of them; with a depth that rates choose, one or the other; refused
    ("dense", Z, DEVICE): (90, 54, 36, 0),
    ("dense", Z, CPU): (18, 54, 18, 90),
    ("dense", F, DEVICE): (70, 50, 36, 24),
    ("dense", F, CPU): (14, 46, 18, 102),
    ("dense", C, DEVICE): (0, 0, 0, 180),
    ("dense", C, CPU): (14, 46, 18, 102),
    ("experts", Z, DEVICE): (250, 182, 108, 0),
    ("experts", Z, CPU): (50, 166, 54, 270),
    ("experts", F, DEVICE): (190, 170, 108, 72),
    ("experts", F, CPU): (38, 142, 54, 306),
    ("experts", C, DEVICE): (0, 0, 0, 540),
    ("experts", C, CPU): (38, 142, 54, 306),
    ("experts", M, DEVICE): (250, 182, 108, 0),
    ("experts", M, CPU): (50, 166, 54, 270),
    ("windows", Z, DEVICE): (90, 54, 36, 0),
    ("windows", Z, CPU): (18, 54, 18, 90),
    ("windows", F, DEVICE): (70, 50, 36, 24),
    ("windows", F, CPU): (14, 46, 18, 102),
    ("windows", C, DEVICE): (0, 0, 0, 180),
    ("windows", C, CPU): (10, 50, 18, 102),
    ("latents", Z, DEVICE): (30, 6, 0, 0),
    ("latents", F, DEVICE): (30, 6, 0, 0),
    ("latents", M, DEVICE): (30, 6, 0, 0),
    ("padded", Z, DEVICE): (30, 6, 0, 0),
    ("padded", F, DEVICE): (30, 6, 0, 0),
}
CASES = [
    pytest.param(*case, counts, id=f"{case[0]}, {case[1].value}, attention on {case[2].value}")
    for case, counts in COUNTS.items()
]


def test_all_of_them_are_counted() -> None:
    """By what becomes of them."""
    cases = [
        (name, order, attention)
        for name, kind in KINDS.items()
        for order, attention in itertools.product(kind.orders, kind.attentions)
    ]
    assert list(COUNTS) == cases
    found = Counter(each.refusal for case in cases for each in combinations(KINDS[case[0]], *case[1:]))
    assert found == {
        None: 3900,
        CGOPIPE: 900,
        BESIDE: 1560,
        "policy.schedule=flexgen reads a stage during the previous one": 120,
        "policy.schedule=cgopipe reads a stage during the previous one": 60,
        "1 slots, but policy.schedule=flexgen loads a stage": 90,
        "1 slots, but policy.schedule=cgopipe loads a stage": 30,
    }
    assert {prefetch.kind for prefetch in PREFETCHES} == {*Prefetch}


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("name", KINDS)
def test_whatever_a_search_may_choose_is_among_them(name: str, bench: Callable[[Kind], Bench]) -> None:
    """Of shares of KV those that leave the same layers where they are."""
    kind, shape = KINDS[name], bench(KINDS[name]).runtime.model.shape
    tried = set[tuple[Order, Attention]]()
    for tier, kv, prefetch in itertools.product(TIERS, KVTier, kind.prefetches):
        config = RuntimeConfig(offload=OffloadConfig(tier=tier), kv=KVConfig(tier=kv), prefetch=prefetch)
        ways = GridAxes.from_config(shape, config, 4, has_device=True).variants
        tried |= {(order, attention) for order, attention, _ in ways}
        if kind.has_few_layers:
            shares = (offloaded_kv_layers(shape, KVTier.cpu, each, has_device=True) for each in (1.0, 0.5, 0.0))
            assert {offloaded_kv_layers(shape, KVTier.cpu, each, has_device=True) for _, _, each in ways} <= {*shares}
    assert tried <= {(order, attention) for kind_name, order, attention in COUNTS if kind_name == name}


@pytest.mark.dealt("name", "order", "attention", most=3)
@pytest.mark.parametrize(("name", "order", "attention", "expected"), CASES)
def test_every_combination_gives_transformers_tokens_or_is_refused(
    name: str,
    order: Order,
    attention: Attention,
    expected: tuple[int, ...],
    bench: Callable[[Kind], Bench],
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    kind, is_product = KINDS[name], bool(pytestconfig.getoption("--product"))
    if kind.has_few_layers:
        monkeypatch.setattr(placer._Placer, "_resident_sets", nothing_stays)
    counts, planned, exact, tried = Counter[str](), set[str](), set[str](), set[Pair]()
    for combination in combinations(kind, order, attention):
        if combination.refusal is not None:
            with pytest.raises(ConfigError, match=re.escape(combination.refusal)):
                bench(kind).plan(combination)
            counts["refused"] += 1
            continue
        plan = bench(kind).plan(combination)
        is_new = (way := what_is_done(plan)) not in planned
        planned.add(way)
        if way not in exact and (is_product or not tried >= combination.pairs):
            exact.add(way)
            assert bench(kind).is_exact(plan, len(exact)), combination
        if way in exact:
            tried |= combination.pairs
        is_depth_open = combination.prefetch.kind is Prefetch.cost_aware  # which one it is, rates say
        counts["cost_aware" if is_depth_open else "exact" if is_new else "as another"] += 1
    assert tried == {
        pair for each in combinations(kind, order, attention) if each.refusal is None for pair in each.pairs
    }
    assert not is_product or exact == planned
    assert tuple(counts[what] for what in ("exact", "as another", "cost_aware", "refused")) == expected
