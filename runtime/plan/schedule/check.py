"""Checks a schedule by simulating its slots and lanes, before the engine runs it.

Separate classes check weight slots, KV slots, transfers between ranks, and the order of actions within each lane.

Stops are optional: `run` and `post` compute attention and experts that the lane did not stop at, one lane at a time. So
a lane may run a stage with attention on the CPU, or with batched experts, without their actions.
"""

from collections.abc import Callable, Sequence
from enum import Enum

from .actions import Action, Op
from .schedule import Schedule
from .walk import Walk


def schedule_error(action: Action, rule: str) -> ValueError:
    return ValueError(f"'{action}': {rule}")


class WeightSlots:
    """Compute and staging slots by stage, with the pages loaded so far."""

    def __init__(self, walk: Walk):
        self._walk, self._streamed = walk, frozenset(walk.streamed)
        self._all_pages = frozenset(range(walk.num_pages))
        self._staged_pages: dict[int, set[int]] = {}
        self._loaded_pages: dict[int, set[int]] = {}
        self._freed: set[int] = set()

    def contents(self) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """Returns copies of the staged and the loaded pages, by stage."""
        staged, present = (
            {stage: set(pages) for stage, pages in slots.items()} for slots in (self._staged_pages, self._loaded_pages)
        )
        return staged, present

    def begin_pass(self) -> None:
        self._freed.clear()

    def end_pass(self) -> None:
        for stage in self._walk.streamed:
            if stage not in self._freed:
                raise schedule_error(Action(Op.free, stage), "missing: the stage still holds its slot after the pass")

    def read(self, action: Action) -> None:
        if action.stage in self._walk.in_host:
            raise schedule_error(action, "read, but its weights are already in host memory")
        if self._walk.copies:
            self._load(action, self._staged_pages, self._walk.num_staging_slots, "staging slot")
        else:
            self._load(action, self._loaded_pages, self._walk.num_slots, "slot")

    def copy(self, action: Action) -> None:
        if not self._walk.copies:
            raise schedule_error(action, "the walk has no copies: compute uses weights where they are read")
        stage = action.stage_index
        if stage not in self._walk.in_host and not self._staged_pages.get(stage, set()) >= self._pages(action):
            raise schedule_error(action, "copied before it was read")
        self._load(action, self._loaded_pages, self._walk.num_slots, "device slot")
        if self._loaded_pages[stage] == self._all_pages:
            self._staged_pages.pop(stage, None)

    def use(self, action: Action) -> None:
        stage = action.stage_index
        if stage in self._streamed and self._loaded_pages.get(stage) != self._all_pages:
            count = f"{len(self._loaded_pages.get(stage, ()))} of {self._walk.num_pages} pages are loaded"
            raise schedule_error(action, f"used before its weights were loaded, {count}")

    def free(self, action: Action) -> None:
        stage = action.stage_index
        if stage not in self._loaded_pages:
            raise schedule_error(action, f"freed but not loaded; loaded stages: {sorted(self._loaded_pages)}")
        if stage in self._freed:
            raise schedule_error(action, "freed twice in one pass")
        del self._loaded_pages[stage]
        self._freed.add(stage)

    def _load(self, action: Action, slots: dict[int, set[int]], limit: int, kind: str) -> None:
        stage, pages = action.stage_index, self._pages(action)
        if stage not in self._streamed:
            raise schedule_error(action, "loaded, but the stage is resident")
        if stage not in slots and len(slots) >= limit:
            raise schedule_error(action, f"no free {kind}, all {limit} are in use, by stages {sorted(slots)}")
        pages_in_slot = slots.setdefault(stage, set())
        if pages_in_slot & pages:
            raise schedule_error(action, f"loaded twice: pages {sorted(pages_in_slot & pages)} are already in the slot")
        if action.page not in (None, len(pages_in_slot)):
            raise schedule_error(action, f"loaded out of order, page {len(pages_in_slot)} is next")
        pages_in_slot |= pages

    def _pages(self, action: Action) -> frozenset[int]:
        if action.page is None:
            return self._all_pages
        if action.page not in self._all_pages:
            raise schedule_error(action, f"a stage has pages 0 to {self._walk.num_pages - 1}")
        return frozenset((action.page,))


class KVSlots:
    """KV slots by stage and lane."""

    def __init__(self, walk: Walk):
        self._offloaded, self._num_slots = frozenset(walk.offloaded_kv), walk.num_kv_slots
        self._occupied: set[tuple[int, int]] = set()
        self._fetched: set[tuple[int, int]] = set()

    def begin_pass(self) -> None:
        self._fetched.clear()

    def end_pass(self) -> None:
        for stage, lane in sorted(self._occupied):
            raise schedule_error(
                Action(Op.store, stage, lane), "missing: its KV slot is not freed by the end of the pass"
            )

    def fetch(self, action: Action) -> None:
        key = action.turn
        if key[0] not in self._offloaded:
            raise schedule_error(action, "the stage's KV is not offloaded")
        if key in self._fetched:
            raise schedule_error(action, "fetched twice in one pass")
        if len(self._occupied) >= self._num_slots:
            raise schedule_error(
                action, f"no free KV slot, all {self._num_slots} are in use, by {_format_turns(self._occupied)}"
            )
        self._occupied.add(key)
        self._fetched.add(key)

    def use(self, action: Action) -> None:
        key = action.turn
        if key[0] in self._offloaded and key not in self._occupied:
            raise schedule_error(action, "the lane enters before its KV was fetched")

    def store(self, action: Action) -> None:
        key = action.turn
        if key not in self._occupied:
            raise schedule_error(action, "stored without having been fetched")
        self._occupied.remove(key)


