"""Discrete-event simulator: predicts the time of a schedule on a disk, a link in both directions, a compute device, and
CPU attention, which share host memory.

A schedule is compiled once to a **script** of lines. Each line has a resource, the events that it waits for, and the
name of its duration. Numbers that depend on the machine are in `durations`. The simulation is deterministic.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from ...resources import Resource
from ..schedule.actions import Action, Op
from ..schedule.schedule import Schedule

DISK, LINK_IN, LINK_OUT, COMPUTE, CPU, HOST = (resource.number for resource in Resource)
_RESOURCES = tuple(Resource)  # by their numbers
SYNC = len(Resource)  # kind of a barrier, which uses no resource
NO_EVENT = 0  # event for a line that waits for nothing: it lies in the past
UNUSED_EVENT = 1  # event for a line that no other line waits for


@dataclass(frozen=True, kw_only=True)
class ExpertReads:
    """Experts that an action reads one by one. Each is computed when it has arrived."""

    num_experts: int
    read_seconds: float  # from disk, all experts together
    copy_seconds: float  # to the device, all experts together
    dense_seconds: float  # compute of the action before the experts
    lead_seconds: float  # reading starts this long before the end of `dense_seconds`
    cpu_seconds: float = 0.0  # time in which the CPU computes further experts, after `dense_seconds`
    host_seconds: float = 0.0  # host memory time to read the weights of the CPU's experts

    @property
    def busy(self) -> tuple[tuple[int, float], ...]:
        """Busy seconds of resources other than compute, by resource number."""
        return (
            (DISK, self.read_seconds),
            (LINK_IN, self.copy_seconds),
            (CPU, self.cpu_seconds),
            (HOST, self.host_seconds),
        )

    def compute_spans(self, action: Action, begin: float, end: float, seconds: float) -> "list[SimulatedSpan]":
        """Returns the spans of compute for an action that lasts from `begin` to `end` and is busy for `seconds`.

        All waiting is shown between the part without experts and the experts.
        """
        parts = [(begin, begin + self.dense_seconds), (end - (seconds - self.dense_seconds), end)]
        if end - begin <= seconds:
            parts = [(begin, end)]
        return [SimulatedSpan(Resource.compute, action, *part) for part in parts if part[1] > part[0]]


def _no_stage_seconds(stage: int) -> float:
    return 0.0


def _no_turn_seconds(stage: int, lane: int) -> float:
    return 0.0


class Links(NamedTuple):
    """Resources that KV transfers and CPU attention use."""

    is_kv_on_disk: bool = False  # False: KV transfers use the link
    has_link_behind: bool = False  # KV on disk also crosses the link to the device
    cpu_is_compute: bool = False  # CPU attention runs on the cores that compute everything else


OVER_LINK = Links()


class ScriptLine(NamedTuple):
    """One step of a script."""

    kind: int  # a resource number, or SYNC
    after: int  # event that must have happened before the step starts
    also_after: int  # a second such event
    event: int  # event that happens when the step ends
    action: Action
    on_compute: bool  # the step uses compute, or compute waits for it
    duration: str  # the field of `Durations` with its seconds


Lines: TypeAlias = list[ScriptLine]


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds of each action, as functions of stage, or of stage and lane.

    Most fields have the name of their action. `read` and `copy` are for a whole stage; its pages take equal shares.
    `fetch` and `store` use the link, or the disk if `links` has KV on disk. In the latter case, `fetch_copy` and
    `store_copy` are the copies between host and device.
    """

    read: Callable[[int], float] = _no_stage_seconds
    copy: Callable[[int], float] = _no_stage_seconds
    experts: Callable[[int], float] = _no_stage_seconds
    run: Callable[[int, int], float] = _no_turn_seconds
    pre: Callable[[int, int], float] = _no_turn_seconds
    attend: Callable[[int, int], float] = _no_turn_seconds
    post: Callable[[int, int], float] = _no_turn_seconds
    route: Callable[[int, int], float] = _no_turn_seconds
    end: Callable[[int, int], float] = _no_turn_seconds
    fetch: Callable[[int, int], float] = _no_turn_seconds
    store: Callable[[int, int], float] = _no_turn_seconds
    fetch_copy: Callable[[int, int], float] = _no_turn_seconds
    store_copy: Callable[[int, int], float] = _no_turn_seconds
    expert_reads: Callable[[Action], ExpertReads | None] | None = None  # None: no action reads experts
    host_attend: Callable[[int, int], float] = _no_turn_seconds  # host memory time of CPU attention
    host_shares: Mapping[int, float] = field(default_factory=dict)  # resource number -> share of host memory
    num_pages: int = 1  # per stage
    links: Links = OVER_LINK

    def line_seconds(self, lines: Lines) -> list[float]:
        """Returns the seconds of each line; 0 for actions without a field, such as barriers."""
        costs: dict[str, Callable[..., float]]
        costs = {name: getattr(self, name, _no_stage_seconds) for name in {line.duration for line in lines}}
        # Actions of a lane, of a whole stage, or of one page of a stage.
        return [
            costs[line.duration](line.action.stage, line.action.lane)
            if line.action.lane is not None
            else costs[line.duration](line.action.stage) / (1 if line.action.page is None else self.num_pages)
            for line in lines
        ]


