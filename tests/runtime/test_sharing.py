"""What several prompts begin with is computed once, and says the same as if each were computed by itself."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest

from runtime import PolicyConfig, Runtime, RuntimeConfig, Targets
from runtime.config.settings import Admission, Attention, KVConfig, KVTier, Order, PolicyKind, SharePrefixes, Tier
from runtime.engine.records import PassRecord
from runtime.errors import Interrupted
from runtime.library.scoring import make_scoring_batch
from runtime.model.families import FAMILIES
from runtime.plan.placement.memory import PAGE_TOKENS
from runtime.sequences.sequence import Request, SequenceState
from tests.dealt import with_slow_others
from tests.fake_device import FakeDevice
from tests.runtime.sharing_support import Alike, run_alike, unshared
from tests.runtime.test_fidelity import config_for
from tests.runtime.test_prefixes import drawn_prompts
from tests.runtime.test_resumption import Stops
from tests.support import KINDS_OF_ATTENTION, Reference

References = Callable[[str], Reference]
Runtimes = Callable[[RuntimeConfig], Runtime]
PLACES = ("device", "cpu", "nvme", "attention")  # of keys and values


@pytest.fixture(scope="session")
def alike(reference: References, shared_home: Path) -> Callable[[str], Alike]:
    return cache(lambda family: Alike.shared(reference(family).directory, shared_home / "alike" / family))


def policy(**settings: object) -> PolicyConfig:
    usual = {"micro_batch_size": 4, "num_micro_batches": 3, "share_prefixes": SharePrefixes.auto, "draft_tokens": 0}
    return PolicyConfig(kind=PolicyKind.fixed, **{**usual, **settings})


@pytest.mark.dealt(most=4)
@pytest.mark.parametrize("family", with_slow_others(FAMILIES, KINDS_OF_ATTENTION))
def test_sharing_changes_no_token_in_any_family(
    family: str, alike: Callable[[str], Alike], reference: References, opened: Runtimes
) -> None:
    runtime = opened(replace(config_for(reference(family), tier=Tier.none), policy=policy()))
    if runtime.model.rope_lengths is not None or not runtime.model.shape.is_packed:
        pytest.skip(f"{family} shares nothing")
    of = alike(family)
    ran = run_alike(runtime, of.prompts)
    assert ran.tokens == of.expected
    assert ran.num_computed < sum(map(len, of.prompts)) * 0.7
    assert ran.num_pages_left == 0


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
@pytest.mark.parametrize("size", [1, 2, 9])
def test_sharing_changes_no_token_whatever_the_chunks_and_lanes(
    size: int, chunk: int, alike: Callable[[str], Alike], reference: References, opened: Runtimes
) -> None:
    of = alike("llama")
    pieces = policy(micro_batch_size=size, num_micro_batches=9, prefill_chunk_tokens=chunk)
    ran = run_alike(opened(replace(config_for(reference("llama")), policy=pieces)), of.prompts)
    assert ran.tokens == of.expected
    assert ran.num_pages_left == 0
    if size == 9:
        assert ran.num_computed == NUM_COMPUTED


NUM_COMPUTED = 21 + 20 + 12 + 3 + 1 + 3 + 25 + 30 + 3 * 2  # stems, and what is each prompt's own


WAYS = [
    (order, tier) for order in Order for tier in (KVTier.cpu, KVTier.nvme)
    if not (order.style.needs_cpu_attention and tier is KVTier.nvme)  # keys and values are where the CPU attends
]  # fmt: skip
WAYS_OF = {  # every way is taken by a family, each order and each tier by all that know it
    "llama": WAYS,
    "mixtral": WAYS[::2],
    "deepseek-v3": [way for way in WAYS[1::2] if not way[0].style.needs_cpu_attention],
}


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize(("family", "order", "tier"), [(family, *way) for family in WAYS_OF for way in WAYS_OF[family]])
def test_sharing_changes_no_token_wherever_keys_and_values_are(
    family: str, order: Order, tier: KVTier, alike: Callable[[str], Alike], reference: References
) -> None:
    of, num_alone = alike(family), None
    attention = Attention.cpu if order.style.needs_cpu_attention else Attention.device
    kv = KVConfig() if attention is Attention.cpu else KVConfig(tier=tier, device_fraction=0.5)
    config = replace(config_for(reference(family)), kv=kv, policy=policy(schedule=order, attention=attention))
    for device in (FakeDevice(), None):
        if device is None and attention is Attention.device and kv.tier is KVTier.cpu:
            continue  # host memory is no other tier there
        runtime = Runtime(config, device=device)
        ran = run_alike(runtime, of.prompts)
        assert ran.tokens == of.expected
        assert ran.num_pages_left == 0
        assert ran.num_spared > 0
        if num_alone is None:
            runtime.config = unshared(config)
            alone = run_alike(runtime, of.prompts)
            assert alone.num_spared == 0
            num_alone = alone.num_computed
        assert ran.num_computed + ran.num_spared == num_alone


def longest_pages(prompts: list[list[int]], max_new_tokens: int) -> int:
    """Fewer can hold no run."""
    return max(-(-(len(prompt) + max_new_tokens) // PAGE_TOKENS) for prompt in prompts)


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek-v3", "gpt-oss"])
def test_sequences_that_come_and_go_compute_what_they_begin_with_once(
    family: str, alike: Callable[[str], Alike], reference: References
) -> None:
    """But for what of it is no whole page."""
    of = alike(family)
    coming = policy(admission=Admission.continuous, micro_batch_size=3, num_micro_batches=2)
    ran = run_alike(Runtime(replace(config_for(reference(family)), policy=coming)), of.prompts)
    assert ran.tokens == of.expected
    assert ran.num_spared == NUM_SPARED_PAGES * PAGE_TOKENS
    assert ran.num_pages_left == 0


NUM_SPARED_PAGES = (8 - 1) + (6 - 1)  # of the stem, and of the branch


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize(
    ("seed", "place"),
    with_slow_others(
        [(0, "device"), (1, "cpu"), (2, "nvme"), (3, "attention"), (3, "device")],
        [(1, "cpu"), (3, "attention"), (3, "device")],
    ),
)
def test_sequences_that_come_and_go_get_the_tokens_of_each_by_itself(
    seed: int, place: str, reference: References
) -> None:
    """With all pages that are planned, and so few that sequences give way."""
    config, device, prompts = drawn_run(seed, place, reference("llama"))
    config = replace(config, policy=replace(config.policy, admission=Admission.continuous))
    runtime = Runtime(unshared(config), device=device)
    alone = run_alike(runtime, prompts)
    runtime.config = config
    shared = run_alike(runtime, prompts)
    assert shared.tokens == alone.tokens
    assert (shared.num_pages_left, alone.num_spared) == (0, 0)
    assert shared.num_computed + shared.num_spared == alone.num_computed
    if place == "device":
        least = longest_pages(prompts, config.sampling.max_new_tokens)
        for num_pages in (least, least + 2):
            tight = run_alike(runtime, prompts, num_kv_pages=num_pages)
            assert (tight.tokens, tight.num_pages_left) == (alone.tokens, 0)
            assert tight.num_computed + tight.num_spared >= alone.num_computed


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("num_passes", [1, 2, 5])
def test_a_block_that_was_stopped_shares_what_it_would_have_shared(
    num_passes: int, alike: Callable[[str], Alike], reference: References
) -> None:
    of = alike("llama")
    runtime = Runtime(replace(config_for(reference("llama")), policy=policy(prefill_chunk_tokens=24)))
    made = [runtime.request(str(index), prompt) for index, prompt in enumerate(of.prompts)]
    requests = [each for each in made if isinstance(each, Request)]
    stops = Stops(runtime=runtime, plan=runtime.plan(requests), requests=requests)
    stops.start(num_passes)
    computed = sum(record.counts.prompt_tokens for record in stops.passes)
    stops.start()
    assert stops.in_order() == of.expected
    num_generated = sum(len(state.token_ids) for state in stops.unfinished.values())
    again = sum(record.counts.prompt_tokens for record in stops.passes) - computed
    assert again <= NUM_COMPUTED + num_generated


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("num_passes", [1, 3, 6])
def test_a_line_that_was_stopped_goes_on_with_the_same_tokens(
    num_passes: int, alike: Callable[[str], Alike], reference: References
) -> None:
    """Stopped between prompts and answers; nobody's share follows from who was left."""
    of = alike("llama")
    coming = policy(admission=Admission.continuous, micro_batch_size=2, num_micro_batches=2, prefill_chunk_tokens=24)
    runtime = Runtime(replace(config_for(reference("llama")), policy=coming))
    made = [runtime.request(str(index), prompt) for index, prompt in enumerate(of.prompts)]
    requests = [each for each in made if isinstance(each, Request)]
    plan, tokens, passes = runtime.plan(requests), dict[int, list[int]](), list[PassRecord]()
    order = [i for block in plan.blocks for i in block.members]
    unfinished = dict[int, SequenceState]()

    def on_pass(record: PassRecord) -> None:
        passes.append(record)
        if len(passes) == num_passes:
            raise Interrupted("stopped")

    while len(tokens) < len(requests):
        with runtime.session(plan) as session:
            left = [i for i in order if i not in tokens]
            try:
                for i, completion in session.stream(left, requests, unfinished, on_pass):
                    tokens[i] = list(completion.token_ids)
            except Interrupted:
                unfinished |= session.snapshot()
    assert len(passes) > num_passes
    assert [tokens[i] for i in range(len(requests))] == of.expected
    assert sum(record.counts.spared_tokens for record in passes) > 0