class PipelineTransfers:
    """Hidden states received from the previous pipeline rank and sent to the next one."""

    def __init__(self, walk: Walk, num_lanes: int):
        self._walk, self._num_lanes, self._last_stage = walk, num_lanes, walk.num_stages - 1
        self._received, self._sent = set[int](), set[int]()

    def begin_pass(self) -> None:
        self._received.clear()
        self._sent.clear()

    def end_pass(self) -> None:
        if self._walk.sends and (missing := {*range(self._num_lanes)} - self._sent):
            raise schedule_error(Action(Op.send, self._last_stage, min(missing)), "missing: the next rank waits for it")

    def receive(self, action: Action) -> None:
        if not self._walk.receives or action.stage != self._walk.first_stage:
            raise schedule_error(action, "this stage receives no hidden states from another rank")
        self._mark_once(action, self._received)

    def enter(self, action: Action) -> None:
        is_first = self._walk.receives and action.stage == self._walk.first_stage
        if is_first and action.lane not in self._received:
            raise schedule_error(action, "the lane enters before its hidden states arrived")

    def send(self, action: Action) -> None:
        if not self._walk.sends or action.stage != self._last_stage:
            raise schedule_error(action, "this stage sends no hidden states to another rank")
        self._mark_once(action, self._sent)

    def _mark_once(self, action: Action, lanes: set[int]) -> None:
        _, lane = action.turn
        if lane in lanes:
            raise schedule_error(action, "twice in one pass")
        lanes.add(lane)


def _format_turns(keys: set[tuple[int, int]]) -> str:
    return ", ".join(f"{stage}.{lane}" for stage, lane in sorted(keys))


def check_schedule(schedule: Schedule, walk: Walk, num_lanes: int, num_passes: int = 3) -> None:
    """Simulates `num_passes` passes, or fewer if the slots return to the same state.

    Raises ValueError with the action and the broken rule: a slot overflows or is freed in use, data is used before it
    is loaded, or an action is missing, repeated or out of order. Also raises ValueError if `num_lanes` is below 1.
    """
    if num_lanes < 1:
        raise ValueError(f"a schedule for {num_lanes} lanes computes nothing: 1 or more are needed")
    checker = _ScheduleChecker(walk, num_lanes)
    checker.play(schedule.prologue)
    for _ in range(num_passes):
        before = checker.weights.contents()
        checker.play_pass(schedule.cycle)
        if checker.weights.contents() == before:
            return


class _LaneState(Enum):
    """Position of a lane within its stage; the values complete "lane 3 is ... stage 7"."""

    entrance = "before"
    attention = "at the attention of"
    attending = "at the running attention of"
    experts = "at the experts of"
    after_experts = "after the experts of"
    exit = "after"


_TRANSITIONS: dict[Op, tuple[set[_LaneState], _LaneState]] = {
    Op.run: ({_LaneState.entrance}, _LaneState.exit),
    Op.pre: ({_LaneState.entrance}, _LaneState.attention),
    Op.attend: ({_LaneState.attention}, _LaneState.attending),
    Op.post: ({_LaneState.attending}, _LaneState.exit),
    Op.route: ({_LaneState.entrance, _LaneState.attending}, _LaneState.experts),
    Op.end: ({_LaneState.after_experts}, _LaneState.exit),
}
_STOPS_AT_ATTENTION = {Op.pre, Op.attend, Op.post}
_STOPS_AT_EXPERTS = {Op.route, Op.experts, Op.end}


class _LanePosition:
    """Position of a lane in a pass; `stage` is the current or next stage."""

    __slots__ = ("stage", "state")

    def __init__(self, stage: int):
        self.stage, self.state = stage, _LaneState.entrance

    def __str__(self) -> str:
        return f"{self.state.value} stage {self.stage}"

    @property
    def passed_attention(self) -> bool:
        return self.state in (_LaneState.experts, _LaneState.after_experts)


