"""Searches for the policy with the highest throughput: MoE-Lightning's (N, mu, A, F, r_w, r_c), and the order.

First the whole grid by the hierarchical roofline, at once, as if each block's prompts went in one pass; then the best
of each way placed and timed by two passes; then the best few as plans in the chunks that are best for each, with the
ledger's word on whether they fit and the simulator's on how long they take.
"""

from dataclasses import dataclass

import numpy as np

from ...batching.balance import Block
from ...config.settings import RuntimeConfig
from ..cost.machine import Machine
from ..cost.work import LayerWork
from ..shape.model import ModelShape
from .candidate import Problem
from .choice import Choice
from .finalists import Finalist, Finalists
from .grid import Choices, PolicyGrid
from .pass_times import Roofline
from .policy import Policy
from .ridge_points import operating_point
from .room import layers_in_host, room
from .workload import Workload


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to, and the run of the best policy."""

    choice: Choice
    best: Finalist


def search(
    problem: Problem,
    *,
    workload: Workload | None = None,
    choices: Choices | None = None,
    blocks: tuple[Block, ...] | None = None,
    usual: Policy | None = None,
) -> Found:
    """The best policy for the tiers, prefetch and chunks of `problem`, which has rates. `workload`: None samples the
    problem's requests. `choices`: None looks at all, or with `blocks`, which are given, at the ways that these can go.
    `usual`: what it would be without a search, which is simulated in any case.

    Raises BudgetError, with the equation, when even the smallest block does not fit.
    """
    shape, config = problem.shape, problem.config
    machine, workload = _machine(problem), workload or Workload.of(problem.sizes)
    choices = choices or Choices.of(shape, config, workload.num_requests, has_device=problem.budgets.has_device)
    if machine.rates.cpu_flops_per_second is None:
        choices = choices.without_guesses(config)
    if blocks:
        choices = choices.of_blocks([[len(lane) for lane in block.micro_batches] for block in blocks])
    roofline = roofline_of(shape, machine, workload, config)
    within = fitting(shape, machine, workload, config, choices.grid(workload.num_requests))
    finalists = Finalists(
        problem=problem, workload=workload, grid=within, roofline=roofline.seconds, blocks=blocks, usual=usual
    ).table()
    best = finalists[0].candidate.policy
    only = within.only(best)
    choice = Choice(
        table=tuple(each.candidate for each in finalists),
        busy_seconds={each: float(seconds[0]) for each, seconds in roofline.decode_pass(only).busy.items()},
        operating_point=operating_point(
            roofline.work,
            machine,
            reads=finalists[0].run.placement.walk.reads,
            num_sequences=float(only.sequences[0]),
            num_rows=float((only.sequences if best.schedule.style.batches_experts else only.rows)[0]),
        ),
    )
    return Found(choice=choice, best=finalists[0])


def _machine(problem: Problem) -> Machine:
    assert problem.rates is not None, "a search goes by rates"
    budgets = problem.budgets
    return Machine(
        name="this machine",
        host_bytes=budgets.host_bytes,
        device_bytes=budgets.device_bytes,
        library_bytes=budgets.library_bytes,
        num_sharers=budgets.num_sharers,
        rates=problem.rates,
    )


def roofline_of(shape: ModelShape, machine: Machine, workload: Workload, config: RuntimeConfig) -> Roofline:
    return Roofline(
        work=LayerWork.of(shape),
        rates=machine.rates,
        workload=workload,
        config=config,
        has_device=machine.device_bytes is not None,
        item_bytes=shape.compute_dtype_bytes,
        in_host=lambda grid: layers_in_host(shape, config, workload, grid, machine.budgets),
        is_packed=shape.is_packed,
        cross_kv_bytes=shape.cross_kv_bytes_per_token,
    )


def fitting(
    shape: ModelShape, machine: Machine, workload: Workload, config: RuntimeConfig, grid: PolicyGrid
) -> PolicyGrid:
    """Those within the budgets, with slots of whole layers or by expert; or if there is none, the smallest of all."""
    budgets = machine.budgets
    ways = (room(shape, config, workload, grid, budgets, is_paged=is_paged) for is_paged in (False, True))
    fits = np.logical_or(*(way.fits(budgets) for way in ways))
    if fits.any():
        return grid.taken(fits)
    size = grid.micro_batch * grid.count * (1 + grid.resident)
    return grid.taken(size == size.min())
