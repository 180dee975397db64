"""What prompts share: laws of `shared_prefixes`, on tries that are drawn at random."""

import random
from collections.abc import Sequence

import pytest

from runtime.batching.prefixes import LEAST_TOKENS, Sharing, shared_prefixes


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


def chain(sharing: Sharing, place: int | None) -> list[int]:
    found = []
    while place is not None:
        found.append(place)
        place = sharing.prefixes[place].parent
    return found


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("multiple", [1, 16])
def test_a_prompt_begins_with_its_prefix_and_a_prefix_with_its_parent(seed: int, multiple: int) -> None:
    prompts = drawn_prompts(seed)
    sharing = shared_prefixes(prompts, limits(prompts), multiple=multiple)
    for prompt, limit, place in zip(prompts, limits(prompts), sharing.of, strict=True):
        longer = limit + 1
        for number in chain(sharing, place):
            prefix = sharing.prefixes[number]
            assert prompt[: prefix.num_tokens] == prompts[prefix.source][: prefix.num_tokens]
            assert prefix.num_tokens % multiple == 0
            assert prefix.num_tokens < longer
            longer = prefix.num_tokens - LEAST_TOKENS + 1
        assert longer > 0


@pytest.mark.parametrize("seed", range(60))
def test_a_prefix_has_two_that_go_on_from_it_and_stands_behind_its_parent(seed: int) -> None:
    prompts = drawn_prompts(seed)
    sharing = shared_prefixes(prompts, limits(prompts))
    users = [*sharing.of, *(prefix.parent for prefix in sharing.prefixes)]
    for number, prefix in enumerate(sharing.prefixes):
        assert users.count(number) >= 2
        assert prefix.parent is None or prefix.parent < number


@pytest.mark.parametrize("seed", range(60))
def test_no_two_prompts_share_more_than_the_least_beyond_their_prefix(seed: int) -> None:
    prompts = drawn_prompts(seed)
    most = limits(prompts)
    sharing = shared_prefixes(prompts, most)
    for i, one in enumerate(prompts):
        for j in range(i):
            common = next(
                (k for k, (a, b) in enumerate(zip(one[: most[i]], prompts[j][: most[j]], strict=False)) if a != b),
                min(most[i], most[j]),
            )
            both = set(chain(sharing, sharing.of[i])) & set(chain(sharing, sharing.of[j]))
            longest = max((sharing.prefixes[number].num_tokens for number in both), default=0)
            assert longest <= common < longest + LEAST_TOKENS


@pytest.mark.parametrize("prompts", [[], [()], [(1, 2, 3) * 20], [(), (), ()]])
def test_nothing_is_shared_where_there_is_nothing_to_share(prompts: list[tuple[int, ...]]) -> None:
    sharing = shared_prefixes(prompts, limits(prompts))
    assert sharing == Sharing(of=(None,) * len(prompts))


def test_equal_prompts_share_all_that_they_may() -> None:
    sharing = shared_prefixes([tuple(range(50))] * 4, [49] * 4)
    assert [prefix.num_tokens for prefix in sharing.prefixes] == [49]
    assert [sharing.num_shared(place) for place in range(4)] == [49] * 4
