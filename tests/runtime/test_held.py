"""Prefixes of sequences that come and go: held while somebody needs them, given up before anybody gives way."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from runtime.batching.admission import AdmissionLimits, PassPlan, SlotState, Waiting, max_cached_tokens, plan_pass
from runtime.batching.prefixes import CachedPrefix, PrefixKey, SharedPrefix, SharingRule, prefix_keys, shared_prefixes
from tests.dealt import with_slow_others
from tests.runtime.test_prefixes import drawn_prompts, limits

PAGE = 16


class Run:
    """Random tries through a small pool; checks the laws of each pass as it goes."""

    def __init__(self, seed: int, *, is_roomy: bool = False):
        rng, prompts = random.Random(seed), [prompt for prompt in drawn_prompts(seed) if prompt]
        self.rule = SharingRule(among_lanes=rng.random() < 0.5, in_pass=rng.random() < 0.5)
        self.limits = AdmissionLimits.from_lanes(
            self.rule,
            num_lanes=rng.randint(1, 3),
            lane_size=rng.randint(1, 4),
            chunk_tokens=rng.choice([1, 8, 64]),
            page_tokens=PAGE,
        )
        self.prefixes = shared_prefixes(prompts, limits(prompts))
        self.allowed = [rng.randint(1, 40) for _ in prompts]
        most = [max_cached_tokens(len(prompt), new) for prompt, new in zip(prompts, self.allowed, strict=True)]
        self.num_pages = max(map(self.limits.pages, most)) + (10_000 if is_roomy else rng.choice([0, 1, 10]))
        self.waiting = [
            Waiting(request=i, num_known=len(prompt), max_cached=most[i], prefix=self.prefixes[i])
            for i, prompt in enumerate(prompts)
        ]
        self.slots: list[SlotState] = []
        self.held: dict[PrefixKey, CachedPrefix] = {}
        self.left = [rng.randint(1, new) for new in self.allowed]
        self.opened = Counter[PrefixKey]()

    @property
    def free_pages(self) -> int:
        pages, shared = self.limits.pages, self.limits.rule.num_shared
        own = [(slot.num_cached, shared(slot.prefix)) for slot in self.slots]
        own += [(held.num_cached, shared(held.prefix.parent)) for held in self.held.values()]
        return self.num_pages - sum(pages(end) - pages(begin) for end, begin in own)

    @property
    def window(self) -> list[Waiting]:
        return self.waiting[: self.limits.num_lanes * self.limits.lane_size]

    def step(self) -> None:
        plan = plan_pass(self.window, self.slots, self.free_pages, self.limits, self.held.values())
        kept = len(self.slots) - len(plan.preempted)
        gone = [_waiting(slot) for slot in self.slots[kept:]]
        self.slots, self.waiting = self.slots[:kept], [*gone, *self.waiting]
        for place in plan.dropped:
            assert place not in self._needed(), "somebody seated goes on from it"
            del self.held[place]
        for request, lane in plan.admitted:
            self._admit(request, lane)
        self._check(plan)
        self.slots = [slot for old in self.slots if (slot := self._compute(old, plan)) is not None]
        for place, new in plan.prefix_tokens.items():
            self.held[place] = replace(self.held[place], num_cached=self.held[place].num_cached + new)

    def _admit(self, request: int, lane: int) -> None:
        entrant = self.waiting.pop(0)
        assert entrant.request == request, "nobody overtakes"
        for place in prefix_keys(entrant.prefix, lane, self.limits.rule):
            if place not in self.held:
                begin = self.limits.rule.num_shared(place[0].parent)
                self.held[place] = CachedPrefix(prefix=place[0], lane=lane, num_cached=begin)
                self.opened[place] += 1
        begin = self.limits.rule.num_shared(entrant.prefix)
        self.slots.append(SlotState(lane=lane, num_cached=begin, **vars(entrant)))

    def _needed(self) -> set[PrefixKey]:
        return {place for slot in self.slots for place in prefix_keys(slot.prefix, slot.lane, self.limits.rule)}

    def _check(self, plan: PassPlan) -> None:
        assert self._needed() <= self.held.keys()
        assert plan.new_tokens or plan.prefix_tokens, "every pass computes something"
        for lane in range(self.limits.num_lanes):
            counts = [plan.new_tokens.get(slot.request, 0) for slot in self.slots if slot.lane == lane]
            counts += [new for place, new in plan.prefix_tokens.items() if self.held[place].lane == lane]
            assert sum(counts) <= self.limits.lane_tokens
        for slot in self.slots:
            if slot.request in plan.new_tokens and slot.num_cached == self.limits.rule.num_shared(slot.prefix):
                self._require_whole(slot.prefix, slot.lane, plan)
        for place in plan.prefix_tokens:
            held = self.held[place]
            if held.num_cached == self.limits.rule.num_shared(held.prefix.parent):
                self._require_whole(held.prefix.parent, held.lane, plan)

    def _require_whole(self, prefix: SharedPrefix | None, lane: int, plan: PassPlan) -> None:
        """Stored by an earlier pass, or by this one in a lane that is not behind."""
        for place in prefix_keys(prefix, lane, self.limits.rule)[-1:]:
            held = self.held[place]
            in_pass = plan.prefix_tokens.get(place, 0) if self.rule.in_pass and held.lane <= lane else 0
            assert held.num_cached + in_pass == self.limits.rule.num_shared(prefix)

    def _compute(self, slot: SlotState, plan: PassPlan) -> SlotState | None:
        new = plan.new_tokens.get(slot.request, 0)
        assert 0 <= new <= slot.num_missing
        slot = replace(slot, num_cached=slot.num_cached + new)
        if slot.num_missing or not new:
            return slot
        self.left[slot.request] -= 1
        return replace(slot, num_known=slot.num_known + 1) if self.left[slot.request] else None

    def finish(self) -> None:
        while self.waiting or self.slots:
            self.step()
            assert self.free_pages >= 0


def _waiting(slot: SlotState) -> Waiting:
    return Waiting(request=slot.request, num_known=slot.num_known, max_cached=slot.max_cached, prefix=slot.prefix)


@pytest.mark.parametrize("seed", with_slow_others(range(150), range(40)))
def test_nobody_begins_before_its_prefix_is_whole_no_page_is_promised_twice_and_all_end(seed: int) -> None:
    run = Run(seed)
    run.finish()
    assert not any(run.left), "a request starved"


@pytest.mark.parametrize("seed", range(50))
def test_with_room_for_all_a_prefix_is_computed_once_where_all_who_share_it_are_in_reach(seed: int) -> None:
    run = Run(seed, is_roomy=True)
    run.limits = replace(run.limits, lane_size=len(run.waiting))
    run.finish()
    assert set(run.opened.values()) <= {1}


def test_a_prefix_is_held_for_those_in_line_and_no_longer() -> None:
    prefix = SharedPrefix(num_tokens=32)
    alone = AdmissionLimits.from_lanes(
        SharingRule(among_lanes=True), num_lanes=1, lane_size=1, chunk_tokens=64, page_tokens=PAGE
    )
    held = [CachedPrefix(prefix=prefix, lane=0, num_cached=32)]
    stranger = Waiting(request=1, num_known=5, max_cached=9)
    user = Waiting(request=2, num_known=40, max_cached=50, prefix=prefix)
    assert plan_pass([stranger, user], [], 8, alone, held).dropped == ()
    assert plan_pass([stranger], [], 8, alone, held).dropped == ((prefix, -1),)


def test_who_decodes_keeps_its_pages_before_a_prefix_for_those_in_line_does() -> None:
    prefix = SharedPrefix(num_tokens=32)
    two = AdmissionLimits.from_lanes(
        SharingRule(among_lanes=True), num_lanes=1, lane_size=2, chunk_tokens=64, page_tokens=PAGE
    )
    slots = [SlotState(request=i, lane=0, num_cached=16, num_known=17, max_cached=40) for i in (0, 1)]
    held = [CachedPrefix(prefix=prefix, lane=0, num_cached=32)]
    user = Waiting(request=2, num_known=40, max_cached=50, prefix=prefix)
    plan = plan_pass([user], slots, 0, two, held)
    assert (plan.preempted, plan.dropped, plan.new_tokens) == ((), ((prefix, -1),), {0: 1, 1: 1})


def test_what_waits_for_a_prefix_in_a_later_lane_waits_a_pass() -> None:
    prefix = SharedPrefix(num_tokens=16)
    lanes = AdmissionLimits.from_lanes(
        SharingRule(among_lanes=True), num_lanes=2, lane_size=2, chunk_tokens=64, page_tokens=PAGE
    )
    held = [CachedPrefix(prefix=prefix, lane=1, num_cached=0)]
    slots = [
        SlotState(request=i, lane=lane, num_cached=16, num_known=20, max_cached=25, prefix=prefix)
        for i, lane in ((0, 0), (1, 1))
    ]
    plan = plan_pass([], slots, 20, lanes, held)
    assert (plan.new_tokens, plan.prefix_tokens) == ({1: 4}, {(prefix, -1): 16})
