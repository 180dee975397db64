"""A pass as a list of actions: made here, printed, parsed back, checked and simulated, and executed by the engine.

    read 7      disk -> host slot, begins in the background
    copy 7      host -> device slot, begins once its read is done (accelerators only)
    run 7.3     lane 3 passes stage 7, once the stage is ready
    free 7      the stage's slot may be reused when its compute has finished

A walk runs `Schedule.prologue` once, then one `Schedule.cycle` per pass. Reads at the end of a cycle are for the
stages of the next one: the walk over the stages is cyclic and the disk never waits for the turn of a pass. Only where
decode passes leave out an encoder do they walk another way than prefill passes; at such a turn slots begin anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..errors import ConfigError


class Op(Enum):
    read = "read"
    copy = "copy"
    run = "run"
    free = "free"


@dataclass(frozen=True)
class Action:
    op: Op
    stage: int
    lane: int | None = None

    def __str__(self) -> str:
        return f"{self.op.value} {self.stage}" + ("" if self.lane is None else f".{self.lane}")


def parse_action(text: str) -> Action:
    """The inverse of `str(action)`; raises ValueError naming the text."""
    op, _, target = text.strip().partition(" ")
    stage, dot, lane = target.partition(".")
    if op not in Op.__members__ or not stage.isdigit() or (dot and not lane.isdigit()) or bool(dot) != (op == "run"):
        raise ValueError(f"not an action: {text!r}; actions look like 'read 7', 'copy 7', 'run 7.3', 'free 7'")
    return Action(Op[op], int(stage), int(lane) if dot else None)


@dataclass(frozen=True, kw_only=True)
class Walk:
    """How streamed stages travel: which ones, in how many slots, and whether each hop exists.

    `block`: stages are read and freed in groups of this many; 1 for every other prefetch.
    """

    num_stages: int
    streamed: tuple[int, ...]
    num_slots: int  # where compute finds the weights
    num_staging_slots: int = 0  # host slots in front of device slots; 0 where one memory serves both
    reads: bool = True  # False: the weights are in host memory already
    copies: bool = False
    block: int = 1
    first_stage: int = 0  # where a pass begins

    @property
    def stages(self) -> range:
        return range(self.first_stage, self.num_stages)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    prologue: tuple[Action, ...]
    cycle: tuple[Action, ...]

    def __str__(self) -> str:
        return "\n".join(["# prologue", *map(str, self.prologue), "# cycle", *map(str, self.cycle)])


def parse_schedule(text: str) -> Schedule:
    prologue, _, cycle = text.partition("# cycle")
    lines = [[line for line in part.splitlines() if line and not line.startswith("#")] for part in (prologue, cycle)]
    return Schedule(prologue=tuple(map(parse_action, lines[0])), cycle=tuple(map(parse_action, lines[1])))


def make_schedule(walk: Walk, num_lanes: int) -> Schedule:
    """Zig-zag: all lanes pass stage i before any enters i+1, so that one read of a stage serves the whole block.

    Slots are filled as early as they are free. With one slot nothing overlaps (prefetch off); with k+1 slots reads
    run k stages ahead; with block b > 1, groups of b stages are read while the group before is computed.
    """
    if walk.streamed and walk.num_slots > len(walk.streamed):
        raise ConfigError(
            f"{walk.num_slots} slots for {len(walk.streamed)} streamed stages: "
            "lower prefetch.depth or prefetch.block_layers"
        )
    if walk.block > 1 and walk.num_slots > walk.block:
        return _block_schedule(walk, num_lanes)
    if walk.num_slots == 1:
        return _sequential_schedule(walk, num_lanes)
    feed = _Feed(walk)
    prologue = feed.fill()
    cycle: list[Action] = []
    for stage in walk.stages:
        cycle += _runs(stage, num_lanes)
        if stage in walk.streamed:
            cycle.append(Action(Op.free, stage))
            feed.release()
            cycle += feed.fill()
    return Schedule(prologue=tuple(prologue), cycle=tuple(cycle))


def _sequential_schedule(walk: Walk, num_lanes: int) -> Schedule:
    """Nothing overlaps: the plain version that every other schedule is measured and tested against."""
    hops = [Op.read] * walk.reads + [Op.copy] * walk.copies
    cycle: list[Action] = []
    for stage in walk.stages:
        is_streamed = stage in walk.streamed
        cycle += [Action(op, stage) for op in hops] if is_streamed else []
        cycle += _runs(stage, num_lanes)
        cycle += [Action(Op.free, stage)] if is_streamed else []
    return Schedule(prologue=(), cycle=tuple(cycle))


def _runs(stage: int, num_lanes: int) -> list[Action]:
    return [Action(Op.run, stage, lane) for lane in range(num_lanes)]


class _Feed:
    """Issues reads and copies in walk order into whatever slots are free."""

    def __init__(self, walk: Walk):
        self.walk = walk
        self.free_slots = walk.num_slots
        self.free_staging = walk.num_staging_slots
        self.num_read = self.num_copied = 0

    def release(self) -> None:
        self.free_slots += 1

    def fill(self) -> list[Action]:
        if not self.walk.streamed:
            return []
        if not self.walk.copies:
            return self._fill_reads()
        actions = self._fill_staging()
        while self.free_slots:
            actions.append(Action(Op.copy, self._stage(self.num_copied)))
            self.num_copied += 1
            self.free_slots -= 1
            self.free_staging += 1
            actions += self._fill_staging()
        return actions

    def _fill_reads(self) -> list[Action]:
        actions = []
        while self.free_slots:
            actions.append(Action(Op.read, self._stage(self.num_read)))
            self.num_read += 1
            self.free_slots -= 1
        return actions

    def _fill_staging(self) -> list[Action]:
        actions = []
        while self.walk.reads and self.free_staging:
            actions.append(Action(Op.read, self._stage(self.num_read)))
            self.num_read += 1
            self.free_staging -= 1
        return actions

    def _stage(self, turn: int) -> int:
        return self.walk.streamed[turn % len(self.walk.streamed)]


def _block_schedule(walk: Walk, num_lanes: int) -> Schedule:
    """Groups of `walk.block` streamed stages; a group is brought in while the one before it is computed.

    Reads begin before the group's compute. A copy that must wait for its read is issued after that compute has been
    queued, so that waiting for the disk never holds up the device.
    """
    groups = [walk.streamed[i : i + walk.block] for i in range(0, len(walk.streamed), walk.block)]
    first_of = {group[0]: turn for turn, group in enumerate(groups)}
    last_of = {group[-1]: turn for turn, group in enumerate(groups)}

    def bring(turn: int, op: Op) -> list[Action]:
        return [Action(op, stage) for stage in groups[turn % len(groups)]]

    cycle: list[Action] = []
    for stage in walk.stages:
        if stage in first_of:
            cycle += bring(first_of[stage] + 1, Op.read) if walk.reads else []
            cycle += bring(first_of[stage] + 1, Op.copy) if walk.copies and not walk.reads else []
        cycle += _runs(stage, num_lanes)
        if stage in last_of:
            cycle += bring(last_of[stage] + 1, Op.copy) if walk.copies and walk.reads else []
            cycle += bring(last_of[stage], Op.free)
    prologue = (bring(0, Op.read) if walk.reads else []) + (bring(0, Op.copy) if walk.copies else [])
    return Schedule(prologue=tuple(prologue), cycle=tuple(cycle))


def check_schedule(schedule: Schedule, walk: Walk, num_lanes: int, num_passes: int = 3) -> None:
    """Plays `num_passes` passes on counters: slots never overflow, nothing runs before it is brought in, nothing is
    missed.

    Raises ValueError naming the action and the rule. Pure; used by the planner and by tests.
    """
    staged: list[int] = []
    present: list[int] = []
    for turn in range(num_passes):
        done: list[tuple[int, int | None]] = []
        actions: Sequence[Action] = schedule.prologue * (turn == 0) + schedule.cycle
        for action in actions:
            _play(action, walk, staged, present, done)
        expected = [(stage, lane) for stage in walk.stages for lane in range(num_lanes)]
        if done != expected:
            missing = sorted(set(expected) - set(done))
            raise ValueError(
                f"pass {turn}: lanes pass the stages out of order or not at all; missing runs: {missing[:5]}"
            )


def _play(
    action: Action, walk: Walk, staged: list[int], present: list[int], done: list[tuple[int, int | None]]
) -> None:
    def rule(holds: bool, text: str) -> None:
        if not holds:
            raise ValueError(f"'{action}': {text} (staged {staged}, present {present})")

    if action.op is Op.read:
        target, limit = (staged, walk.num_staging_slots) if walk.copies else (present, walk.num_slots)
        rule(len(target) < limit, f"no free slot, all {limit} are in use")
        target.append(action.stage)
    elif action.op is Op.copy:
        rule(len(present) < walk.num_slots, f"no free device slot, all {walk.num_slots} are in use")
        rule(not walk.reads or action.stage in staged, "copied before it was read")
        if walk.reads:
            staged.remove(action.stage)
        present.append(action.stage)
    elif action.op is Op.run:
        rule(action.stage not in walk.streamed or action.stage in present, "run before its weights were brought in")
        done.append((action.stage, action.lane))
    else:
        rule(action.stage in present, "freed but not present")
        present.remove(action.stage)
