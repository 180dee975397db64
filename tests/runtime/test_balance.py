"""Blocks are a partition of the requests, within the sizes, even in tokens, and a function of the lengths alone."""

import random
import time

import pytest

from runtime.batching.balance import balance, plan_blocks

CASES = [(seed, is_packed) for seed in range(40) for is_packed in (True, False)]


def draw(seed: int) -> tuple[list[int], int, int]:
    rng = random.Random(seed)
    lengths = [int(rng.lognormvariate(4, 1)) + 1 for _ in range(rng.choice([0, 1, 2, 7, 50, 300]))]
    return lengths, rng.randint(1, 20), rng.randint(1, 6)


@pytest.mark.parametrize(("seed", "is_packed"), CASES)
def test_blocks_are_a_partition_within_the_sizes(seed: int, is_packed: bool) -> None:
    lengths, size, count = draw(seed)
    blocks = plan_blocks(lengths, micro_batch_size=size, num_micro_batches=count, is_packed=is_packed)
    assert sorted(i for block in blocks for i in block.members) == list(range(len(lengths)))
    assert [block.index for block in blocks] == list(range(-(-len(lengths) // (size * count))))
    for block in blocks:
        assert 1 <= len(block.micro_batches) <= count
        assert all(1 <= len(micro_batch) <= size for micro_batch in block.micro_batches)
    assert blocks == plan_blocks(lengths, micro_batch_size=size, num_micro_batches=count, is_packed=is_packed)


@pytest.mark.parametrize("seed", range(40))
def test_micro_batches_differ_by_no_more_than_one_request(seed: int) -> None:
    """With room everywhere the greedy rule leaves no two micro-batches further apart than the longest request."""
    rng = random.Random(seed)
    lengths = sorted((rng.randint(1, 100) for _ in range(64)), reverse=True)
    groups = balance(range(64), lengths, 16)
    assert len(groups) == 4
    totals = [sum(lengths[i] for i in group) for group in groups]
    assert max(totals) - min(totals) <= lengths[0]


@pytest.mark.parametrize("seed", range(20))
def test_packed_blocks_are_alike_in_tokens(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(10, 500) for _ in range(240)]
    blocks = plan_blocks(lengths, micro_batch_size=10, num_micro_batches=4, is_packed=True)
    totals = [sum(lengths[i] for i in block.members) for block in blocks]
    assert max(totals) - min(totals) <= max(lengths)


@pytest.mark.parametrize("seed", range(20))
def test_padded_micro_batches_are_runs_of_the_sorted_lengths(seed: int) -> None:
    """So the padding of all micro-batches together is the least that their sizes allow."""
    lengths, size, count = draw(seed)
    blocks = plan_blocks(lengths, micro_batch_size=size, num_micro_batches=count, is_packed=False)
    assert [lengths[i] for block in blocks for i in block.members] == sorted(lengths, reverse=True)


def test_equal_lengths_are_ordered_by_position() -> None:
    blocks = plan_blocks([5] * 6, micro_batch_size=2, num_micro_batches=1, is_packed=False)
    assert [block.members for block in blocks] == [(0, 1), (2, 3), (4, 5)]


def test_time_grows_with_the_requests_and_not_with_their_square() -> None:
    begin = time.process_time()
    plan_blocks(range(1, 100_001), micro_batch_size=4, num_micro_batches=4, is_packed=True)
    assert time.process_time() - begin < 5  # 0.5 s; dealt by a search per block it takes minutes


@pytest.mark.parametrize("seed", range(40))
def test_each_goes_where_a_look_at_all_micro_batches_would_put_it(seed: int) -> None:
    lengths, size, _ = draw(seed)
    lengths = [length // 8 for length in lengths]  # with ties
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = [[] for _ in range(-(-len(order) // size))]
    for i in order:
        room = (group for group in range(len(groups)) if len(groups[group]) < size)
        groups[min(room, key=lambda group: (sum(lengths[j] for j in groups[group]), group))].append(i)
    assert balance(order, lengths, size) == groups