@pytest.mark.dealt("family", most=2)
@pytest.mark.parametrize(
    ("family", "seed"),
    [*(("llama", seed) for seed in range(6)), ("deepseek-v3", 0), ("deepseek-v3", 3), ("gpt-oss", 1), ("gpt-oss", 4)],
)
def test_scores_behind_random_tries_are_those_of_each_prompt_by_itself(
    family: str, seed: int, reference: References, opened: Runtimes
) -> None:
    pairs = [
        Targets(prompt or (7,), [list(prompt[-3:]) or [9], [5, 6, 7], [5]]) for prompt in drawn_prompts(seed, floor=5)
    ]
    config = replace(config_for(reference(family), tier=Tier.none), policy=policy(prefill_chunk_tokens=32))
    shared = opened(config).score(pairs)
    alone = opened(unshared(config)).score(pairs)
    for one, other in zip(shared, alone, strict=True):
        assert one.error is None
        assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-4)


def tried(seed: int) -> list[list[int]]:
    """Prompts of a random trie; one alone, equal ones, and some that part where a page ends or beside that."""
    rng = Random(seed)
    if seed % 4 == 3:
        stem = rng.choices(range(5, 600), k=rng.choice((15, 16, 17, 31, 32, 33)))
        return [[*stem, token, *rng.choices(range(5, 600), k=rng.randint(0, 20))] for token in range(20, 28)]
    drawn = [list(prompt) for prompt in drawn_prompts(seed, floor=5) if prompt]
    return [drawn[:1], drawn[:1] * 7, drawn][seed % 3] if seed % 4 == 1 else drawn


