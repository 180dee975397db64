"""A run's time is that of its passes: as many as the engine would make, in the steady state, added up by phase."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from runtime.batching.admission import AdmissionLimits
from runtime.batching.balance import Block, plan_blocks
from runtime.config.settings import Admission, OffloadConfig, RuntimeConfig, Tier
from runtime.plan.cost.mixed_passes import mixed_passes
from runtime.plan.cost.predict import Prediction, predict
from runtime.plan.cost.rates import MachineRates
from runtime.plan.placement.load import Load
from runtime.plan.placement.memory import PAGE_TOKENS, SequenceSize
from runtime.plan.placement.placement import Budgets
from runtime.plan.placement.placer import choose_placement
from runtime.plan.shape.model import ModelShape
from runtime.resources import Resource
from runtime.units import GIB, MIB
from tests.toy import sizes_of, toy_shape

FAST = MachineRates(disk_bytes_per_second=1e15, gemm_flops_per_second={1: 1e15})
SLOW_TURNS = replace(FAST, turn_seconds=0.5)
NUM_STAGES = 10


def blocks_of(sizes: Sequence[SequenceSize], size: int, num_lanes: int = 1) -> tuple[Block, ...]:
    tokens = [each.capacity_tokens for each in sizes]
    return plan_blocks(tokens, micro_batch_size=size, num_micro_batches=num_lanes, is_packed=True)


def predicted(
    sizes: Sequence[SequenceSize],
    blocks: Sequence[Block],
    rates: MachineRates,
    *,
    tier: Tier = Tier.none,
    admission: Admission = Admission.wave,
    chunk_tokens: int = 64,
    shape: ModelShape | None = None,
) -> Prediction:
    shape = shape or toy_shape()
    config = RuntimeConfig(offload=OffloadConfig(tier=tier, resident_layers=None if tier is Tier.none else 0))
    load = Load.from_lanes(shape, [[sizes[i] for i in group] for group in blocks[0].micro_batches], chunk_tokens)
    placement = choose_placement(shape, config, Budgets(host_bytes=GIB), load)
    return predict(shape, placement, blocks, sizes, chunk_tokens, rates, admission)


def test_passes_are_as_many_as_chunks_and_new_tokens() -> None:
    """Prompts of 100 and 28 tokens are two chunks of 64; 5 tokens are one from the prefill and four passes."""
    sizes = sizes_of([100, 28], max_new_tokens=5)
    found = predicted(sizes, blocks_of(sizes, 2), SLOW_TURNS)
    assert (found.prefill.num_passes, found.decode.num_passes) == (2, 4)
    assert found.prefill_seconds == pytest.approx(2 * NUM_STAGES * 0.5)
    assert found.decode_seconds == pytest.approx(4 * NUM_STAGES * 0.5)


def test_blocks_follow_each_other() -> None:
    sizes = sizes_of([40] * 12, max_new_tokens=5)
    one, four = (predicted(sizes[:n], blocks_of(sizes[:n], 3), SLOW_TURNS) for n in (3, 12))
    assert four.decode_seconds == pytest.approx(4 * one.decode_seconds)
    assert four.prefill_seconds == pytest.approx(4 * one.prefill_seconds)


def test_attention_grows_with_what_is_cached() -> None:
    """The mean over the passes is that of the passes: sampled ones stand for their neighbours on both sides."""
    sizes = sizes_of([40], max_new_tokens=81)
    rates = replace(FAST, attention_bytes_per_second=1e6)
    found = predicted(sizes, blocks_of(sizes, 1), rates)
    exact = sum(41 + turn for turn in range(80)) * 8 * 1024 / 1e6
    assert found.decode_seconds == pytest.approx(exact, rel=0.01)


def test_sequences_that_have_ended_cost_nothing() -> None:
    long, short = sizes_of([40], max_new_tokens=41), sizes_of([40] * 63, max_new_tokens=2)
    rates = replace(FAST, gemm_flops_per_second={1: 1e9})
    found = predicted([*long, *short], blocks_of([*long, *short], 64), rates)
    alone = predicted(long, blocks_of(long, 1), rates)
    everyone = predicted(sizes_of([40] * 64, 41), blocks_of(sizes_of([40] * 64, 41), 64), rates)
    assert found.decode_seconds < 0.2 * everyone.decode_seconds
    assert found.decode_seconds > alone.decode_seconds


def test_a_streamed_run_is_as_long_as_its_reads_and_waits_for_them() -> None:
    sizes = sizes_of([40], max_new_tokens=5)
    shape = toy_shape()
    rates = replace(FAST, disk_bytes_per_second=float(MIB))
    found = predicted(sizes, blocks_of(sizes, 1), rates, tier=Tier.nvme)
    read_seconds = 4 * 8  # eight layers of 4 MiB; embeddings and head stay
    assert found.decode_seconds == pytest.approx(4 * read_seconds, rel=0.01)
    assert found.decode.stall_seconds == pytest.approx(found.decode_seconds, rel=0.01)
    assert found.decode.busy_seconds[Resource.disk] == pytest.approx(4 * read_seconds)
    assert sum(stage.num_bytes for stage in shape.layers) == read_seconds * MIB


def test_the_first_pass_of_a_run_takes_longer_and_of_no_other_block() -> None:
    """A pass is 32 s of reading, all of it hidden behind nothing; then the last layer and the head still have their
    turns, which hide reads of the next pass, but of the first pass come on top."""
    sizes, turn_seconds = sizes_of([40] * 2, max_new_tokens=5), 0.5
    rates = replace(FAST, disk_bytes_per_second=float(MIB), turn_seconds=turn_seconds)
    one, two = (predicted(sizes[:n], blocks_of(sizes[:n], 1), rates, tier=Tier.nvme) for n in (1, 2))
    assert one.seconds == pytest.approx(5 * 32 + 2 * turn_seconds)
    assert two.seconds == pytest.approx(10 * 32 + 2 * turn_seconds)


def test_nothing_to_generate_takes_no_time() -> None:
    sizes = sizes_of([40], max_new_tokens=0)
    assert predicted(sizes, blocks_of(sizes, 1), SLOW_TURNS).decode_seconds == 0
    assert predicted(sizes, blocks_of(sizes, 1), SLOW_TURNS).prefill_seconds == 0


LIMITS = AdmissionLimits(num_lanes=2, lane_size=2, lane_tokens=64, page_tokens=PAGE_TOKENS)


def test_mixed_passes_compute_every_token_once_and_none_twice() -> None:
    sizes = sizes_of([50, 20, 90, 33, 70, 10, 12], max_new_tokens=9)
    passes = mixed_passes(sizes, LIMITS, num_pages=1000)
    tokens = sum(lane.num_tokens for each in passes for lane in each.lanes)
    prompts = sum(each.prefill_share * sum(lane.num_tokens for lane in each.lanes) for each in passes)
    assert tokens == sum(size.num_prompt_tokens + size.max_new_tokens - 1 for size in sizes)
    assert prompts == pytest.approx(sum(size.num_prompt_tokens for size in sizes))
    assert all(len(each.lanes) <= 2 for each in passes)


def test_where_pages_are_short_sequences_give_way_and_are_prefilled_again() -> None:
    sizes = sizes_of([40] * 6, max_new_tokens=30)
    tokens = []
    for num_pages in (1000, 12):
        passes = mixed_passes(sizes, LIMITS, num_pages)
        tokens.append(sum(lane.num_tokens for each in passes for lane in each.lanes))
    assert tokens[1] > tokens[0]


def test_continuous_admission_needs_fewer_passes_where_answers_differ_in_length() -> None:
    sizes = [*sizes_of([20] * 4, max_new_tokens=61), *sizes_of([20] * 28, max_new_tokens=2)]
    blocks = blocks_of(sizes, 4, 2)
    wave, flow = (predicted(sizes, blocks, SLOW_TURNS, admission=each) for each in Admission)
    assert flow.prefill_seconds + flow.decode_seconds < wave.prefill_seconds + wave.decode_seconds
