"""Continuous batching: decides before each pass which waiting requests are admitted to a lane (micro-batch), which
running ones are preempted, and how many tokens each computes. Pure.

A lane has a slot for each of its requests. Requests are admitted in the order of the plan; the one admitted last is
preempted first. So the first request always progresses, and every request finishes. Each shared prefix of prompts is
computed by an additional sequence, which takes no slot.

Sources: iteration-level scheduling from Orca (Yu et al. 2022); chunked prefill under one token budget with decode from
Sarathi (Agrawal et al. 2023); preemption with recomputation from vLLM (Kwon et al. 2023)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .prefixes import WITHIN_LANES, CachedPrefix, PrefixKey, RetainedPrefixes, SharedPrefix, SharingRule


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A request that waits for a slot. `num_known`: number of prompt tokens and of tokens generated before a
    preemption. `max_cached`: see `max_cached_tokens`."""

    request: int
    num_known: int
    max_cached: int
    prefix: SharedPrefix | None = None


@dataclass(slots=True, kw_only=True)
class SlotState:
    """A request in a lane, between two passes. `num_cached`: number of its tokens with stored KV. The tokens of its
    shared prefix count already while another sequence still computes the prefix. Mutable, for simulations."""

    request: int
    lane: int
    num_cached: int
    num_known: int
    max_cached: int
    prefix: SharedPrefix | None = None

    @property
    def num_missing(self) -> int:
        """Number of known tokens that are not cached yet; 1 for a sequence that decodes."""
        return self.num_known - self.num_cached


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits:
    """Limits of lanes. `lane_size`: requests per lane. `lane_tokens`: new tokens per lane and pass, in prefill and
    decode. `page_tokens`: positions per KV page. `reserved_pages`: pages of the pool that stay free, for other
    ranks."""

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
        """Makes limits with which a lane prefills up to `chunk_tokens` per pass, and can always decode all its
        requests. Only whole pages of prefixes are shared, so sharing never takes more pages than not sharing."""
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
    """What to do before the next pass, and the tokens of the pass.

    - preempted: requests that free their pages and return to the head of the queue, oldest first.
    - dropped: prefixes that free their pages, after the preemptions.
    - admitted: (request, lane), oldest first; prefixes that they need and that are not cached are started.
    - new_tokens: request -> number of its known tokens that the pass computes. A running request that is missing here
      waits for its lane's token budget, or for its prefix.
    - prefix_tokens: prefix -> number of its tokens that the pass computes."""

    preempted: tuple[int, ...]
    admitted: tuple[tuple[int, int], ...]
    new_tokens: Mapping[int, int]
    dropped: tuple[PrefixKey, ...] = ()
    prefix_tokens: Mapping[PrefixKey, int] = field(default_factory=dict)


def max_cached_tokens(num_prompt_tokens: int, max_new_tokens: int) -> int:
    """Number of KV positions of a sequence at its length limit. A plan must have enough pages for each request
    alone."""
    return num_prompt_tokens + max(0, max_new_tokens - 1)  # the last generated token is not an input


def plan_pass(
    waiting: Sequence[Waiting],
    running: Sequence[SlotState],
    free_pages: int,
    limits: AdmissionLimits,
    cached: Iterable[CachedPrefix] = (),
) -> PassPlan:
    """Plans the next pass. `waiting`: first requests of the queue, in order; `running`: requests in order of admission;
    `cached`: prefixes, oldest first.

    A request is admitted if, with it, the free pages suffice for the known tokens of all running requests, and one more
    page for each that is below its limit. So preemption is rare. If a pass needs more pages than are free, unused
    prefixes are dropped. If that does not suffice, the youngest requests are preempted, and none is admitted."""
    prefixes = RetainedPrefixes(cached, limits.rule, limits.page_tokens)
    remaining, preempted, free = list(running), list[SlotState](), free_pages
    if prefixes:
        free += prefixes.drop_unused(_assigned_prefixes(remaining), _waiting_prefixes(waiting))
    assigned = _assign_tokens(remaining, prefixes, limits)
    while (needed := _needed_pages(remaining, prefixes, limits, *assigned)) > free:
        queue = _waiting_prefixes([*preempted, *waiting])
        if (dropped := prefixes.drop_least_urgent(_assigned_prefixes(remaining), queue)) is not None:
            free += dropped
        else:
            assert len(remaining) > 1, f"request {remaining[0].request} alone needs {needed} KV pages, {free} are free"
            youngest = remaining.pop()
            # The request frees its own pages, not those of its shared prefix.
            free += limits.pages(youngest.num_cached) - limits.pages(limits.rule.num_shared(youngest.prefix))
            preempted.insert(0, youngest)
        assigned = _assign_tokens(remaining, prefixes, limits)
    admitted = [] if preempted else _admit(waiting, remaining, prefixes, free, limits)
    assert remaining or admitted or not waiting, f"request {waiting[0].request} can never be admitted: {free} pages"
    new_tokens, prefix_tokens = _assign_tokens([*remaining, *admitted], prefixes, limits) if admitted else assigned
    return PassPlan(
        preempted=tuple(slot.request for slot in preempted),
        admitted=tuple((slot.request, slot.lane) for slot in admitted),
        new_tokens=new_tokens,
        dropped=tuple(prefixes.dropped),
        prefix_tokens=prefix_tokens,
    )


def _assigned_prefixes(running: Iterable[SlotState]) -> list[tuple[SharedPrefix | None, int]]:
    return [(slot.prefix, slot.lane) for slot in running]


