"""What prompts share: laws of the prefixes of a run, and of some of its prompts, on tries that are drawn at random."""

import random
from collections.abc import Sequence

import pytest

from runtime.batching.prefixes import MIN_PREFIX_TOKENS, PrefixSharing, shared_prefixes
from runtime.plan.placement.memory import PAGE_TOKENS, SequenceSize

SEEDS = range(60)


def drawn_prompts(seed: int, floor: int = 0) -> list[tuple[int, ...]]:
    """Prompts out of a random trie, one to five levels deep, some of them empty, equal, or another's beginning; of
    tokens from `floor` on."""
    rng, tokens = random.Random(seed), range(floor, floor + 4)
    stems = [tuple[int, ...]()]
    for _ in range(rng.randint(1, 5)):
        stems += [(*rng.choice(stems), *rng.choices(tokens, k=rng.randint(0, 70))) for _ in range(rng.randint(1, 3))]
    prompts = [(*rng.choice(stems), *rng.choices(tokens, k=rng.choice((0, 0, 1, 5, 40)))) for _ in range(12)]
    return [*prompts, *rng.choices(prompts, k=rng.randint(0, 4))]


def limits(prompts: Sequence[Sequence[int]]) -> list[int]:
    return [max(0, len(prompt) - 1) for prompt in prompts]


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Of what each may share."""
    heads = zip(one[:-1], other[:-1], strict=False)
    least = min(len(one), len(other)) - 1
    return max(0, next((place for place, (a, b) in enumerate(heads) if a != b), least))


@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_has_the_same_prefix_has_the_same_tokens(seed: int) -> None:
    prompts = drawn_prompts(seed)
    found = shared_prefixes(prompts, limits(prompts))
    for one, prefix in zip(prompts, found, strict=True):
        for each in prefix.chain if prefix is not None else ():
            assert each.num_tokens < len(one)
            assert each.num_tokens - (each.parent.num_tokens if each.parent else 0) >= MIN_PREFIX_TOKENS
            alike = [p for p, q in zip(prompts, found, strict=True) if q is not None and each in list(q.chain)]
            assert len(alike) > 1
            assert {p[: each.num_tokens] for p in alike} == {one[: each.num_tokens]}


@pytest.mark.parametrize("seed", SEEDS)
def test_no_two_prompts_share_more_than_the_least_beyond_their_prefix(seed: int) -> None:
    prompts = drawn_prompts(seed)
    found = shared_prefixes(prompts, limits(prompts))
    for one, first in zip(prompts, found, strict=True):
        for other, second in zip(prompts, found, strict=True):
            if one is not other and first is not None and second is not None:
                both = set(first.chain) & set(second.chain)
                longest = max((prefix.num_tokens for prefix in both), default=0)
                assert longest <= num_common(one, other) < longest + MIN_PREFIX_TOKENS


@pytest.mark.parametrize("seed", SEEDS)
def test_some_of_the_prompts_share_what_two_of_them_have_and_part_at(seed: int) -> None:
    prompts = drawn_prompts(seed)
    found = shared_prefixes(prompts, limits(prompts))
    some = [prefix for prefix in found if random.Random(seed).random() < 0.5] or found[:1]
    shares = PrefixSharing.from_prefixes(some)
    users = [prefix for prefix in (*shares.prefixes, *shares.parents.values()) if prefix is not None]
    for prefix, parent in shares.parents.items():
        assert users.count(prefix) >= 2
        assert parent is None or list(shares.parents).index(parent) < list(shares.parents).index(prefix)
    for prefix, kept in zip(some, shares.prefixes, strict=True):
        chain = [] if prefix is None else list(prefix.chain)
        two = [each for each in chain if sum(each in list(p.chain) for p in some if p is not None) > 1]
        assert kept is (two[0] if two else None)


def test_a_prefix_is_left_out_at_which_none_of_some_prompts_parts_from_the_others() -> None:
    head, tail = tuple(range(40)), tuple(range(40, 80))
    prompts = [(*head, *tail, 100, 101), (*head, *tail, 102, 103), (*head, 104, 105)]
    found = shared_prefixes(prompts, limits(prompts))
    one, other, short = found
    assert one is other is not None
    assert one.parent is short is not None
    assert PrefixSharing.from_prefixes(found) == PrefixSharing(
        prefixes=[one, one, short], parents={short: None, one: short}
    )
    assert PrefixSharing.from_prefixes(found[:2]) == PrefixSharing(prefixes=[one, one], parents={one: None})


@pytest.mark.parametrize("prompts", [[], [()], [(1, 2, 3) * 20], [(), (), ()]])
def test_nothing_is_shared_where_there_is_nothing_to_share(prompts: list[tuple[int, ...]]) -> None:
    found = shared_prefixes(prompts, limits(prompts))
    assert found == [None] * len(prompts)
    assert PrefixSharing.from_prefixes(found) == PrefixSharing(prefixes=found, parents={})


def test_sizes_of_prompts_that_share_nothing_are_those_without_sharing() -> None:
    """So that what goes by them, a plan above all, costs the same."""
    sizes = [SequenceSize.interned(num_tokens, 9) for num_tokens in (5, 70, 70)]
    assert all(size.with_prefix(None) is size for size in sizes)


@pytest.mark.parametrize("num_common", range(2 * MIN_PREFIX_TOKENS))
def test_prompts_share_from_the_least_on(num_common: int) -> None:
    prompts = [tuple([7] * num_common + [turn] * 40) for turn in (1, 2)]
    found = shared_prefixes(prompts, limits(prompts))
    expected = num_common if num_common >= MIN_PREFIX_TOKENS else None
    assert [prefix.num_tokens if prefix is not None else None for prefix in found] == [expected] * 2


def test_equal_prompts_share_all_that_they_may() -> None:
    found = shared_prefixes([tuple(range(50))] * 4, [49] * 4)
    assert {None if prefix is None else prefix.num_tokens for prefix in found} == {49}
    assert len(set(found)) == 1


def test_a_prefix_goes_on_for_a_page_at_least_so_that_sharing_takes_no_more_pages() -> None:
    assert MIN_PREFIX_TOKENS >= PAGE_TOKENS
