"""Executes a schedule on a cost model instead of a machine and says how long it takes: a disk, a link with two
directions, a compute device, and the CPU's attention workers.

Pure and deterministic. Costs are measured elsewhere (`runtime.calibrate`); nothing here is a constant of some machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from .actions import Action, Op
from .rates import MachineRates
from .schedule import Schedule


class Resource(Enum):
    """What works side by side; each does one thing at a time, in the order in which things are begun."""

    disk = "disk"
    link_in = "host-to-device"
    link_out = "device-to-host"
    compute = "compute"
    cpu = "CPU attention"


def _of_stage(stage: int) -> float:
    return 0.0


def _of_turn(stage: int, lane: int) -> float:
    return 0.0


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds of each action, by stage or by stage and lane. `read` and `copy` are of a whole stage, of whose seconds a
    page takes its share."""

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
    num_pages: int = 1
    is_kv_on_disk: bool = False  # otherwise KV is fetched and stored over the link

    def of(self, action: Action) -> float:
        seconds = getattr(self, action.op.value)
        if action.lane is not None:
            return seconds(*action.turn)
        return seconds(action.its_stage) / (1 if action.page is None else self.num_pages)


@dataclass(frozen=True, kw_only=True)
class SimulatedPasses:
    seconds: float  # of all passes together
    stall_seconds: float  # compute waited for weights, KV, attention or a barrier
    busy_seconds: Mapping[Resource, float]


def simulate(schedule: Schedule, num_passes: int, durations: Durations) -> SimulatedPasses:
    """Plays prologue and cycles. Slots are not waited for: a schedule that passes the checker begins nothing for which
    there is none, and what is stored leaves before what is fetched in its place arrives."""
    machine = _Machine(durations)
    for action in schedule.prologue + schedule.cycle * num_passes:
        machine.play(action)
    return SimulatedPasses(
        seconds=machine.free_at[Resource.compute],
        stall_seconds=machine.stall_seconds,
        busy_seconds=machine.busy_seconds,
    )


class _Machine:
    """Actions are issued by compute's own clock, as the engine's thread does: nothing begins before it."""

    def __init__(self, durations: Durations):
        self._durations = durations
        self.free_at = dict.fromkeys(Resource, 0.0)
        self.busy_seconds = dict.fromkeys(Resource, 0.0)
        self.stall_seconds = 0.0
        self._read: dict[tuple[int | None, int | None], float] = {}  # by stage and page; when it ended
        self._ready: dict[int | None, float] = {}  # the weights of a stage
        self._turns: dict[tuple[int | None, int | None], float] = {}  # KV of a turn, then its attention

    def play(self, action: Action) -> None:
        turn = (action.stage, action.lane)
        if action.op is Op.read:
            self._read[action.stage, action.page] = self._ready[action.stage] = self._begin(Resource.disk, action)
        elif action.op is Op.copy:
            after = self._read.get((action.stage, action.page), 0.0)
            self._ready[action.stage] = self._begin(Resource.link_in, action, after)
        elif action.op is Op.fetch:
            self._turns[turn] = self._begin(self._kv_road(Resource.link_in), action)
        elif action.op is Op.store:
            self._begin(self._kv_road(Resource.link_out), action)
        elif action.op is Op.attend:
            self._turns[turn] = self._begin(Resource.cpu, action)
        elif action.op is Op.sync:
            self._wait(max(self.free_at.values()))
        elif action.op is not Op.free:
            self._wait(max(self._ready.get(action.stage, 0.0), self._turns.get(turn, 0.0)))
            self._begin(Resource.compute, action)

    def _kv_road(self, link: Resource) -> Resource:
        return Resource.disk if self._durations.is_kv_on_disk else link

    def _begin(self, resource: Resource, action: Action, after: float = 0.0) -> float:
        """Returns when it will have ended."""
        seconds = self._durations.of(action)
        self.busy_seconds[resource] += seconds
        self.free_at[resource] = max(self.free_at[resource], self.free_at[Resource.compute], after) + seconds
        return self.free_at[resource]

    def _wait(self, until: float) -> None:
        clock = self.free_at[Resource.compute]
        self.stall_seconds += max(0.0, until - clock)
        self.free_at[Resource.compute] = max(clock, until)


def lane_seconds(
    rates: MachineRates, flops_per_token: Sequence[float], lane_tokens: Sequence[int]
) -> Callable[[int, int], float]:
    """`Durations.run` for dense products: FLOPs of a stage over the rate at the lane's number of tokens."""
    table = [[f * t / rates.gemm_rate(t) if t else 0.0 for t in lane_tokens] for f in flops_per_token]
    return lambda stage, lane: table[stage][lane]
