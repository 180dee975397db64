"""Searches for the policy with the highest throughput: MoE-Lightning's (N, mu, A, F, r_w, r_c), and the order.

First the whole grid by the hierarchical roofline, at once, with the smallest chunks of prompts; then the best few as
plans in the chunks that are best for each, with the ledger's word on whether they fit and the simulator's on how long
they take.
"""

from dataclasses import replace

import numpy as np

from ...config import Order, RuntimeConfig
from ..cost.layer_work import LayerWork
from ..cost.machine import Machine
from ..shape.model import ModelShape
from .choice import Choice
from .finalists import Finalists, Plan
from .grid import Choices, PolicyGrid
from .pass_times import Roofline
from .policy import Policy
from .ridge_points import standing
from .room import room
from .workload import Workload


def search(
    shape: ModelShape,
    machine: Machine,
    workload: Workload,
    config: RuntimeConfig,
    plan: Plan,
    *,
    choices: Choices | None = None,
    usual: Policy | None = None,
) -> Choice:
    """The best policy for `config`'s tiers, prefetch and chunks. `plan` makes the plan of a config whose policy is
    fixed, with a prediction. `choices`: None looks at all. `usual`: what it would be without a search, whose way is
    simulated in any case.

    Raises BudgetError, with the equation, when even the smallest block does not fit.
    """
    has_device = machine.device_bytes is not None
    choices = choices or Choices.of(shape, config, workload.num_requests, has_device=has_device)
    roofline = roofline_of(shape, machine, workload, config)
    grid = choices.grid(workload.num_requests)
    within = fitting(shape, machine, workload, config, grid)
    table = Finalists(
        shape=shape,
        machine=machine,
        workload=workload,
        config=config,
        plan=plan,
        grid=within,
        roofline=roofline.seconds,
        usual=usual,
    ).table()
    best = grid.only(table[0].policy)
    busy = {resource: float(seconds[0]) for resource, seconds in roofline.decode_pass(best).busy.items()}
    return Choice(
        table=table,
        busy_seconds=busy,
        standing=standing(
            roofline.work,
            machine,
            config.offload.tier,
            num_sequences=float(best.sequences[0]),
            num_rows=float((best.sequences if table[0].policy.schedule is Order.module_batched else best.rows)[0]),
        ),
        ffn_on_cpu_seconds=_ffn_on_cpu(roofline, within),
    )


def roofline_of(shape: ModelShape, machine: Machine, workload: Workload, config: RuntimeConfig) -> Roofline:
    return Roofline(
        work=LayerWork.of(shape),
        rates=machine.rates,
        workload=workload,
        config=config,
        has_device=machine.device_bytes is not None,
        is_packed=shape.is_packed,
    )


def fitting(
    shape: ModelShape, machine: Machine, workload: Workload, config: RuntimeConfig, grid: PolicyGrid
) -> PolicyGrid:
    """Those within the budgets, with slots of whole layers or by expert; or if there is none, the smallest of all."""
    has_device = machine.device_bytes is not None
    ways = (room(shape, config, workload, grid, has_device=has_device, is_paged=is_paged) for is_paged in (False, True))
    fits = np.logical_or(*(way.fits(machine.budgets) for way in ways))
    if fits.any():
        return grid.taken(fits)
    size = grid.micro_batch * grid.count * (1 + grid.resident)
    return grid.taken(size == size.min())


def _ffn_on_cpu(roofline: Roofline, grid: PolicyGrid) -> float | None:
    """Seconds of the fastest policy of that kind, for the analysis alone."""
    if not roofline.has_device or roofline.rates.cpu_flops_per_second is None:
        return None
    return float(np.min(replace(roofline, ffn_on_cpu=True).seconds(grid)))
