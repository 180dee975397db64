"""Chooses the lanes of each pass: static batches, or continuous batching, where sequences enter and leave between
passes (Orca, Yu et al. 2022).
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Rows  # `Sequence` is a running request
from dataclasses import dataclass
from itertools import islice

from ..batching.admission import AdmissionLimits, SlotState, Waiting, max_cached_tokens, plan_pass
from ..batching.prefixes import (
    CachedPrefix,
    PrefixKey,
    PrefixSharing,
    SharedPrefix,
    SharingRule,
    prefix_keys,
    shared_prefixes,
)
from ..cache.pages import SharedPages
from ..closing import Closing
from ..plan.placement.memory import SequenceSize
from ..sequences.sequence import Request, Sequence
from .lanes.factory import LaneFactory
from .lanes.lane import Lane
from .lanes.packed import PackedLane
from .records import Phase


def sequence_sizes(requests: Rows[Request]) -> list[SequenceSize]:
    """Sizes of a run's requests, including the prefixes that they share."""
    prompts = [request.prompt_ids for request in requests]
    # Every request computes at least one prompt position itself, to get logits.
    max_shared = [len(request.prompt_ids) - max(1, request.num_scored) for request in requests]
    prefixes = shared_prefixes(prompts, max_shared)
    pairs = zip(requests, prefixes, strict=True)
    return [request.size.with_prefix(prefix) for request, prefix in pairs]


def insert_prefixes(
    groups: Rows[Rows[int]],
    prefixes: Rows[SharedPrefix | None],
    running: Mapping[int, Sequence],
    rule: SharingRule,
) -> list[list[Sequence]]:
    """Builds lanes of the running members of each group. The sequence that computes a shared prefix precedes its users,
    in the first lane that needs it. Prefixes depend on all members of `groups`, so a resumed block shares the same
    ones. Mutates `running`."""
    lanes = list[list[Sequence]]()
    for sharing_group in rule.sharing_groups(groups):
        members = [i for group in sharing_group for i in group]
        sharing = PrefixSharing.from_prefixes([prefixes[i] for i in members])
        prefix_of = dict(zip(members, sharing.prefixes, strict=True))
        open_pages = dict[SharedPrefix, SharedPages]()
        for group in sharing_group:
            lanes.append([])
            for i in group:
                if i in running:
                    sequence, prefix = running[i], prefix_of[i]
                    if prefix is not None:
                        sequence.parent_prefix = _open_prefix(
                            prefix, sharing, sequence.request.prompt_ids, rule, open_pages, lanes[-1]
                        )
                    lanes[-1].append(sequence)
    return lanes


def _open_prefix(
    prefix: SharedPrefix,
    sharing: PrefixSharing,
    tokens: tuple[int, ...],
    rule: SharingRule,
    open_pages: dict[SharedPrefix, SharedPages],
    lane: list[Sequence],
) -> SharedPages:
    """Returns the prefix's pages and counts one more user. The first call also inserts the sequence that computes them
    into `lane`, after those of its parents. `tokens`: the user's prompt."""
    if prefix not in open_pages:
        parent = sharing.parents[prefix]
        parent_pages = _open_prefix(parent, sharing, tokens, rule, open_pages, lane) if parent is not None else None
        open_pages[prefix] = SharedPages(num_tokens=rule.num_shared(prefix), in_pass=rule.in_pass)
        lane.append(_prefix_sequence(open_pages[prefix], tokens, parent_pages))
    open_pages[prefix].num_users += 1
    return open_pages[prefix]


def _prefix_sequence(pages: SharedPages, tokens: tuple[int, ...], parent: SharedPages | None) -> Sequence:
    request = Request(id="", prompt_ids=tokens[: pages.num_tokens], max_new_tokens=0)
    return Sequence(request=request, fills_prefix=pages, parent_prefix=parent)


