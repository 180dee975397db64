"""Plays a schedule on counters and refuses what would go wrong on lanes: for the engine, before it plays it on them."""

from collections.abc import Callable, Sequence
from enum import Enum

from .actions import Action, Op
from .check_slots import KVSlots, Neighbours, WeightSlots, broken
from .schedule import Schedule
from .walk import Walk


def check_schedule(schedule: Schedule, walk: Walk, num_lanes: int, num_passes: int = 3) -> None:
    """Plays at most `num_passes` passes; fewer when slots hold at the end of one what they held at its beginning, since
    every further pass then goes the same way.

    Raises ValueError that begins with the action in quotes and says which rule it breaks: slots never overflow and are
    not freed while a lane needs them, nothing is used before it is brought in, nothing is missing or done twice. A pass
    without lanes is no pass, and a ValueError too.
    """
    if num_lanes < 1:
        raise ValueError(f"a schedule for {num_lanes} lanes computes nothing: it takes 1 or more")
    play = _Play(walk, num_lanes)
    play.play(schedule.prologue)
    for _ in range(num_passes):
        before = play.weights.contents()
        play.play_pass(schedule.cycle)
        if play.weights.contents() == before:
            return


class _Place(Enum):
    """Where in its stage a lane stands."""

    entrance = "before"
    attention = "at the attention of"
    attending = "at the attention, which has begun, of"
    experts = "at the experts of"
    answered = "behind the experts of"
    exit = "behind"


_MOVES: dict[Op, tuple[set[_Place], _Place]] = {
    Op.run: ({_Place.entrance}, _Place.exit),
    Op.pre: ({_Place.entrance}, _Place.attention),
    Op.attend: ({_Place.attention}, _Place.attending),
    Op.post: ({_Place.attending}, _Place.exit),
    Op.route: ({_Place.entrance, _Place.attending}, _Place.experts),
    Op.end: ({_Place.answered}, _Place.exit),
}
_STOPS_AT_ATTENTION = {Op.pre, Op.attend, Op.post}
_STOPS_AT_EXPERTS = {Op.route, Op.experts, Op.end}


class _Lane:
    """`stage` is the one that the lane is in or comes to next."""

    __slots__ = ("place", "stage")

    def __init__(self, stage: int):
        self.stage, self.place = stage, _Place.entrance

    def __str__(self) -> str:
        return f"{self.place.value} stage {self.stage}"

    @property
    def passed_attention(self) -> bool:
        return self.place in (_Place.experts, _Place.answered)


class _Play:
    """Weights in slots go on from pass to pass; lanes begin each anew."""

    def __init__(self, walk: Walk, num_lanes: int):
        self.weights, self._kv, self._neighbours = WeightSlots(walk), KVSlots(walk), Neighbours(walk, num_lanes)
        self._walk, self._num_lanes, self._lanes = walk, num_lanes, list[_Lane]()
        self._attending, self._routing = frozenset(walk.attending), frozenset(walk.routing)
        self._rules: dict[Op, Callable[[Action], None]] = {
            **dict.fromkeys(_MOVES, self._move),
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
                raise broken(action, f"no such stage, the walk has stages {stages.start} to {stages.stop - 1}")
            self._rules[action.op](action)

    def play_pass(self, actions: Sequence[Action]) -> None:
        self._lanes = [_Lane(self._walk.first_stage) for _ in range(self._num_lanes)]
        self.weights.begin_pass()
        self._kv.begin_pass()
        self._neighbours.begin_pass()
        self.play(actions)
        for index, lane in enumerate(self._lanes):
            if lane.stage < self._walk.num_stages:
                raise broken(self._missing(index, lane), f"missing: at the end of the pass lane {index} stands {lane}")
        self.weights.end_pass()
        self._kv.end_pass()
        self._neighbours.end_pass()

    def _move(self, action: Action) -> None:
        lane, (stage, index) = self._lane(action), action.turn
        origins, target = _MOVES[action.op]
        self._require_stop(action, stage)
        if lane.stage != stage or lane.place not in origins:
            raise broken(action, f"out of order, lane {index} stands {lane}")
        if action.op is Op.attend:
            self._require_room_to_attend(action)
        if lane.place is _Place.entrance:
            self._neighbours.enter(action)
            self.weights.use(action)
            self._kv.use(action)
        lane.place = target
        if target is _Place.exit:
            lane.stage, lane.place = stage + 1, _Place.entrance

    def _require_room_to_attend(self, action: Action) -> None:
        """Only so many can be under way between the device and the CPU."""
        most = self._walk.order.style.num_ahead + 1
        attending = [index for index, lane in enumerate(self._lanes) if lane.place is _Place.attending]
        if len(attending) >= most:
            raise broken(
                action,
                f"policy.schedule={self._walk.order.value} has {most} attentions under way at most, "
                f"those of lanes {attending} are",
            )

    def _experts(self, action: Action) -> None:
        self._require_stop(action, action.its_stage)
        for index, lane in enumerate(self._lanes):
            if lane.stage != action.stage or lane.place is not _Place.experts:
                raise broken(action, f"run before all lanes have come there, lane {index} stands {lane}")
        for lane in self._lanes:
            lane.place = _Place.answered

    def _free(self, action: Action) -> None:
        for index, lane in enumerate(self._lanes):
            if lane.stage <= action.its_stage:
                raise broken(action, f"freed before all lanes have left it, lane {index} stands {lane}")
        self.weights.free(action)

    def _fetch(self, action: Action) -> None:
        self._lane(action)
        self._kv.fetch(action)

    def _store(self, action: Action) -> None:
        lane, (stage, index) = self._lane(action), action.turn
        if lane.stage < stage or (lane.stage == stage and not lane.passed_attention):
            raise broken(action, f"stored before its attention is over, lane {index} stands {lane}")
        self._kv.store(action)

    def _receive(self, action: Action) -> None:
        self._lane(action)
        self._neighbours.receive(action)

    def _send(self, action: Action) -> None:
        lane, (stage, index) = self._lane(action), action.turn
        if lane.stage <= stage:
            raise broken(action, f"sent before its stages are over, lane {index} stands {lane}")
        self._neighbours.send(action)

    def _lane(self, action: Action) -> _Lane:
        _, index = action.turn
        if index >= len(self._lanes):
            raise broken(action, f"no such lane, there are {len(self._lanes)}; a prologue has none")
        return self._lanes[index]

    def _require_stop(self, action: Action, stage: int) -> None:
        if action.op in _STOPS_AT_ATTENTION and stage not in self._attending:
            raise broken(action, f"lanes do not stop at the attention of stage {stage}")
        if action.op in _STOPS_AT_EXPERTS and stage not in self._routing:
            raise broken(action, f"lanes do not stop at the experts of stage {stage}")

    def _missing(self, index: int, lane: _Lane) -> Action:
        if lane.place is _Place.experts:
            return Action(Op.experts, lane.stage)
        enters = Op.pre if lane.stage in self._attending else Op.route if lane.stage in self._routing else Op.run
        leaves = {_Place.entrance: enters, _Place.attention: Op.attend, _Place.attending: Op.post}
        return Action(leaves.get(lane.place, Op.end), lane.stage, index)