def _waiting_prefixes(waiting: Iterable[Waiting | SlotState]) -> list[SharedPrefix | None]:
    return [each.prefix for each in waiting]


def _needed_pages(
    running: Sequence[SlotState],
    prefixes: RetainedPrefixes,
    limits: AdmissionLimits,
    new_tokens: Mapping[int, int],
    filled: Mapping[PrefixKey, int],
) -> int:
    """Number of pages that the pass allocates. `new_tokens`, `filled`: new tokens by request, and by prefix."""
    page = limits.page_tokens
    num_cached = {key: prefixes[key].num_cached for key in filled}
    needed = sum(limits.pages(num_cached[key] + new) - limits.pages(num_cached[key]) for key, new in filled.items())
    for slot in running:  # as `limits.pages`, inlined for speed
        cached = slot.num_cached
        needed += -(-(cached + new_tokens.get(slot.request, 0)) // page) - -(-cached // page)
    return needed


def _assign_tokens(
    running: Iterable[SlotState], prefixes: RetainedPrefixes, limits: AdmissionLimits
) -> tuple[dict[int, int], dict[PrefixKey, int]]:
    """Distributes each lane's token budget: first to decode, then to shared prefixes, then to prompts, oldest first.
    Returns the new tokens by request, and by prefix. Prefixes are handled in the order of lanes, since a lane can use
    a prefix that an earlier lane computes in the same pass."""
    budgets, rule = [limits.lane_tokens] * limits.num_lanes, limits.rule
    new_tokens, prefix_tokens = dict[int, int](), dict[PrefixKey, int]()

    def spend(lane: int, num_tokens: int) -> int:
        """Takes up to `num_tokens` from the lane's budget. Returns how many."""
        granted = min(budgets[lane], num_tokens)
        budgets[lane] -= granted
        return granted

    def can_prefill(slot: SlotState) -> bool:
        """False if the request comes next after its shared prefix, and the prefix is not computed yet."""
        is_at_prefix = slot.prefix is not None and slot.num_cached == rule.num_shared(slot.prefix)
        return not is_at_prefix or prefixes.can_start_after(slot.prefix, slot.lane, prefix_tokens)

    prompts = list[SlotState]()
    for slot in running:
        missing, prefix = slot.num_known - slot.num_cached, slot.prefix
        # The order of conditions avoids calls of `can_prefill` for requests that decode.
        if missing > 1 or (prefix is not None and slot.num_cached <= prefix.num_tokens and not can_prefill(slot)):
            prompts.append(slot)
        elif missing and budgets[slot.lane]:
            budgets[slot.lane] -= 1
            new_tokens[slot.request] = 1
    incomplete = [(key, cached) for key, cached in prefixes if cached.num_cached < rule.num_shared(key[0])]
    for (prefix, key_lane), cached in sorted(incomplete, key=lambda item: item[1].lane):
        is_at_parent = cached.num_cached == rule.num_shared(prefix.parent)
        if not is_at_parent or prefixes.can_start_after(prefix.parent, cached.lane, prefix_tokens):
            prefix_tokens[prefix, key_lane] = spend(cached.lane, rule.num_shared(prefix) - cached.num_cached)
    for slot in prompts:
        if can_prefill(slot) and (granted := spend(slot.lane, slot.num_missing)):
            new_tokens[slot.request] = granted
    return new_tokens, {key: count for key, count in prefix_tokens.items() if count}


def _admit(
    waiting: Sequence[Waiting],
    running: Sequence[SlotState],
    prefixes: RetainedPrefixes,
    free_pages: int,
    limits: AdmissionLimits,
) -> list[SlotState]:
    """Admits waiting requests. Each gets the lane with a free slot and the fewest tokens, counting tokens of prefixes
    that the lane would have to compute."""
    if not waiting or len(running) == limits.num_lanes * limits.lane_size:
        return []
    num_assigned, num_tokens = [0] * limits.num_lanes, [0] * limits.num_lanes
    for slot in running:
        num_assigned[slot.lane] += 1
        num_tokens[slot.lane] += slot.num_known
    left = free_pages - prefixes.pending_pages
    page = limits.page_tokens
    for slot in running:  # reserve one page beyond the known tokens of each, up to its limit
        reserved = slot.num_known + page
        left -= -(-(reserved if reserved < slot.max_cached else slot.max_cached) // page) - -(-slot.num_cached // page)
    admitted: list[SlotState] = []
    for index, request in enumerate(waiting):
        open_lanes = [lane for lane in range(limits.num_lanes) if num_assigned[lane] < limits.lane_size]
        if not open_lanes:
            break
        prefix = request.prefix
        lane = min(open_lanes, key=lambda lane: (num_tokens[lane] + prefixes.missing_tokens(prefix, lane), lane))
        candidate = SlotState(
            request=request.request,
            lane=lane,
            num_cached=limits.rule.num_shared(prefix),
            num_known=request.num_known,
            max_cached=request.max_cached,
            prefix=prefix,
        )
        needed = limits.pages(min(request.num_known + limits.page_tokens, request.max_cached))
        needed += prefixes.missing_pages(prefix, lane) - limits.pages(candidate.num_cached)
        if needed > left:
            num_released = prefixes.make_room(
                needed - left,
                _assigned_prefixes([*running, *admitted, candidate]),
                _waiting_prefixes(waiting[index:]),
            )
            if num_released is None:
                break
            left += num_released
        prefixes.open(prefix, lane)
        left -= needed
        num_assigned[lane] += 1
        num_tokens[lane] += request.num_known
        admitted.append(candidate)
    return admitted
