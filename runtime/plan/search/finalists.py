"""The few policies of a grid that are made into plans: whether the ledger lets them through, and how long they take."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Protocol

import numpy as np

from ...config import PolicyConfig, RuntimeConfig
from ...errors import BudgetError
from ...resources import Resource
from ..cost.machine import Machine
from ..cost.predict import Prediction
from ..placement.placement import Placement
from ..shape.model import ModelShape
from .choice import Candidate
from .grid import Floats, PolicyGrid
from .policy import Policy
from .workload import Workload

NUM_WAYS = 6  # each with its best block
NUM_BLOCKS = 4  # more, of the best way
NUM_TRIES = 8  # blocks of one way, where what the grid lets through does not fit
NEXT_SHARE = 0.75  # of a refused block's sequences, where none of those blocks fits
WORTHWHILE = 1.5  # times the best roofline: beyond that no simulation turns the tables


class Planned(Protocol):
    """What a search asks of a plan: where everything lies, how long it takes, and the policy as resolved."""

    @property
    def placement(self) -> Placement: ...

    @property
    def policy(self) -> PolicyConfig: ...

    @property
    def prediction(self) -> Prediction | None: ...


Plan = Callable[[RuntimeConfig], Planned]


@dataclass(frozen=True, kw_only=True)
class Finalists:
    """`roofline` says the seconds of each policy of a grid. `plan` makes the plan of a config whose policy is fixed,
    with a prediction. `usual` is one more finalist, which need not be of `grid`."""

    shape: ModelShape
    machine: Machine
    workload: Workload
    config: RuntimeConfig
    plan: Plan
    grid: PolicyGrid
    roofline: Callable[[PolicyGrid], Floats]
    usual: Policy | None = None

    @cached_property
    def seconds(self) -> Floats:
        return self.roofline(self.grid)

    def table(self) -> tuple[Candidate, ...]:
        """The best block of each way, then more blocks of the best way, sorted by what the simulator says.

        Raises BudgetError, with the equation, when not even the smallest block fits.
        """
        ways = self._ways()
        found = [each for places in list(ways.values())[:NUM_WAYS] for each in islice(self._that_fit(places), 1)]
        if not found:
            found = [self._smaller()]
        found += self._usual(found)
        best = min(found, key=_seconds).policy
        more = self._that_fit(ways.get(best.way, [])[: NUM_BLOCKS + NUM_TRIES])
        known = {_as_asked(each.policy) for each in found}
        found += islice((each for each in more if _as_asked(each.policy) not in known), NUM_BLOCKS)
        return tuple(sorted(found, key=_seconds))

    def _ways(self) -> dict[tuple[object, ...], list[int]]:
        """Places in the grid, by way: of each block once, with as many resident layers as fit; the fastest first."""
        ways: dict[tuple[object, ...], dict[tuple[int, int], int]] = {}
        limit = WORTHWHILE * float(self.seconds.min())
        for place in np.argsort(self.seconds, kind="stable"):
            if self.seconds[place] > limit:
                break
            policy = self.grid.policy(int(place))
            size = (policy.micro_batch_size, policy.num_micro_batches)
            ways.setdefault(policy.way, {}).setdefault(size, int(place))
        return {way: list(blocks.values()) for way, blocks in ways.items()}

    def _usual(self, found: list[Candidate]) -> list[Candidate]:
        """Nothing where it was found already, or does not fit."""
        if self.usual is None or _as_asked(self.usual) in {_as_asked(each.policy) for each in found}:
            return []
        try:
            return [self._candidate(self.usual, float(self.roofline(self.grid.only(self.usual))[0]))]
        except BudgetError:
            return []

    def _that_fit(self, places: list[int]) -> Iterator[Candidate]:
        for place in places[:NUM_TRIES]:
            try:
                yield self._at(place)
            except BudgetError:  # the longest requests need more than the mean: the next block takes less
                continue

    def _smaller(self) -> Candidate:
        """The fastest of all ways whose block is smaller than what was refused before, until one fits. Raises
        BudgetError when not even the smallest does."""
        left = np.argsort(self.seconds, kind="stable")
        while len(left):
            try:
                return self._at(int(left[0]))
            except BudgetError:
                left = left[self.grid.sequences[left] <= NEXT_SHARE * self.grid.sequences[left[0]]]
        return self._at(int(np.argmin(self.grid.micro_batch * self.grid.count)))

    def _at(self, place: int) -> Candidate:
        return self._candidate(self.grid.policy(place), float(self.seconds[place]))

    def _candidate(self, policy: Policy, roofline_seconds: float) -> Candidate:
        """Raises BudgetError when the plan does not fit."""
        plan = self.plan(policy.applied(self.config, has_device=self.machine.device_bytes is not None))
        assert plan.prediction is not None, "a search predicts"
        seconds = plan.prediction.seconds
        fullest = max(plan.placement.ledgers, key=lambda ledger: ledger.total_bytes / ledger.budget_bytes)
        num_resident = sum(stage.index in plan.placement.resident for stage in self.shape.layers)
        return Candidate(
            policy=replace(policy, resident_layers=num_resident, prefill_chunk_tokens=plan.policy.prefill_chunk_tokens),
            roofline_seconds=roofline_seconds,
            seconds=seconds,
            binding=_binding(plan.prediction),
            tokens_per_second=self.workload.num_new_tokens / seconds if seconds else 0.0,
            full_memory=fullest.memory,
            full_share=fullest.total_bytes / fullest.budget_bytes,
        )


def _as_asked(policy: Policy) -> Policy:
    """Without what its plan came to."""
    return replace(policy, resident_layers=0, prefill_chunk_tokens=None)


def _binding(prediction: Prediction) -> Resource:
    """Of decode passes, or where there is none of prefill passes."""
    return prediction.decode.binding or prediction.prefill.binding or Resource.compute


def _seconds(candidate: Candidate) -> float:
    return candidate.seconds
