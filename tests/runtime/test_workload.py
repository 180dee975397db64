"""A workload in few numbers says what a search asks of it."""

import pytest

from runtime.batching.balance import plan_blocks
from runtime.batching.prefixes import SharedPrefix
from runtime.plan.cost.lane_work import prefill_works
from runtime.plan.placement.memory import SequenceSize
from runtime.plan.search.workload import MAX_SAMPLED_LENGTHS, Workload
from tests.toy import sizes_of, toy_shape


def test_few_requests_are_kept_as_they_are() -> None:
    workload = Workload.from_sizes(sizes_of([30, 10, 20], max_new_tokens=7))
    assert workload == Workload(num_requests=3, prompt_tokens=(10, 20, 30), max_new_tokens=7)
    assert workload.sizes() == [SequenceSize(num_prompt_tokens=n, max_new_tokens=7) for n in (10, 20, 30)]
    assert workload.mean_prompt_tokens == 20
    assert workload.mean_squared_tokens == pytest.approx((100 + 400 + 900) / 3)
    assert workload.mean_capacity_tokens == pytest.approx((32 + 32 + 48) / 3)
    assert workload.num_new_tokens == 21


def test_a_sample_of_many_has_the_mean_of_all() -> None:
    lengths = [n * n % 977 + 1 for n in range(20_000)]
    workload = Workload.from_sizes(sizes_of(lengths))
    assert workload.num_requests == 20_000
    assert len(workload.prompt_tokens) == MAX_SAMPLED_LENGTHS
    assert workload.mean_prompt_tokens == pytest.approx(sum(lengths) / len(lengths), rel=0.005)


@pytest.mark.parametrize(("mean", "longest"), [(77, 418), (242, 256), (1693, 1984), (10, 10)])
def test_mean_and_longest_are_met(mean: float, longest: int) -> None:
    workload = Workload.from_mean(1000, mean=mean, longest=longest, max_new_tokens=8)
    assert workload.mean_prompt_tokens == pytest.approx(mean, rel=0.01)
    assert 0.98 * longest <= workload.prompt_tokens[-1] <= longest
    assert list(workload.prompt_tokens) == sorted(workload.prompt_tokens)
    assert sum(size.num_prompt_tokens for size in workload.sizes()) == pytest.approx(1000 * mean, rel=0.02)


@pytest.mark.parametrize("count", [1, 3, 17, 300, 512, 1280])
def test_few_requests_are_no_shorter_than_many(count: int) -> None:
    workload = Workload.from_mean(10_000, mean=200, longest=300, max_new_tokens=8)
    sizes = workload.sizes(count)
    assert len(sizes) == count
    assert sum(size.num_prompt_tokens for size in sizes) / count == pytest.approx(200, rel=0.1)


def test_a_mean_above_the_longest_is_refused() -> None:
    with pytest.raises(ValueError, match="1 <= mean <= longest"):
        Workload.from_mean(10, mean=20, longest=10, max_new_tokens=1)


def test_padding_makes_every_prompt_the_longest() -> None:
    assert {s.num_prompt_tokens for s in Workload.from_sizes(sizes_of([3, 9])).pad_to_longest().sizes()} == {9}


@pytest.mark.parametrize(("lane_size", "expected"), [(1, 25.0), (2, 30.0), (3, (20 + 40) / 2), (4, 40.0), (9, 40.0)])
def test_padding_costs_what_lanes_of_neighbours_compute(lane_size: int, expected: float) -> None:
    assert Workload.from_sizes(sizes_of([40, 10, 30, 20])).mean_padded_tokens(lane_size) == pytest.approx(expected)


def test_workloads_that_differ_have_other_digests() -> None:
    one = Workload.from_sizes(sizes_of([3, 9]))
    others = [
        Workload.from_sizes(sizes_of([3, 8])),
        Workload.from_sizes(sizes_of([3, 9], max_new_tokens=1)),
        one.pad_to_longest(),
    ]
    assert one.digest == Workload.from_sizes(sizes_of([9, 3])).digest
    assert len({one.digest, *(other.digest for other in others)}) == 4


def test_no_requests_are_a_workload_too() -> None:
    assert Workload.from_sizes([]).sizes() == []
    assert Workload.from_sizes([]).mean_prompt_tokens == 0


def sharing_sizes(num_tasks: int, num_prompts: int, num_samples: int) -> list[SequenceSize]:
    """Of prompts of 120 tokens: each task's begin with the same 100, and each prompt is asked several times."""
    found = list[SequenceSize]()
    for _ in range(num_tasks):
        task = SharedPrefix(num_tokens=100)
        for _ in range(num_prompts):
            prefix = SharedPrefix(num_tokens=119, parent=task) if num_samples > 1 else task
            found += [SequenceSize(num_prompt_tokens=120, max_new_tokens=3, prefix=prefix)] * num_samples
    return found


@pytest.mark.parametrize("lane_size", [2, 8, 32, 64])
def test_what_is_spared_is_what_blocks_spare(lane_size: int) -> None:
    sizes = sharing_sizes(6, 16, 2)
    workload = Workload.from_sizes(sizes)
    blocks = plan_blocks(
        [size.capacity_tokens for size in sizes],
        micro_batch_size=lane_size,
        num_micro_batches=3,
        is_packed=True,
        prefixes=[size.prefix for size in sizes],
    )
    lanes = [[sizes[i] for i in lane] for block in blocks for lane in block.micro_batches]
    works = [work for lane in lanes for work in prefill_works(toy_shape(), lane, 10**6)]
    computed = sum(work.num_tokens for work in works)
    squares = sum(2 * (work.prefill_pairs + work.kv_positions) - work.num_tokens for work in works)
    mean = workload.mean_prompt_tokens - workload.mean_spared_tokens(lane_size)
    assert len(sizes) * mean == pytest.approx(computed, rel=0.001)
    mean = workload.mean_squared_tokens - workload.mean_spared_squares(lane_size)
    assert len(sizes) * mean == pytest.approx(squares, rel=0.02)


def test_workloads_that_share_are_told_from_those_that_do_not() -> None:
    shared = sharing_sizes(2, 3, 1)
    alone = [SequenceSize(num_prompt_tokens=120, max_new_tokens=3)] * 6
    assert Workload.from_sizes(shared).digest == Workload.from_sizes(sharing_sizes(2, 3, 1)).digest
    assert len({Workload.from_sizes(sizes).digest for sizes in (shared, alone, sharing_sizes(1, 6, 1))}) == 3
    assert Workload.from_sizes(alone).mean_spared_tokens(64) == 0
