"""Plans for several ranks: plans the largest rank's share of the model, and adds its waiting time for other ranks.

A **rank** is one of the processes that compute a run together. A **lane** is a micro-batch of a rank.
"""

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

LANES_PER_RANK = (1, 2, 4)  # candidates for the lanes of a pipeline, as multiples of its ranks


@dataclass(frozen=True, kw_only=True)
class RankView:
    """A model and machine as seen by the largest rank."""

    parallelism: Parallelism
    num_ranks: int
    whole: ModelShape  # the model of all ranks together
    shape: ModelShape  # this rank's share of the model
    machine: Machine  # this rank's share of the machine

    @staticmethod
    def from_shape(
        machine: Machine,
        shape: ModelShape,
        parallelism: Parallelism,
        num_ranks: int,
        experts: DividedExperts = DividedExperts.auto,
    ) -> "RankView":
        """Raises ConfigError if the model or the machine cannot be divided among `num_ranks` ranks."""
        is_one, key = parallelism is Parallelism.one, f"devices={parallelism.value}"
        if (num_ranks == 1) is not is_one:
            processes = "several processes; set it to 2 or more"
            if is_one:
                processes = "one process; set devices=sharded, tensor or pipeline"
            raise ConfigError(f"plan.num_ranks={num_ranks}: {key} runs in {processes}")
        require(
            is_one or not shape.has_encoder,
            f"{key}: model={shape.name} has an encoder, which several ranks do not support: set devices=one",
        )
        machine_share = rank_machine(machine, shape, parallelism, num_ranks, experts)
        shares = {
            Parallelism.tensor: partial(tensor_parallel_shape, experts=experts),
            Parallelism.pipeline: pipeline_shape,
        }
        part = shares[parallelism](shape, num_ranks) if parallelism in shares else shape
        return RankView(parallelism=parallelism, num_ranks=num_ranks, whole=shape, shape=part, machine=machine_share)

    def sizes(self, sizes: Sequence[SequenceSize]) -> Sequence[SequenceSize]:
        """Returns the sizes of the requests that the rank computes. Sharded ranks each take every n-th request."""
        return sizes[:: self.num_ranks] if self.parallelism is Parallelism.sharded else sizes

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that the rank reads per pass if no stage is resident."""
        is_sharded = self.parallelism is Parallelism.sharded
        return self.whole.weight_bytes // self.num_ranks if is_sharded else self.shape.weight_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """The KV bytes of this rank per token of the whole run. Each token belongs to one of the sharded ranks."""
        return self.shape.kv_bytes_per_token // (self.num_ranks if self.parallelism is Parallelism.sharded else 1)

    def add_waiting(self, prediction: Prediction, run: RunPlan) -> Prediction:
        """Returns the rank's prediction plus the time that it waits for other pipeline ranks."""
        if self.parallelism is not Parallelism.pipeline:
            return prediction
        prefill = self._pipeline_phase(prediction.prefill, run, chunk_tokens(run.policy))
        return Prediction(prefill=prefill, decode=self._pipeline_phase(prediction.decode, run, run.lane_size))

    def _pipeline_phase(self, phase: PhaseTime, run: RunPlan, tokens: int) -> PhaseTime:
        """Returns one rank's `phase` plus the bubble of GPipe (Huang et al. 2019): the time to fill the pipeline.

        Each rank starts a pass when the first lane leaves the previous rank. With resident weights that is after the
        compute time of one lane. With streamed weights all lanes run a layer before the next layer begins, so the first
        lane leaves in the last layer. `tokens`: tokens of a lane per pass.
        """
        if not phase.seconds:
            return phase
        lanes, layers = run.num_lanes, len(self.shape.layers)
        lane_seconds = phase.busy_seconds[Resource.compute] / lanes
        is_streamed = bool(run.placement.walk.streamed)
        delay = max(lane_seconds, phase.seconds - lane_seconds * (lanes - 1) / layers) if is_streamed else lane_seconds
        num_bytes = tokens * self.whole.hidden_size * self.whole.compute_dtype_bytes
        send_seconds = phase.num_passes * self.machine.fabric.send_seconds(num_bytes, self.num_ranks)
        return replace(phase, seconds=phase.seconds + (self.num_ranks - 1) * (delay + send_seconds))

    def plan(self, problem: Problem, make_plan: Callable[[Problem], RunPlan]) -> RunPlan:
        """Returns the rank's plan by `make_plan`, with waiting time added to its prediction.

        For a pipeline, also tries more and smaller lanes and returns the fastest plan. `make_plan` cannot find it, as
        it does not know that smaller lanes shorten the wait.
        """
        best = self._plan_with_waiting(problem, make_plan)
        if self.parallelism is not Parallelism.pipeline:
            return best
        policy, block_size = problem.config.policy, best.block_size
        for lanes_per_rank in LANES_PER_RANK:
            lane_size = -(-block_size // (lanes_per_rank * self.num_ranks))
            if lane_size >= min(best.lane_size, policy.micro_batch_size or best.lane_size):
                continue
            smaller = replace(problem.config, policy=replace(policy, micro_batch_size=lane_size))
            best = min(best, self._plan_with_waiting(replace(problem, config=smaller), make_plan), key=_seconds)
        return best

    def _plan_with_waiting(self, problem: Problem, make_plan: Callable[[Problem], RunPlan]) -> RunPlan:
        run = make_plan(problem)
        return replace(run, prediction=self.add_waiting(run.prediction, run)) if run.prediction is not None else run

    def waiting_share(self, run: RunPlan, sizes: Sequence[SequenceSize], admission: Admission) -> float:
        """Returns the share of the run's time that the rank waits for data from other ranks.

        Compares the prediction with that of a rank whose exchanges take no time.
        """
        if self.parallelism is Parallelism.one or run.prediction is None or not run.prediction.seconds:
            return 0.0
        rates = self.machine.rates
        shards = None if rates.shard_bytes_per_second is None else self.num_ranks * rates.link_in_bytes_per_second
        no_exchange = replace(
            rates, exchange_bytes_per_second=UNLIMITED, exchange_seconds=0.0, shard_bytes_per_second=shards
        )
        chunk = chunk_tokens(run.policy)
        alone = predict(self.shape, run.placement, run.blocks, sizes, chunk, no_exchange, admission)
        return max(0.0, 1 - alone.seconds / run.prediction.seconds)


def _seconds(run: RunPlan) -> float:
    return run.prediction.seconds if run.prediction is not None else 0.0
