"""The passes of continuous admission, played on sizes alone by the very rules of `batching/admission.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ...batching.admission import AdmissionLimits, PassPlan, SeatState, Waiting, most_cached, plan_pass
from ...batching.held import HeldPrefix, Place, places_of
from ..placement.memory import SequenceSize
from .lane_work import LaneWork, Piece, packed_work

MAX_STEPS = 100_000  # seats times passes that are played: about a second


@dataclass(frozen=True, kw_only=True)
class MixedPass:
    """`prefill_share`: of its tokens, those of prompts."""

    lanes: Sequence[LaneWork]
    prefill_share: float


@dataclass(frozen=True, kw_only=True)
class MixedRun:
    """`passes` of the first requests; all of them take `scale` times as many."""

    passes: Sequence[MixedPass]
    scale: float


def mixed_passes(sizes: Sequence[SequenceSize], limits: AdmissionLimits, num_pages: int) -> MixedRun:
    """`sizes` in the order in which requests enter; every one runs to its limit, and asks for a token at least."""
    costs = list(accumulate(size.max_new_tokens + size.num_prompt_tokens // limits.lane_tokens for size in sizes))
    num_seats = limits.num_lanes * limits.lane_size
    played = [size for size, cost in zip(sizes, costs, strict=True) if cost <= MAX_STEPS] or list(sizes[:1])
    played = list(sizes[: max(len(played), min(len(sizes), 2 * num_seats))])
    everything, some = (sum(s.num_prompt_tokens + s.max_new_tokens for s in part) for part in (sizes, played))
    return MixedRun(passes=_Seats(played, limits, num_pages).passes(), scale=everything / some)


class _Seats:
    def __init__(self, sizes: Sequence[SequenceSize], limits: AdmissionLimits, num_pages: int):
        self._sizes, self._limits, self._num_pages = sizes, limits, num_pages
        self._line = list(reversed(range(len(sizes))))  # the next one last
        self._seats: dict[int, int] = {}  # request -> lane, in the order of admission
        self._cached, self._generated = [0] * len(sizes), [0] * len(sizes)
        self._held: dict[Place, HeldPrefix] = {}

    def passes(self) -> list[MixedPass]:
        found = []
        while self._line or self._seats:
            found.append(self._pass())
        return found

    def _pass(self) -> MixedPass:
        limits, seats = self._limits, self._seats
        waiting = [self._waiting(i) for i in self._line[: -1 - limits.num_lanes * limits.lane_size : -1]]
        plan = plan_pass(waiting, [self._state(i) for i in seats], self._num_free, limits, self._held.values())
        for i in reversed(plan.preempted):
            del seats[i]
            self._line.append(i)
        for place in plan.dropped:
            del self._held[place]
        for i, lane in plan.admitted:
            self._line.pop()
            self._enter(i, lane)
        return self._played(plan)

    @property
    def _num_free(self) -> int:
        own = [(self._cached[i], self._num_shared(i)) for i in self._seats]
        own += [(held.num_cached, self._begin(place)) for place, held in self._held.items()]
        return self._num_pages - sum(self._limits.pages(end) - self._limits.pages(begin) for end, begin in own)

    def _num_shared(self, i: int) -> int:
        return self._limits.rule.num_shared(self._sizes[i].prefix)

    def _begin(self, place: Place) -> int:
        """Tokens of a prefix that are its parent's."""
        return self._limits.rule.num_shared(place[0].parent)

    def _enter(self, i: int, lane: int) -> None:
        for place in places_of(self._sizes[i].prefix, lane, self._limits.rule):
            if place not in self._held:
                self._held[place] = HeldPrefix(prefix=place[0], lane=lane, num_cached=self._begin(place))
        self._seats[i], self._cached[i] = lane, self._num_shared(i)

    def _played(self, plan: PassPlan) -> MixedPass:
        lanes: list[list[Piece]] = [[] for _ in range(self._limits.num_lanes)]
        shared = [self._shared_pages(lane, plan) for lane in range(self._limits.num_lanes)]
        num_tokens = num_decoded = 0
        for place, new in plan.filled.items():
            held = self._held[place]
            lanes[held.lane].append(Piece(held.num_cached, new, 0, self._begin(place)))
            num_tokens += new
            self._held[place] = replace(held, num_cached=held.num_cached + new)
        for i, lane in list(self._seats.items()):
            new, past = plan.new_tokens.get(i, 0), self._cached[i]
            asks = new > 0 and past + new == self._known(i)
            selected = int(asks) if self._generated[i] else self._sizes[i].num_selected(past, new)
            lanes[lane].append(Piece(past, new, selected, self._num_shared(i)))
            num_tokens += new
            num_decoded += new if self._generated[i] and past + 1 == self._known(i) else 0
            self._cached[i] += new
            self._generated[i] += asks
            if self._generated[i] == self._sizes[i].max_new_tokens:
                del self._seats[i]
        works = [
            packed_work(pieces, shared[lane]) for lane, pieces in enumerate(lanes) if any(piece.new for piece in pieces)
        ]
        return MixedPass(lanes=works, prefill_share=1 - num_decoded / num_tokens)

    def _shared_pages(self, lane: int, plan: PassPlan) -> int:
        """What sequences of the lane go on from, but for what the pass computes of it."""
        sizes = [self._sizes[i] for i, where in self._seats.items() if where == lane]
        places = {place for size in sizes for place in places_of(size.prefix, lane, self._limits.rule)}
        stored = [(self._held[place].num_cached, self._begin(place)) for place in places - plan.filled.keys()]
        return sum(self._limits.pages(end) - self._limits.pages(begin) for end, begin in stored)

    def _known(self, i: int) -> int:
        return self._sizes[i].num_prompt_tokens + self._generated[i]

    def _waiting(self, i: int) -> Waiting:
        size = self._sizes[i]
        most = most_cached(size.num_prompt_tokens, size.max_new_tokens)
        return Waiting(request=i, num_known=self._known(i), num_most=most, prefix=size.prefix)

    def _state(self, i: int) -> SeatState:
        waiting = self._waiting(i)
        return SeatState(
            request=i, lane=self._seats[i], num_cached=self._cached[i],
            num_known=waiting.num_known, num_most=waiting.num_most, prefix=waiting.prefix,
        )  # fmt: skip
