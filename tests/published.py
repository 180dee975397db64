"""What MoE-Lightning (Cao et al. 2025) published, beside what a search predicts for it.

    python -m tests.published    prints the table, in about two minutes

Published numbers are generated tokens over the seconds of prefill and decode. Those called padded computed every prompt
as long as the longest.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from jobs.io.typed import build
from runtime.config import MachineConfig, OffloadConfig, PolicyConfig, PolicyKind, RuntimeConfig, Tier
from runtime.plan.choice import Choice
from runtime.plan.hrm import search
from runtime.plan.machine import Machine
from runtime.plan.model_shape import ModelShape
from runtime.plan.planner import RunPlan, plan_run
from runtime.plan.profile import USABLE_SHARE, machine_of
from runtime.plan.workload import Workload
from runtime.units import GIB
from tests.moe_shapes import DBRX, MIXTRAL, MIXTRAL_8X22B, Moe

MACHINES = Path(__file__).resolve().parents[1] / "conf" / "machine"
NUM_REQUESTS = 6000  # several blocks of any size that fits
MTBENCH = {"mean": 77, "longest": 418}
REASONING = {"mean": 242, "longest": 256}
SUMMARIZATION = {"mean": 1693, "longest": 1984}
CONFIG = RuntimeConfig(offload=OffloadConfig(tier=Tier.cpu), policy=PolicyConfig(kind=PolicyKind.hrm))
LENGTHS = (32, 64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """`policy` is the published N in words, empty where none was; rates in generated tokens/s."""

    model: Moe
    machine: str
    task: str
    workload: Workload
    is_padded: bool
    host_gib: int | None  # where the profile's cannot hold the weights as we pin them
    policy: str
    flexgen: float | None
    moe_lightning: float

    @property
    def shape(self) -> ModelShape:
        """Padding is in the workload, where every prompt is as long as the longest: all lanes are packed."""
        return self.model.shape()


def settings() -> Iterator[Setting]:
    """All of them, in the order of the paper's table."""
    t4 = ("19 x 164", "19 x 164", "14 x 164", "15 x 100")
    l4 = ("14 x 324", "16 x 228", "16 x 164", "12 x 132")
    none = ("",) * 4
    t4_flexgen, l4_flexgen = (12.1, 12.3, 9.5, 9.6), (29.2, 34.9, 37.2, 28.8)
    x22_flexgen = (4.97, 5.31, 4.36, 2.96)
    yield from _mtbench(MIXTRAL, "t4", t4, t4_flexgen, (63.0, 101.0, 97.7, 96.9), is_padded=False)
    yield from _mtbench(MIXTRAL, "t4", none, t4_flexgen, (15.6, 24.0, 30.1, 33.9), is_padded=True)
    yield from _mtbench(MIXTRAL, "l4", l4, l4_flexgen, (203.0, 294.5, 217.5, 167.9), is_padded=False)
    yield from _mtbench(MIXTRAL, "l4", none, l4_flexgen, (53.7, 67.4, 79.0, 78.6), is_padded=True)
    yield _helm("reasoning", REASONING, 50, 50.1, 105.3)
    yield _helm("summarization", SUMMARIZATION, 64, 7.14, 12.4)
    yield from _mtbench(
        MIXTRAL_8X22B, "4xt4", none, x22_flexgen, (14.9, 22.4, 26.2, 25.8), is_padded=True, host_gib=512
    )
    yield from _mtbench(DBRX, "4xt4", none, (None,) * 4, (71.5, 83.6, 83.0, 59.5), is_padded=True)


def _mtbench(
    model: Moe,
    machine: str,
    policies: tuple[str, ...],
    flexgen: tuple[float | None, ...],
    found: tuple[float, ...],
    *,
    is_padded: bool,
    host_gib: int | None = None,
) -> Iterator[Setting]:
    for length, policy, theirs, tokens in zip(LENGTHS, policies, flexgen, found, strict=True):
        workload = Workload.from_mean(NUM_REQUESTS, **MTBENCH, max_new_tokens=length)
        yield Setting(
            model=model,
            machine=machine,
            task=f"MTBench {length}",
            workload=workload.padded() if is_padded else workload,
            is_padded=is_padded,
            host_gib=host_gib,
            policy=policy,
            flexgen=theirs,
            moe_lightning=tokens,
        )


def _helm(task: str, lengths: dict[str, int], max_new_tokens: int, flexgen: float, tokens: float) -> Setting:
    return Setting(
        model=MIXTRAL,
        machine="l4",
        task=f"HELM {task} {max_new_tokens}",
        workload=Workload.from_mean(NUM_REQUESTS, **lengths, max_new_tokens=max_new_tokens).padded(),
        is_padded=True,
        host_gib=None,
        policy="",
        flexgen=flexgen,
        moe_lightning=tokens,
    )


def machine(name: str) -> Machine:
    """From its profile."""
    values = yaml.safe_load((MACHINES / f"{name}.yaml").read_text(encoding="utf-8"))
    return machine_of(build(MachineConfig, values))


def machine_for(setting: Setting) -> Machine:
    on = machine(setting.machine)
    if setting.host_gib is None:
        return on
    return replace(on, host_bytes=int(setting.host_gib * GIB * USABLE_SHARE))


def choose(setting: Setting) -> Choice:
    """Weights in host memory, as MoE-Lightning has them; everything else searched."""
    shape, sizes, on = setting.shape, setting.workload.sizes(), machine_for(setting)

    def plan(fixed: RuntimeConfig) -> RunPlan:
        return plan_run(shape, fixed, on.budgets, sizes, rates=on.rates)

    return search(shape, on, setting.workload, CONFIG, plan)


def row(setting: Setting) -> str:
    """Of the table, as Markdown."""
    best = choose(setting).best
    policy, tokens = best.policy, best.tokens_per_second
    way = f"{policy.schedule.value}, attention on {policy.attention.value}, {policy.resident_layers} resident"
    padding = " padded" * setting.is_padded + f", host {setting.host_gib} GiB" * (setting.host_gib is not None)
    cells = [
        f"{setting.model.name}, {setting.machine}, {setting.task}{padding}",
        f"{policy.num_micro_batches} x {policy.micro_batch_size}, {way}",
        f"{tokens:.1f}",
        f"{setting.workload.num_new_tokens / best.roofline_seconds:.1f}",
        setting.policy or "not published",
        f"{setting.moe_lightning:.1f}",
        f"{tokens / setting.moe_lightning:.2f}",
        "" if setting.flexgen is None else f"{setting.flexgen:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| setting | policy chosen | predicted tokens/s | by the roofline alone | published policy | published tokens/s "
    "| predicted / published | FlexGen, published |\n|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="?", default="", help="settings whose name holds this text")
    only = parser.parse_args().only
    print(HEADER)
    for setting in settings():
        if only in f"{setting.model.name}, {setting.machine}, {setting.task}":
            print(row(setting), flush=True)


if __name__ == "__main__":
    main()
