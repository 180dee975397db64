"""The orders in which lanes pass the stages: what is computed, when; bringing weights and KV is woven in elsewhere.

A **turn** is one lane in one stage. Turns follow each other stage by stage, and in a stage lane by lane, so that one
read of a stage serves the whole block. A step ends one turn: lanes `run` a stage, or where its attention is the CPU's
`pre`, `attend` and `post` it, or where its experts serve all lanes `route`, and `end` it behind `experts`.

- zigzag: while the CPU attends for a turn, the device begins the next one of the stage.
- flexgen: turn after turn, with a barrier behind each (FlexGen, Sheng et al. 2023, section 4.2).
- cgopipe: as zigzag, but the next turn may be the next stage's (MoE-Lightning, Cao et al. 2025, Algorithm 1): while the
  CPU attends for turns t+1 and t+2, the device does `post` of turn t and `pre` of turn t+2. The weights of the next
  stage come page by page between the two.
- module_batched: as zigzag; it differs in having stages with routing (MoE-Gen, Xu et al. 2025).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ...config import Order
from .actions import Action, Op
from .walk import Walk


@dataclass(frozen=True, kw_only=True)
class Style:
    """`num_ahead`: turns that stand at their attention while the one before them goes on from its own."""

    num_ahead: int
    crosses_stages: bool = False  # they may be turns of the next stage
    has_barriers: bool = False
    spreads_pages: bool = False  # the pages of a stage come turn by turn, not in one go


STYLES = {
    Order.zigzag: Style(num_ahead=1),
    Order.flexgen: Style(num_ahead=0, has_barriers=True, spreads_pages=True),
    Order.cgopipe: Style(num_ahead=1, crosses_stages=True, spreads_pages=True),
    Order.module_batched: Style(num_ahead=1),
}


def lane_steps(walk: Walk, num_lanes: int) -> Iterator[list[Action]]:
    """The steps of one pass, as many as it has turns; step t ends turn t."""
    style, attending = STYLES[walk.order], frozenset(walk.attending)
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