class _ScheduleChecker:
    """Simulates passes. Weight slots carry over from pass to pass; lanes restart in each."""

    def __init__(self, walk: Walk, num_lanes: int):
        self.weights, self._kv, self._transfers = WeightSlots(walk), KVSlots(walk), PipelineTransfers(walk, num_lanes)
        self._walk, self._num_lanes, self._lanes = walk, num_lanes, list[_LanePosition]()
        self._cpu_stages, self._expert_stages = frozenset(walk.cpu_attention), frozenset(walk.batched_experts)
        self._rules: dict[Op, Callable[[Action], None]] = {
            **dict.fromkeys(_TRANSITIONS, self._move),
            Op.read: self.weights.read,
            Op.copy: self.weights.copy,
            Op.free: self._free,
            Op.experts: self._experts,
            Op.fetch: self._fetch,
            Op.store: self._store,
            Op.recv: self._receive,
            Op.send: self._send,
            Op.sync: lambda action: None,
        }

    def play(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if action.stage is not None and action.stage not in self._walk.stages:
                stages = self._walk.stages
                raise schedule_error(action, f"no such stage, the walk has stages {stages.start} to {stages.stop - 1}")
            self._rules[action.op](action)

    def play_pass(self, actions: Sequence[Action]) -> None:
        self._lanes = [_LanePosition(self._walk.first_stage) for _ in range(self._num_lanes)]
        self.weights.begin_pass()
        self._kv.begin_pass()
        self._transfers.begin_pass()
        self.play(actions)
        for index, lane in enumerate(self._lanes):
            if lane.stage < self._walk.stages.stop:
                raise schedule_error(self._next_action(index, lane), f"missing: the pass ends with lane {index} {lane}")
        self.weights.end_pass()
        self._kv.end_pass()
        self._transfers.end_pass()

    def _move(self, action: Action) -> None:
        lane, (stage, index) = self._find_lane(action), action.turn
        origins, target = _TRANSITIONS[action.op]
        self._require_stop(action, stage)
        if lane.stage != stage or lane.state not in origins:
            raise schedule_error(action, f"out of order, lane {index} is {lane}")
        if action.op is Op.attend:
            # The exchange between device and CPU has buffers for this many attentions only.
            max_attending = self._walk.order.style.num_ahead + 1
            attending = [i for i, each in enumerate(self._lanes) if each.state is _LaneState.attending]
            if len(attending) >= max_attending:
                raise schedule_error(
                    action,
                    f"policy.schedule={self._walk.order.value} has {max_attending} attentions running at most, "
                    f"lanes {attending} are running theirs",
                )
        if lane.state is _LaneState.entrance:
            self._transfers.enter(action)
            self.weights.use(action)
            self._kv.use(action)
        lane.state = target
        if target is _LaneState.exit:
            lane.stage, lane.state = stage + 1, _LaneState.entrance

    def _experts(self, action: Action) -> None:
        self._require_stop(action, action.stage_index)
        for index, lane in enumerate(self._lanes):
            if lane.stage != action.stage or lane.state is not _LaneState.experts:
                raise schedule_error(action, f"run before all lanes reached them, lane {index} is {lane}")
        for lane in self._lanes:
            lane.state = _LaneState.after_experts

    def _free(self, action: Action) -> None:
        for index, lane in enumerate(self._lanes):
            if lane.stage <= action.stage_index:
                raise schedule_error(action, f"freed before all lanes left it, lane {index} is {lane}")
        self.weights.free(action)

    def _fetch(self, action: Action) -> None:
        self._find_lane(action)
        self._kv.fetch(action)

    def _store(self, action: Action) -> None:
        lane, (stage, index) = self._find_lane(action), action.turn
        if lane.stage < stage or (lane.stage == stage and not lane.passed_attention):
            raise schedule_error(action, f"stored before its attention is done, lane {index} is {lane}")
        self._kv.store(action)

    def _receive(self, action: Action) -> None:
        self._find_lane(action)
        self._transfers.receive(action)

    def _send(self, action: Action) -> None:
        lane, (stage, index) = self._find_lane(action), action.turn
        if lane.stage <= stage:
            raise schedule_error(action, f"sent before its stages are done, lane {index} is {lane}")
        self._transfers.send(action)

    def _find_lane(self, action: Action) -> _LanePosition:
        _, index = action.turn
        if index >= len(self._lanes):
            raise schedule_error(action, f"no such lane, there are {len(self._lanes)}; a prologue has none")
        return self._lanes[index]

    def _require_stop(self, action: Action, stage: int) -> None:
        if action.op in _STOPS_AT_ATTENTION and stage not in self._cpu_stages:
            raise schedule_error(action, f"lanes do not stop at the attention of stage {stage}")
        if action.op in _STOPS_AT_EXPERTS and stage not in self._expert_stages:
            raise schedule_error(action, f"lanes do not stop at the experts of stage {stage}")

    def _next_action(self, index: int, lane: _LanePosition) -> Action:
        """Returns an action that the lane may do next, to name in a message. Others may be possible too."""
        if lane.state is _LaneState.experts:
            return Action(Op.experts, lane.stage)  # of all lanes
        if lane.state is _LaneState.entrance:
            has_attention, has_experts = lane.stage in self._cpu_stages, lane.stage in self._expert_stages
            op = Op.pre if has_attention else Op.route if has_experts else Op.run
        else:
            op = {
                _LaneState.attention: Op.attend,
                _LaneState.attending: Op.post,
                _LaneState.after_experts: Op.end,
            }[lane.state]
        return Action(op, lane.stage, index)
