"""Continuous admission, decided anew before each pass: who enters, who gives way, and what each lane computes. Pure.

The seated are always ahead of the waiting in the order of the plan: requests enter in it, none overtakes, and the one
that gives way is the last that entered. So the first seat never gives way, and every request comes to its end.

Sources: sequences that enter and leave between passes are Orca's (Yu et al. 2022); pieces of prompts beside tokens
that are decoded, under one budget, Sarathi's (Agrawal et al. 2023); giving way and computing again vLLM's (Kwon et
al. 2023).

What several begin with is computed by a row of its own, which takes no seat, and its pages are held (`held.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .prefixes import WITHIN_LANES, CachedPrefix, PrefixKey, RetainedPrefixes, SharedPrefix, SharingRule


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A request without a seat. `num_known`: tokens of its prompt and those generated before it last gave way;
    `num_most`: the positions that it caches if it runs to its limit, see `most_cached`; `prefix`: what it goes on from.
    """

    request: int
    num_known: int
    max_cached: int
    prefix: SharedPrefix | None = None


@dataclass(slots=True, kw_only=True)
class SlotState:
    """A request in a lane, between two passes; who plays many of them moves it on from one to the next. `num_cached`:
    of its known tokens, those whose KV is stored, and those that it goes on from, stored or not."""

    request: int
    lane: int
    num_cached: int
    num_known: int
    max_cached: int
    prefix: SharedPrefix | None = None

    @property
    def num_missing(self) -> int:
        """Known tokens that are not cached yet: one for a sequence that decodes."""
        return self.num_known - self.num_cached


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits:
    """`lane_size`: sequences of a lane; `lane_tokens`: those that a lane computes in a pass, decoded ones included;
    `page_tokens`: positions of a KV page; `rule`: how far prefixes are shared, of which whole pages are;
    `others_pages`: of those that are free, what others may take."""

    num_lanes: int
    lane_size: int
    lane_tokens: int
    page_tokens: int
    rule: SharingRule = WITHIN_LANES
    reserved_pages: int = 0

    @staticmethod
    def from_lanes(
        rule: SharingRule,
        *,
        num_lanes: int,
        lane_size: int,
        chunk_tokens: int,
        page_tokens: int,
        reserved_pages: int = 0,
    ) -> "AdmissionLimits":
        """The limits of lanes that prefill so many tokens a pass, and decode one of each sequence in any case. `rule`:
        of blocks that nobody joins. Here a page is shared whole or not at all, so that sharing never takes more pages
        than not to, however few there are at the moment."""
        return AdmissionLimits(
            num_lanes=num_lanes,
            lane_size=lane_size,
            lane_tokens=max(lane_size, chunk_tokens),
            page_tokens=page_tokens,
            rule=replace(rule, page_tokens=page_tokens),
            reserved_pages=reserved_pages,
        )

    def pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)


@dataclass(frozen=True, kw_only=True)
class PassPlan:
    """What to do before the next pass, in this order, and what the pass computes.

    `preempted` give their pages back and go to the head of the waiting line, where they are listed in its order;
    prefixes that are `dropped` give theirs back; `admitted` are (request, lane), oldest first, each behind what it goes
    on from, which begins to be held where it is not. `new_tokens` says how many of its known tokens a request brings
    into the pass, `filled` the same of prefixes. A seated request that is not in it waits for its lane's budget, or for
    what it goes on from.
    """

    preempted: tuple[int, ...]
    admitted: tuple[tuple[int, int], ...]
    new_tokens: Mapping[int, int]
    dropped: tuple[PrefixKey, ...] = ()
    prefix_tokens: Mapping[PrefixKey, int] = field(default_factory=dict)


def max_cached_tokens(num_prompt_tokens: int, max_new_tokens: int) -> int:
    """KV positions of a sequence that runs to its limit: its last token is never computed on. What takes more pages
    than there are can never be admitted: refuse it with the plan."""
    return num_prompt_tokens + max(0, max_new_tokens - 1)


def plan_pass(
    waiting: Sequence[Waiting],
    running: Sequence[SlotState],
    free_pages: int,
    limits: AdmissionLimits,
    held: Iterable[CachedPrefix] = (),
) -> PassPlan:
    """`waiting` in the order of the line, as far as they may soon enter, `running` in the order of admission, `held` in
    that in which they were opened.

    A request enters when every seated one, itself included, could get from what is free the pages of its known tokens
    and one more (none beyond its limit): so those that grow rarely have to give way. Where the pages of a pass are not
    free all the same, prefixes that nobody seated needs and then the youngest give way until they are, and nobody
    enters.
    """
    kept, staying, preempted = RetainedPrefixes(held, limits.rule, limits.page_tokens), list(running), list[SlotState]()
    free = free_pages + (kept.drop_unwanted(_assigned_prefixes(staying), _waiting_prefixes(waiting)) if kept else 0)
    shares = _assign_tokens(staying, kept, limits)
    while (needed := _needed_pages(staying, kept, limits, *shares)) > free:
        if (
            dropped := kept.drop_least_urgent(_assigned_prefixes(staying), _waiting_prefixes([*preempted, *waiting]))
        ) is not None:
            free += dropped
        else:
            assert len(staying) > 1, f"request {staying[0].request} alone needs {needed} KV pages, {free} are free"
            youngest = staying.pop()
            # Pages that it holds alone.
            free += limits.pages(youngest.num_cached) - limits.pages(limits.rule.num_shared(youngest.prefix))
            preempted.insert(0, youngest)
        shares = _assign_tokens(staying, kept, limits)
    entered = [] if preempted else _admit(waiting, staying, kept, free, limits)
    assert staying or entered or not waiting, f"request {waiting[0].request} can never be admitted: {free} pages"
    new_tokens, filled = _assign_tokens([*staying, *entered], kept, limits) if entered else shares
    return PassPlan(
        preempted=tuple(slot.request for slot in preempted),
        admitted=tuple((slot.request, slot.lane) for slot in entered),
        new_tokens=new_tokens,
        dropped=tuple(kept.dropped),
        prefix_tokens=filled,
    )


