"""Builds a pass as a list of actions. `check` validates it, `cost` simulates it, and the engine executes it.

A run executes `Schedule.prologue` once, then one `Schedule.cycle` per pass. Reads at the end of a cycle are for the
first stages of the next one, so the disk does not idle between passes. Prefill and decode passes share a walk, unless
decode passes skip an encoder: then their first pass starts with empty slots.

Weights of streamed stages are loaded ahead of the lanes, whole or in pages, as soon as slots are free. Offloaded KV is
fetched ahead and stored back. **Visit** v is the use of stage `streamed[v % n]` in pass `v // n`. Times are **gaps**:
gap g lies before step g of a pass. Negative gaps lie in the previous pass, which ends with reads for this one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

from ...errors import ConfigError
from .actions import Action, Op
from .walk import Walk


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Actions before the first pass, and at each gap of every pass, from 0 to the number of steps."""

    prologue: list[Action]
    gaps: dict[int, list[Action]]


def weight_transfers(walk: Walk, num_lanes: int) -> Transfers:
    if not walk.streamed:
        return Transfers(prologue=[], gaps={})
    if walk.num_slots == 1:
        return _sequential_transfers(walk, num_lanes)
    num_steps = len(walk.stages) * num_lanes
    if walk.block > 1 and walk.num_slots > walk.block and not walk.order.style.spreads_pages:
        return _cyclic_transfers([], _block_deliveries(walk, num_lanes), num_steps)
    # Stages read into staging before the first copy. One slot stays empty if slots fill page by page.
    num_ahead = walk.num_staging_slots - _reads_by_page(walk) if walk.copies and walk.reads else 0
    initial_reads = [action for stage in walk.from_disk[:num_ahead] for action in _load_actions(walk, Op.read, stage)]
    return _cyclic_transfers(initial_reads, _ring_deliveries(walk, num_lanes), num_steps)


Delivery: TypeAlias = tuple[int, list[Action]]  # actions at a gap of pass 0, repeated in every pass


def _cyclic_transfers(initial_reads: list[Action], deliveries: Iterable[Delivery], num_steps: int) -> Transfers:
    """Makes the transfers of repeating passes. At one gap, actions for this pass come before those for the next."""
    ordered = sorted(deliveries, key=itemgetter(0))
    ahead = [(gap, actions) for gap, actions in ordered if gap <= 0]
    gaps: dict[int, list[Action]] = {}
    for gap, actions in [*ordered[len(ahead) :], *ahead]:
        gaps.setdefault(gap if gap > 0 else gap + num_steps, []).extend(actions)
    return Transfers(prologue=[*initial_reads, *(action for _, actions in ahead for action in actions)], gaps=gaps)


class _Timetable:
    """The gaps at which lanes enter and leave the stage of a visit."""

    def __init__(self, walk: Walk, num_lanes: int):
        self._streamed, self._first_stage, self._num_lanes = walk.streamed, walk.first_stage, num_lanes
        self._num_steps = len(walk.stages) * num_lanes
        self._steps_early = 1 if walk.order.style.crosses_stages else 0

    def entry_gap(self, visit: int) -> int:
        """Returns the last gap before the first lane enters."""
        return self._first_step(visit) - self._steps_early

    def exit_gap(self, visit: int) -> int:
        """Returns the first gap after the last lane left."""
        return self._first_step(visit) + self._num_lanes

    def _first_step(self, visit: int) -> int:
        pass_index, position = divmod(visit, len(self._streamed))
        return pass_index * self._num_steps + (self._streamed[position] - self._first_stage) * self._num_lanes


def _sequential_transfers(walk: Walk, num_lanes: int) -> Transfers:
    """Loads each stage right before use, into one slot, without overlap: the baseline in tests and measurements."""
    times = _Timetable(walk, num_lanes)
    gaps: dict[int, list[Action]] = {}
    for visit, stage in enumerate(walk.streamed):
        actions = [action for op in _load_ops(walk) for action in _load_actions(walk, op, stage)]
        gaps.setdefault(max(0, times.entry_gap(visit)), []).extend(actions)
    return Transfers(prologue=[], gaps=gaps)


