"""A schedule as flat lines that the simulator plays: what each works at, what it waits for, and for how long."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ...resources import Resource
from ..schedule.actions import Action, Op
from ..schedule.schedule import Schedule

DISK, LINK_IN, LINK_OUT, COMPUTE, CPU, HOST = (resource.number for resource in Resource)
SYNC = len(Resource)
NEVER = 0  # the event that has always happened
UNSEEN = 1  # one that nobody waits for


@dataclass(frozen=True, kw_only=True)
class ExpertReads:
    """What an action brings in by itself: experts one by one, `num_experts` of them, each computed as it arrives.

    `read_seconds` and `copy_seconds` are of all of them; of the action's own seconds `dense_seconds` come before the
    first expert is needed, and reading begins `lead_seconds` before that. Beside them the CPU multiplies others for
    `cpu_seconds`, whose weights take `host_seconds` of host memory.
    """

    num_experts: int
    read_seconds: float
    copy_seconds: float
    dense_seconds: float
    lead_seconds: float
    cpu_seconds: float = 0.0
    host_seconds: float = 0.0


def _of_stage(stage: int) -> float:
    return 0.0


def _of_turn(stage: int, lane: int) -> float:
    return 0.0


class Links(NamedTuple):
    """The links by which an action goes: whether KV goes to the disk, and from there on over the link; and whether the
    CPU's workers and the products share the same cores."""

    is_kv_on_disk: bool = False
    has_link_behind: bool = False
    cpu_is_compute: bool = False


OVER_LINK = Links()


class Line(NamedTuple):
    """`kind`: the number of a resource, or a barrier. It begins behind the events `after` and `too`, and its end is
    `event`. `price` names the field of `Durations` that says how long it takes."""

    kind: int
    after: int
    too: int
    event: int
    action: Action
    on_compute: bool  # compute does it, or waits for it
    price: str


Lines: TypeAlias = list[Line]


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds of each action, by stage or by stage and lane. `read` and `copy` are of a whole stage, of whose seconds a
    page takes its share; `fetch` and `store` over the link, or where `links` say so over the disk, from which
    `fetch_copy` and `store_copy` lead on over the link. `expert_reads`: None where no action reads any. Of host memory
    a resource that works takes its share by `host_shares`, the CPU's attention takes `host_attend`."""

    read: Callable[[int], float] = _of_stage
    copy: Callable[[int], float] = _of_stage
    experts: Callable[[int], float] = _of_stage
    run: Callable[[int, int], float] = _of_turn
    pre: Callable[[int, int], float] = _of_turn
    attend: Callable[[int, int], float] = _of_turn
    post: Callable[[int, int], float] = _of_turn
    route: Callable[[int, int], float] = _of_turn
    end: Callable[[int, int], float] = _of_turn
    fetch: Callable[[int, int], float] = _of_turn
    store: Callable[[int, int], float] = _of_turn
    fetch_copy: Callable[[int, int], float] = _of_turn
    store_copy: Callable[[int, int], float] = _of_turn
    expert_reads: Callable[[Action], ExpertReads | None] | None = None
    host_attend: Callable[[int, int], float] = _of_turn
    host_shares: Mapping[int, float] = field(default_factory=dict)
    num_pages: int = 1
    links: Links = OVER_LINK

    def of(self, lines: Lines) -> list[float]:
        """The seconds of each line; a barrier takes none by itself."""
        prices: dict[str, Callable[..., float]]
        prices = {price: getattr(self, price, _of_stage) for price in {line.price for line in lines}}
        return [
            prices[line.price](line.action.stage, line.action.lane)
            if line.action.lane is not None
            else prices[line.price](line.action.stage) / (1 if line.action.page is None else self.num_pages)
            for line in lines
        ]


class Events:
    """Numbers of what compute may wait for: pages read, weights in their places, KV and attention of a turn."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}

    @property
    def count(self) -> int:
        return len(self._numbers) + 2

    def of(self, *key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers) + 2)


class Script:
    """A schedule as lines. Scripts that are played one behind the other share their events."""

    def __init__(self, schedule: Schedule, links: Links, events: Events | None = None):
        self.events = events or Events()
        self._roads = links
        actions = (*schedule.prologue, *schedule.cycle)
        self._copied = {action.stage for action in actions if action.op is Op.copy}
        self._staged_before = _staging_before(schedule)
        self.prologue, self.cycle = self._lines(schedule.prologue), self._lines(schedule.cycle)

    def _lines(self, actions: Sequence[Action]) -> Lines:
        return [line for action in actions for line in self._made(action)]

    def _made(self, action: Action) -> list[Line]:
        op, stage, event = action.op, action.stage, self.events.of
        if op is Op.free:
            return []
        if op is Op.sync:
            return [Line(SYNC, NEVER, NEVER, UNSEEN, action, True, op.value)]
        if op is Op.read:
            read = event(stage, "read", action.page) if stage in self._copied else event(stage)
            left = event(self._staged_before[action.its_stage]) if stage in self._copied else NEVER
            return [_line(DISK, action, left, read)]
        if op is Op.copy:
            return [_line(LINK_IN, action, event(stage, "read", action.page), event(stage))]
        turn = event(stage, action.lane)
        if op is Op.attend:
            return [_line(CPU, action, event=turn, on_compute=self._roads.cpu_is_compute)]
        if op is Op.fetch:
            return self._carried(action, (DISK, LINK_IN), turn)
        if op is Op.store:
            return self._carried(action, (LINK_OUT, DISK), UNSEEN)
        return [Line(COMPUTE, event(stage), turn, UNSEEN, action, True, op.value)]

    def _carried(self, action: Action, path: tuple[int, int], event: int) -> list[Line]:
        """KV over the link, or over disk and link, one behind the other."""
        link = next(part for part in path if part != DISK)
        if not self._roads.is_kv_on_disk:
            return [_line(link, action, event=event)]
        if not self._roads.has_link_behind:
            return [_line(DISK, action, event=event)]
        between, copy = self.events.of(*action.turn, action.op), f"{action.op.value}_copy"
        first, second = ((part, copy if part == link else action.op.value) for part in path)
        return [
            _line(first[0], action, event=between, price=first[1]),
            _line(second[0], action, between, event, price=second[1]),
        ]


def _staging_before(schedule: Schedule) -> dict[int, int]:
    """Gives for each stage that is read into staging, the one whose copy must have left that memory. Slots are as many
    as are ever in use, and go round as the stages do."""
    every = (*schedule.prologue, *schedule.cycle)
    are_read = {action.stage for action in every if action.op is Op.read}
    actions = [action for action in every if action.stage in are_read]
    copied_pages = [action.page or 0 for action in actions if action.op is Op.copy]
    if not copied_pages:
        return {}
    last_page = max(copied_pages)
    num_used = num_slots = 0
    for action in actions:
        num_used += action.op is Op.read and not action.page
        num_used -= action.op is Op.copy and action.page in (None, last_page)
        num_slots = max(num_slots, num_used)
    order = [action.its_stage for action in schedule.cycle if action.op is Op.read and not action.page]
    return {stage: order[place - num_slots] for place, stage in enumerate(order)}


def _line(
    kind: int,
    action: Action,
    after: int = NEVER,
    event: int = UNSEEN,
    *,
    on_compute: bool = False,
    price: str | None = None,
) -> Line:
    return Line(kind, after, NEVER, event, action, on_compute, price or action.op.value)
