"""What MoE-Lightning (Cao et al. 2025) published, and what is predicted for its settings and policies.

Published numbers are generated tokens over the seconds of prefill and decode. Those called padded computed every prompt
as long as the longest. `python -m tests.deviations` prints them all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from jobs.config.typed import build
from runtime.config.settings import (
    Attention,
    DividedExperts,
    MachineConfig,
    OffloadConfig,
    Order,
    Parallelism,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    Tier,
)
from runtime.plan.cost.machine import Machine, make_machine
from runtime.plan.cost.predict import Prediction
from runtime.plan.cost.rates import MachineRates
from runtime.plan.placement.ledger import PINNED_SHARE
from runtime.plan.planner import plan_run
from runtime.plan.rank_plans import RankView
from runtime.plan.search.candidate import Problem
from runtime.plan.search.hrm import SearchResult, search
from runtime.plan.search.policy import Policy
from runtime.plan.search.workload import Workload
from runtime.plan.shape.model import ModelShape
from runtime.units import GIB
from tests.moe_shapes import DBRX, MIXTRAL, MIXTRAL_8X22B, Moe

MACHINES = Path(__file__).resolve().parents[1] / "conf" / "machine"
THEIR_SHARE = 0.9  # of a host's memory: their machines did nothing else, and their runs pinned more than three quarters
NUM_REQUESTS = 6000  # several blocks of any size that fits
MTBENCH = {"mean": 77, "longest": 418}
REASONING = {"mean": 242, "longest": 256}
SUMMARIZATION = {"mean": 1693, "longest": 1984}
CONFIG = RuntimeConfig(offload=OffloadConfig(tier=Tier.cpu), policy=PolicyConfig(kind=PolicyKind.hrm))
LENGTHS = (32, 64, 128, 256)
NONE = (None,) * 4


@dataclass(frozen=True, kw_only=True)
class Setting:
    """`policy`: micro-batches and their size, where they were published; rates in generated tokens/s."""

    model: Moe
    machine: str
    task: str
    workload: Workload
    is_padded: bool
    host_gib: int | None  # what pinning matrix by matrix in powers of two, as torch does, leaves of the profile's
    policy: tuple[int, int] | None
    flexgen: float | None
    deepspeed: float | None
    moe_lightning: float

    @property
    def name(self) -> str:
        return f"{self.model.name}, {self.machine}, {self.task}" + " padded" * self.is_padded

    @property
    def shape(self) -> ModelShape:
        """What a card has of the model. Padding is in the workload, where every prompt is as long as the longest: all
        lanes are packed."""
        return view_for(self).shape


def settings() -> Iterator[Setting]:
    """All of them, in the order of the paper's table."""
    t4 = ((19, 164), (19, 164), (14, 164), (15, 100))
    l4 = ((14, 324), (16, 228), (16, 164), (12, 132))
    t4_others = ((12.1, 12.3, 9.5, 9.6), (7.1, 7.6, 7.8, 6.7))
    l4_others = ((29.2, 34.9, 37.2, 28.8), (12.7, 13.3, 12.1, 11.8))
    x22_others = ((4.97, 5.31, 4.36, 2.96), NONE)
    yield from _mtbench(MIXTRAL, "t4", t4, (NONE, NONE), (63.0, 101.0, 97.7, 96.9), is_padded=False)
    yield from _mtbench(MIXTRAL, "t4", NONE, t4_others, (15.6, 24.0, 30.1, 33.9), is_padded=True)
    yield from _mtbench(MIXTRAL, "l4", l4, (NONE, NONE), (203.0, 294.5, 217.5, 167.9), is_padded=False)
    yield from _mtbench(MIXTRAL, "l4", NONE, l4_others, (53.7, 67.4, 79.0, 78.6), is_padded=True)
    yield _helm("reasoning", REASONING, 50, 50.1, 18.6, 105.3)
    yield _helm("summarization", SUMMARIZATION, 64, 7.14, 1.45, 12.4)
    yield from _mtbench(MIXTRAL_8X22B, "4xt4", NONE, x22_others, (14.9, 22.4, 26.2, 25.8), is_padded=True, host_gib=297)
    yield from _mtbench(DBRX, "4xt4", NONE, (NONE, NONE), (71.5, 83.6, 83.0, 59.5), is_padded=True)


