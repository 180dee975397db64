"""Selects policies of a grid to plan in full: the best blocks of each variant, placed and timed by a few passes.

The roofline is rarely above the simulated time, as it loads weights once for all prompts of a block. So a policy is
skipped if its roofline time is much longer than the best trial. A trial takes milliseconds, a tenth of a full plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TypeAlias

import numpy as np

from ...batching.balance import Block
from ..cost.predict import predict_from_sample
from ..placement.defaults import CHUNK_TOKENS
from .candidate import Problem
from .grid import Floats, PolicyGrid
from .policy import Policy

SWEEP_TOKENS = 16 * CHUNK_TOKENS  # in a prefill pass of all lanes: compute takes about as long as loading weights
SWEEP_FACTOR = 4  # further sweeps: this much larger if prefill stalls, this much smaller for variants near the best
STALL_SHARE = 0.05  # prefill stalls above this share of the time count
MAX_SLOWDOWN = 1.0  # times the roofline's seconds; slower trials repeat with the smallest chunk
MANY_LANES = 4
MAX_BOUND_RATIO = 1.25  # times the shortest trial: policies slower by the roofline are skipped
NUM_FIRST = 2  # trials per variant at first: the best block by the roofline, and the best one with many lanes
NUM_NEAR = 6  # variants with further trials
NEAR_RATIO = 1.15  # times the shortest trial: variants within it are near the best
NUM_BLOCKS = 6  # blocks tried per variant near the best
NUM_TIMED = 3  # blocks timed with padded lanes, as these differ
MANY_REQUESTS = 8192  # above this, a trial places a sample
NUM_TRIES = 8  # blocks per variant, if the first ones do not fit

Variant: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Predicted seconds of the whole workload, scaled up from its middle block, or from a few blocks if padded."""

    index: int
    policy: Policy
    seconds: float
    stall_seconds: float  # in prefill
    bound_seconds: float  # the roofline's

    @property
    def pessimistic_seconds(self) -> float:
        """The slower of trial and roofline, as either may be wrong."""
        return max(self.seconds, self.bound_seconds)


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Times policies of a grid."""

    problem: Problem
    grid: PolicyGrid
    bounds: Floats  # the roofline's seconds of each policy
    blocks: tuple[Block, ...] | None = None  # of a resumed run; None: by policy

    def best(self) -> list[Trial]:
        """Returns the best trial of each policy, the fastest first; empty if none fits."""
        trials_by_variant = dict[Variant, list[Trial]]()
        shortest = float("inf")
        for variant, indices in self._variants.items():
            if self.bounds[indices[0]] < MAX_BOUND_RATIO * shortest:
                many_lanes = [index for index in indices[1:] if self.grid.lanes[index] >= MANY_LANES][:1]
                order = list(dict.fromkeys([indices[0], *many_lanes, *indices]))[:NUM_TRIES]
                trials = list(islice(self._fitting_trials(order, shortest), NUM_FIRST))
                trials_by_variant[variant] = trials
                shortest = min([shortest, *(trial.pessimistic_seconds for trial in trials)])
        fitting = [variant for variant, trials in trials_by_variant.items() if trials]
        near = sorted(fitting, key=lambda variant: _shortest(trials_by_variant[variant]))[:NUM_NEAR]
        all_trials = [trial for trials in trials_by_variant.values() for trial in trials]
        for variant in near:
            first_trials, indices = trials_by_variant[variant], self._variants[variant][:NUM_BLOCKS]
            if _shortest(first_trials) < NEAR_RATIO * shortest:
                known = {trial.index for trial in first_trials}
                promising = [index for index in indices if self.bounds[index] < MAX_BOUND_RATIO * shortest]
                trials = list(self._fitting_trials([index for index in promising if index not in known], shortest))
                best_of_variant = min([*first_trials, *trials], key=lambda trial: trial.seconds)
                smaller = self._trial(best_of_variant.index, SWEEP_TOKENS // SWEEP_FACTOR)
                all_trials += trials if smaller is None else [*trials, smaller]
        best = dict[int, Trial]()
        for trial in sorted(all_trials, key=lambda trial: trial.seconds):
            best.setdefault(trial.index, trial)
        return list(best.values())

    def _fitting_trials(self, indices: Sequence[int], shortest: float) -> Iterator[Trial]:
        """Yields the best trial of each policy that fits, over a few chunk sizes.

        Larger chunks are tried if prefill stalls and the policy would be near the best without stalls. The smallest
        chunk is tried if the trial is slower than the roofline: it leaves more memory for layers and KV.
        """
        for index in indices:
            first = self._trial(index, SWEEP_TOKENS)
            if first is None:
                continue
            trials = [first]
            busy_seconds = first.seconds - first.stall_seconds  # larger chunks can only save stalls
            if first.stall_seconds > STALL_SHARE * first.seconds and busy_seconds < NEAR_RATIO * shortest:
                trials.append(self._trial(index, SWEEP_FACTOR * SWEEP_TOKENS) or first)
            if first.seconds > MAX_SLOWDOWN * self.bounds[index]:
                trials.append(self._trial(index, CHUNK_TOKENS) or first)
            yield min(trials, key=lambda trial: trial.seconds)

    def _trial(self, index: int, sweep_tokens: int) -> Trial | None:
        """Returns the trial with the largest chunks, up to `sweep_tokens` over all lanes, that fit; None if none do."""
        policy = self.grid.policy(index)
        sample, blocks, scale = self._sample(policy.micro_batch_size, policy.num_micro_batches)
        problem = sample.with_policy(policy)
        fixed_chunk = problem.config.policy.prefill_chunk_tokens
        lane_tokens = -(-sweep_tokens // policy.num_micro_batches)
        chunk = fixed_chunk or max(CHUNK_TOKENS, 1 << max(0, lane_tokens - 1).bit_length())  # a power of two
        while True:
            run = problem.place_blocks(blocks, chunk)
            if run.placement.fits:
                break
            if fixed_chunk or chunk <= CHUNK_TOKENS:
                return None
            chunk //= 2
        assert problem.rates is not None, "a search goes by rates"
        num_timed = 1 if problem.shape.is_packed else NUM_TIMED
        prediction = predict_from_sample(
            problem.shape, run.placement, blocks, problem.sizes, chunk, problem.rates, num_timed=num_timed
        )
        return Trial(
            index=index,
            policy=policy,
            seconds=scale * prediction.seconds,
            stall_seconds=scale * prediction.prefill.stall_seconds,
            bound_seconds=float(self.bounds[index]),
        )

    def _sample(self, micro_batch_size: int, num_micro_batches: int) -> tuple[Problem, tuple[Block, ...], int]:
        """Returns a sample of the requests, its blocks, and the factor to scale times. Blocks are cached by size, as
        dividing takes longer than placing. For many packed requests one block is enough, as blocks are similar."""
        key, problem = (micro_batch_size, num_micro_batches), self.problem
        if key not in self._samples:
            num_blocks = -(-len(problem.sizes) // (micro_batch_size * num_micro_batches))
            is_single_block = self.blocks is None and problem.shape.is_packed and len(problem.sizes) > MANY_REQUESTS
            scale = num_blocks if is_single_block else 1
            problem = problem.sample(-(-len(problem.sizes) // scale))
            self._samples[key] = (problem, self.blocks or problem.blocks(*key), scale)
        return self._samples[key]

    @cached_property
    def _samples(self) -> dict[tuple[int, int], tuple[Problem, tuple[Block, ...], int]]:
        return {}

    @cached_property
    def _variants(self) -> dict[Variant, list[int]]:
        """Grid indices by variant, the fastest first. Blocks that differ only in resident layers count once."""
        grid, order = self.grid, np.argsort(self.bounds, kind="stable")
        sizes = np.stack([np.ceil(grid.rows), grid.lanes], axis=1)
        axes = np.stack([grid.order, grid.attention, grid.kv_fraction, grid.shares_experts], axis=1)
        _, first_positions = np.unique(np.concatenate([axes, sizes], axis=1)[order], axis=0, return_index=True)
        variants = dict[Variant, list[int]]()
        for position in np.sort(first_positions):
            index = int(order[position])
            variants.setdefault(tuple(axes[index]), []).append(index)
        return variants


def _shortest(trials: Sequence[Trial]) -> float:
    return min(trial.seconds for trial in trials)
