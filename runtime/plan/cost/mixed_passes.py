"""The passes of continuous admission, played on sizes alone by the very rules of `batching/admission.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...batching.admission import AdmissionLimits, SeatState, Waiting, most_cached, plan_pass
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

    def passes(self) -> list[MixedPass]:
        found = []
        while self._line or self._seats:
            found.append(self._pass())
        return found

    def _pass(self) -> MixedPass:
        limits, seats = self._limits, self._seats
        waiting = [self._waiting(i) for i in self._line[: -1 - limits.num_lanes * limits.lane_size : -1]]
        free = self._num_pages - sum(limits.pages(self._cached[i]) for i in seats)
        plan = plan_pass(waiting, [self._state(i) for i in seats], free, limits)
        for i in reversed(plan.preempted):
            del seats[i]
            self._cached[i] = 0
            self._line.append(i)
        for i, lane in plan.admitted:
            self._line.pop()
            seats[i] = lane
        return self._played(plan.new_tokens)

    def _played(self, new_tokens: Mapping[int, int]) -> MixedPass:
        lanes: list[list[Piece]] = [[] for _ in range(self._limits.num_lanes)]
        num_tokens = num_decoded = 0
        for i, lane in list(self._seats.items()):
            new, past = new_tokens.get(i, 0), self._cached[i]
            asks = new > 0 and past + new == self._known(i)
            selected = int(asks) if self._generated[i] else self._sizes[i].num_selected(past, new)
            lanes[lane].append(Piece(past, new, selected))
            num_tokens += new
            num_decoded += new if self._generated[i] and past + 1 == self._known(i) else 0
            self._cached[i] += new
            self._generated[i] += asks
            if self._generated[i] == self._sizes[i].max_new_tokens:
                del self._seats[i]
        works = [packed_work(pieces) for pieces in lanes if any(piece.new for piece in pieces)]
        return MixedPass(lanes=works, prefill_share=1 - num_decoded / num_tokens)

    def _known(self, i: int) -> int:
        return self._sizes[i].num_prompt_tokens + self._generated[i]

    def _waiting(self, i: int) -> Waiting:
        size = self._sizes[i]
        return Waiting(
            request=i, num_known=self._known(i), num_most=most_cached(size.num_prompt_tokens, size.max_new_tokens)
        )

    def _state(self, i: int) -> SeatState:
        waiting = self._waiting(i)
        return SeatState(
            request=i, lane=self._seats[i], num_cached=self._cached[i],
            num_known=waiting.num_known, num_most=waiting.num_most,
        )  # fmt: skip
