"""A pass as a list of actions: made here and printed; checked by `check`, simulated by `cost`, and executed
by the engine.

A walk runs `Schedule.prologue` once, then one `Schedule.cycle` per pass. Reads at the end of a cycle are for the
stages of the next one: the walk over the stages is cyclic and the disk never waits for the turn of a pass. Only where
decode passes leave out an encoder do they walk another way than prefill passes; at such a turn slots begin anew.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import ConfigError
from .actions import Action, Op
from .feeds import kv_feed, require_kv_slots, weight_feed
from .walk import Walk


@dataclass(frozen=True, kw_only=True)
class Schedule:
    prologue: tuple[Action, ...]
    cycle: tuple[Action, ...]

    def __str__(self) -> str:
        return "\n".join(["# prologue", *map(str, self.prologue), "# cycle", *map(str, self.cycle)])


def make_schedule(walk: Walk, num_lanes: int) -> Schedule:
    """The walk's order of computing, with weights and KV brought in as early as their slots are free.

    With one slot no weights are read ahead (prefetch off); with k+1 slots reads run k stages ahead; with block b > 1,
    groups of b stages are read while the group before is computed. Raises as `require_slots`.
    """
    require_slots(walk, num_lanes)
    weights, kv, frees = weight_feed(walk, num_lanes), kv_feed(walk, num_lanes), _frees(walk, num_lanes)

    def begun_at(gap: int) -> list[Action]:
        """KV first: it is small, and the next turn waits for it."""
        return [action for feed in (kv, frees, weights.gaps) for action in feed.get(gap, ())]

    cycle = begun_at(0)
    for gap, step in enumerate(lane_steps(walk, num_lanes), start=1):
        cycle += step
        cycle += begun_at(gap)
    return Schedule(prologue=tuple(weights.prologue), cycle=tuple(cycle))


def _frees(walk: Walk, num_lanes: int) -> dict[int, list[Action]]:
    """The actions that free stages, by gap: a stage is freed behind its last lane."""
    return {(stage - walk.first_stage + 1) * num_lanes: [Action(Op.free, stage)] for stage in walk.streamed}


def require_slots(walk: Walk, num_lanes: int) -> None:
    """Raises ConfigError when the walk's slots, of weights or of KV, are too few for its order, or too many."""
    require_kv_slots(walk, num_lanes)
    if walk.num_slots > len(walk.streamed) > 0:
        raise ConfigError(
            f"{walk.num_slots} slots for {len(walk.streamed)} streamed stages: "
            "lower prefetch.depth or prefetch.block_layers"
        )
    needed = min(walk.order.style.num_slots, len(walk.streamed))
    if walk.num_slots < needed:
        raise ConfigError(
            f"{walk.num_slots} slots, but policy.schedule={walk.order.value} brings a stage in while the one before it "
            f"is computed, which takes {needed}: prefetch=lookahead with prefetch.depth of 1 or more"
        )


def lane_steps(walk: Walk, num_lanes: int) -> Iterator[list[Action]]:
    """The steps of one pass, as many as it has turns; step t ends turn t, see `runtime/config/orders.py`. Lanes `run` a
    stage, or where its attention is the CPU's `pre`, `attend` and `post` it, or where its experts serve all lanes
    `route`, and `end` it behind `experts`."""
    if walk.is_by_lane:
        yield from ([*_whole_turn(walk, *turn)] for turn in walk.turns(num_lanes))
        return
    for step in _steps_by_stage(walk, num_lanes):
        yield [action for each in step for action in _beside_neighbours(walk, each)]


def _whole_turn(walk: Walk, stage: int, lane: int) -> Iterator[Action]:
    """A turn that nothing else goes on beside."""
    ops = (Op.pre, Op.attend, Op.post) if stage in walk.attending else (Op.run,)
    for op in ops:
        yield from _beside_neighbours(walk, Action(op, stage, lane))


def _beside_neighbours(walk: Walk, action: Action) -> Iterator[Action]:
    """The action, and where a lane comes from another rank or leaves for one, that as well."""
    op, stage, lane = action.op, action.stage, action.lane
    enters = op in (Op.run, Op.pre) or (op is Op.route and stage not in walk.attending)
    if walk.receives and enters and stage == walk.first_stage:
        yield Action(Op.recv, stage, lane)
    yield action
    if walk.sends and op in (Op.run, Op.post, Op.end) and stage == walk.num_stages - 1:
        yield Action(Op.send, stage, lane)


def _steps_by_stage(walk: Walk, num_lanes: int) -> Iterator[list[Action]]:
    style, attending = walk.order.style, frozenset(walk.attending)
    turns = walk.turns(num_lanes)
    begun = ended = 0  # turns; a lane begins a turn when its last one, `num_lanes` before, has ended
    for at, (stage, lane) in enumerate(turns):
        next_stage = at - lane + num_lanes
        limit = min(at + 1 + style.num_ahead, ended + num_lanes, len(turns) if style.crosses_stages else next_stage)
        step = [Action(op, *turn) for turn in turns[begun:limit] if turn[0] in attending for op in (Op.pre, Op.attend)]
        step += _end_turn(walk, num_lanes, stage, lane)
        begun = limit
        ended = at + 1 if stage not in walk.routing else next_stage if at + 1 == next_stage else ended
        yield step + [Action(Op.sync, None)] * style.has_barriers


def _end_turn(walk: Walk, num_lanes: int, stage: int, lane: int) -> list[Action]:
    if stage not in walk.routing:
        return [Action(Op.post if stage in walk.attending else Op.run, stage, lane)]
    route = Action(Op.route, stage, lane)
    if lane + 1 < num_lanes:
        return [route]
    return [route, Action(Op.experts, stage), *[Action(Op.end, stage, each) for each in range(num_lanes)]]
