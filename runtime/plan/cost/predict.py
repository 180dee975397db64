"""Predicts the duration of a run by simulating representative passes. Pure functions.

Assumes that every sequence runs to its token limit. Passes change slowly as prompts finish and KV grows. So each phase
is divided into **spans** of consecutive passes, and the middle pass represents its span. A **walk** describes the path
of a pass (stages, slots and transfers); a **lane** is a micro-batch.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from ...batching.admission import AdmissionLimits
from ...batching.balance import Block
from ...batching.prefixes import WITHIN_LANES, SharingRule
from ...config.settings import Admission
from ...resources import Resource
from ..placement.memory import PAGE_TOKENS, MicroBatch, SequenceSize
from ..placement.placement import Placement
from ..schedule.schedule import make_schedule
from ..schedule.walk import Walk
from ..shape.model import ModelShape
from .durations import StageCosts, make_durations
from .lane_work import LaneWork, PassGroup, block_prefills, decode_work, with_drafts
from .mixed_passes import sample_passes
from .rates import MachineRates
from .simulator import Links, PhaseTime, Script, simulate_each

MANY_PREFILLS = 8  # with more prefill passes than this, a rough prediction does not time the partial last one
MAX_BLOCKS = 3  # number of simulated blocks, as the blocks of a plan are similar
MAX_SPANS = 8  # per phase of a block
MAX_MIXED_SPANS = 24  # per run with continuous admission, whose passes both prefill and decode


@lru_cache(64)
def _script(walk: Walk, num_lanes: int, links: Links) -> Script:
    return Script(make_schedule(walk, num_lanes), links)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted time of a run by phase.

    The time of a pass that both prefills and decodes is divided in the ratio of prompt tokens to decoding tokens.
    """

    prefill: PhaseTime
    decode: PhaseTime

    @property
    def prefill_seconds(self) -> float:
        return self.prefill.seconds

    @property
    def decode_seconds(self) -> float:
        return self.decode.seconds

    @property
    def stall_seconds(self) -> float:
        return self.prefill.stall_seconds + self.decode.stall_seconds

    @property
    def seconds(self) -> float:
        return self.prefill.seconds + self.decode.seconds

    @property
    def phases(self) -> Mapping[str, PhaseTime]:
        """The phases that have passes, by name."""
        return {name: phase for name, phase in vars(self).items() if phase.seconds}


def predict(
    shape: ModelShape,
    placement: Placement,
    blocks: Sequence[Block],
    sizes: Sequence[SequenceSize],
    chunk_tokens: int,
    rates: MachineRates,
    admission: Admission = Admission.wave,
) -> Prediction:
    """Returns the prediction for all blocks, from the start of a run."""
    timer = _PassTimer(shape=shape, placement=placement, rates=rates)
    blocks = [block for block in (_drop_empty_requests(block, sizes) for block in blocks) if block.members]
    if not blocks:
        return Prediction(prefill=PhaseTime(), decode=PhaseTime())
    if admission is Admission.continuous and shape.is_packed:
        return timer.predict(mixed_spans(placement, blocks, sizes, chunk_tokens))
    sample, rule = pick_evenly(blocks, MAX_BLOCKS), placement.sharing_rule
    lanes = [[[sizes[i] for i in group] for group in block.micro_batches if group] for block in sample]
    spans = [span for block in lanes for span in block_spans(shape, block, chunk_tokens, rule)]
    prediction, scale = timer.predict(spans, num_blocks=len(sample)), len(blocks) / len(sample)
    none = PhaseTime()
    return Prediction(prefill=none.plus(prediction.prefill, scale), decode=none.plus(prediction.decode, scale))


def decode_pass_seconds(
    shape: ModelShape, placement: Placement, lanes: Sequence[MicroBatch], rates: MachineRates, *, num_drafted: int = 0
) -> float:
    """Returns the seconds of a steady decode pass halfway through the outputs.

    `num_drafted`: drafted tokens of each sequence.
    """
    half = max((size.max_new_tokens for lane in lanes for size in lane), default=0) // 2
    shortened = [[replace(size, max_new_tokens=half + 2) for size in lane] for lane in lanes]
    works = [
        with_drafts(work, num_drafted) for lane in shortened if (work := decode_work(shape, lane, half)) is not None
    ]
    timer = _PassTimer(shape=shape, placement=placement, rates=rates)
    return timer.steady(PassGroup(num_passes=1, lanes=works, prefill_share=0.0)).seconds if works else 0.0


