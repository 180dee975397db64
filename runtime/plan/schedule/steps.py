"""What is computed in a pass, step by step; bringing weights and KV is woven in elsewhere.

A step ends one turn, see `runtime/orders.py`: lanes `run` a stage, or where its attention is the CPU's `pre`, `attend`
and `post` it, or where its experts serve all lanes `route`, and `end` it behind `experts`.
"""

from collections.abc import Iterator

from .actions import Action, Op
from .walk import Walk


def lane_steps(walk: Walk, num_lanes: int) -> Iterator[list[Action]]:
    """The steps of one pass, as many as it has turns; step t ends turn t."""
    style, attending = walk.order.style, frozenset(walk.attending)
    turns = [(stage, lane) for stage in walk.stages for lane in range(num_lanes)]
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