class Events:
    """Assigns numbers to the events that lines wait for. Numbers 0 and 1 are `NO_EVENT` and `UNUSED_EVENT`.

    Keys of events: (stage, "read", page) if a page is in a staging slot, (stage,) if the stage's weights are in compute
    memory, (stage, lane) if the KV is loaded or CPU attention is done.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}

    @property
    def count(self) -> int:
        return len(self._numbers) + 2

    def number(self, *key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers) + 2)


class Script:
    """A schedule compiled to lines. Scripts that are simulated one after another must share their `events`."""

    def __init__(self, schedule: Schedule, links: Links, events: Events | None = None):
        self.events = events or Events()
        self._links = links
        actions = (*schedule.prologue, *schedule.cycle)
        self._copied = {action.stage for action in actions if action.op is Op.copy}
        self._previous_stage = _previous_in_slot(schedule)
        self.prologue: Lines = [line for action in schedule.prologue for line in self._make_lines(action)]
        self.cycle: Lines = [line for action in schedule.cycle for line in self._make_lines(action)]

    def _make_lines(self, action: Action) -> list[ScriptLine]:
        """Returns the lines of an action: none, one, or for KV that crosses two resources two."""
        op, stage, event = action.op, action.stage, self.events.number
        if op is Op.free:
            return []
        if op is Op.sync:
            return [ScriptLine(SYNC, NO_EVENT, NO_EVENT, UNUSED_EVENT, action, True, op.value)]
        if op is Op.read:
            read = event(stage, "read", action.page) if stage in self._copied else event(stage)
            slot_free = event(self._previous_stage[action.stage_index]) if stage in self._copied else NO_EVENT
            return [_line(DISK, action, slot_free, read)]
        if op is Op.copy:
            return [_line(LINK_IN, action, event(stage, "read", action.page), event(stage))]
        turn = event(stage, action.lane)
        if op is Op.attend:
            return [_line(CPU, action, event=turn, on_compute=self._links.cpu_is_compute)]
        if op is Op.fetch:
            return self._kv_lines(action, (DISK, LINK_IN), turn)
        if op is Op.store:
            return self._kv_lines(action, (LINK_OUT, DISK), UNUSED_EVENT)
        return [ScriptLine(COMPUTE, event(stage), turn, UNUSED_EVENT, action, True, op.value)]

    def _kv_lines(self, action: Action, path: tuple[int, int], event: int) -> list[ScriptLine]:
        """Returns the lines of a KV transfer: over the link, from or to the disk, or both in the order of `path`."""
        link = next(resource for resource in path if resource != DISK)
        if not self._links.is_kv_on_disk:
            return [_line(link, action, event=event)]
        if not self._links.has_link_behind:
            return [_line(DISK, action, event=event)]
        durations = {DISK: action.op.value, link: f"{action.op.value}_copy"}
        first, second = path
        first_done = self.events.number(*action.turn, action.op)
        return [
            _line(first, action, event=first_done, duration=durations[first]),
            _line(second, action, first_done, event, duration=durations[second]),
        ]


def _previous_in_slot(schedule: Schedule) -> dict[int, int]:
    """Maps each stage that is read into a staging slot to the previous stage in this slot, which must be copied first.

    Slots are used in rotation. Their number is the maximum number of stages that are read but not copied yet.
    """
    all_actions = (*schedule.prologue, *schedule.cycle)
    stages_read = {action.stage for action in all_actions if action.op is Op.read}
    actions = [action for action in all_actions if action.stage in stages_read]
    copied_pages = [action.page or 0 for action in actions if action.op is Op.copy]
    if not copied_pages:
        return {}
    last_page = max(copied_pages)
    num_used = num_slots = 0
    for action in actions:
        num_used += action.op is Op.read and not action.page
        num_used -= action.op is Op.copy and action.page in (None, last_page)
        num_slots = max(num_slots, num_used)
    order = [action.stage_index for action in schedule.cycle if action.op is Op.read and not action.page]
    # A negative index is a stage of the previous pass.
    return {stage: order[index - num_slots] for index, stage in enumerate(order)}


def _line(
    kind: int,
    action: Action,
    after: int = NO_EVENT,
    event: int = UNUSED_EVENT,
    *,
    on_compute: bool = False,
    duration: str | None = None,
) -> ScriptLine:
    return ScriptLine(kind, after, NO_EVENT, event, action, on_compute, duration or action.op.value)


class SimulatedSpan(NamedTuple):
    """Time from `begin` to `end`, in seconds, in which a resource is busy with one action."""

    resource: Resource
    action: Action
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """Total time of several passes, such as all passes of a phase."""

    num_passes: float = 0.0
    seconds: float = 0.0
    stall_seconds: float = 0.0  # compute waits for weights, experts, KV, attention, barriers or host memory
    busy_seconds: Mapping[Resource, float] = field(default_factory=lambda: dict.fromkeys(Resource, 0.0))

    def plus(self, other: "PhaseTime", times: float = 1.0) -> "PhaseTime":
        return PhaseTime(
            num_passes=self.num_passes + times * other.num_passes,
            seconds=self.seconds + times * other.seconds,
            stall_seconds=self.stall_seconds + times * other.stall_seconds,
            busy_seconds={r: self.busy_seconds[r] + times * other.busy_seconds[r] for r in Resource},
        )

    @property
    def binding(self) -> Resource | None:
        """The busiest resource; None without passes."""
        busy = self.busy_seconds
        return max(busy, key=lambda resource: busy[resource]) if self.seconds else None

    def bubble_seconds(self, resource: Resource) -> float:
        """Returns the idle seconds of a resource during the passes."""
        return max(0.0, self.seconds - self.busy_seconds[resource])


class SimulatedPass(NamedTuple):
    """A simulated pass."""

    begin: float  # on compute
    end: float  # on compute
    spans: Sequence[SimulatedSpan]  # of all resources, in the order of the schedule


def simulate(schedule: Schedule, num_passes: int, durations: Durations) -> PhaseTime:
    """Simulates the prologue (actions before the first pass) and `num_passes` cycles of a schedule.

    Actions start in the order of the schedule, as in the engine, where one thread computes and starts transfers. Slots
    are not modeled: a checked schedule never uses more than there are, and a KV slot is empty before its next fetch
    arrives. Host memory has no queue, but a pass takes at least the time to move all its bytes through host memory.
    Simulates about a million actions per second.
    """
    return simulate_each(Script(schedule, durations.links), [num_passes], durations)[0]


def simulate_each(script: Script, counts: Sequence[int], durations: Durations) -> list[PhaseTime]:
    """Returns the results of `simulate` for several numbers of passes, from one simulation of the largest number.

    `counts` must be ascending. `script` must be compiled with the links of `durations`.
    """
    clock, times, num_done = _Clock(script.events.count), list[PhaseTime](), 0
    prologue, cycle = (
        _TimedLines.from_script(script.prologue, durations),
        _TimedLines.from_script(script.cycle, durations),
    )
    clock.play(prologue)
    prologue_busy, cycle_busy = prologue.busy(), cycle.busy()
    for count in counts:
        for number in range(num_done + 1, count + 1):
            clock.play(cycle)
            clock.wait_until(prologue_busy[HOST] + number * cycle_busy[HOST])
        num_done = count
        busy = {each: prologue_busy[each.number] + count * cycle_busy[each.number] for each in Resource}
        times.append(
            PhaseTime(num_passes=count, seconds=clock.now, stall_seconds=clock.stall_seconds, busy_seconds=busy)
        )
    return times


def simulate_passes(passes: Sequence[tuple[Schedule, Durations]], pass_seconds: float = 0.0) -> list[SimulatedPass]:
    """Simulates one pass of each schedule, one after another.

    If the previous pass has the same prologue, slots are filled already and the prologue is skipped. `pass_seconds`:
    overhead on compute after each pass, during which reads continue.
    """
    events = Events()
    scripts = [Script(schedule, durations.links, events) for schedule, durations in passes]
    clock, results = _Clock(events.count), list[SimulatedPass]()
    filled: Sequence[Action] | None = None
    host_seconds = 0.0
    for (schedule, durations), script in zip(passes, scripts, strict=True):
        begin, spans = clock.now, list[SimulatedSpan]()
        parts = [script.cycle] if schedule.prologue == filled else [script.prologue, script.cycle]
        for timed in (_TimedLines.from_script(lines, durations) for lines in parts):
            clock.play(timed, spans)
            host_seconds += timed.busy()[HOST]
        clock.wait_until(host_seconds)
        clock.now += pass_seconds
        results.append(SimulatedPass(begin, clock.now, spans))
        filled = schedule.prologue
    return results


@dataclass(frozen=True)
class _TimedLines:
    """Lines with their seconds and expert reads."""

    lines: Lines
    seconds: Sequence[float]
    reads: Sequence[ExpertReads | None]
    durations: Durations

    @staticmethod
    def from_script(lines: Lines, durations: Durations) -> "_TimedLines":
        expert_reads = durations.expert_reads
        reads = [None if expert_reads is None or line.kind != COMPUTE else expert_reads(line.action) for line in lines]
        return _TimedLines(lines, durations.line_seconds(lines), reads, durations)

    def busy(self) -> list[float]:
        """Returns the busy seconds of each resource, by number."""
        busy, attend = [0.0] * (SYNC + 1), self.durations.host_attend
        for line, seconds in zip(self.lines, self.seconds, strict=True):
            busy[line.kind] += seconds
            if line.kind == CPU:
                busy[HOST] += attend(*line.action.turn)
        for reads in filter(None, self.reads):
            for number, seconds in reads.busy:
                busy[number] += seconds
        busy[HOST] += sum(share * busy[number] for number, share in self.durations.host_shares.items())
        return busy[:SYNC]


class _Clock:
    """State of a simulation."""

    def __init__(self, num_events: int):
        self.now = 0.0  # time up to which compute is done
        self.stall_seconds = 0.0  # time that compute has waited
        self._free = [0.0] * len(_RESOURCES)  # the time when each resource becomes free
        self._ends = [0.0] * num_events  # the time when each event happens

    def wait_until(self, second: float) -> None:
        """Advances compute to `second`, unless it is later already."""
        self.stall_seconds += max(0.0, second - self.now)
        self.now = max(self.now, second)

    def play(self, timed: _TimedLines, spans: list[SimulatedSpan] | None = None) -> None:
        """Runs lines, and appends their busy times to `spans`.

        A line on compute waits for its events, and later lines wait for it. All other lines queue at their resource.
        The code is one loop over local variables for speed.
        """
        now, stalled, free, ends = self.now, self.stall_seconds, self._free, self._ends
        timed_lines = zip(timed.lines, timed.seconds, timed.reads, strict=True)
        for (kind, after, also_after, event, action, on_compute, _), seconds, reads in timed_lines:
            if on_compute:
                ready = ends[after] if ends[after] > ends[also_after] else ends[also_after]
                if kind == SYNC:
                    ready = max(free)
                if ready > now:
                    stalled += ready - now
                    now = ready
                begin = now
                end = now = (
                    begin + seconds if reads is None else self._play_experts(begin, seconds, reads, action, spans)
                )
                stalled += end - begin - seconds
            else:
                begin = free[kind] if free[kind] > now else now
                if ends[after] > begin:
                    begin = ends[after]
                end = free[kind] = ends[event] = begin + seconds
            if spans is not None and kind != SYNC and end > begin:
                if reads is None:
                    spans.append(SimulatedSpan(_RESOURCES[kind], action, begin, end))
                else:
                    spans += reads.compute_spans(action, begin, end, seconds)
        self.now, self.stall_seconds = now, stalled

    def _play_experts(
        self, begin: float, seconds: float, reads: ExpertReads, action: Action, spans: list[SimulatedSpan] | None
    ) -> float:
        """Returns the time when all experts are done: those that are read, and those that the CPU computes."""
        dense_end, free = begin + reads.dense_seconds, self._free
        end = self._play_expert_reads(begin, seconds, reads, action, spans) if reads.num_experts else begin + seconds
        if not reads.cpu_seconds:
            return end
        cpu_begin = max(free[CPU], dense_end)
        free[CPU] = cpu_begin + reads.cpu_seconds
        if spans is not None:
            spans.append(SimulatedSpan(Resource.cpu_attention, Action(Op.experts, action.stage), cpu_begin, free[CPU]))
        return max(end, free[CPU])

    def _play_expert_reads(
        self, begin: float, seconds: float, reads: ExpertReads, action: Action, spans: list[SimulatedSpan] | None
    ) -> float:
        """Returns the time when all experts that are read are done.

        An expert is computed when it has arrived and the previous one is done. So the end is the first arrival plus
        the compute of all experts, or the last arrival plus the compute of one expert if that is later.
        """
        count, free = max(1, reads.num_experts), self._free
        requested = begin + reads.dense_seconds - reads.lead_seconds
        read, copy = reads.read_seconds / count, reads.copy_seconds / count
        read_begin = max(free[DISK], requested) if reads.read_seconds else requested
        first_arrival = max(read_begin + read, free[LINK_IN]) + copy
        last_arrival = max(read_begin + reads.read_seconds + copy, first_arrival + (count - 1) * copy)
        if reads.read_seconds:
            free[DISK] = read_begin + reads.read_seconds
        free[LINK_IN] = max(free[LINK_IN], last_arrival)
        if spans is not None and reads.read_seconds:
            spans.append(SimulatedSpan(Resource.disk, Action(Op.read, action.stage), read_begin, free[DISK]))
        if spans is not None and reads.copy_seconds:
            copy_begin = last_arrival - reads.copy_seconds  # shown as if only the first expert waited for its read
            spans.append(
                SimulatedSpan(Resource.host_to_device, Action(Op.copy, action.stage), copy_begin, last_arrival)
            )
        expert_seconds = seconds - reads.dense_seconds
        return max(
            max(begin + reads.dense_seconds, first_arrival) + expert_seconds, last_arrival + expert_seconds / count
        )