def drawn_run(seed: int, place: str, ref: Reference) -> tuple[RuntimeConfig, FakeDevice | None, list[list[int]]]:
    """Prompts, and a way to run them, with keys and values in that place."""
    rng, prompts = Random(seed), tried(seed)
    order = rng.choice([each for each in Order if place == "attention" or not each.style.needs_cpu_attention])
    ways = policy(
        micro_batch_size=rng.randint(1, 6),
        num_micro_batches=rng.randint(1, 4),
        prefill_chunk_tokens=rng.choice((5, 16, 64)),
        schedule=order,
        attention=Attention.cpu if place == "attention" else Attention.device,
    )
    kv = KVConfig(tier=KVTier(place), device_fraction=0.5) if place in ("cpu", "nvme") else KVConfig()
    config = replace(config_for(ref), kv=kv, policy=ways)
    device = FakeDevice() if place in ("cpu", "attention") else None
    return config, device, prompts


@pytest.mark.dealt("place", most=2)
@pytest.mark.parametrize(
    ("seed", "place"),
    [(seed, PLACES[(turn + further) % 4]) for turn, seed in enumerate((0, 1, 3, 5, 7, 9)) for further in (0, 1)],
)
def test_random_tries_get_the_tokens_and_scores_of_each_prompt_by_itself(
    seed: int, place: str, reference: References
) -> None:
    config, device, prompts = drawn_run(seed, place, reference("llama"))
    runtime, pairs = Runtime(config, device=device), [Targets(tuple(p), [p[-3:], [5, 6]]) for p in prompts[:6]]
    shared, scores = run_alike(runtime, prompts), runtime.score(pairs)
    runtime.config = unshared(config)
    alone = run_alike(runtime, prompts)
    assert shared.tokens == alone.tokens
    assert (shared.num_pages_left, alone.num_spared) == (0, 0)
    assert shared.num_computed + shared.num_spared == alone.num_computed
    for one, other in zip(scores, runtime.score(pairs), strict=True):
        assert one.error is None
        assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=1e-4)


def test_targets_of_one_prompt_share_it(reference: References) -> None:
    prompt = tuple(range(20, 70))
    runtime = Runtime(replace(config_for(reference("llama"), tier=Tier.none), policy=policy(micro_batch_size=8)))
    asked = make_scoring_batch(runtime.model, [(0, Targets(prompt, [[first, 8, 9] for first in range(100, 108)]))])
    passes = list[PassRecord]()
    plan = runtime.plan(asked.requests)
    with runtime.open_with_backoff(asked.requests) as (_, session):
        session.run(plan.blocks[0], asked.requests, passes.append)
    assert sum(record.counts.prompt_tokens for record in passes) == len(prompt) - 1 + 8 * 3
