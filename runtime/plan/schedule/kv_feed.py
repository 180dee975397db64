"""When the KV of travelling stages is fetched to a slot, ahead within the pass in the order of turns, and stored."""

from ...errors import ConfigError
from .actions import Action, Op
from .orders import STYLES
from .walk import Walk


def kv_feed(walk: Walk, num_lanes: int) -> dict[int, list[Action]]:
    """By gap: fetches fill the slots as a pass begins; behind each turn its slot is stored and fetched into again."""
    if not walk.travelling:
        return {}
    turns = [
        (step, Action(Op.fetch, stage, lane), Action(Op.store, stage, lane))
        for step, (stage, lane) in enumerate((stage, lane) for stage in walk.stages for lane in range(num_lanes))
        if stage in walk.travelling
    ]
    gaps = {0: [fetch for _, fetch, _ in turns[: walk.num_kv_slots]]}
    for place, (step, _, store) in enumerate(turns):
        next_turn = place + walk.num_kv_slots
        gaps[step + 1] = [store, *(fetch for _, fetch, _ in turns[next_turn : next_turn + 1])]
    return gaps


def require_kv_slots(walk: Walk, num_lanes: int) -> None:
    """Raises ConfigError when the slots are fewer than the turns that the order has open at once."""
    if not walk.travelling:
        return
    overlaps = STYLES[walk.order].num_ahead if set(walk.travelling) & set(walk.attending) else 0
    needed = min(1 + overlaps, num_lanes)
    if walk.num_kv_slots < needed:
        raise ConfigError(
            f"{walk.num_kv_slots} KV slots, but policy.schedule={walk.order.value} has {needed} lanes at the attention "
            f"of one stage at once: raise kv.num_slots to {needed}"
        )