def _mtbench(
    model: Moe,
    machine: str,
    policies: tuple[tuple[int, int] | None, ...],
    others: tuple[tuple[float | None, ...], tuple[float | None, ...]],
    values: tuple[float, ...],
    *,
    is_padded: bool,
    host_gib: int | None = None,
) -> Iterator[Setting]:
    for length, policy, flexgen, deepspeed, tokens in zip(LENGTHS, policies, *others, values, strict=True):
        workload = Workload.from_mean(NUM_REQUESTS, **MTBENCH, max_new_tokens=length)
        yield Setting(
            model=model,
            machine=machine,
            task=f"MTBench {length}",
            workload=workload.pad_to_longest() if is_padded else workload,
            is_padded=is_padded,
            host_gib=host_gib,
            policy=policy,
            flexgen=flexgen,
            deepspeed=deepspeed,
            moe_lightning=tokens,
        )


def _helm(
    task: str, lengths: dict[str, int], max_new_tokens: int, flexgen: float, deepspeed: float, tokens: float
) -> Setting:
    return Setting(
        model=MIXTRAL,
        machine="l4",
        task=f"HELM {task} {max_new_tokens}",
        workload=Workload.from_mean(NUM_REQUESTS, **lengths, max_new_tokens=max_new_tokens).pad_to_longest(),
        is_padded=True,
        host_gib=None,
        policy=None,
        flexgen=flexgen,
        deepspeed=deepspeed,
        moe_lightning=tokens,
    )


def machine(name: str) -> Machine:
    """From its profile."""
    values = yaml.safe_load((MACHINES / f"{name}.yaml").read_text(encoding="utf-8"))
    return make_machine(build(MachineConfig, values))


def view_for(setting: Setting, num_cards: int | None = None) -> RankView:
    """The view of one of the cards: several are tensor parallel. `num_cards`: None takes all of the profile's."""
    on = machine(setting.machine)
    host_bytes = on.host_bytes / PINNED_SHARE if setting.host_gib is None else setting.host_gib * GIB
    on = replace(on, host_bytes=int(host_bytes * THEIR_SHARE))
    count = num_cards or on.fabric.num_devices
    return RankView.from_shape(
        on, setting.model.shape(), Parallelism.one if count == 1 else Parallelism.tensor, count, DividedExperts.rows
    )


def machine_for(setting: Setting) -> Machine:
    return view_for(setting).machine


def published_policy(setting: Setting) -> Policy | None:
    """Their way is CGOPipe; weights beyond N and mu were not published, and the placement keeps what fits."""
    if setting.policy is None:
        return None
    count, size = setting.policy
    return Policy(
        micro_batch_size=size,
        num_micro_batches=count,
        attention=Attention.cpu,
        schedule=Order.cgopipe,
        resident_layers=0,
        kv_fraction=0.0,
    )


def predicted(setting: Setting, policy: Policy, rates: MachineRates) -> Prediction:
    """Of one block. Theirs fit the profile's memories; what a doubt makes of a block may take more of the host's."""
    on, block = machine_for(setting), replace(setting.workload, num_requests=policy.num_sequences)
    budgets = replace(on.budgets, host_bytes=8 * on.host_bytes)
    config = policy.apply(CONFIG, has_device=True)
    prediction = plan_run(setting.shape, config, budgets, block.sizes(), rates=rates).prediction
    assert prediction is not None, "a plan for a machine with rates predicts"
    return prediction


def choose(setting: Setting) -> SearchResult:
    """Weights in host memory, as MoE-Lightning has them; everything else searched."""
    on, workload = machine_for(setting), setting.workload
    problem = Problem(shape=setting.shape, config=CONFIG, budgets=on.budgets, sizes=workload.sizes(), rates=on.rates)
    return search(problem, workload=workload)[0]
