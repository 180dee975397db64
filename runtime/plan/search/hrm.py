"""Searches for the policy with the highest throughput, see `Policy`.

First, the hierarchical roofline model (HRM) ranks the whole grid, as if all prompts of a block were prefilled in one
pass. Then the best policies of each variant (a policy without its sizes) are placed, and a few of their passes are
simulated. Last, a few finalists are planned in full: the table of memory use shows whether they fit, and the simulator
predicts their time.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TypeAlias

import numpy as np

from ...batching.balance import Block
from ...config.settings import FeedForward, RuntimeConfig
from ...errors import BudgetError
from ...resources import Resource
from ..cost.machine import Machine
from ..cost.predict import Prediction
from ..cost.roofline import OperatingPoint, operating_point
from ..cost.work import LayerWork
from ..shape.model import ModelShape
from .candidate import PlacedRun, Problem, place_existing_blocks, tune_chunks
from .drafts import place_beside_drafts
from .grid import Floats, GridAxes, PolicyGrid
from .memory_estimates import MemoryEstimate, layers_in_host
from .pass_times import Roofline
from .policy import Policy
from .trials import Trial, Trials
from .workload import Workload

NUM_VARIANTS = 4  # variants with a finalist each
NUM_BLOCKS = 5  # further finalists of any variant
NEXT_SHARE = 0.75  # if a block does not fit, the next candidate has at most this share of its sequences
NOTABLE = 0.01  # minimum saving of a policy that replaces the default, as a share of the run's time


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A policy that fits, with its predicted time for the whole workload."""

    policy: Policy
    roofline_seconds: float  # predicted by the roofline
    seconds: float  # predicted by the simulator
    binding: Resource  # busiest resource of the simulated decode passes
    tokens_per_second: float  # generated tokens
    full_memory: str  # host or device: the memory closest to its budget
    full_share: float  # used share of this budget

    @property
    def text(self) -> str:
        return f"{self.policy}: {self.tokens_per_second:.4g} tokens/s predicted"


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best policies of a search."""

    table: tuple[Candidate, ...]  # the fastest first
    busy_seconds: Mapping[Resource, float]  # roofline of a decode pass of the best policy
    operating_point: OperatingPoint  # of the best policy

    @property
    def best(self) -> Candidate:
        return self.table[0]

    @property
    def binding(self) -> Resource:
        return self.best.binding

    @property
    def roofline_binding(self) -> Resource:
        return max(self.busy_seconds, key=lambda resource: self.busy_seconds[resource])

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest policy of another variant, or if there is none, of another size."""
        others = [each for each in self.table[1:] if each.policy.variant != self.best.policy.variant]
        return (others or list(self.table[1:]) or [None])[0]

    @property
    def why(self) -> tuple[str, ...]:
        """Lines of text for users that explain the choice."""
        best, runner_up, point = self.best, self.runner_up, self.operating_point
        parts = [f"{resource.value} {s:.3g} s" for resource, s in self.busy_seconds.items() if s]
        is_same = self.binding is self.roofline_binding
        roofline = "" if is_same else f", limited by {self.roofline_binding.value}"
        p1, p2 = point.p1, point.p2
        points = f"P1 {'unknown' if p1 is None else f'{p1:.3g}'}, P2 {p2:.3g}"
        return (
            f"policy {best.policy.digest}: {best.text}",
            *([f"runner-up: {runner_up.text}"] if runner_up else []),
            f"{self.binding.value} is the limit; by the roofline a decode pass takes {', '.join(parts)}{roofline}",
            f"feed-forward layers have {point.feed_forward:.3g} FLOPs per byte, "
            f"{'above' if point.feed_forward >= p2 else 'below'} P2; turning points: {points} "
            f"(a block of {point.needed_sequences:,.0f} sequences)",
            f"{best.full_memory} memory is {best.full_share:.0%} full",
            *(
                [f"attention has {point.attention:.3g} FLOPs per byte of KV, below P1: faster where the KV is"]
                if p1 is not None and point.attention < p1
                else []
            ),
        )


Finalist: TypeAlias = tuple[Candidate, PlacedRun, Prediction]  # a candidate with its run and predicted time


