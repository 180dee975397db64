"""Selects policies of a grid to plan in full, by trials: a trial places a policy and simulates a few of its passes.

A **variant** is a policy without its block size and resident layers. The roofline's time is nearly a lower bound of the
simulated time, as it assumes that weights are loaded once for all prompts of a block. So a policy is skipped if its
roofline time is much longer than the best trial. A trial takes milliseconds, a tenth of a full plan.
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

# Maximum tokens of all lanes in a prefill pass of a trial: compute then takes about as long as loading the weights.
SWEEP_TOKENS = 16 * CHUNK_TOKENS
SWEEP_FACTOR = 4  # a further trial has passes larger by this factor if prefill stalls, or smaller if near the best
STALL_SHARE = 0.05  # minimum share of prefill stalls in the time, to try larger passes
MAX_SLOWDOWN = 1.0  # trials slower than this, relative to the roofline, are repeated with the smallest chunk
MANY_LANES = 4
MAX_BOUND_RATIO = 1.25  # policies with a longer roofline time, relative to the shortest trial, are skipped
NUM_FIRST = 2  # first trials per variant: the best block by the roofline, and the best one with many lanes
NUM_NEAR = 6  # maximum number of variants with further trials
NEAR_RATIO = 1.15  # variants with a shorter time, relative to the shortest trial, are near the best
NUM_BLOCKS = 6  # block sizes to try for each variant near the best
NUM_TIMED = 3  # blocks to simulate with padded lanes, as these differ
MANY_REQUESTS = 8192  # with more requests, a trial uses a sample of them
NUM_TRIES = 8  # maximum block sizes to try per variant until `NUM_FIRST` fit

Variant: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Predicted seconds of a policy for the whole workload, from a simulation of one block, or of a few if padded."""

    index: int  # of the policy in the grid
    policy: Policy
    seconds: float
    stall_seconds: float  # in prefill
    bound_seconds: float  # predicted by the roofline

    @property
    def pessimistic_seconds(self) -> float:
        """The longer time of trial and roofline, as either may be too short."""
        return max(self.seconds, self.bound_seconds)


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Runs trials of policies of a grid."""

    problem: Problem
    grid: PolicyGrid
    bounds: Floats  # roofline seconds of each policy
    blocks: tuple[Block, ...] | None = None  # blocks of a resumed run; None: each policy divides the requests

    def best(self) -> list[Trial]:
        """Returns the best trial of each policy that fits, the fastest first.

        A few policies of each variant are tried, then more policies of the variants near the best.
        """
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
        """Yields, for each policy that fits, the best of its trials with different prefill chunks.

        Larger chunks are tried if prefill stalls and the policy would be near the best without these stalls. The
        smallest chunk is tried if the trial is slower than the roofline, as it leaves more memory for layers and KV.
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
        """Returns the trial with the largest chunks that fit; None if no chunk fits.

        `sweep_tokens`: maximum tokens of all lanes in a prefill pass.
        """
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
        assert problem.rates is not None, "a search needs rates"
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
        """Returns a sample of the requests, its blocks, and the ratio of all requests to the sample.

        The sample is one block if there are many packed requests, as their blocks are similar; otherwise all requests.
        Results are cached by size, as dividing requests into blocks takes longer than placing them.
        """
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
        """Grid indices by variant, the fastest first by the roofline.

        Of policies that differ only in resident layers, only the fastest is included.
        """
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
