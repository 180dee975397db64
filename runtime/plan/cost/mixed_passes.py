"""Passes of continuous admission, simulated on the sizes of requests with the rules of `batching/admission.py`.

A **slot** is a place for one running sequence in a **lane** (a micro-batch). Large runs are sampled: a few lanes, with
their share of requests and KV pages, represent all lanes, and the first requests represent all requests. The simulation
has three phases. First slots fill. Then follows a steady state, whose passes are counted several times, for requests
that are not simulated. The last passes have an empty queue.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, cycle, islice

from ...batching.admission import AdmissionLimits, PassPlan, SlotState, Waiting, max_cached_tokens, plan_pass
from ...batching.prefixes import CachedPrefix, PrefixKey, SharedPrefix, all_prefix_keys, prefix_keys
from ..placement.memory import SequenceSize
from .lane_work import LaneWork, PassGroup, Piece, packed_work

MAX_STEPS = 48_000  # maximum sum of simulated slots over all passes: takes about a tenth of a second
NUM_TURNOVERS = 3  # minimum number of simulated requests per slot
MAX_SLOTS = 256  # maximum simulated slots, but at least one lane; no maximum if lanes share prefixes
# Minimum KV pages relative to those of the longest sequence. With fewer, single sequences would determine admission.
MIN_PAGES_FACTOR = 8
MAX_GROUPS = 96  # maximum number of passes to return


def mixed_passes(sizes: Sequence[SequenceSize], limits: AdmissionLimits, num_pages: int) -> list[PassGroup]:
    """Returns every pass of a run. `sizes`: requests in the order of admission.

    Every sequence must generate at least one token. Assumes that all of them run to their token limits.
    """
    slots, groups = _RunningSlots(sizes, limits, num_pages), list[PassGroup]()
    while slots.has_sequences:
        plan = slots.plan_next()
        groups.append(slots.make_group(plan))
        slots.advance(plan)
    return groups


def sample_passes(sizes: Sequence[SequenceSize], limits: AdmissionLimits, num_pages: int) -> list[PassGroup]:
    """Returns up to `MAX_GROUPS` passes that represent all those of `mixed_passes`."""
    sample = _RequestSample.from_limits(sizes, limits, num_pages)
    slots, passes = _RunningSlots(sample.simulated, sample.limits, sample.num_pages), _PassSample()
    passes_per_step = 0.0  # passes that a simulated pass of the steady state represents; 0: it has not begun
    while slots.has_sequences:
        plan = slots.plan_next()
        if not passes_per_step and slots.has_turned_over:
            passes_per_step = 1.0
            if sample.num_other_tokens:
                passes_per_step += sample.num_other_tokens / slots.num_waiting_tokens
        is_steady = passes_per_step > 0 and slots.has_waiting
        if passes.count_pass(passes_per_step if is_steady else 1.0):
            passes.append(slots.make_group(plan))
        slots.advance(plan)
    return [replace(each, lanes=sample.all_lanes(each.lanes)) for each in passes.all_groups]


@dataclass(kw_only=True)
class _PassSample:
    """Every n-th pass of a simulation, where n is `stride`. Each represents all passes since the previous one.

    If there are `MAX_GROUPS`, neighbors are merged and the stride doubles.
    """

    groups: list[PassGroup] = field(default_factory=list)
    stride: int = 1
    num_counted: int = 0  # calls of `count_pass`
    num_passes: float = 0.0  # passes since the last group

    def count_pass(self, num_passes: float) -> bool:
        """Counts a pass that represents `num_passes`. Returns True if the caller must append it."""
        self.num_passes += num_passes
        self.num_counted += 1
        if self.num_counted % self.stride == 0 and len(self.groups) == MAX_GROUPS:
            pairs = zip(self.groups[::2], self.groups[1::2], strict=True)
            self.groups = [replace(last, num_passes=first.num_passes + last.num_passes) for first, last in pairs]
            self.stride *= 2
        return self.num_counted % self.stride == 0

    def append(self, group: PassGroup) -> None:
        self.groups.append(replace(group, num_passes=self.num_passes))
        self.num_passes = 0.0

    @property
    def all_groups(self) -> list[PassGroup]:
        """The groups; the last one also represents all passes after it."""
        *earlier, last = self.groups
        return [*earlier, replace(last, num_passes=last.num_passes + self.num_passes)]


@dataclass(frozen=True, kw_only=True)
class _RequestSample:
    """The part of a run to simulate: a few lanes, and the first of their requests."""

    simulated: Sequence[SequenceSize]
    num_other_tokens: int  # tokens of requests of these lanes that are not simulated
    limits: AdmissionLimits
    num_pages: int  # KV pages of the simulated lanes
    lane_ratio: float  # lanes of the run per simulated lane

    @staticmethod
    def from_limits(sizes: Sequence[SequenceSize], limits: AdmissionLimits, num_pages: int) -> "_RequestSample":
        num_lanes = limits.num_lanes
        if all(size.prefix is None for size in sizes):
            longest = max(limits.pages(_max_cached(size)) for size in sizes)
            lanes_with_enough_pages = -(-MIN_PAGES_FACTOR * longest * num_lanes // num_pages)
            num_lanes = min(num_lanes, max(1, MAX_SLOTS // limits.lane_size, lanes_with_enough_pages))
        lane_ratio = limits.num_lanes / num_lanes
        lane_sizes = [sizes[int((i + 0.5) * lane_ratio)] for i in range(int(len(sizes) / lane_ratio))] or sizes[:1]
        limits = replace(limits, num_lanes=num_lanes)
        # Simulate as many requests as take up to MAX_STEPS. A request takes a step per pass.
        costs = accumulate(size.max_new_tokens + size.num_prompt_tokens // limits.lane_tokens for size in lane_sizes)
        min_requests = NUM_TURNOVERS * limits.num_lanes * limits.lane_size
        num_simulated = max(sum(cost <= MAX_STEPS for cost in costs), min_requests)
        return _RequestSample(
            simulated=lane_sizes[:num_simulated],
            num_other_tokens=sum(map(_num_tokens, lane_sizes[num_simulated:])),
            limits=limits,
            num_pages=int(num_pages / lane_ratio),
            lane_ratio=lane_ratio,
        )

    def all_lanes(self, lanes: Sequence[LaneWork]) -> list[LaneWork]:
        """Repeats the work of simulated lanes for all lanes of the run."""
        return list(islice(cycle(lanes), round(self.lane_ratio * len(lanes))))


def _max_cached(size: SequenceSize) -> int:
    return max_cached_tokens(size.num_prompt_tokens, size.max_new_tokens)


def _num_tokens(size: SequenceSize) -> int:
    return size.num_prompt_tokens + size.max_new_tokens


class _RunningSlots:
    """State of a simulated run between two passes. Call `plan_next`, `make_group` and `advance` in this order."""

    def __init__(self, sizes: Sequence[SequenceSize], limits: AdmissionLimits, num_pages: int):
        self._sizes, self._limits = sizes, limits
        self._num_free = num_pages  # KV pages
        self._queue = [  # reversed: the next request is last
            Waiting(request=i, num_known=size.num_prompt_tokens, max_cached=_max_cached(size), prefix=size.prefix)
            for i, size in enumerate(sizes)
        ][::-1]
        self._shared = [limits.rule.num_shared(size.prefix) for size in sizes]  # shared prefix tokens, by request
        self._num_slots = limits.num_lanes * limits.lane_size
        self._has_prefixes = any(size.prefix is not None for size in sizes)
        self._slots: dict[int, SlotState] = {}  # by request, in the order of admission
        self._prefixes: dict[PrefixKey, CachedPrefix] = {}

    @property
    def has_sequences(self) -> bool:
        return bool(self._queue or self._slots)

    @property
    def has_waiting(self) -> bool:
        return bool(self._queue)

    @property
    def has_turned_over(self) -> bool:
        """True if the steady state has begun: all initial sequences ended, or half of the requests were admitted."""
        oldest = next(iter(self._slots))
        return oldest >= len(self._slots) or 2 * len(self._queue) <= len(self._sizes)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(_num_tokens(self._sizes[each.request]) for each in self._queue)

    def plan_next(self) -> PassPlan:
        """Plans the next pass, and applies its admissions and preemptions."""
        # The head of the queue: as many requests as slots are free, and one more. With prefixes a longer head, as
        # prefixes of waiting requests stay cached.
        num_candidates = self._num_slots if self._has_prefixes else 1 + self._num_slots - len(self._slots)
        waiting, slots = self._queue[: -1 - num_candidates : -1], list(self._slots.values())
        plan = plan_pass(waiting, slots, self._num_free, self._limits, self._prefixes.values())
        for i in reversed(plan.preempted):
            slot = self._slots.pop(i)
            self._num_free += self._num_pages(slot.num_cached, self._shared[i])
            self._queue.append(
                Waiting(request=i, num_known=slot.num_known, max_cached=slot.max_cached, prefix=slot.prefix)
            )
        for key in plan.dropped:
            self._num_free += self._num_pages(self._prefixes.pop(key).num_cached, self._begin(key))
        for _, lane in plan.admitted:
            entrant = self._queue.pop()
            for key in prefix_keys(entrant.prefix, lane, self._limits.rule):
                if key not in self._prefixes:
                    self._prefixes[key] = CachedPrefix(prefix=key[0], lane=lane, num_cached=self._begin(key))
            self._slots[entrant.request] = SlotState(
                request=entrant.request, lane=lane, num_cached=self._shared[entrant.request],
                num_known=entrant.num_known, max_cached=entrant.max_cached, prefix=entrant.prefix,
            )  # fmt: skip
        return plan

    def _num_pages(self, end: int, begin: int) -> int:
        """Returns the pages of `end` tokens, without those of the first `begin` tokens."""
        return self._limits.pages(end) - self._limits.pages(begin)

    def _begin(self, key: PrefixKey) -> int:
        """Returns how many tokens of a prefix belong to its parent prefix. `key`: prefix and lane."""
        return self._limits.rule.num_shared(key[0].parent)

    def make_group(self, plan: PassPlan) -> PassGroup:
        """Returns the work of the planned pass."""
        lanes: list[list[Piece]] = [[] for _ in range(self._limits.num_lanes)]
        prefixes: list[set[SharedPrefix | None]] = [set() for _ in lanes]  # prefixes in use, by lane
        for key, new in plan.prefix_tokens.items():
            prefix = self._prefixes[key]
            lanes[prefix.lane].append(Piece(prefix.num_cached, new, 0, self._begin(key)))
        num_decoded = 0
        for i, slot in self._slots.items():
            new, past = plan.new_tokens.get(i, 0), slot.num_cached
            needs_logits = new > 0 and past + new == slot.num_known
            is_decoding = slot.num_known > self._sizes[i].num_prompt_tokens
            num_selected = int(needs_logits) if is_decoding else self._sizes[i].num_selected(past, new)
            lanes[slot.lane].append(Piece(past, new, num_selected, self._shared[i]))
            prefixes[slot.lane].add(slot.prefix)
            num_decoded += new if is_decoding and past + 1 == slot.num_known else 0
        works = list[LaneWork]()
        for lane, pieces in enumerate(lanes):
            if any(piece.new for piece in pieces):
                # Pages of cached prefixes belong to no piece. Prefixes that this pass computes are pieces already.
                keys = all_prefix_keys([(prefix, lane) for prefix in prefixes[lane]], self._limits.rule)
                stored = [
                    (self._prefixes[key].num_cached, self._begin(key)) for key in keys - plan.prefix_tokens.keys()
                ]
                works.append(packed_work(pieces, sum(self._num_pages(end, begin) for end, begin in stored)))
        return PassGroup(lanes=works, prefill_share=1 - num_decoded / sum(work.num_tokens for work in works))

    def advance(self, plan: PassPlan) -> None:
        """Applies the planned pass: caches its tokens, and ends sequences at their limits."""
        for key, new in plan.prefix_tokens.items():
            prefix = self._prefixes[key]
            self._num_free -= self._num_pages(prefix.num_cached + new, prefix.num_cached)
            self._prefixes[key] = replace(prefix, num_cached=prefix.num_cached + new)
        page = self._limits.page_tokens
        for i, new in plan.new_tokens.items():
            slot = self._slots[i]
            past, cached = slot.num_cached, slot.num_cached + new
            self._num_free -= -(-cached // page) - -(-past // page)
            slot.num_cached = cached
            if cached == slot.num_known:
                slot.num_known += 1
                if slot.num_known > slot.max_cached:
                    self._num_free += self._num_pages(cached, self._shared[i])
                    del self._slots[i]