@dataclass(frozen=True, kw_only=True)
class Finalists:
    """Plans the most promising policies of a grid in full."""

    problem: Problem
    workload: Workload
    grid: PolicyGrid
    roofline: Callable[[PolicyGrid], Floats]  # predicted seconds of each policy
    blocks: tuple[Block, ...] | None = None  # blocks of a resumed run; None: each policy divides the requests
    default: Policy | None = None  # the default policy, always a finalist

    @cached_property
    def seconds(self) -> Floats:
        """Seconds of each policy, predicted by the roofline."""
        return self.roofline(self.grid)

    def table(self) -> tuple[Finalist, ...]:
        """Returns the finalists, the fastest first: the best policies of a few variants, and a few further policies.

        Raises BudgetError, with the table of memory use, if not even the smallest block fits.
        """
        trials = Trials(problem=self.problem, grid=self.grid, bounds=self.seconds, blocks=self.blocks).best()
        best_of_variants = dict[Hashable, Trial]()
        for trial in trials:
            best_of_variants.setdefault(trial.policy.variant, trial)
        best_trials = list(best_of_variants.values())[:NUM_VARIANTS]
        others = [trial for trial in trials if trial not in best_trials]
        finalists = [*self._fitting(best_trials), *islice(self._fitting(others), NUM_BLOCKS)]
        if not finalists:
            finalists = [self._smaller_block()]
        default = self.default.without_plan if self.default is not None else None
        if self.default is not None and default not in {candidate.policy.without_plan for candidate, _, _ in finalists}:
            with suppress(BudgetError):
                seconds = float(self.roofline(self.grid.single(self.default))[0])
                finalists.append(self._make_finalist(self.default, seconds))

        def rank(finalist: Finalist) -> float:
            """Returns the predicted seconds, with a small bonus for the default policy."""
            candidate = finalist[0]
            return candidate.seconds * (1 - NOTABLE if candidate.policy.without_plan == default else 1)

        return tuple(sorted(finalists, key=rank))

    def _fitting(self, trials: Sequence[Trial]) -> Iterator[Finalist]:
        for trial in trials:
            with suppress(BudgetError):
                yield self._finalist_at(trial.index)

    def _smaller_block(self) -> Finalist:
        """Returns the fastest policy that fits, trying ever smaller blocks. Raises BudgetError if none fits."""
        remaining = np.argsort(self.seconds, kind="stable")
        while len(remaining):
            try:
                return self._finalist_at(int(remaining[0]))
            except BudgetError:
                remaining = remaining[self.grid.sequences[remaining] <= NEXT_SHARE * self.grid.sequences[remaining[0]]]
        return self._finalist_at(int(np.argmin(self.grid.micro_batch * self.grid.count)))

    def _finalist_at(self, index: int) -> Finalist:
        return self._make_finalist(self.grid.policy(index), float(self.seconds[index]))

    def _make_finalist(self, policy: Policy, roofline_seconds: float) -> Finalist:
        """Plans the run of `policy`. Raises BudgetError if it does not fit."""
        problem, blocks = self.problem.with_policy(policy), self.blocks
        if blocks is None:  # cached by size: dividing many requests into blocks takes longer than placing them
            key = (policy.micro_batch_size, policy.num_micro_batches)
            blocks = self._blocks_cache[key] = self._blocks_cache.get(key) or self.problem.blocks(*key)
        run = place_existing_blocks(problem, blocks)
        run.placement.require_fit(problem.config)
        run = place_beside_drafts(problem, tune_chunks(problem, run))
        prediction = problem.predict(run)
        assert prediction is not None, "a search needs rates"
        seconds = prediction.seconds
        fullest = max(run.placement.ledgers, key=lambda ledger: ledger.total_bytes / ledger.budget_bytes)
        num_resident = sum(stage.index in run.placement.resident for stage in problem.shape.layers)
        candidate = Candidate(
            policy=replace(
                policy, resident_layers=num_resident, prefill_chunk_tokens=run.config.policy.prefill_chunk_tokens
            ),
            roofline_seconds=roofline_seconds,
            seconds=seconds,
            binding=prediction.decode.binding or prediction.prefill.binding or Resource.compute,
            tokens_per_second=self.workload.num_new_tokens / seconds if seconds else 0.0,
            full_memory=fullest.memory,
            full_share=fullest.total_bytes / fullest.budget_bytes,
        )
        return candidate, run, prediction

    @cached_property
    def _blocks_cache(self) -> dict[tuple[int, int], tuple[Block, ...]]:
        return {}


