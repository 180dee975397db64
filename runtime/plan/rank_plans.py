"""A plan for several ranks, as one of them has it: what it holds and computes, and when it waits for the others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..config.settings import Admission, DividedExperts, Parallelism
from ..errors import ConfigError, require
from ..resources import Resource
from .cost.machine import Machine, rank_machine
from .cost.predict import Prediction, predict
from .cost.rates import UNLIMITED
from .cost.simulator import PhaseTime
from .placement.defaults import chunk_tokens
from .placement.memory import SequenceSize
from .planner import RunPlan
from .search.candidate import Problem
from .shape.model import ModelShape
from .shape.rank_shares import pipeline_shape, tensor_parallel_shape

LANES_PER_RANK = (1, 2, 4)  # of a pipeline, that are tried


@dataclass(frozen=True, kw_only=True)
class RankView:
    """The model and the machine of the rank that has most. `whole` is the model of all ranks together."""

    parallelism: Parallelism
    num_ranks: int
    whole: ModelShape
    shape: ModelShape
    machine: Machine

    @staticmethod
    def from_shape(
        machine: Machine,
        shape: ModelShape,
        parallelism: Parallelism,
        num_ranks: int,
        experts: DividedExperts = DividedExperts.auto,
    ) -> "RankView":
        """The view of each of `num_ranks` of a machine as `machine_of` describes it. Raises ConfigError where model or
        machine cannot be shared out among so many."""
        if (num_ranks == 1) is not (parallelism is Parallelism.one):
            raise ConfigError(
                f"plan.num_ranks={num_ranks}: devices={parallelism.value} runs in "
                + (
                    "one process; choose devices=sharded, tensor or pipeline"
                    if parallelism is Parallelism.one
                    else "several processes; set it to 2 or more"
                )
            )
        require(
            parallelism is Parallelism.one or not shape.has_encoder,
            f"devices={parallelism.value}: model={shape.name} has an encoder, unsupported with ranks: devices=one",
        )
        machine_share = rank_machine(machine, shape, parallelism, num_ranks, experts)
        shares = {
            Parallelism.tensor: partial(tensor_parallel_shape, experts=experts),
            Parallelism.pipeline: pipeline_shape,
        }
        own = shares[parallelism](shape, num_ranks) if parallelism in shares else shape
        return RankView(parallelism=parallelism, num_ranks=num_ranks, whole=shape, shape=own, machine=machine_share)

    def sizes(self, sizes: Sequence[SequenceSize]) -> Sequence[SequenceSize]:
        """The requests that the rank computes."""
        return sizes[:: self.num_ranks] if self.parallelism is Parallelism.sharded else sizes

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that the rank reads in a pass in which none stays."""
        return (
            self.whole.weight_bytes // self.num_ranks
            if self.parallelism is Parallelism.sharded
            else self.shape.weight_bytes
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of keys and values that a rank keeps for each token of the run, in the mean."""
        count = self.num_ranks if self.parallelism is Parallelism.sharded else 1
        return self.shape.kv_bytes_per_token // count

    def add_waiting(self, prediction: Prediction, run: RunPlan) -> Prediction:
        """The prediction of one rank by itself, with what it waits for others."""
        if self.parallelism is not Parallelism.pipeline:
            return prediction
        prefill = self._pipeline_phase(prediction.prefill, run, chunk_tokens(run.policy))
        return Prediction(prefill=prefill, decode=self._pipeline_phase(prediction.decode, run, run.lane_size))

    def _pipeline_phase(self, phase: PhaseTime, run: RunPlan, tokens: int) -> PhaseTime:
        """The passes of a phase where lanes go through all ranks. A lane comes out of the first behind a share of its
        compute: of its layers lane by lane where all stay, GPipe's bubble (Huang et al. 2019). Where weights pass
        through slots, all lanes take a layer before any takes the next, so a lane comes out in the last layer."""
        if not phase.seconds:
            return phase
        lanes, layers = run.num_lanes, len(self.shape.layers)
        turn = phase.busy_seconds[Resource.compute] / lanes
        is_streamed = bool(run.placement.walk.streamed)
        ahead = max(turn, phase.seconds - turn * (lanes - 1) / layers) if is_streamed else turn
        hidden = tokens * self.whole.hidden_size * self.whole.compute_dtype_bytes
        sent = phase.num_passes * self.machine.fabric.send_seconds(hidden, self.num_ranks)
        return replace(phase, seconds=phase.seconds + (self.num_ranks - 1) * (ahead + sent))

    def plan(self, problem: Problem, find: Callable[[Problem], RunPlan]) -> RunPlan:
        """The plan that `find` makes of the rank's problem, with what it waits for others. A pipeline needs lanes,
        which nothing that one rank sees asks for: of plans with more and smaller ones the fastest is taken."""
        best = self._find_plan(problem, find)
        if self.parallelism is not Parallelism.pipeline:
            return best
        policy, block = problem.config.policy, best.block_size
        for times in LANES_PER_RANK:
            size = -(-block // (times * self.num_ranks))
            if size >= min(best.lane_size, policy.micro_batch_size or best.lane_size):
                continue
            smaller = replace(problem.config, policy=replace(policy, micro_batch_size=size))
            found = self._find_plan(replace(problem, config=smaller), find)
            if _seconds(found) < _seconds(best):
                best = found
        return best

    def _find_plan(self, problem: Problem, find: Callable[[Problem], RunPlan]) -> RunPlan:
        run = find(problem)
        return replace(run, prediction=self.add_waiting(run.prediction, run)) if run.prediction is not None else run

    def waiting_share(self, run: RunPlan, sizes: Sequence[SequenceSize], admission: Admission) -> float:
        """The share of a run's time that it would be shorter by if what comes from other ranks came at once."""
        if self.parallelism is Parallelism.one or run.prediction is None or not run.prediction.seconds:
            return 0.0
        rates = self.machine.rates
        at_once = None if rates.shard_bytes_per_second is None else self.num_ranks * rates.link_in_bytes_per_second
        free = replace(rates, exchange_bytes_per_second=UNLIMITED, exchange_seconds=0.0, shard_bytes_per_second=at_once)
        chunk = chunk_tokens(run.policy)
        alone = predict(self.shape, run.placement, run.blocks, sizes, chunk, free, admission)
        return max(0.0, 1 - alone.seconds / run.prediction.seconds)


def _seconds(run: RunPlan) -> float:
    return run.prediction.seconds if run.prediction is not None else 0.0