def make_prefix_sequence(
    prefix: SharedPrefix, parent: SharedPages | None, user: Sequence, rule: SharingRule
) -> Sequence:
    """The sequence that computes a prefix of `user` in continuous batching. The caller must release its pages later."""
    pages = SharedPages(num_tokens=rule.num_shared(prefix), in_pass=rule.in_pass, num_users=1)
    if parent is not None:
        parent.num_users += 1
    return _prefix_sequence(pages, user.request.prompt_ids, parent)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The lanes of pass `index` of a block. `new_tokens`: per lane, the number of tokens of each sequence; None: the
    lane chooses."""

    block: int
    index: int
    phase: Phase
    lanes: Rows[Lane]
    new_tokens: Rows[Rows[int] | None] | None = None


def empty_batch() -> Batch:
    """A batch without lanes, for a rank that has no work in this pass."""
    return Batch(block=0, index=0, phase=Phase.decode, lanes=(), new_tokens=())


class Batcher(Closing):
    """Yields batches until every sequence has finished. `close` closes the open lanes and frees their KV pages."""

    def __init__(self, block: int = 0):
        self._block, self._num_passes = block, 0

    @abstractmethod
    def next_batch(self) -> Batch | None:
        """The batch of the next pass; None if no sequences are left. The last pass must have ended."""

    def _make_batch(self, phase: Phase, lanes: Rows[Lane], new_tokens: Rows[Rows[int] | None]) -> Batch:
        index, self._num_passes = self._num_passes, self._num_passes + 1
        return Batch(block=self._block, index=index, phase=phase, lanes=lanes, new_tokens=new_tokens)


class StaticBatcher(Batcher):
    """Lanes with a fixed set of sequences. At most `num_lanes` are open; the next one starts when one ends. Results do
    not depend on interruptions."""

    def __init__(self, queue: Iterator[Lane], *, num_lanes: int, block: int = 0):
        """`queue`: lanes to run, none empty."""
        super().__init__(block)
        self._queue, self._num_lanes = queue, num_lanes
        self._lanes: list[Lane] = []

    @staticmethod
    def from_block(
        lanes: LaneFactory,
        block: int,
        micro_batches: Rows[Rows[Sequence]],
        chunks: Rows[int | None] | None = None,
    ) -> "StaticBatcher":
        """All micro-batches of a block at once. `chunks`: prefill tokens per pass of each; None: the policy's."""
        pairs = zip(micro_batches, chunks or [None] * len(micro_batches), strict=True)
        queue = (lanes.lane(micro_batch, chunk) for micro_batch, chunk in pairs if micro_batch)
        return StaticBatcher(queue, num_lanes=len(micro_batches), block=block)

    @staticmethod
    def from_sequences(
        lanes: LaneFactory, sequences: Iterable[Sequence], *, num_lanes: int, lane_size: int
    ) -> "StaticBatcher":
        """Continuous admission for padded lanes, which sequences cannot join: the next `lane_size` sequences start as a
        new lane when one ends."""
        waiting = iter(sequences)
        micro_batches = iter(lambda: list(islice(waiting, lane_size)), [])
        return StaticBatcher(map(lanes.lane, micro_batches), num_lanes=num_lanes)

    def next_batch(self) -> Batch | None:
        for lane in self._lanes:
            if lane.is_done:
                lane.close()
        self._lanes = [lane for lane in self._lanes if not lane.is_done]
        self._lanes.extend(islice(self._queue, self._num_lanes - len(self._lanes)))
        if not self._lanes:
            return None
        prefilling = [lane for lane in self._lanes if lane.is_prefilling]  # without the others, which need no encoder
        if prefilling:
            phase = Phase.prefill
        else:
            # A restarted sequence prefills while others decode, and a resumed decoder after its encoder has run.
            phase = Phase.decode if all(lane.is_prefilled for lane in self._lanes) else Phase.mixed
        choices = [(lane, lane.choose_tokens()) for lane in prefilling or self._lanes]
        running = [(lane, new) for lane, new in choices if new is None or any(new)]  # others wait for a shared prefix
        return self._make_batch(phase, [lane for lane, _ in running], [new for _, new in running])

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._lanes = []