def predict_roughly(
    shape: ModelShape,
    placement: Placement,
    lanes: Sequence[MicroBatch],
    chunk_tokens: int,
    rates: MachineRates,
    *,
    max_prefills: int = 3,
) -> Prediction:
    """Returns the prediction for one block, from at most `max_prefills` prefill passes and one decode pass."""
    rule = placement.sharing_rule
    spans = list(block_spans(shape, lanes, chunk_tokens, rule, max_prefills=max_prefills, max_decodes=1))
    return _PassTimer(shape=shape, placement=placement, rates=rates, num_steady=1).predict(spans)


def predict_from_sample(
    shape: ModelShape,
    placement: Placement,
    blocks: Sequence[Block],
    sizes: Sequence[SequenceSize],
    chunk_tokens: int,
    rates: MachineRates,
    *,
    num_timed: int,
) -> Prediction:
    """Returns the prediction for all blocks, from `num_timed` evenly spaced ones.

    For each of these it simulates a full prefill pass and a decode pass, and the last prefill pass if there are few.
    """
    blocks = [block for block in (_drop_empty_requests(block, sizes) for block in blocks) if block.members]
    prefill, decode, count = PhaseTime(), PhaseTime(), min(num_timed, len(blocks))
    for part in range(count):
        # The middle one of these neighboring blocks represents them.
        nearby = blocks[part * len(blocks) // count : (part + 1) * len(blocks) // count]
        lanes = [[sizes[i] for i in group] for group in nearby[len(nearby) // 2].micro_batches]
        prediction = predict_roughly(shape, placement, lanes, chunk_tokens, rates, max_prefills=2)
        prefill, decode = prefill.plus(prediction.prefill, len(nearby)), decode.plus(prediction.decode, len(nearby))
    return Prediction(prefill=prefill, decode=decode)


def block_spans(
    shape: ModelShape,
    lanes: Sequence[MicroBatch],
    chunk_tokens: int,
    rule: SharingRule = WITHIN_LANES,
    *,
    max_prefills: int = MAX_SPANS,
    max_decodes: int = MAX_SPANS,
) -> Iterator[PassGroup]:
    """Yields the prefill spans of a block, then its decode spans.

    A lane leaves the prefill passes when its prompts are done, and the decode passes when its sequences end.
    """
    prompts = block_prefills(shape, lanes, chunk_tokens, rule)
    ends = {size.max_new_tokens - 1 for lane in lanes for size in lane}

    def prefill_lanes(index: int) -> list[LaneWork]:
        return [work for works in prompts if index < len(works) and (work := works[index]) is not None]

    def decode_lanes(index: int) -> list[LaneWork]:
        return [work for lane in lanes if (work := decode_work(shape, lane, index)) is not None]

    # Spans end where lanes end. The last prefill pass is a span of its own, as it is often partial.
    counts = set(map(len, prompts))
    num_prefills = max(counts, default=0)
    parts = _split_at({*counts, num_prefills - 1}, max_prefills) if num_prefills else []
    if max_prefills <= 2:  # a span of full passes, and if passes are few a span of the partial last pass
        part_ends = [num_prefills] if num_prefills > MANY_PREFILLS else [max(0, num_prefills - 1), num_prefills]
        parts = [range(begin, end) for begin, end in pairwise([0, *part_ends]) if begin < end]
    for part in parts:
        yield PassGroup(num_passes=len(part), lanes=prefill_lanes(part[len(part) // 2]), prefill_share=1.0)
    for part in _split_at(ends, max_decodes):
        yield PassGroup(num_passes=len(part), lanes=decode_lanes(part[len(part) // 2]), prefill_share=0.0)


def mixed_spans(
    placement: Placement, blocks: Sequence[Block], sizes: Sequence[SequenceSize], chunk_tokens: int
) -> list[PassGroup]:
    """Returns the spans of a run with continuous admission.

    It has as many lanes as the largest block, and each lane has the size of the largest.
    """
    limits = AdmissionLimits.from_lanes(
        placement.sharing_rule,
        num_lanes=max(len(block.micro_batches) for block in blocks),
        lane_size=max(len(group) for block in blocks for group in block.micro_batches),
        chunk_tokens=chunk_tokens,
        page_tokens=PAGE_TOKENS,
    )
    order = [sizes[i] for block in blocks for i in block.members]
    passes = sample_passes(order, limits, placement.kv.num_pages)
    parts = [passes[part.start : part.stop] for part in _even_ranges(len(passes), MAX_MIXED_SPANS)]
    return [replace(part[len(part) // 2], num_passes=sum(each.num_passes for each in part)) for part in parts]


def _drop_empty_requests(block: Block, sizes: Sequence[SequenceSize]) -> Block:
    """Returns the block without requests for zero new tokens, which never enter a lane."""
    groups = (tuple(i for i in group if sizes[i].max_new_tokens) for group in block.micro_batches)
    return Block(index=block.index, micro_batches=tuple(group for group in groups if group))


def pick_evenly(blocks: Sequence[Block], count: int) -> tuple[Block, ...]:
    """Returns up to `count` evenly spaced blocks."""
    return tuple(blocks[part[len(part) // 2]] for part in _even_ranges(len(blocks), count))


def _split_at(ends: Collection[int], max_parts: int) -> list[range]:
    """Splits range(max(ends)) at some or all of `ends` into up to `max_parts` ranges.

    If there are fewer, halves the longest ranges until there are `max_parts`.
    """
    boundaries = sorted({0, *ends})
    part_ends = [boundaries[part[-1]] for part in _even_ranges(len(boundaries), max_parts)]
    parts = [range(begin, end) for begin, end in pairwise([0, *part_ends]) if begin < end]
    while parts and len(parts) < max_parts and (longest := max(parts, key=len))[1:]:
        index, middle = parts.index(longest), (longest.start + longest.stop) // 2
        parts[index : index + 1] = [range(longest.start, middle), range(middle, longest.stop)]
    return parts


def _even_ranges(count: int, max_parts: int) -> list[range]:
    """Splits range(count) into up to `max_parts` ranges of about equal length."""
    num_parts = min(count, max_parts)
    return [range(count * n // num_parts, count * (n + 1) // num_parts) for n in range(num_parts)]


@dataclass(frozen=True, kw_only=True)
class _PassTimer:
    """Simulates passes with one placement on one machine.

    The first pass starts with empty weight slots. Later passes are **steady**: while one runs, the first stages of the
    next are read already.
    """

    shape: ModelShape
    placement: Placement
    rates: MachineRates
    num_steady: int = 2  # number of simulated steady passes, whose times are averaged

    def predict(self, spans: Sequence[PassGroup], num_blocks: int = 1) -> Prediction:
        """Returns the time of these spans by phase, from steady passes plus the extra time of first passes.

        A pass starts with empty slots at the start of the run. If prefill and decode have different walks, the first
        pass of each phase of each block starts with empty slots too.
        """
        prefill, decode = PhaseTime(), PhaseTime()
        keeps_slots = self.placement.walk.first_stage == self.placement.decode_walk.first_stage
        started = set[bool]()  # phases whose extra time is added: True for prefill
        for span in spans:
            first, steady = self._first_and_steady(span)
            share = span.prefill_share
            prefill = prefill.plus(steady, span.num_passes * share)
            decode = decode.plus(steady, span.num_passes * (1 - share))
            if span.is_prefill not in started and (not started or not keeps_slots):
                started.add(span.is_prefill)
                extra = PhaseTime(
                    seconds=max(0.0, first.seconds - steady.seconds),
                    stall_seconds=max(0.0, first.stall_seconds - steady.stall_seconds),
                )
                num_first = 1 if keeps_slots else num_blocks
                prefill, decode = prefill.plus(extra, num_first * share), decode.plus(extra, num_first * (1 - share))
        return Prediction(prefill=prefill, decode=decode)

    def steady(self, span: PassGroup) -> PhaseTime:
        return self._first_and_steady(span)[1]

    def _first_and_steady(self, span: PassGroup) -> tuple[PhaseTime, PhaseTime]:
        """Returns the time of a first pass, and of a steady pass."""
        # Passes that both prefill and decode use the decode walk.
        walk = self.placement.walk if span.is_prefill else self.placement.decode_walk
        durations = make_durations(self.shape, self.placement, walk, span.lanes, self.rates, self._stage_costs)
        count, script = self.num_steady, _script(walk, len(span.lanes), durations.links)
        one, more = simulate_each(script, [1, 1 + count], durations)  # one pass, and several in sequence
        steady = PhaseTime(
            num_passes=1,
            seconds=(more.seconds - one.seconds) / count + self.rates.pass_seconds,
            stall_seconds=max(0.0, more.stall_seconds - one.stall_seconds) / count,
            busy_seconds={r: (more.busy_seconds[r] - one.busy_seconds[r]) / count for r in Resource},
        )
        first = PhaseTime(seconds=one.seconds + self.rates.pass_seconds, stall_seconds=one.stall_seconds)
        return first, steady

    @cached_property
    def _stage_costs(self) -> StageCosts:
        return StageCosts.from_shape(self.shape, self.placement)
