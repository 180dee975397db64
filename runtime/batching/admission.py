"""Continuous admission, decided anew before each pass: who enters, who gives way, and what each lane computes. Pure.

The seated are always ahead of the waiting in the order of the plan: requests enter in it, none overtakes, and the one
that gives way is the last that entered. So the first seat never gives way, and every request comes to its end.

Sources: sequences that enter and leave between passes are Orca's (Yu et al. 2022); pieces of prompts beside tokens
that are decoded, under one budget, Sarathi's (Agrawal et al. 2023); giving way and computing again vLLM's (Kwon et
al. 2023).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A request without a seat. `num_known`: tokens of its prompt and those generated before it last gave way;
    `num_most`: the positions that it caches if it runs to its limit, see `most_cached`."""

    request: int
    num_known: int
    num_most: int


@dataclass(frozen=True, kw_only=True)
class SeatState:
    """A request in a lane, between two passes. `num_cached`: of its known tokens, those whose KV is stored."""

    request: int
    lane: int
    num_cached: int
    num_known: int
    num_most: int

    @property
    def num_missing(self) -> int:
        """Known tokens that are not cached yet: one for a sequence that decodes."""
        return self.num_known - self.num_cached


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits:
    """`lane_size`: sequences of a lane; `lane_tokens`: those that a lane computes in a pass, decoded ones included;
    `page_tokens`: positions of a KV page."""

    num_lanes: int
    lane_size: int
    lane_tokens: int
    page_tokens: int

    def pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)


@dataclass(frozen=True, kw_only=True)
class PassPlan:
    """What to do before the next pass, in this order, and what the pass computes.

    `preempted` give their pages back and go to the head of the waiting line, where they are listed in its order;
    `admitted` are (request, lane), oldest first; `new_tokens` says how many of its known tokens a request brings into
    the pass. A seated request that is not in it waits for its lane's budget.
    """

    preempted: tuple[int, ...]
    admitted: tuple[tuple[int, int], ...]
    new_tokens: Mapping[int, int]


def most_cached(num_prompt_tokens: int, max_new_tokens: int) -> int:
    """KV positions of a sequence that runs to its limit: its last token is never computed on. What takes more pages
    than there are can never be admitted: refuse it with the plan."""
    return num_prompt_tokens + max(0, max_new_tokens - 1)


def plan_pass(
    waiting: Sequence[Waiting], seats: Sequence[SeatState], free_pages: int, limits: AdmissionLimits
) -> PassPlan:
    """`waiting` in the order of the line, `seats` in the order of admission.

    A request enters when every seated one, itself included, could get from what is free the pages of its known tokens
    and one more (none beyond its limit): so those that grow rarely have to give way. Where the pages of a pass are not
    free all the same, the youngest give way until they are, and nobody enters.
    """
    staying = list(seats)
    free, preempted = free_pages, list[int]()
    while (needed := _needed_pages(staying, limits)) > free:
        assert len(staying) > 1, f"request {staying[0].request} alone needs {needed} KV pages, {free} are free"
        youngest = staying.pop()
        free += limits.pages(youngest.num_cached)
        preempted.insert(0, youngest.request)
    entered = [] if preempted else _enter(waiting, staying, free, limits)
    assert staying or entered or not waiting, f"request {waiting[0].request} can never be admitted: {free} pages"
    return PassPlan(
        preempted=tuple(preempted),
        admitted=tuple((seat.request, seat.lane) for seat in entered),
        new_tokens=_share_budgets([*staying, *entered], limits),
    )


def _needed_pages(seats: Sequence[SeatState], limits: AdmissionLimits) -> int:
    """That the next pass takes from the free ones."""
    new_tokens = _share_budgets(seats, limits)
    return sum(
        limits.pages(seat.num_cached + new_tokens.get(seat.request, 0)) - limits.pages(seat.num_cached)
        for seat in seats
    )


def _share_budgets(seats: Iterable[SeatState], limits: AdmissionLimits) -> dict[int, int]:
    """Shares out each lane's tokens: what is decoded comes first, then pieces of prompts, the oldest first."""
    left = [limits.lane_tokens] * limits.num_lanes
    new_tokens: dict[int, int] = {}
    for seat in sorted(seats, key=lambda seat: seat.num_missing > 1):
        taken = min(left[seat.lane], seat.num_missing)
        if taken:
            new_tokens[seat.request] = taken
            left[seat.lane] -= taken
    return new_tokens


def _enter(
    waiting: Sequence[Waiting], seats: Sequence[SeatState], free_pages: int, limits: AdmissionLimits
) -> list[SeatState]:
    """Each into the lane with the fewest tokens that has a free seat."""
    num_seated, num_tokens = [0] * limits.num_lanes, [0] * limits.num_lanes
    for seat in seats:
        num_seated[seat.lane] += 1
        num_tokens[seat.lane] += seat.num_known
    promised = sum(_wanted_pages(seat, limits) - limits.pages(seat.num_cached) for seat in seats)
    entered: list[SeatState] = []
    for request in waiting:
        open_lanes = [lane for lane in range(limits.num_lanes) if num_seated[lane] < limits.lane_size]
        promised += _wanted_pages(request, limits)
        if not open_lanes or promised > free_pages:
            break
        lane = min(open_lanes, key=lambda lane: (num_tokens[lane], lane))
        num_seated[lane] += 1
        num_tokens[lane] += request.num_known
        entered.append(_seated(request, lane))
    return entered


def _seated(request: Waiting, lane: int) -> SeatState:
    return SeatState(
        request=request.request, lane=lane, num_cached=0, num_known=request.num_known, num_most=request.num_most
    )


def _wanted_pages(sequence: Waiting | SeatState, limits: AdmissionLimits) -> int:
    return limits.pages(min(sequence.num_known + limits.page_tokens, sequence.num_most))