class ContinuousBatcher(Batcher):
    """Continuous batching in packed lanes: executes the plans of `plan_pass`. `sequences`: by request index, in order
    of admission; finished ones are skipped. `prefixes`: the shared prefix of each request; empty disables sharing. An
    additional sequence computes each prefix."""

    def __init__(
        self,
        lanes: LaneFactory,
        sequences: Mapping[int, Sequence],
        limits: AdmissionLimits,
        prefixes: Rows[SharedPrefix | None] = (),
    ):
        super().__init__()
        self._factory, self._sequences, self._limits = lanes, dict(sequences), limits
        self._prefixes = {i: prefixes[i] for i in sequences} if prefixes else {}
        self._queue = deque(sequences)
        self._lanes: list[PackedLane] = [lanes.packed([]) for _ in range(limits.num_lanes)]
        self._lane_of: dict[int, int] = {}  # admitted requests, in order
        self._prefixes_in_use: dict[PrefixKey, tuple[int, Sequence]] = {}  # lane and computing sequence, oldest first

    def next_batch(self) -> Batch | None:
        for i in [i for i in self._lane_of if self._sequences[i].finish is not None]:
            del self._lane_of[i], self._sequences[i]
        if not self._queue and not self._lane_of:
            return None
        max_running = self._limits.num_lanes * self._limits.lane_size
        waiting = [self._waiting_request(i) for i in islice(self._queue, max_running)]
        slots = list[SlotState]()
        for i, lane in self._lane_of.items():
            known = self._waiting_request(i)
            state = SlotState(
                request=i,
                lane=lane,
                num_cached=self._sequences[i].num_cached,
                num_known=known.num_known,
                max_cached=known.max_cached,
                prefix=known.prefix,
            )
            slots.append(state)
        cached = [
            CachedPrefix(prefix=prefix, lane=lane, num_cached=sequence.num_cached)
            for (prefix, _), (lane, sequence) in self._prefixes_in_use.items()
        ]
        free_pages = self._factory.num_free_pages - self._limits.reserved_pages
        plan = plan_pass(waiting, slots, free_pages, self._limits, cached)
        for i in reversed(plan.preempted):
            self._lanes[self._lane_of.pop(i)].leave(self._sequences[i])
            self._queue.appendleft(i)
        for key in plan.dropped:
            self._drop_prefix(key)
        for i, lane in plan.admitted:
            assert self._queue.popleft() == i, "requests enter in the order of the queue"
            self._enter(self._sequences[i], self._prefixes.get(i), lane)
            self._lane_of[i] = lane
        new_tokens = {id(self._sequences[i]): count for i, count in plan.new_tokens.items()}
        new_tokens |= {id(self._prefixes_in_use[key][1]): count for key, count in plan.prefix_tokens.items()}
        lane_tokens = {lane: [new_tokens.get(id(s), 0) for s in lane.sequences] for lane in self._lanes}
        running = {lane: new for lane, new in lane_tokens.items() if any(new)}
        are_prefilled = {sequence.is_prefilled for lane in running for sequence in lane.sequences}
        phase = Phase.mixed if len(are_prefilled) > 1 else Phase.decode if True in are_prefilled else Phase.prefill
        return self._make_batch(phase, list(running), list(running.values()))

    def add(self, sequences: Mapping[int, Sequence]) -> None:
        """Appends sequences without shared prefixes to the queue, between passes."""
        self._sequences.update(sequences)
        self._queue.extend(sequences)

    def remove(self, i: int) -> None:
        """Drops an unfinished sequence and frees its pages, between passes."""
        sequence, lane = self._sequences.pop(i), self._lane_of.pop(i, None)
        if lane is None:
            self._queue.remove(i)
        else:
            self._lanes[lane].leave(sequence)

    def close(self) -> None:
        for key in list(self._prefixes_in_use):
            self._drop_prefix(key)
        for lane in self._lanes:
            lane.close()

    def _enter(self, sequence: Sequence, prefix: SharedPrefix | None, lane: int) -> None:
        """Adds a sequence to the lane, and the sequences that compute its prefixes unless they are cached."""
        parent = None
        for key in prefix_keys(prefix, lane, self._limits.rule):
            if key not in self._prefixes_in_use:
                self._prefixes_in_use[key] = lane, make_prefix_sequence(key[0], parent, sequence, self._limits.rule)
                self._lanes[lane].enter(self._prefixes_in_use[key][1])
            parent = self._prefixes_in_use[key][1].fills_prefix
        sequence.parent_prefix = parent
        if parent is not None:
            parent.num_users += 1
        self._lanes[lane].enter(sequence)

    def _drop_prefix(self, key: PrefixKey) -> None:
        """Releases a cached prefix. Its pages are freed when their last user leaves."""
        lane, sequence = self._prefixes_in_use.pop(key)
        if not sequence.is_filled:
            self._lanes[lane].leave(sequence)
        assert sequence.fills_prefix is not None, "it computes a prefix"
        self._lanes[lane].release(sequence.fills_prefix)

    def _waiting_request(self, i: int) -> Waiting:
        s = self._sequences[i]
        max_cached = max_cached_tokens(len(s.request.prompt_ids), s.request.max_new_tokens)
        return Waiting(request=i, num_known=s.num_known, max_cached=max_cached, prefix=self._prefixes.get(i))
