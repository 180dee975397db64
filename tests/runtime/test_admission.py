"""Continuous admission: pages are never promised twice, nobody overtakes, and every request comes to its end."""

import random
from dataclasses import replace

import pytest

from runtime.batching.admission import AdmissionLimits, PassPlan, SlotState, Waiting, max_cached_tokens, plan_pass
from tests.dealt import with_slow_others

LIMITS = AdmissionLimits(num_lanes=2, lane_size=2, lane_tokens=32, page_tokens=16)
FAR = 10_000  # positions of a request whose limit does not matter


def line(*lengths: int, first: int = 0, most: int = FAR) -> list[Waiting]:
    return [Waiting(request=first + i, num_known=n, max_cached=most) for i, n in enumerate(lengths)]


def slot(request: int, lane: int, cached: int, known: int, most: int = FAR) -> SlotState:
    return SlotState(request=request, lane=lane, num_cached=cached, num_known=known, max_cached=most)


# --- who enters


@pytest.mark.parametrize(
    ("waiting", "slots", "free_pages", "admitted"),
    [
        pytest.param(line(5, 5), [], 100, ((0, 0), (1, 1)), id="the emptier lane first"),
        pytest.param(line(40, 5, 5, 5), [], 100, ((0, 0), (1, 1), (2, 1), (3, 0)), id="fewest tokens, not sequences"),
        pytest.param(line(5, 5, 5, 5, 5), [], 100, ((0, 0), (1, 1), (2, 0), (3, 1)), id="as many as there are seats"),
        pytest.param(line(5, first=9), [slot(1, 0, 8, 9), slot(2, 1, 3, 4)], 4, ((9, 1),), id="beside the seated"),
        pytest.param(line(16), [], 2, ((0, 0),), id="its own pages and one more"),
        pytest.param(line(16, 16), [], 3, ((0, 0),), id="one more is missing"),
        pytest.param(line(16, 17, 1), [], 4, ((0, 0),), id="a short one does not overtake"),
        pytest.param(line(16, most=16), [], 1, ((0, 0),), id="none beyond its limit"),
        pytest.param(line(1, first=9), [slot(1, 0, 16, 17)], 3, (), id="what the seated want is kept"),
        pytest.param(line(1, first=9), [slot(1, 0, 16, 17)], 4, ((9, 1),), id="and no more than that"),
        pytest.param(line(1, first=9), [slot(1, 0, 0, 160)], 12, (), id="a prompt on its way has its pages promised"),
    ],
)
def test_who_enters(
    waiting: list[Waiting], slots: list[SlotState], free_pages: int, admitted: tuple[tuple[int, int], ...]
) -> None:
    assert plan_pass(waiting, slots, free_pages, LIMITS).admitted == admitted


def test_a_request_that_can_never_enter_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="request 3 can never be admitted: 1 pages"):
        plan_pass(line(17, first=3), [], 1, LIMITS)


def test_the_last_token_takes_no_position() -> None:
    assert [max_cached_tokens(10, new) for new in (0, 1, 2)] == [10, 10, 11]


# --- what a lane computes


@pytest.mark.parametrize(
    ("slots", "new_tokens"),
    [
        pytest.param([slot(0, 0, 9, 10), slot(1, 0, 0, 20)], {0: 1, 1: 20}, id="a prompt beside a decoded token"),
        pytest.param([slot(0, 0, 0, 50), slot(1, 0, 9, 10)], {0: 31, 1: 1}, id="decoded tokens before prompts"),
        pytest.param([slot(0, 0, 30, 50), slot(1, 0, 0, 50)], {0: 20, 1: 12}, id="the older prompt first"),
        pytest.param([slot(0, 0, 0, 50), slot(1, 0, 0, 50)], {0: 32}, id="the younger prompt waits"),
        pytest.param([slot(0, 0, 0, 50), slot(1, 1, 0, 50)], {0: 32, 1: 32}, id="each lane has its own budget"),
    ],
)
def test_what_a_lane_computes(slots: list[SlotState], new_tokens: dict[int, int]) -> None:
    assert plan_pass([], slots, 100, LIMITS).new_tokens == new_tokens


# --- who gives way


def test_the_youngest_give_way_until_the_pass_fits_and_nobody_enters() -> None:
    slots = [slot(0, 0, 16, 17), slot(1, 1, 32, 33), slot(2, 0, 5, 6), slot(3, 1, 16, 17)]
    plan = plan_pass(line(1, first=4), slots, 1, LIMITS)  # 0, 1 and 3 need a page each; 3 has one to give
    assert plan == PassPlan(preempted=(3,), admitted=(), new_tokens={0: 1, 1: 1, 2: 1})


def test_those_that_give_way_stand_in_line_as_they_entered() -> None:
    slots = [slot(0, 0, 16, 17), slot(1, 1, 0, 1), slot(2, 0, 0, 1)]
    assert plan_pass([], slots, 1, LIMITS).preempted == (1, 2)


