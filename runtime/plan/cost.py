"""Executes a schedule on a cost model instead of a machine and says how long it takes: a disk, a link with two
directions, a compute device, and the CPU's attention workers.

Pure and deterministic. What an action takes comes from `durations`; nothing here is a constant of some machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

from .actions import Action, Op
from .schedule import Schedule


class Resource(Enum):
    """What works side by side; each does one thing at a time, in the order in which things are begun."""

    disk = "disk"
    link_in = "host-to-device"
    link_out = "device-to-host"
    compute = "compute"
    cpu = "CPU attention"


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


class Span(NamedTuple):
    """What a resource worked at, from and to, in seconds."""

    resource: Resource
    action: Action
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class SimulatedPasses:
    seconds: float  # of all passes together
    stall_seconds: float  # compute waited for weights, experts, KV, attention or a barrier
    busy_seconds: Mapping[Resource, float]
    timeline: Sequence[Span] = ()  # in the order in which things are begun, where it was asked for


def simulate(schedule: Schedule, num_passes: int, durations: Durations, *, timeline: bool = False) -> SimulatedPasses:
    """Plays prologue and cycles. Slots are not waited for: a schedule that passes the checker begins nothing for which
    there is none, and what is stored leaves before what is fetched in its place arrives.

    Actions are issued by compute's own clock, as the engine's thread does: nothing begins before it. A million actions
    take about a second: the schedule becomes flat lines once, which are then played in one loop.
    """
    spans: list[Span] | None = [] if timeline else None
    return _simulated(_Script(schedule, durations), [num_passes], spans)[0]


def simulate_each(schedule: Schedule, counts: Sequence[int], durations: Durations) -> list[SimulatedPasses]:
    """What `simulate` says of each of these numbers of passes, which rise, at the price of the last."""
    return _simulated(_Script(schedule, durations), counts, None)


def _simulated(script: "_Script", counts: Sequence[int], spans: list[Span] | None) -> list[SimulatedPasses]:
    clock, found, done = _Clock(script.num_events), list[SimulatedPasses](), 0
    clock.play(script.prologue, spans)
    begun, each = (
        [_busy(lines, index) for index in range(len(_RESOURCES))] for lines in (script.prologue, script.cycle)
    )
    for count in counts:
        for _ in range(count - done):
            clock.play(script.cycle, spans)
        done = count
        busy = {resource: begun[index] + count * each[index] for index, resource in enumerate(_RESOURCES)}
        passes = SimulatedPasses(
            seconds=clock.now, stall_seconds=clock.stall_seconds, busy_seconds=busy, timeline=tuple(spans or ())
        )
        found.append(passes)
    return found


_RESOURCES = tuple(Resource)
_DISK, _LINK_IN, _LINK_OUT, _COMPUTE, _CPU = range(5)
_SYNC = 5
_NEVER = 0  # the event that has always happened
_UNSEEN = 1  # one that nobody waits for


class _Line(NamedTuple):
    """`kind`: a resource, or a barrier. It begins behind the events `after` and `too`, and its end is `event`."""

    kind: int
    seconds: float
    after: int
    too: int
    event: int
    action: Action
    reads: ExpertReads | None
    on_compute: bool  # compute does it, or waits for it


_Lines: TypeAlias = list[_Line]


class _Script:
    """A schedule as lines. Events are what compute may wait for: pages read, weights in their places, KV and attention
    of a turn."""

    def __init__(self, schedule: Schedule, durations: Durations):
        self._durations = durations
        actions = (*schedule.prologue, *schedule.cycle)
        self._copied = {action.stage for action in actions if action.op is Op.copy}
        self._events: dict[tuple[object, ...], int] = {}
        self.prologue, self.cycle = self._lines(schedule.prologue), self._lines(schedule.cycle)

    @property
    def num_events(self) -> int:
        return len(self._events) + 2

    def _lines(self, actions: Sequence[Action]) -> _Lines:
        return [line for action in actions for line in self._made(action)]

    def _event(self, *key: object) -> int:
        return self._events.setdefault(key, len(self._events) + 2)

    def _made(self, action: Action) -> list[_Line]:
        op, stage = action.op, action.stage
        if op is Op.free:
            return []
        if op is Op.sync:
            return [_Line(_SYNC, 0.0, _NEVER, _NEVER, _UNSEEN, action, None, True)]
        seconds = self._durations.of(action)
        if op is Op.read:
            event = self._event(stage, "read", action.page) if stage in self._copied else self._event(stage)
            return [self._line(_DISK, seconds, action, event=event)]
        if op is Op.copy:
            return [self._line(_LINK_IN, seconds, action, self._event(stage, "read", action.page), self._event(stage))]
        turn = self._event(stage, action.lane)
        if op is Op.attend:
            return [self._line(_CPU, seconds, action, event=turn, on_compute=self._durations.cpu_is_compute)]
        if op is Op.fetch:
            return self._carried(action, [_DISK, _LINK_IN], seconds, self._durations.fetch_copy, turn)
        if op is Op.store:
            return self._carried(action, [_LINK_OUT, _DISK], seconds, self._durations.store_copy, _UNSEEN)
        reads = self._durations.expert_reads(action)
        return [_Line(_COMPUTE, seconds, self._event(stage), turn, _UNSEEN, action, reads, True)]

    def _carried(
        self, action: Action, road: Sequence[int], seconds: float, copy: Callable[[int, int], float], event: int
    ) -> list[_Line]:
        """KV over the link, or over disk and link, one behind the other."""
        link = next(part for part in road if part != _DISK)
        if not self._durations.is_kv_on_disk:
            return [self._line(link, seconds, action, event=event)]
        copied = copy(*action.turn)
        if not copied:
            return [self._line(_DISK, seconds, action, event=event)]
        first, second = ((part, copied if part == link else seconds) for part in road)
        between = self._event(*action.turn, action.op)
        return [self._line(*first, action, event=between), self._line(*second, action, between, event)]

    def _line(
        self,
        kind: int,
        seconds: float,
        action: Action,
        after: int = _NEVER,
        event: int = _UNSEEN,
        *,
        on_compute: bool = False,
    ) -> _Line:
        return _Line(kind, seconds, after, _NEVER, event, action, None, on_compute)


def _busy(lines: _Lines, resource: int) -> float:
    own = sum(line.seconds for line in lines if line.kind == resource)
    reads = [line.reads for line in lines if line.reads is not None]
    if resource == _DISK:
        return own + sum(each.read_seconds for each in reads)
    return own + sum(each.copy_seconds for each in reads) if resource == _LINK_IN else own


class _Clock:
    """Compute's time, when each resource is free, and when each event has happened."""

    def __init__(self, num_events: int):
        self.now, self.stall_seconds = 0.0, 0.0
        self._free, self._ends = [0.0] * len(_RESOURCES), [0.0] * num_events

    def play(self, lines: _Lines, spans: list[Span] | None) -> None:
        """One loop over local names, longer than functions here are: it is played a million times."""
        now, stalled, free, ends = self.now, self.stall_seconds, self._free, self._ends
        for kind, seconds, after, too, event, action, reads, on_compute in lines:
            if on_compute:
                until = ends[after] if ends[after] > ends[too] else ends[too]
                if kind == _SYNC:
                    until = max(free)
                if until > now:
                    stalled += until - now
                    now = until
                begin = now
                end = now = begin + seconds if reads is None else self._with_reads(begin, seconds, reads)
                stalled += end - begin - seconds
            else:
                begin = free[kind] if free[kind] > now else now
                if ends[after] > begin:
                    begin = ends[after]
                end = free[kind] = ends[event] = begin + seconds
            if spans is not None and kind != _SYNC:
                spans.append(Span(_RESOURCES[kind], action, begin, end))
        self.now, self.stall_seconds = now, stalled

    def _with_reads(self, begin: float, seconds: float, reads: ExpertReads) -> float:
        """Experts arrive one behind the other, and each is computed when it has arrived and the one before it is done:
        as long as it takes to get the first and compute all, or to get all and compute the last."""
        count, free = max(1, reads.num_experts), self._free
        asked = begin + reads.dense_seconds - reads.lead_seconds
        read, copy = reads.read_seconds / count, reads.copy_seconds / count
        start = max(free[_DISK], asked) if reads.read_seconds else asked
        first = max(start + read, free[_LINK_IN]) + copy
        last = max(start + reads.read_seconds + copy, first + (count - 1) * copy)
        if reads.read_seconds:
            free[_DISK] = start + reads.read_seconds
        free[_LINK_IN] = max(free[_LINK_IN], last)
        computing = seconds - reads.dense_seconds
        return max(max(begin + reads.dense_seconds, first) + computing, last + computing / count)
