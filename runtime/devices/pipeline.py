"""A model that ranks have divided among them: which layers are whose, what this rank computes, and one plan for all.

Rank 0 plans for each rank with its own shape and budget; the blocks are those of the one whose memory holds fewest
sequences. All play the same passes of the same rows, the last rank draws the tokens, and all are told them: so all come
to the same, and rank 0 alone need write it.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from ..batching.balance import Block
from ..config.settings import OffloadConfig, PolicyConfig
from ..engine.records import Phase
from ..errors import BudgetError, Interrupted, require
from ..model.loading import LoadedModel
from ..model.part import handed_on, keep_part
from ..plan.placement.placement import Budgets
from ..plan.planner import RunPlan
from ..plan.shape.model import ModelShape
from ..plan.shape.rank_shares import divided, part_of
from ..planning.budgets import budgets_of
from ..planning.planner import Planner
from ..probing.meta import build_meta_model
from ..ranks.collectives import PipelineLink
from ..ranks.ranks import STOPPED, Message, Ranks
from ..sequences.sequence import Request, Unfinished
from ..stream.device import ComputeDevice
from .agreement import KIND, LANES, STATES, STOPPING
from .messages import Values, read_states, written_plan
from .same_rows import BetweenPasses
from .told_plan import NOT_YET, plan_told


class PipelineAgreement(BetweenPasses):
    """Whether one of them is to stop. How far rows have come the last rank says, which has the generators that draw
    their tokens."""

    def __init__(self, line: PipelineLink, asked_to_stop: Callable[[], bool]):
        super().__init__(line.ranks, asked_to_stop)
        self._line = line

    def lanes(self, num_lanes: int, phase: Phase) -> tuple[int, Phase]:
        """What was asked for. Raises Interrupted where a rank was asked to stop, and PeerEnded."""
        if self._has_stopped:
            raise Interrupted(STOPPED)
        while self._met({KIND: LANES, STOPPING: self._asked_to_stop()})[0][KIND] == STATES:
            self._keep(self.ranks.exchange(self._own_states()))
        return num_lanes, phase

    def all_states(self) -> dict[int, Unfinished]:
        """What the last rank says; of rank 0 alone, between two passes or behind the last one. Where it cannot be asked
        any more, what it said last counts."""
        try:
            if not self._has_stopped:
                self._met({KIND: STATES})
                self._keep(self.ranks.exchange(self._own_states()))
        except Interrupted:
            self._has_stopped = True
        return {place: self._known[place] for place in self.states() if place in self._known}

    def stop(self) -> None:
        """Has the others stop before their next pass, unless all are about to."""
        try:
            if not self._has_stopped:
                self._met({KIND: LANES, STOPPING: True})
        except Interrupted:
            self._has_stopped = True

    def _met(self, message: Message) -> list[Message]:
        """Raises Interrupted where a rank stops, and has then heard the last one; and PeerEnded."""
        met = self.ranks.exchange(message)
        if any(each.get(STOPPING) for each in met):
            self._has_stopped = True
            self._keep(self.ranks.exchange(self._own_states()))
            raise Interrupted(STOPPED)
        return met

    def _own_states(self) -> Message:
        return super()._own_states() if self._line.is_last else {KIND: STATES}

    def _keep(self, met: list[Message]) -> None:
        self._known = read_states(met[-1]["states"])


LANES_PER_RANK = 4  # so that a rank waits for lanes of others in a fifth of a pass at most
MOST_ROWS = 64  # of a lane, where the policy leaves that open
CROWDED = 0.5  # of the smallest budget, which weights take at most that are divided by time instead of memory


class Pipeline:
    """This rank's place among those that divide a model. All ranks make theirs at the same time. Raises ConfigError
    where they have other weights, or the model cannot be divided among them."""

    def __init__(self, ranks: Ranks, model: LoadedModel, offload: OffloadConfig, device: ComputeDevice):
        way = ranks.devices.way.value
        require(not model.habits.apart, NOT_YET.format(way, f"rows apart ({model.habits.apart})", "take devices=one"))
        own = budgets_of(offload, device)
        own = replace(own, host_bytes=own.host_bytes // ranks.machines.count(ranks.machines[ranks.rank]))
        met = ranks.exchange({"budgets": vars(own), "weights": model.fingerprint})
        is_same = all(each["weights"] == met[0]["weights"] for each in met)
        require(is_same, f"devices={way}: ranks have other weights than rank 0 at model.path")
        self.rank, self.size = ranks.rank, ranks.size
        self.budgets = tuple(Budgets(**each["budgets"]) for each in met)
        self.whole = model.shape
        self.parts = _parts(model.shape, self.budgets)
        self.line, self._device = PipelineLink(ranks), device.torch_device

    def part_of(self, model: LoadedModel) -> LoadedModel:
        """The model with this rank's stages alone. Mutates its modules."""
        config = copy.deepcopy(model.staged.model.config)
        for each in (config, config.get_text_config(decoder=True)):
            each._attn_implementation = "eager"
        layers = handed_on(build_meta_model(config, model.compute_dtype))
        keep_part(model.staged, self.parts[self.rank], layers, self._device)
        return replace(model, shape=self.shapes[self.rank])

    @cached_property
    def shapes(self) -> tuple[ModelShape, ...]:
        """The model as each rank sees it."""
        return tuple(part_of(self.whole, part) for part in self.parts)

    def plan(
        self, planner: Planner, requests: Sequence[Request], blocks: tuple[Block, ...] | None, chunk_tokens: int | None
    ) -> Values:
        """What rank 0 tells of the plan that all ranks make. Raises BudgetError where one of them has no room."""
        config = planner.config
        planner = replace(planner, config=replace(config, policy=_policy(config.policy, self.size, requests)))
        plans = [self._of_rank(rank, planner, requests, blocks, chunk_tokens) for rank in range(self.size)]
        told = [written_plan(plan, requests, planner.model.fingerprint) for plan in sorted(plans, key=_size)]
        for rank in range(self.size):
            self._told(rank, told[0], planner, requests)
        return told[0]

    def plan_told(self, told: Values, planner: Planner, requests: Sequence[Request]) -> RunPlan:
        """This rank's plan."""
        return self._told(self.rank, told, planner, requests)

    def _of_rank(
        self,
        rank: int,
        planner: Planner,
        requests: Sequence[Request],
        blocks: tuple[Block, ...] | None,
        chunk_tokens: int | None,
    ) -> RunPlan:
        sizes = [request.size for request in requests]
        try:
            return self._planner(rank, planner).plan(sizes, blocks=blocks, chunk_tokens=chunk_tokens)
        except BudgetError as error:
            raise BudgetError(f"devices=pipeline, rank {rank}: {error}") from error

    def _told(self, rank: int, told: Values, planner: Planner, requests: Sequence[Request]) -> RunPlan:
        try:
            return plan_told({**told, "budgets": vars(self.budgets[rank])}, self._planner(rank, planner), requests)
        except BudgetError as error:
            raise BudgetError(f"devices=pipeline, rank {rank}: {error}") from error

    def _planner(self, rank: int, planner: Planner) -> Planner:
        return replace(planner, model=replace(planner.model, shape=self.shapes[rank]), given_budgets=self.budgets[rank])


def _parts(shape: ModelShape, budgets: Sequence[Budgets]) -> tuple[range, ...]:
    """Such that no rank takes longer than it must, or where weights may not fit that way, none holds more than it
    must."""
    parts = divided(shape.stages, len(budgets))
    heaviest = max(part_of(shape, part).weight_bytes for part in parts)
    is_crowded = heaviest > CROWDED * min(each.compute_bytes for each in budgets)
    return divided(shape.stages, len(budgets), with_tables=True) if is_crowded else parts


def _policy(policy: PolicyConfig, size: int, requests: Sequence[Request]) -> PolicyConfig:
    """The policy with as many lanes as keep all ranks busy, where it leaves their number open."""
    count = policy.num_micro_batches or LANES_PER_RANK * size
    rows = policy.micro_batch_size or min(MOST_ROWS, max(1, -(-len(requests) // count)))
    return replace(policy, num_micro_batches=count, micro_batch_size=rows)


def _size(plan: RunPlan) -> tuple[int, int]:
    return plan.block_size, plan.policy.prefill_chunk_tokens or 0