def _assigned_prefixes(running: Iterable[SlotState]) -> list[tuple[SharedPrefix | None, int]]:
    return [(slot.prefix, slot.lane) for slot in running]


def _waiting_prefixes(waiting: Iterable[Waiting | SlotState]) -> list[SharedPrefix | None]:
    return [each.prefix for each in waiting]


def _needed_pages(
    running: Sequence[SlotState],
    kept: RetainedPrefixes,
    limits: AdmissionLimits,
    new_tokens: Mapping[int, int],
    filled: Mapping[PrefixKey, int],
) -> int:
    """That a pass of so many tokens takes from the free ones."""
    page = limits.page_tokens
    cached_of = {place: kept[place].num_cached for place in filled}
    needed = sum(limits.pages(cached_of[place] + new) - limits.pages(cached_of[place]) for place, new in filled.items())
    for slot in running:
        cached = slot.num_cached
        needed += -(-(cached + new_tokens.get(slot.request, 0)) // page) - -(-cached // page)
    return needed


def _assign_tokens(
    running: Iterable[SlotState], kept: RetainedPrefixes, limits: AdmissionLimits
) -> tuple[dict[int, int], dict[PrefixKey, int]]:
    """Shares out each lane's tokens: what is decoded comes first, then what others wait for, lane by lane, as a lane
    goes on from those before it; then pieces of prompts, the oldest first."""
    left, rule = [limits.lane_tokens] * limits.num_lanes, limits.rule
    new_tokens, filled = dict[int, int](), dict[PrefixKey, int]()

    def take(lane: int, most: int) -> int:
        taken = min(left[lane], most)
        left[lane] -= taken
        return taken

    def may_begin(slot: SlotState) -> bool:
        begins = slot.prefix is not None and slot.num_cached == rule.num_shared(slot.prefix)
        return not begins or kept.may_begin(slot.prefix, slot.lane, filled)

    prompts = list[SlotState]()
    for slot in running:
        missing, prefix = slot.num_known - slot.num_cached, slot.prefix
        # Most decode, behind what they went on from: that is seen without a call.
        if missing > 1 or (prefix is not None and slot.num_cached <= prefix.num_tokens and not may_begin(slot)):
            prompts.append(slot)
        elif missing and left[slot.lane]:
            left[slot.lane] -= 1
            new_tokens[slot.request] = 1
    growing = [each for each in kept if each[1].num_cached < rule.num_shared(each[0][0])]
    for (prefix, where), held in sorted(growing, key=lambda each: each[1].lane):
        begins = held.num_cached == rule.num_shared(prefix.parent)
        if not begins or kept.may_begin(prefix.parent, held.lane, filled):
            filled[prefix, where] = take(held.lane, rule.num_shared(prefix) - held.num_cached)
    for slot in prompts:
        if may_begin(slot) and (taken := take(slot.lane, slot.num_missing)):
            new_tokens[slot.request] = taken
    return new_tokens, {place: count for place, count in filled.items() if count}


def _admit(
    waiting: Sequence[Waiting],
    running: Sequence[SlotState],
    kept: RetainedPrefixes,
    free_pages: int,
    limits: AdmissionLimits,
) -> list[SlotState]:
    """Each into the lane with the fewest tokens that has a free seat, counting what it has computed for it there."""
    if not waiting or len(running) == limits.num_lanes * limits.lane_size:
        return []
    num_assigned, num_tokens = [0] * limits.num_lanes, [0] * limits.num_lanes
    for slot in running:
        num_assigned[slot.lane] += 1
        num_tokens[slot.lane] += slot.num_known
    room = free_pages - kept.pending_pages
    page = limits.page_tokens
    for slot in running:  # what they want beyond what they have
        most = slot.num_known + page
        room -= -(-(most if most < slot.max_cached else slot.max_cached) // page) - -(-slot.num_cached // page)
    entered: list[SlotState] = []
    for turn, request in enumerate(waiting):
        open_lanes = [lane for lane in range(limits.num_lanes) if num_assigned[lane] < limits.lane_size]
        if not open_lanes:
            break
        prefix = request.prefix
        lane = min(open_lanes, key=lambda lane: (num_tokens[lane] + kept.missing_tokens(prefix, lane), lane))
        entering = SlotState(
            request=request.request,
            lane=lane,
            num_cached=limits.rule.num_shared(prefix),
            num_known=request.num_known,
            max_cached=request.max_cached,
            prefix=prefix,
        )
        wanted = limits.pages(min(request.num_known + limits.page_tokens, request.max_cached))
        wanted += kept.missing_pages(prefix, lane) - limits.pages(entering.num_cached)
        if wanted > room:
            made = kept.make_room(
                wanted - room, _assigned_prefixes([*running, *entered, entering]), _waiting_prefixes(waiting[turn:])
            )
            if made is None:
                break
            room += made
        kept.open(prefix, lane)
        room -= wanted
        num_assigned[lane] += 1
        num_tokens[lane] += request.num_known
        entered.append(entering)
    return entered
