"""MoE-Lightning's ablation, simulated: its schedule and policy against FlexGen's, one step at a time.

    python -m tests.ablation    prints the table: Mixtral 8x7B on a T4, MTBench, 128 new tokens

A **bubble** is time in which the busiest resource of a decode pass waits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from runtime.config.settings import (
    Attention,
    OffloadConfig,
    Order,
    PolicyConfig,
    PolicyKind,
    Prefetch,
    PrefetchConfig,
    RuntimeConfig,
    Tier,
)
from runtime.plan.cost.machine import Machine
from runtime.plan.cost.simulator import Durations, simulate
from runtime.plan.planner import RunPlan, plan_run
from runtime.plan.schedule.schedule import make_schedule
from runtime.plan.search.grid import GridAxes, PolicyGrid
from runtime.plan.search.hrm import make_roofline, select_fitting
from runtime.plan.search.pass_times import Roofline
from runtime.plan.search.policy import Policy
from runtime.plan.search.workload import Workload
from runtime.plan.shape.model import ModelShape
from runtime.resources import Resource
from tests.moe_shapes import MIXTRAL
from tests.published import MTBENCH, machine

NUM_PASSES = 3
CONFIG = RuntimeConfig(
    offload=OffloadConfig(tier=Tier.cpu),
    policy=PolicyConfig(kind=PolicyKind.hrm, prefill_chunk_tokens=512),  # of each the same: decode passes are compared
)
NO_OVERLAP = replace(CONFIG, prefetch=PrefetchConfig(kind=Prefetch.off))
WORKLOAD = Workload.from_mean(6000, **MTBENCH, max_new_tokens=128)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Of the ablation: seconds of a decode pass, and for how many of them its busiest resource waits."""

    name: str
    policy: Policy
    pass_seconds: float
    bubble_seconds: float
    busiest: Resource

    @property
    def tokens_per_second(self) -> float:
        """Of decode passes."""
        return self.policy.num_sequences / self.pass_seconds

    @property
    def bubble_share(self) -> float:
        return self.bubble_seconds / self.pass_seconds


def steps(shape: ModelShape, on: Machine) -> Iterator[Step]:
    """In the order of the paper, behind a pass in which nothing overlaps."""
    ours = best_of_way(shape, on, Order.cgopipe, Attention.cpu)
    half = replace(ours, num_micro_batches=-(-ours.num_micro_batches // 2))
    yield step("no overlap", shape, on, replace(ours, schedule=Order.zigzag), NO_OVERLAP)
    flexgen = replace(half, schedule=Order.flexgen)
    theirs = replace(flexgen, attention=Attention.device)
    yield step("FlexGen's schedule and attention, half of N", shape, on, theirs)
    yield step("FlexGen's schedule, our attention, half of N", shape, on, flexgen)
    yield step("FlexGen's schedule, our policy, larger N", shape, on, replace(ours, schedule=Order.flexgen))
    yield step("CGOPipe", shape, on, ours)


def best_of_way(shape: ModelShape, on: Machine, order: Order, attention: Attention) -> Policy:
    """The fastest by the roofline that fits."""
    every = GridAxes.from_config(shape, CONFIG, WORKLOAD.num_requests, has_device=True)
    variants = [way for way in every.variants if way[:2] == (order, attention)]
    grid = select_fitting(shape, on, WORKLOAD, CONFIG, replace(every, variants=variants).grid(WORKLOAD.num_requests))
    return grid.policy(int(np.argmin(make_roofline(shape, on, WORKLOAD, CONFIG).seconds(grid))))


def step(name: str, shape: ModelShape, on: Machine, policy: Policy, config: RuntimeConfig = CONFIG) -> Step:
    workload = replace(WORKLOAD, num_requests=policy.num_sequences)
    plan = plan_run(shape, policy.apply(config, has_device=True), on.budgets, workload.sizes())
    roofline = make_roofline(shape, on, workload, config)
    schedule = make_schedule(plan.placement.decode_walk, plan.num_lanes)
    played = simulate(schedule, NUM_PASSES, turn_durations(shape, roofline, plan, policy))
    busiest = max(played.busy_seconds, key=lambda resource: played.busy_seconds[resource])
    return Step(
        name=name,
        policy=policy,
        pass_seconds=played.seconds / NUM_PASSES,
        bubble_seconds=(played.seconds - played.busy_seconds[busiest]) / NUM_PASSES,
        busiest=busiest,
    )


def turn_durations(shape: ModelShape, roofline: Roofline, plan: RunPlan, policy: Policy) -> Durations:
    """The roofline's seconds of a pass in equal parts: a lane and a layer each. Attention's projections and experts
    lie on both sides of attention, in the share of their weights."""
    work, rates = roofline.work, roofline.rates
    grid: PolicyGrid = GridAxes(micro_batches=[1], counts=[1], resident=[0], variants=[]).grid(1).single(policy)
    grid = replace(grid, num_requests=policy.num_sequences)
    busy = roofline.decode_pass(grid).busy_at(0)
    turns = work.num_layers * plan.num_lanes
    compute, attend = busy[Resource.compute] / turns, busy[Resource.cpu_attention] / turns
    kv_share = 1 if policy.attention is Attention.device else 0
    positions = roofline.workload.mean_prompt_tokens + roofline.workload.max_new_tokens / 2
    fetched = kv_share * grid.rows[0] * positions * work.kv_bytes
    before = (work.dense_weights - work.ffn_weights) / 2
    share = before / (work.dense_weights + work.num_experts * work.expert_weights)
    layers = frozenset(stage.index for stage in shape.layers)
    return Durations(
        copy=lambda stage: shape.stages[stage].num_bytes / rates.link_in_bytes_per_second,
        run=lambda stage, _: compute if stage in layers else 0.0,
        pre=lambda *_: share * compute,
        attend=lambda *_: attend,
        post=lambda *_: (1 - share) * compute,
        fetch=lambda *_: float(fetched) / rates.link_in_bytes_per_second,
        store=lambda *_: float(grid.rows[0]) * work.kv_bytes / rates.link_out_bytes_per_second,
        num_pages=plan.placement.decode_walk.num_pages,
    )


def main() -> None:
    print("| step | policy | decode tokens/s | seconds per pass | bubbles per pass, s | of | share |")
    print("|---|---|---|---|---|---|---|")
    for each in steps(MIXTRAL.shape(), machine("t4")):
        cells = [
            each.name,
            f"{each.policy.num_micro_batches} x {each.policy.micro_batch_size}, {each.policy.schedule.value}, "
            f"attention on {each.policy.attention.value}",
            f"{each.tokens_per_second:.1f}",
            f"{each.pass_seconds:.2f}",
            f"{each.bubble_seconds:.2f}",
            each.busiest.value,
            f"{each.bubble_share:.0%}",
        ]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
