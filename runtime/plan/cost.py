"""Executes a schedule on a cost model instead of a machine and says how long it takes: two channels and one compute
device.

Pure and deterministic. Costs are measured elsewhere (`runtime.calibrate`); nothing here is a constant of some machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .schedule import Op, Schedule


@dataclass(frozen=True, kw_only=True)
class MachineRates:
    """Measured on the machine at hand. `gemm_flops_per_second` maps rows (M) of a product to its rate."""

    disk_bytes_per_second: float
    link_bytes_per_second: float
    gemm_flops_per_second: Mapping[int, float]

    def gemm_rate(self, num_rows: int) -> float:
        """Linear between the measured points, constant rate beyond the last, proportional to M below the first."""
        points = sorted(self.gemm_flops_per_second.items())
        rows, rates = [p[0] for p in points], [p[1] for p in points]
        if num_rows <= rows[0]:
            return rates[0] * num_rows / rows[0]
        for (m0, r0), (m1, r1) in pairwise(points):
            if num_rows <= m1:
                return r0 + (r1 - r0) * (num_rows - m0) / (m1 - m0)
        return rates[-1]


@dataclass(frozen=True, kw_only=True)
class SimulatedPasses:
    seconds: float  # of all passes together
    stall_seconds: float  # compute waited for weights
    disk_seconds: float


def simulate(
    schedule: Schedule,
    num_passes: int,
    *,
    read_seconds: Callable[[int], float],
    copy_seconds: Callable[[int], float],
    run_seconds: Callable[[int, int], float],
) -> SimulatedPasses:
    """Plays prologue and cycles. `read_seconds(stage)`, `copy_seconds(stage)`, `run_seconds(stage, lane)` are
    durations."""
    clock = disk = link = stall = disk_busy = 0.0
    ready: dict[int, float] = {}
    for action in schedule.prologue + schedule.cycle * num_passes:
        stage = action.stage
        if action.op is Op.read:
            disk = max(disk, clock) + read_seconds(stage)
            disk_busy += read_seconds(stage)
            ready[stage] = disk
        elif action.op is Op.copy:
            link = max(link, clock, ready.get(stage, 0.0)) + copy_seconds(stage)
            ready[stage] = link
        elif action.op is Op.run and action.lane is not None:
            wait = max(0.0, ready.get(stage, 0.0) - clock)
            stall += wait
            clock += wait + run_seconds(stage, action.lane)
    return SimulatedPasses(seconds=clock, stall_seconds=stall, disk_seconds=disk_busy)


def lane_seconds(
    rates: MachineRates, flops_per_token: Sequence[float], lane_tokens: Sequence[int]
) -> Callable[[int, int], float]:
    """`run_seconds` for dense products: FLOPs of a stage over the rate at the lane's number of tokens."""
    table = [[f * t / rates.gemm_rate(t) if t else 0.0 for t in lane_tokens] for f in flops_per_token]
    return lambda stage, lane: table[stage][lane]
