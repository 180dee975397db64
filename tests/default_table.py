"""What the default settings plan, beside the best that wider searches find; prints Markdown.

    python -m tests.default_table            every model, machine and length of answers
    python -m tests.default_table every=12   each twelfth of them
    python -m tests.default_table kept=FILE  rows made before are read from it, new ones added (all take hours)

256 prompts of 100 tokens in the mean and 300 at most, by each machine's data sheet; `cpu` is made up in `cpu_machine`.
`best`: the fastest of the tiers by themselves and of a search that makes plans of several times as many candidates. A
row is `slow` where the default takes 3 % longer than that, and `idle` where it computes one sequence at a time while
half of a memory is unused. Planning is timed in seconds of a processor.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from types import ModuleType

from jobs.planning.config import PlanConfig, WorkloadConfig
from jobs.planning.planning import Planned, plan_for_machine
from runtime.config.settings import ModelConfig, OffloadConfig, PolicyConfig, PolicyKind, SamplingConfig, Tier
from runtime.errors import BudgetError
from runtime.plan.cost.machine import Machine
from runtime.plan.cost.rates import MachineRates
from runtime.plan.planner import MIN_SEARCHED_SECONDS
from runtime.plan.search import hrm, trials
from runtime.units import GIB
from tests.published import machine

MACHINES = ("rtx3060", "rtx4090", "t4", "l4", "a10", "a100-40", "h100", "cpu")
NEW_TOKENS = (32, 128, 512)
MODELS = sorted(path.stem for path in Path("conf/model").glob("*.yaml") if path.stem not in ("hf", "tiny", "random"))
WORKLOAD = WorkloadConfig(num_requests=256, mean_prompt_tokens=100, max_prompt_tokens=300)
WIDER = {
    hrm: {"NUM_VARIANTS": 12, "NUM_BLOCKS": 12},
    trials: {
        "MAX_BOUND_RATIO": 1.5,
        "STALL_SHARE": 0.0,
        "MAX_SLOWDOWN": 0.0,
        "NUM_FIRST": 4,
        "NUM_NEAR": 16,
        "NEAR_RATIO": 1.5,
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

    def __str__(self) -> str:
        return f"{self.model}, {self.machine}, {self.max_new_tokens}"

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
            return plan_for_machine(cpu_machine() if self.machine == "cpu" else machine(self.machine), config)
        except BudgetError:
            return None

    def best_seconds(self) -> float:
        """The shortest run that any search finds; infinite where all are refused."""
        runs = [self.planned(tier, PolicyKind.hrm) for tier in (Tier.none, Tier.cpu, Tier.nvme)]
        with wider():
            runs.append(self.planned(Tier.auto, PolicyKind.hrm))
        return min((each.prediction.seconds for each in runs if each is not None), default=float("inf"))


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
    """`way`: the default's, None where it is refused. Predicted seconds of its run and of the best, which is None where
    nothing fits. `planning_seconds` are the processor's."""

    case: str
    way: str | None
    seconds: float | None
    best_seconds: float | None
    planning_seconds: float
    is_searched: bool
    is_idle: bool

    @staticmethod
    def of(case: Case) -> "Row":
        begin = time.process_time()
        planned = case.planned()
        spent = time.process_time() - begin
        best = case.best_seconds()
        return Row(
            case=str(case),
            way=None if planned is None else way(planned),
            seconds=None if planned is None else planned.prediction.seconds,
            best_seconds=best if best < float("inf") else None,
            planning_seconds=spent,
            is_searched=planned is not None and planned.run.choice is not None,
            is_idle=planned is not None and is_idle(planned),
        )

    @property
    def ratio(self) -> float | None:
        """The default's time to the best."""
        return None if self.seconds is None or self.best_seconds is None else self.seconds / self.best_seconds

    @property
    def is_missed(self) -> bool:
        return self.way is None and self.best_seconds is not None

    @property
    def is_slow(self) -> bool:
        """Runs too short for a search are planned without one: they may lose what a search would take."""
        return self.ratio is not None and self.ratio > SLOW and self.is_searched

    def __str__(self) -> str:
        if self.ratio is None:
            what = "refused" if self.is_missed else "nothing fits"
            return f"| {self.case} | {what} | | {self.planning_seconds:.1f} | |"
        doubts = " ".join(word for word, holds in (("slow", self.is_slow), ("idle", self.is_idle)) if holds)
        return f"| {self.case} | {self.way} | {self.ratio:.3f} | {self.planning_seconds:.1f} | {doubts} |"


def way(planned: Planned) -> str:
    policy = planned.run.policy
    assert policy.schedule is not None, "a plan says it"
    assert policy.attention is not None, "a plan says it"
    return f"{planned.run.num_lanes} x {planned.run.lane_size}, {policy.schedule.value}, {policy.attention.value}"


def is_idle(planned: Planned) -> bool:
    if planned.run.block_size > 1:
        return False
    return all(each.total_bytes < IDLE * each.budget_bytes for each in planned.run.placement.ledgers)


def summary(rows: Sequence[Row]) -> str:
    searched = [row.ratio for row in rows if row.ratio is not None and row.is_searched]
    short = [row for row in rows if row.ratio is not None and not row.is_searched]
    lost = max((row.seconds - row.best_seconds for row in short if row.seconds and row.best_seconds), default=0.0)
    times = [row.planning_seconds for row in rows]
    return (
        f"{len(rows)} cases, {len(searched) + len(short)} planned, {sum(row.is_missed for row in rows)} refused though "
        f"something fits; the default takes {statistics.median(searched):.3f} (median) to {max(searched):.3f} times "
        f"the best, {sum(row.is_slow for row in rows)} are slow, {sum(row.is_idle for row in rows)} idle; {len(short)} "
        f"runs below {MIN_SEARCHED_SECONDS} s by rule are planned without a search and lose {lost:.2f} s at most; "
        f"planning takes {statistics.median(times):.1f} s of a processor in the median and {max(times):.1f} at most"
    )


def rows_of(cases: Sequence[Case], path: Path | None) -> Iterator[Row]:
    """`kept`: a file of rows made before, one JSON object per line, which is added to."""
    known = {}
    if path is not None and path.exists():
        known = {row.case: row for row in (Row(**json.loads(line)) for line in path.read_text().splitlines())}
    for case in cases:
        row = known.get(str(case)) or Row.of(case)
        if path is not None and str(case) not in known:
            with path.open("a") as file:
                print(json.dumps(asdict(row)), file=file)
        yield row


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    cases = [Case(model=m, machine=n, max_new_tokens=t) for m, n, t in product(MODELS, MACHINES, NEW_TOKENS)]
    print("| model, machine, new tokens | default | times the best | planning s | |\n|---|---|---|---|---|")
    made = []
    for row in rows_of(cases[:: int(given.get("every", "1"))], Path(given["kept"]) if "kept" in given else None):
        made.append(row)
        print(row, flush=True)
    print(f"\n{summary(made)}")
