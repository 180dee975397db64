"""What the default settings plan, beside the best that wider searches find; prints Markdown.

    python -m tests.default_table            every model, machine and length of answers
    python -m tests.default_table every=12   each twelfth of them

256 prompts of 100 tokens in the mean and 300 at most, by each machine's data sheet; `cpu` is made up in `cpu_machine`.
`best`: the fastest of the tiers by themselves and of a search that makes plans of several times as many candidates. A
row is `slow` where the default takes 3 % longer than that, and `idle` where it computes one sequence at a time while
half of a memory is unused.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType

from jobs.planning.config import PlanConfig, WorkloadConfig
from jobs.planning.planning import Planned, plan_on
from runtime.config import ModelConfig, OffloadConfig, PolicyConfig, PolicyKind, SamplingConfig, Tier
from runtime.errors import BudgetError
from runtime.plan.cost.machine import Machine
from runtime.plan.cost.rates import MachineRates
from runtime.plan.search import finalists, trials
from runtime.units import GIB
from tests.published import machine

MACHINES = ("rtx3060", "rtx4090", "t4", "l4", "a10", "a100-40", "h100", "cpu")
NEW_TOKENS = (32, 128, 512)
MODELS = sorted(path.stem for path in Path("conf/model").glob("*.yaml") if path.stem not in ("hf", "tiny", "random"))
WORKLOAD = WorkloadConfig(num_requests=256, mean_prompt_tokens=100, max_prompt_tokens=300)
WIDER = {
    finalists: {"NUM_WAYS": 12, "NUM_BLOCKS": 12},
    trials: {
        "HOPELESS": 1.5,
        "WAITING": 0.0,
        "FAR": 0.0,
        "NUM_FIRST": 4,
        "NUM_NEAR": 16,
        "NEAR": 1.5,
        "NUM_BLOCKS": 10,
        "NUM_TRIES": 16,
    },
}
SLOW, IDLE = 1.03, 0.5


def cpu_machine() -> Machine:
    """Sixteen cores with a fast disk."""
    rates = MachineRates(
        disk_bytes_per_second=3e9,
        gemm_flops_per_second={1: 4e10, 8: 3e11, 64: 1e12, 512: 1.4e12},
        attention_bytes_per_second=6e10,
        cpu_attention_bytes_per_second=6e10,
        prefill_attention_flops_per_second=4e11,
        turn_seconds=1e-4,
        pass_seconds=1e-3,
    )
    return Machine(name="cpu", host_bytes=64 * GIB, device_bytes=None, library_bytes=0, rates=rates)


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    machine: str
    max_new_tokens: int

    def planned(self, tier: Tier = Tier.auto, kind: PolicyKind = PolicyKind.auto) -> Planned | None:
        """None where it is refused."""
        config = PlanConfig(
            model=ModelConfig(name=self.model),
            offload=OffloadConfig(tier=tier),
            policy=PolicyConfig(kind=kind),
            sampling=SamplingConfig(max_new_tokens=self.max_new_tokens),
            workload=WORKLOAD,
        )
        try:
            return plan_on(cpu_machine() if self.machine == "cpu" else machine(self.machine), config)
        except BudgetError:
            return None

    def best_seconds(self) -> float:
        """The shortest run that any search finds; infinite where all are refused."""
        found = [self.planned(tier, PolicyKind.hrm) for tier in (Tier.none, Tier.cpu, Tier.nvme)]
        with wider():
            found.append(self.planned(Tier.auto, PolicyKind.hrm))
        return min((each.prediction.seconds for each in found if each is not None), default=float("inf"))


@contextmanager
def wider() -> Iterator[None]:
    before = {module: {name: getattr(module, name) for name in values} for module, values in WIDER.items()}
    _set(WIDER)
    try:
        yield
    finally:
        _set(before)


def _set(constants: Mapping[ModuleType, Mapping[str, float]]) -> None:
    for module, values in constants.items():
        for name, value in values.items():
            setattr(module, name, value)


@dataclass(frozen=True, kw_only=True)
class Row:
    """`ratio`: of the default's time to the best; None where the default is refused. `planning_seconds` are the
    processor's."""

    case: Case
    planned: Planned | None
    best_seconds: float
    planning_seconds: float

    @staticmethod
    def of(case: Case) -> "Row":
        begin = time.process_time()
        planned = case.planned()
        seconds = time.process_time() - begin
        return Row(case=case, planned=planned, best_seconds=case.best_seconds(), planning_seconds=seconds)

    @property
    def ratio(self) -> float | None:
        return None if self.planned is None else self.planned.prediction.seconds / self.best_seconds

    @property
    def is_idle(self) -> bool:
        if self.planned is None or self.planned.run.block_size > 1:
            return False
        return all(each.total_bytes < IDLE * each.budget_bytes for each in self.planned.run.placement.ledgers)

    def __str__(self) -> str:
        head = f"{self.case.model}, {self.case.machine}, {self.case.max_new_tokens}"
        if self.planned is None or self.ratio is None:
            is_missed = self.best_seconds < float("inf")
            return f"| {head} | {'refused' if is_missed else 'nothing fits'} | | {self.planning_seconds:.1f} | |"
        run = self.planned.run
        policy = run.policy
        assert policy.schedule is not None, "a plan says it"
        assert policy.attention is not None, "a plan says it"
        way = f"{run.num_lanes} x {run.lane_size}, {policy.schedule.value}, {policy.attention.value}"
        doubts = " ".join(["slow"] * (self.ratio > SLOW) + ["idle"] * self.is_idle)
        return f"| {head} | {way} | {self.ratio:.3f} | {self.planning_seconds:.1f} | {doubts} |"


def summary(rows: Sequence[Row]) -> str:
    ratios = [row.ratio for row in rows if row.ratio is not None]
    times = [row.planning_seconds for row in rows]
    missed = sum(row.planned is None and row.best_seconds < float("inf") for row in rows)
    return (
        f"{len(rows)} cases, {len(ratios)} planned, {missed} refused though something fits; the default takes "
        f"{statistics.median(ratios):.3f} (median) to {max(ratios):.3f} times the best, "
        f"{sum(ratio > SLOW for ratio in ratios)} are slow, {sum(row.is_idle for row in rows)} idle; planning takes "
        f"{statistics.median(times):.1f} s of a processor in the median and {max(times):.1f} at most"
    )


if __name__ == "__main__":
    every = int(dict(argument.split("=") for argument in sys.argv[1:]).get("every", "1"))
    cases = [Case(model=m, machine=n, max_new_tokens=t) for m, n, t in product(MODELS, MACHINES, NEW_TOKENS)]
    print("| model, machine, new tokens | default | times the best | planning s | |\n|---|---|---|---|---|")
    made = []
    for case in cases[::every]:
        made.append(Row.of(case))
        print(made[-1], flush=True)
    print(f"\n{summary(made)}")