def search(
    problem: Problem,
    *,
    workload: Workload | None = None,
    axes: GridAxes | None = None,
    blocks: tuple[Block, ...] | None = None,
    default: Policy | None = None,
) -> tuple[SearchResult, PlacedRun, Prediction]:
    """Returns the search result for the tiers and prefetch of `problem`, and the run of the best policy with its time.

    `problem` must have rates. `workload`: None derives it from the problem's requests. `axes`: None allows all values.
    `blocks`: existing blocks of a resumed run. `default`: the default policy, which is always a finalist.

    Raises BudgetError, with the table of memory use, if not even the smallest block fits.
    """
    shape, config, budgets = problem.shape, problem.config, problem.budgets
    assert problem.rates is not None, "a search needs rates"
    machine = Machine(
        name="this machine",
        host_bytes=budgets.host_bytes,
        device_bytes=budgets.device_bytes,
        library_bytes=budgets.library_bytes,
        num_sharers=budgets.num_sharers,
        rates=problem.rates,
    )
    workload = workload or Workload.from_sizes(problem.sizes)
    axes = axes or GridAxes.from_config(shape, config, workload.num_requests, has_device=budgets.has_device)
    if problem.rates.cpu_flops_per_second is None:  # the CPU then computes experts only if configured
        axes = replace(axes, feedforwards=[config.policy.feedforward or FeedForward.device])
    if blocks:
        lanes = [[len(lane) for lane in block.micro_batches] for block in blocks]
        lane_size = max((rows for block in lanes for rows in block), default=1)
        axes = replace(axes, micro_batches=[lane_size], counts=[max(map(len, lanes), default=1)])
    roofline = make_roofline(shape, machine, workload, config)
    grid = select_fitting(shape, machine, workload, config, axes.grid(workload.num_requests))
    finalists = Finalists(
        problem=problem, workload=workload, grid=grid, roofline=roofline.seconds, blocks=blocks, default=default
    ).table()
    best, run, prediction = finalists[0]
    single = grid.single(best.policy)
    result = SearchResult(
        table=tuple(candidate for candidate, _, _ in finalists),
        busy_seconds=roofline.decode_pass(single).busy_at(0),
        operating_point=operating_point(
            roofline.work,
            machine,
            reads=run.placement.walk.reads,
            num_sequences=float(single.sequences[0]),
            num_rows=float((single.sequences if best.policy.schedule.style.batches_experts else single.rows)[0]),
        ),
    )
    return result, run, prediction


def make_roofline(shape: ModelShape, machine: Machine, workload: Workload, config: RuntimeConfig) -> Roofline:
    return Roofline(
        work=LayerWork.from_shape(shape),
        rates=machine.rates,
        workload=workload,
        config=config,
        has_device=machine.device_bytes is not None,
        item_bytes=shape.compute_dtype_bytes,
        in_host=lambda grid: layers_in_host(shape, config, workload, grid, machine.budgets),
        is_packed=shape.is_packed,
        cross_kv_bytes=shape.cross_kv_bytes_per_token,
    )


def select_fitting(
    shape: ModelShape, machine: Machine, workload: Workload, config: RuntimeConfig, grid: PolicyGrid
) -> PolicyGrid:
    """Returns the policies that fit the budgets, with whole layers or with experts that are read one by one.

    If none fits, returns the smallest policies.
    """
    budgets = machine.budgets
    needs = (MemoryEstimate(shape, config, workload, grid, budgets, is_paged=is_paged) for is_paged in (False, True))
    fits = np.logical_or(*(estimate.fits(budgets) for estimate in needs))
    if fits.any():
        return grid.select(fits)
    size = grid.micro_batch * grid.count * (1 + grid.resident)
    return grid.select(size == size.min())
