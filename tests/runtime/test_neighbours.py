"""Pages of one lane lie side by side, whoever else takes and gives pages meanwhile."""

import random

import pytest

from runtime.cache.paged import PagedKV
from runtime.cache.pages import ContiguousPool, KVPages
from runtime.plan.placement.kv import consecutive_ranges
from runtime.plan.placement.memory import PAGE_TOKENS
from runtime.stream.device import ComputeDevice


def num_spans(pages: list[int]) -> int:
    return len(list(consecutive_ranges(pages)))


def test_lanes_that_grow_in_turns_each_stay_in_one_stretch() -> None:
    pool = ContiguousPool(64)
    lanes: list[list[int]] = [[] for _ in range(4)]
    for _ in range(16):
        for lane in lanes:
            lane += pool.allocate(1, lane[-1] if lane else None)
    assert sorted(page for lane in lanes for page in lane) == list(range(64))
    assert [num_spans(lane) for lane in lanes] == [1, 1, 1, 1]
    with pytest.raises(AssertionError, match="1 KV pages requested, 0 of 64 are free"):
        pool.allocate(1)


@pytest.mark.parametrize("seed", range(5))
def test_each_page_is_handed_out_once_until_it_is_given_back(seed: int) -> None:
    rng, pool, taken, given = random.Random(seed), ContiguousPool(50), set[int](), list[int]()
    for _ in range(300):
        if rng.random() < 0.5:
            pages = pool.allocate(rng.randint(0, pool.num_free), rng.choice([None, *taken]))
            assert taken.isdisjoint(pages)
            assert len(set(pages)) == len(pages)
            taken |= set(pages)
        else:
            back = rng.sample(sorted(taken), rng.randint(0, len(taken)))
            pool.free(back)
            given += back
            taken -= set(back)
        assert pool.num_free == 50 - len(taken)
        assert taken <= set(range(50))
    assert pool.take_freed() == given
    pool.free(taken)
    assert pool._spans == [range(50)], "what is free and touches is one stretch"


def test_once_all_decode_a_lane_has_all_its_pages_in_one_stretch_and_so_the_open_ones() -> None:
    """Two lanes of 12 rows, prompts in chunks. In 16 passes each row takes one page: those that are open then."""
    rng = random.Random(0)
    pages = KVPages(400, ComputeDevice("cpu"), pool=ContiguousPool(400))
    lanes = [PagedKV(pages, offloaded_layers=frozenset([0])) for _ in range(2)]
    for lane in lanes:
        prompts = [rng.randint(1, 90) for _ in range(12)]
        for _ in prompts:
            lane.table.add()
        for row, prompt in enumerate(prompts):
            lane.begin_pass([prompt if other == row else 0 for other in range(12)])
            lane.end_pass()
    for _ in range(PAGE_TOKENS + 5):
        for lane in lanes:
            lane.begin_pass([1] * 12)
            assert num_spans(lane.pages) == 1
            found = num_spans(lane.dirty_pages)
            lane.end_pass()
    assert found == 1
