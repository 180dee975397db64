"""The few policies of a grid that are made into plans: whether the ledger lets them through, and how long they take."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np

from ...batching.balance import Block
from ...errors import BudgetError
from ...resources import Resource
from ..cost.predict import Prediction
from .blocks import of_blocks
from .candidate import PlacedRun, Problem
from .choice import Candidate
from .chunks import balanced
from .grid import Floats, PolicyGrid
from .policy import Policy
from .trials import Trial, Trials
from .workload import Workload

NUM_WAYS = 4  # each with its best block
NUM_BLOCKS = 5  # more, of any way
NEXT_SHARE = 0.75  # of a refused block's sequences, where none of those blocks fits
NOTABLE = 0.01  # of a run's time


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A candidate, and the run that its numbers are of."""

    candidate: Candidate
    run: PlacedRun
    prediction: Prediction


@dataclass(frozen=True, kw_only=True)
class Finalists:
    """`roofline` says the seconds of each policy of a grid. `blocks`: None makes those of each policy. `usual` is one
    more finalist, which need not be of `grid`."""

    problem: Problem
    workload: Workload
    grid: PolicyGrid
    roofline: Callable[[PolicyGrid], Floats]
    blocks: tuple[Block, ...] | None = None
    usual: Policy | None = None

    @cached_property
    def seconds(self) -> Floats:
        return self.roofline(self.grid)

    def table(self) -> tuple[Finalist, ...]:
        """The best block of each of a few ways, then more blocks of any, sorted by what the simulator says.

        Raises BudgetError, with the equation, when not even the smallest block fits.
        """
        trials = Trials(problem=self.problem, grid=self.grid, bounds=self.seconds, blocks=self.blocks).best()
        best_of_ways = dict[Hashable, Trial]()
        for trial in trials:
            best_of_ways.setdefault(trial.policy.way, trial)
        ways = list(best_of_ways.values())[:NUM_WAYS]
        others = [trial for trial in trials if trial not in ways]
        found = [*self._that_fit(ways), *islice(self._that_fit(others), NUM_BLOCKS)]
        if not found:
            found = [self._smaller()]
        found += self._usual(found)
        return tuple(sorted(found, key=self._rank))

    def _rank(self, finalist: Finalist) -> float:
        """Predictions are not so sharp that a hair's breadth is worth leaving the usual policy."""
        is_usual = self.usual is not None and _as_asked(finalist.candidate.policy) == _as_asked(self.usual)
        return finalist.candidate.seconds * (1 - NOTABLE if is_usual else 1)

    def _usual(self, found: list[Finalist]) -> list[Finalist]:
        """The usual policy as a finalist; none where it was found already, or does not fit."""
        if self.usual is None or _as_asked(self.usual) in {_as_asked(each.candidate.policy) for each in found}:
            return []
        try:
            return [self._finalist(self.usual, float(self.roofline(self.grid.only(self.usual))[0]))]
        except BudgetError:
            return []

    def _that_fit(self, trials: Sequence[Trial]) -> Iterator[Finalist]:
        for trial in trials:
            try:
                yield self._at(trial.place)
            except BudgetError:
                continue

    def _smaller(self) -> Finalist:
        """The fastest of all ways whose block is smaller than what was refused before, until one fits. Raises
        BudgetError when not even the smallest does."""
        left = np.argsort(self.seconds, kind="stable")
        while len(left):
            try:
                return self._at(int(left[0]))
            except BudgetError:
                left = left[self.grid.sequences[left] <= NEXT_SHARE * self.grid.sequences[left[0]]]
        return self._at(int(np.argmin(self.grid.micro_batch * self.grid.count)))

    def _at(self, place: int) -> Finalist:
        return self._finalist(self.grid.policy(place), float(self.seconds[place]))

    def _finalist(self, policy: Policy, roofline_seconds: float) -> Finalist:
        """Raises BudgetError when the policy's run does not fit."""
        problem = self.problem.of(policy)
        run = of_blocks(problem, self._blocks_of(policy))
        run.placement.require_fit(problem.config)
        run = balanced(problem, run)
        prediction = problem.predicted(run)
        assert prediction is not None, "a search predicts"
        seconds = prediction.seconds
        fullest = max(run.placement.ledgers, key=lambda ledger: ledger.total_bytes / ledger.budget_bytes)
        num_resident = sum(stage.index in run.placement.resident for stage in problem.shape.layers)
        candidate = Candidate(
            policy=replace(
                policy, resident_layers=num_resident, prefill_chunk_tokens=run.config.policy.prefill_chunk_tokens
            ),
            roofline_seconds=roofline_seconds,
            seconds=seconds,
            binding=_binding(prediction),
            tokens_per_second=self.workload.num_new_tokens / seconds if seconds else 0.0,
            full_memory=fullest.memory,
            full_share=fullest.total_bytes / fullest.budget_bytes,
        )
        return Finalist(candidate=candidate, run=run, prediction=prediction)

    def _blocks_of(self, policy: Policy) -> tuple[Block, ...]:
        """Blocks of many requests take longer to make than to place: each size is made once."""
        if self.blocks is not None:
            return self.blocks
        key = (policy.micro_batch_size, policy.num_micro_batches)
        if key not in self._made:
            self._made[key] = self.problem.blocks(*key)
        return self._made[key]

    @cached_property
    def _made(self) -> dict[tuple[int, int], tuple[Block, ...]]:
        return {}


def _as_asked(policy: Policy) -> Policy:
    """The policy without what its plan came to."""
    return replace(policy, resident_layers=0, prefill_chunk_tokens=None)


def _binding(prediction: Prediction) -> Resource:
    """The resource that binds decode passes, or where there are none prefill passes."""
    return prediction.decode.binding or prediction.prefill.binding or Resource.compute
