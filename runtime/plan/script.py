"""A schedule as flat lines that the simulator plays: what each works at, how long, and what it waits for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from .actions import Action, Op
from .schedule import Schedule

DISK, LINK_IN, LINK_OUT, COMPUTE, CPU = range(5)  # `cost.Resource`, in its order
SYNC = 5
NEVER = 0  # the event that has always happened
UNSEEN = 1  # one that nobody waits for


@dataclass(frozen=True, kw_only=True)
class ExpertReads:
    """What an action brings in by itself: experts one by one, `num_experts` of them, each computed as it arrives.

    `read_seconds` and `copy_seconds` are of all of them; of the action's own seconds `dense_seconds` come before the
    first expert is needed, and reading begins `lead_seconds` before that.
    """

    num_experts: int
    read_seconds: float
    copy_seconds: float
    dense_seconds: float
    lead_seconds: float


def _of_stage(stage: int) -> float:
    return 0.0


def _of_turn(stage: int, lane: int) -> float:
    return 0.0


def _no_reads(action: Action) -> ExpertReads | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds of each action, by stage or by stage and lane. `read` and `copy` are of a whole stage, of whose seconds a
    page takes its share; `fetch` and `store` over the link, or where `is_kv_on_disk` over the disk, from which
    `fetch_copy` and `store_copy` lead on over the link."""

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
    expert_reads: Callable[[Action], ExpertReads | None] = _no_reads
    num_pages: int = 1
    is_kv_on_disk: bool = False
    cpu_is_compute: bool = False  # the CPU's workers and the products share the same cores

    def of(self, action: Action) -> float:
        seconds = getattr(self, action.op.value)
        if action.lane is not None:
            return seconds(*action.turn)
        return seconds(action.its_stage) / (1 if action.page is None else self.num_pages)


class Line(NamedTuple):
    """`kind`: a resource, or a barrier. It begins behind the events `after` and `too`, and its end is `event`."""

    kind: int
    seconds: float
    after: int
    too: int
    event: int
    action: Action
    reads: ExpertReads | None
    on_compute: bool  # compute does it, or waits for it


Lines: TypeAlias = list[Line]


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
    """A schedule as lines."""

    def __init__(self, schedule: Schedule, durations: Durations, events: Events):
        self._durations, self._event = durations, events.of
        actions = (*schedule.prologue, *schedule.cycle)
        self._copied = {action.stage for action in actions if action.op is Op.copy}
        self.prologue, self.cycle = self._lines(schedule.prologue), self._lines(schedule.cycle)

    def _lines(self, actions: Sequence[Action]) -> Lines:
        return [line for action in actions for line in self._made(action)]

    def _made(self, action: Action) -> list[Line]:
        op, stage = action.op, action.stage
        if op is Op.free:
            return []
        if op is Op.sync:
            return [Line(SYNC, 0.0, NEVER, NEVER, UNSEEN, action, None, True)]
        seconds = self._durations.of(action)
        if op is Op.read:
            event = self._event(stage, "read", action.page) if stage in self._copied else self._event(stage)
            return [self._line(DISK, seconds, action, event=event)]
        if op is Op.copy:
            return [self._line(LINK_IN, seconds, action, self._event(stage, "read", action.page), self._event(stage))]
        turn = self._event(stage, action.lane)
        if op is Op.attend:
            return [self._line(CPU, seconds, action, event=turn, on_compute=self._durations.cpu_is_compute)]
        if op is Op.fetch:
            return self._carried(action, [DISK, LINK_IN], seconds, self._durations.fetch_copy, turn)
        if op is Op.store:
            return self._carried(action, [LINK_OUT, DISK], seconds, self._durations.store_copy, UNSEEN)
        reads = self._durations.expert_reads(action)
        return [Line(COMPUTE, seconds, self._event(stage), turn, UNSEEN, action, reads, True)]

    def _carried(
        self, action: Action, road: Sequence[int], seconds: float, copy: Callable[[int, int], float], event: int
    ) -> list[Line]:
        """KV over the link, or over disk and link, one behind the other."""
        link = next(part for part in road if part != DISK)
        if not self._durations.is_kv_on_disk:
            return [self._line(link, seconds, action, event=event)]
        copied = copy(*action.turn)
        if not copied:
            return [self._line(DISK, seconds, action, event=event)]
        first, second = ((part, copied if part == link else seconds) for part in road)
        between = self._event(*action.turn, action.op)
        return [self._line(*first, action, event=between), self._line(*second, action, between, event)]

    def _line(
        self,
        kind: int,
        seconds: float,
        action: Action,
        after: int = NEVER,
        event: int = UNSEEN,
        *,
        on_compute: bool = False,
    ) -> Line:
        return Line(kind, seconds, after, NEVER, event, action, None, on_compute)