def test_a_sequence_that_does_not_fit_alone_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="request 0 alone needs 1 KV pages, 0 are free"):
        plan_pass([], [slot(0, 0, 16, 17)], 0, LIMITS)


# --- a whole run


class Run:
    """Requests of random lengths through a small pool; checks the laws of each pass as it goes."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        self.limits = AdmissionLimits(
            num_lanes=rng.randint(1, 4),
            lane_size=rng.randint(1, 8),
            lane_tokens=rng.choice([1, 3, 8, 64]),
            page_tokens=rng.choice([1, 4, 16]),
        )
        prompts = [rng.randint(1, 60) for _ in range(rng.randint(1, 60))]
        allowed = [rng.randint(1, 60) for _ in prompts]
        most = [max_cached_tokens(prompt, new) for prompt, new in zip(prompts, allowed, strict=True)]
        self.left = [rng.randint(1, new) for new in allowed]  # tokens until the end of sequence, which nobody knows
        self.num_pages = max(map(self.limits.pages, most)) + rng.choice([0, 0, 1, 10, 100])
        lengths = zip(prompts, most, strict=True)
        self.waiting = [Waiting(request=i, num_known=n, max_cached=m) for i, (n, m) in enumerate(lengths)]
        self.slots: list[SlotState] = []
        self.first_admissions: list[int] = []
        self.num_preempted = 0

    @property
    def free_pages(self) -> int:
        return self.num_pages - sum(self.limits.pages(slot.num_cached) for slot in self.slots)

    def step(self) -> None:
        plan = plan_pass(self.waiting, self.slots, self.free_pages, self.limits)
        assert plan == plan_pass(self.waiting, self.slots, self.free_pages, self.limits)
        self._give_way(plan)
        self._admit(plan)
        self._check(plan)
        self.slots = [slot for old in self.slots if (slot := self._compute(old, plan)) is not None]

    def _give_way(self, plan: PassPlan) -> None:
        kept = len(self.slots) - len(plan.preempted)
        assert kept > 0 or not plan.preempted, "the first seat never gives way"
        assert tuple(slot.request for slot in self.slots[kept:]) == plan.preempted
        gone = [Waiting(request=s.request, num_known=s.num_known, max_cached=s.max_cached) for s in self.slots[kept:]]
        self.slots, self.waiting = self.slots[:kept], [*gone, *self.waiting]
        self.num_preempted += len(gone)

    def _admit(self, plan: PassPlan) -> None:
        assert not (plan.preempted and plan.admitted)
        for request, lane in plan.admitted:
            entrant = self.waiting.pop(0)
            assert entrant.request == request, "nobody overtakes"
            self.slots.append(SlotState(lane=lane, num_cached=0, **vars(entrant)))
            if request not in self.first_admissions:
                self.first_admissions.append(request)

    def _check(self, plan: PassPlan) -> None:
        order = [item.request for item in [*self.slots, *self.waiting]]
        assert order == sorted(order), "the seated are ahead of the waiting in the order of the plan"
        assert plan.new_tokens, "every pass computes something"
        assert set(plan.new_tokens) <= {slot.request for slot in self.slots}
        for lane in range(self.limits.num_lanes):
            members = [slot for slot in self.slots if slot.lane == lane]
            assert len(members) <= self.limits.lane_size
            assert sum(plan.new_tokens.get(slot.request, 0) for slot in members) <= self.limits.lane_tokens

    def _compute(self, slot: SlotState, plan: PassPlan) -> SlotState | None:
        new = plan.new_tokens.get(slot.request, 0)
        assert 0 <= new <= slot.num_missing
        slot = replace(slot, num_cached=slot.num_cached + new)
        assert slot.num_cached <= slot.max_cached
        if slot.num_missing or not new:
            return slot
        self.left[slot.request] -= 1
        return replace(slot, num_known=slot.num_known + 1) if self.left[slot.request] else None


@pytest.mark.dealt(most=16)
@pytest.mark.parametrize("seed", with_slow_others(range(200), range(50)))
def test_a_run_never_commits_a_page_twice_keeps_the_order_and_ends(seed: int) -> None:
    run = Run(seed)
    num_requests, num_tokens = len(run.waiting), sum(run.left) + sum(item.num_known for item in run.waiting)
    for _ in range(30 * num_tokens):
        if not (run.waiting or run.slots):
            break
        run.step()
        assert run.free_pages >= 0
    assert not any(run.left), "a request starved"
    assert run.first_admissions == list(range(num_requests))


def test_the_runs_above_meet_full_pools_and_empty_ones() -> None:
    preempted = []
    for seed in range(50):
        run = Run(seed)
        while run.waiting or run.slots:
            run.step()
        preempted.append(run.num_preempted)
    assert preempted.count(0) > 10
    assert sum(1 for count in preempted if count > 5) > 5
