"""Who is with whom where prompts share what they begin with: laws of blocks, on tries that are drawn at random."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from runtime.batching.balance import Block, group_by_prefix, plan_blocks
from runtime.batching.prefixes import SharedPrefix, shared_prefixes
from runtime.plan.placement.memory import SequenceSize, computed_tokens
from tests.runtime.test_prefixes import drawn_prompts, limits

SEEDS = range(40)


def sizes_of(prompts: Sequence[Sequence[int]]) -> list[SequenceSize]:
    found = shared_prefixes(prompts, limits(prompts))
    return [
        SequenceSize(num_prompt_tokens=len(p), max_new_tokens=3, prefix=f) for p, f in zip(prompts, found, strict=True)
    ]


def blocks_of(sizes: Sequence[SequenceSize], size: int, count: int) -> tuple[Block, ...]:
    return plan_blocks(
        [each.capacity_tokens for each in sizes],
        micro_batch_size=size,
        num_micro_batches=count,
        is_packed=True,
        prefixes=[each.prefix for each in sizes],
    )


def num_computed(sizes: Sequence[SequenceSize], blocks: Sequence[Block]) -> int:
    return sum(computed_tokens([sizes[i] for i in lane]) for block in blocks for lane in block.micro_batches)


def tasks(num_tasks: int, num_prompts: int, num_samples: int) -> list[tuple[int, ...]]:
    """Prompts of several tasks in a mixed order, each of a prefix of 100 tokens, 20 of its own, asked several times."""
    prompts = [
        (*[task] * 100, *[1000 * task + turn] * 20)
        for task in range(num_tasks)
        for turn in range(num_prompts)
        for _ in range(num_samples)
    ]
    random.Random(0).shuffle(prompts)
    return prompts


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sequence_is_in_one_lane_of_a_block_that_is_not_larger_than_asked(seed: int) -> None:
    rng, sizes = random.Random(seed), sizes_of(drawn_prompts(seed))
    size, count = rng.randint(1, 9), rng.randint(1, 4)
    blocks = blocks_of(sizes, size, count)
    assert sorted(i for block in blocks for i in block.members) == list(range(len(sizes)))
    assert len(blocks) == -(-len(sizes) // (size * count))
    assert all(1 <= len(block.micro_batches) <= count for block in blocks)
    assert all(1 <= len(lane) <= size for block in blocks for lane in block.micro_batches)
    assert blocks == blocks_of(sizes, size, count)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_more_is_computed_than_where_lengths_alone_decide(seed: int) -> None:
    rng = random.Random(seed)
    sizes = sizes_of([prompt for turn in range(4) for prompt in drawn_prompts(seed, floor=10 * turn)])
    size, count = rng.randint(2, 12), rng.randint(1, 3)
    tokens = [each.capacity_tokens for each in sizes]
    plain = plan_blocks(tokens, micro_batch_size=size, num_micro_batches=count, is_packed=True)
    assert num_computed(sizes, blocks_of(sizes, size, count)) <= num_computed(sizes, plain)


def test_samples_of_a_prompt_are_in_one_lane() -> None:
    sizes = sizes_of(tasks(1, 30, 4))
    for block in blocks_of(sizes, 16, 2):
        for lane in block.micro_batches:
            assert len({sizes[i].prefix for i in lane}) == len(lane) // 4


def test_a_task_is_computed_once_for_each_lane_that_it_fills() -> None:
    sizes = sizes_of(tasks(5, 16, 2))
    assert num_computed(sizes, blocks_of(sizes, 32, 2)) == 5 * (100 + 16 * 20 + 16)  # the last token by each sample


def test_tasks_that_fill_no_lane_share_one() -> None:
    sizes = sizes_of(tasks(8, 4, 1))
    assert num_computed(sizes, blocks_of(sizes, 16, 2)) == 8 * 100 + 32 * 20


def test_one_prefix_of_all_leaves_lanes_as_even_as_lengths_are() -> None:
    rng = random.Random(1)
    sizes = sizes_of([(*[7] * 64, *rng.choices(range(9, 99), k=rng.randint(20, 120))) for _ in range(300)])
    lanes = [lane for block in blocks_of(sizes, 10, 3) for lane in block.micro_batches]
    totals = [sum(sizes[i].capacity_tokens for i in lane) for lane in lanes]
    assert len(lanes) == 30
    assert max(totals) < 1.1 * min(totals)


def test_a_group_for_which_no_lane_has_room_is_taken_apart() -> None:
    prefixes: list[SharedPrefix | None] = [SharedPrefix(num_tokens=32) for _ in range(3) for _ in range(1)]
    of = [prefix for prefix in prefixes for _ in range(4)]
    lanes = group_by_prefix([48] * 12, of, num_lanes=2, lane_size=6)
    assert sorted(len(lane.members) for lane in lanes) == [6, 6]
    assert sum(len({of[i] for i in lane.members}) for lane in lanes) == 4


def test_hundreds_of_thousands_are_grouped_in_no_time() -> None:
    of = [prefix for prefix in (SharedPrefix(num_tokens=64) for _ in range(25_000)) for _ in range(4)]
    lanes = group_by_prefix(range(100, 100_100), of, num_lanes=1600, lane_size=64)
    assert sum(len(lane.members) for lane in lanes) == 100_000


def test_those_who_begin_alike_are_neighbours_in_line_over_all_blocks() -> None:
    """Lanes that are dealt out to blocks bring each beginning into every block."""
    prefixes = [SharedPrefix(num_tokens=32) for _ in range(4)]
    of = [prefix for prefix in prefixes for _ in range(12)]
    num_tokens = [100 + i % 7 for i in range(len(of))]
    blocks = plan_blocks(
        num_tokens, micro_batch_size=3, num_micro_batches=2, is_packed=True, prefixes=of, is_continuous=True
    )
    line = [of[i] for block in blocks for i in block.members]
    assert sum(one is not other for one, other in pairwise(line)) == len(prefixes) - 1
    assert sorted(i for block in blocks for i in block.members) == list(range(len(of)))
    assert all(len(block.micro_batches) <= 2 for block in blocks)