def _ring_deliveries(walk: Walk, num_lanes: int) -> Iterator[Delivery]:
    """Look-ahead: with k+1 slots, weights are loaded k stages ahead.

    If the order spreads pages, those of a stage are spaced evenly over the turns until the next stage's pages. Small
    urgent transfers (hidden states, KV) then never wait for a whole stage, and a barrier waits for the pages of one
    turn only. With two slots, cgopipe waits for the last page of each stage; a third slot hides that wait.
    """
    times, num_pages = _Timetable(walk, num_lanes), walk.num_pages
    is_spread = walk.order.style.spreads_pages
    for visit, stage in enumerate(walk.streamed):
        free_gap, entry_gap = times.exit_gap(visit - walk.num_slots), times.entry_gap(visit)
        num_turns = times.exit_gap(visit + 1 - walk.num_slots) - free_gap
        for page in range(num_pages):
            gap = min(free_gap + page * num_turns // num_pages, entry_gap) if is_spread else free_gap
            yield gap, _ring_delivery(walk, stage, page)


def _ring_delivery(walk: Walk, stage: int, page: int) -> list[Action]:
    """Returns the actions to load one page into a compute slot, and to refill the staging memory this frees."""
    if not walk.copies:
        return [_page_action(walk, Op.read, stage, page)]
    copy = [_page_action(walk, Op.copy, stage, page)]
    if stage in walk.in_host:
        return copy
    if _reads_by_page(walk):
        return [*copy, _page_action(walk, Op.read, _next_read(walk, stage, walk.num_staging_slots - 1), page)]
    is_last = page + 1 == walk.num_pages
    next_stage = _next_read(walk, stage, walk.num_staging_slots)
    return copy + (_load_actions(walk, Op.read, next_stage) if is_last else [])


def _next_read(walk: Walk, stage: int, num_reads: int) -> int:
    """Returns the stage read `num_reads` reads after `stage`, in this pass or the next; skips stages in host memory."""
    return walk.from_disk[(walk.from_disk.index(stage) + num_reads) % len(walk.from_disk)]


def _reads_by_page(walk: Walk) -> bool:
    """True if one staging slot fills page by page while another one is copied out."""
    return walk.order.style.spreads_pages and walk.num_pages > 1 and walk.num_staging_slots > 1


def _block_deliveries(walk: Walk, num_lanes: int) -> Iterator[Delivery]:
    """Loads groups of `walk.block` streamed stages, each while the previous group computes. Not used if the order
    spreads pages: the slots are then used for look-ahead."""
    times, num_streamed = _Timetable(walk, num_lanes), len(walk.streamed)
    starts = range(0, num_streamed, walk.block)
    for group, start in enumerate(starts):
        stages = walk.streamed[start : start + walk.block]
        # The last stage to use these slots: of the previous group, which for group 0 is in the previous pass.
        last_visit = starts[group - 1] - 1 - (num_streamed if group == 0 else 0)
        loads = [(op, stage) for op in _load_ops(walk) for stage in stages]
        yield (
            times.exit_gap(last_visit),
            [action for op, stage in loads for action in _load_actions(walk, op, stage)],
        )


def _load_ops(walk: Walk) -> list[Op]:
    return [Op.read] * walk.reads + [Op.copy] * walk.copies


def _load_actions(walk: Walk, op: Op, stage: int) -> list[Action]:
    if op is Op.read and stage in walk.in_host:
        return []
    return [_page_action(walk, op, stage, page) for page in range(walk.num_pages)]


def _page_action(walk: Walk, op: Op, stage: int, page: int) -> Action:
    return Action(op, stage, page=page if walk.num_pages > 1 else None)


def kv_transfers(walk: Walk, num_lanes: int) -> dict[int, list[Action]]:
    """Returns KV actions by gap. Fetches fill all slots when a pass starts. After each turn, its KV is stored and the
    slot is refilled."""
    if not walk.offloaded_kv:
        return {}
    turns = [
        (step, Action(Op.fetch, stage, lane), Action(Op.store, stage, lane))
        for step, (stage, lane) in enumerate(walk.turns(num_lanes))
        if stage in walk.offloaded_kv
    ]
    gaps = {0: [fetch for _, fetch, _ in turns[: walk.num_kv_slots]]}
    for index, (step, _, store) in enumerate(turns):
        next_turn = index + walk.num_kv_slots
        gaps[step + 1] = [store, *(fetch for _, fetch, _ in turns[next_turn : next_turn + 1])]
    return gaps


@dataclass(frozen=True, kw_only=True)
class Schedule:
    prologue: tuple[Action, ...]
    cycle: tuple[Action, ...]

    def __str__(self) -> str:
        return "\n".join(["# prologue", *map(str, self.prologue), "# cycle", *map(str, self.cycle)])


def make_schedule(walk: Walk, num_lanes: int) -> Schedule:
    """Returns the walk's compute order, with weights and KV loaded as soon as their slots are free.

    One slot reads no weights ahead (prefetch off); k+1 slots read k stages ahead; block b > 1 reads groups of b stages
    while the previous group computes. Raises the ConfigError of `require_slots`.
    """
    require_slots(walk, num_lanes)
    weights, kv = weight_transfers(walk, num_lanes), kv_transfers(walk, num_lanes)
    # A slot is reusable only after the stage's last lane.
    frees = {(stage - walk.first_stage + 1) * num_lanes: [Action(Op.free, stage)] for stage in walk.streamed}

    def actions_at(gap: int) -> list[Action]:
        """Returns the actions of a gap. KV comes first: it is small, and the next turn waits for it."""
        return [action for actions in (kv, frees, weights.gaps) for action in actions.get(gap, ())]

    cycle = actions_at(0)
    for gap, step in enumerate(lane_steps(walk, num_lanes), start=1):
        cycle += step
        cycle += actions_at(gap)
    return Schedule(prologue=tuple(weights.prologue), cycle=tuple(cycle))


def require_slots(walk: Walk, num_lanes: int) -> None:
    """Raises ConfigError if the walk has too few or too many slots, of weights or of KV, for its order."""
    num_overlapping = walk.order.style.num_ahead if set(walk.offloaded_kv) & set(walk.cpu_attention) else 0
    needed = min(1 + num_overlapping, num_lanes)  # turns of a stage that overlap
    if walk.offloaded_kv and walk.num_kv_slots < needed:
        raise ConfigError(
            f"kv.num_slots={walk.num_kv_slots}: policy.schedule={walk.order.value} attends for {needed} lanes of a "
            f"stage at a time: set kv.num_slots={needed}"
        )
    if walk.num_slots > len(walk.streamed) > 0:
        raise ConfigError(
            f"{walk.num_slots} slots for {len(walk.streamed)} streamed stages: "
            "lower prefetch.depth or prefetch.block_layers"
        )
    needed = min(walk.order.style.num_slots, len(walk.streamed))
    if walk.num_slots < needed:
        raise ConfigError(
            f"{walk.num_slots} slots, but policy.schedule={walk.order.value} loads a stage while the previous one is "
            f"computed, which takes {needed}: set prefetch=lookahead and prefetch.depth=1 or more"
        )


def lane_steps(walk: Walk, num_lanes: int) -> Iterator[list[Action]]:
    """Yields the steps of one pass, one per turn; step t ends turn t, see `runtime/config/orders.py`.

    Lanes `run` a stage. With attention on the CPU they `pre`, `attend` and `post` it; with experts batched over all
    lanes they `route`, and `end` it after `experts`.
    """
    if walk.is_lane_major:
        for stage, lane in walk.turns(num_lanes):  # turns do not overlap
            ops = (Op.pre, Op.attend, Op.post) if stage in walk.cpu_attention else (Op.run,)
            yield [each for op in ops for each in _with_transfers(walk, Action(op, stage, lane))]
        return
    for step in _steps_by_stage(walk, num_lanes):
        yield [action for each in step for action in _with_transfers(walk, each)]


def _with_transfers(walk: Walk, action: Action) -> Iterator[Action]:
    """Yields the action, with `recv` before it or `send` after it at the boundaries of a pipeline rank."""
    op, stage, lane = action.op, action.stage, action.lane
    enters = op in (Op.run, Op.pre) or (op is Op.route and stage not in walk.cpu_attention)
    if walk.receives and enters and stage == walk.first_stage:
        yield Action(Op.recv, stage, lane)
    yield action
    if walk.sends and op in (Op.run, Op.post, Op.end) and stage == walk.num_stages - 1:
        yield Action(Op.send, stage, lane)


def _steps_by_stage(walk: Walk, num_lanes: int) -> Iterator[list[Action]]:
    style, on_cpu = walk.order.style, frozenset(walk.cpu_attention)
    turns = walk.turns(num_lanes)
    begun = ended = 0  # turns; a lane begins one only after its previous turn, `num_lanes` earlier, has ended
    for index, (stage, lane) in enumerate(turns):
        stage_end = index - lane + num_lanes
        limit = min(index + 1 + style.num_ahead, ended + num_lanes, len(turns) if style.crosses_stages else stage_end)
        step = [Action(op, *turn) for turn in turns[begun:limit] if turn[0] in on_cpu for op in (Op.pre, Op.attend)]
        if stage in walk.batched_experts:
            step.append(Action(Op.route, stage, lane))
            if lane + 1 == num_lanes:
                step += [Action(Op.experts, stage), *[Action(Op.end, stage, each) for each in range(num_lanes)]]
        else:
            step.append(Action(Op.post if stage in on_cpu else Op.run, stage, lane))
        begun = limit
        ended = index + 1 if stage not in walk.batched_experts else stage_end if index + 1 == stage_end else ended
        yield step + [Action(Op.sync, None)] * style.has_barriers
