"""What a runtime does differently in a run of several ranks (processes): devices, budgets, plans and sessions. Such a
run is sharded, tensor-parallel or pipeline-parallel."""

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from ..batching.balance import Block
from ..config.profiles import BackendTable
from ..config.settings import OffloadConfig, Parallelism, RuntimeConfig
from ..errors import BudgetError, ConfigError, require
from ..model.loading import LoadedModel, ModelSplit
from ..plan.placement.placement import Budgets
from ..plan.planner import RunPlan
from ..plan.shape.model import ModelShape
from ..plan.shape.rank_shares import restrict_to_stages, split_stages
from ..planning.budgets import make_budgets
from ..planning.planner import Planner
from ..probing.meta import build_meta_model
from ..ranks.collectives import AllGather, PipelineLink, WeightGather
from ..ranks.pipeline import keep_stages, layer_signatures
from ..ranks.ranks import Message, Ranks
from ..ranks.shared_memory import SharedMemory
from ..ranks.tensor import TensorSplit
from ..sequences.sequence import Request
from ..stream.device import ComputeDevice, choose_device
from ..stream.weight_reader import SessionResources
from .messages import KIND, SESSION, UNSUPPORTED, Values, config_for_ranks, plan_from_broadcast, plan_to_broadcast
from .rank_sync import PassSync, PipelineSync, RankSync
from .sessions import RankSession, SameRowsSession

LANES_PER_RANK = 4  # micro-batches in a pipeline, per rank; ranks then idle at most a fifth of a pass
MAX_ROWS = 64  # sequences per micro-batch in a pipeline, unless policy.micro_batch_size is set
# If a rank's weights exceed this share of the smallest memory budget, pipeline stages are split by bytes, not by time.
MAX_WEIGHT_SHARE = 0.5


def choose_rank_device(ranks: Ranks | None, name: str) -> ComputeDevice:
    """Chooses the device of this process. If it sees several accelerators, each rank on the machine gets its own; if a
    launcher shows it only one, it gets that one. Raises ConfigError."""
    if ranks is None:
        return ComputeDevice(name)
    device = choose_device(name)
    count = 0 if device.type == "cpu" else torch.accelerator.device_count()
    if count < 2 or ":" in name:
        return ComputeDevice(name)
    index = accelerator_index(ranks.local_rank, ranks.num_local_ranks, count)
    return ComputeDevice(str(torch.device(device.type, index)))


def accelerator_index(local_rank: int, num_local_ranks: int, count: int) -> int:
    """Index of the accelerator of a rank on a machine with `count` accelerators. Raises ConfigError."""
    require(
        num_local_ranks <= count,
        f"devices: {num_local_ranks} ranks on this machine, but torch finds {count} accelerators: start one rank for "
        "each, or set machine=cpu",
    )
    return local_rank


def require_same_devices(ranks: Ranks, model: LoadedModel, device: ComputeDevice) -> None:
    """Checks that no two ranks use the same accelerator, and that all have the same kind of device and compute dtype.
    All ranks must call it together. Raises ConfigError."""
    torch_device, kind = device.torch_device, "accelerator" if device.is_accelerator else "processor"
    name, identity = "a processor", ""
    if torch_device.type != "cpu":
        name = str(torch.get_device_module(torch_device).get_device_name(torch_device))
    if torch_device.type == "cuda":  # the UUID is the same in all processes
        identity = str(torch.cuda.get_device_properties(torch_device).uuid)
    dtype = str(model.compute_dtype).removeprefix("torch.")
    replies = ranks.exchange({"kind": kind, "dtype": dtype, "device": identity, "name": name})
    users = Counter((ranks.machines[rank], each["device"]) for rank, each in enumerate(replies) if each["device"])
    shared = [device for (_, device), count in users.items() if count > 1]
    require(
        not shared,
        f"devices: several ranks on a machine use the same accelerator ({', '.join(shared)}): set machine.device "
        "without a number, and start one rank for each accelerator",
    )
    for rank, each in enumerate(replies):
        _require_same(rank, each["kind"], kind, "on", "set machine=cpu or machine.device")
        _require_same(rank, each["dtype"], dtype, "in", "set model.dtype")
        if ranks.devices.way is Parallelism.tensor:
            _require_same(rank, each["name"], name, "on", "set devices=sharded or pipeline")


def _require_same(rank: int, peer: str, own: str, how: str, remedy: str) -> None:
    if peer != own:
        raise ConfigError(f"devices: rank {rank} computes {how} {peer}, this rank {how} {own}: {remedy}")


class SharedRun(ABC):
    """What a runtime does differently in a run of several ranks. All ranks make the same calls in the same order, with
    one exception: rank 0 calls `plan` and `begin`, other ranks receive the message and call `join`.

    `all_gather` and `pipeline_link`: the transports of tensor and pipeline parallelism. `split`: how the model's
    matrices are split. `budgets`: the memory of all ranks together, for planning; None: each rank has its own."""

    all_gather: AllGather | None = None
    split: ModelSplit | None = None
    pipeline_link: PipelineLink | None = None
    budgets: Budgets | None = None
    session_kind: type[RankSession] = SameRowsSession

    def __init__(self, ranks: Ranks):
        self.ranks, self.way = ranks, ranks.devices.way

    @staticmethod
    def from_ranks(ranks: Ranks) -> "SharedRun":
        kinds = {Parallelism.tensor: TensorRun, Parallelism.pipeline: PipelineRun}
        return kinds.get(ranks.devices.way, ShardedRun)(ranks)

    def rank_config(self, config: RuntimeConfig) -> RuntimeConfig:
        """Returns `config` without features that need a single process. Raises ConfigError if such a feature was
        explicitly set."""
        return config_for_ranks(config, self.way)

    def divide_model(self, model: LoadedModel, offload: OffloadConfig, device: ComputeDevice) -> LoadedModel:
        """Returns this rank's part of the model; may mutate `model`. Raises ConfigError if the model cannot be
        split."""
        encoder = UNSUPPORTED.format(self.way.value, "encoder-decoder models", "set devices=one")
        require(not model.shape.has_encoder, encoder)
        require_same_devices(self.ranks, model, device)
        return model

    def share_memory(self, offload: OffloadConfig, device: ComputeDevice) -> None:
        """Sets `budgets`, the memory for which rank 0 plans. All ranks must call it together, after loading.

        Host memory: with shared memory, that of the machine. Otherwise the smallest rank's memory times the number of
        ranks, since all get equally many requests. Device memory: the smallest rank's times the number of ranks. With
        tensor parallelism, host and device memory are the smallest rank's."""
        own, ranks = make_budgets(offload, device), self.ranks
        replies = ranks.exchange({"host_bytes": own.host_bytes, "device_bytes": own.device_bytes})
        shares = zip(replies, ranks.machines, strict=True)
        host_bytes = min(reply["host_bytes"] // ranks.machines.count(machine) for reply, machine in shares)
        device_bytes = None if own.device_bytes is None else min(each["device_bytes"] for each in replies)
        if self.way is Parallelism.tensor:
            self.budgets = replace(own, host_bytes=host_bytes, device_bytes=device_bytes)
            return
        if device_bytes is not None:
            own = replace(own, device_bytes=ranks.size * device_bytes, num_devices=ranks.size)
        if not ranks.uses_shared_memory:
            own = replace(own, host_bytes=ranks.size * host_bytes, num_copies=ranks.size)
        self.budgets = own

    def agree_on_backends(self, measured: BackendTable | None) -> BackendTable | None:
        """Returns the backends for matrix products that this rank must use. `measured`: the fastest ones on this
        rank."""
        return measured

    def full_shape(self, shape: ModelShape) -> ModelShape | None:
        """The shape of the whole model, for the comparison with transformers before a run; None if this rank cannot run
        it. `shape`: that of this rank's part."""
        return shape

    def plan(
        self, planner: Planner, requests: Sequence[Request], blocks: tuple[Block, ...] | None, chunk_tokens: int | None
    ) -> Values:
        """Plans on rank 0 and returns the message to broadcast. Raises ConfigError, BudgetError."""
        sizes = [request.size for request in requests]
        chosen = planner.plan(sizes, blocks=blocks, chunk_tokens=chunk_tokens)
        return plan_to_broadcast(chosen, requests, planner.model.fingerprint)

    def plan_from_broadcast(self, message: Values, planner: Planner, requests: Sequence[Request]) -> RunPlan:
        """Builds this rank's plan from rank 0's message. Raises ConfigError, BudgetError."""
        return plan_from_broadcast(message, planner, requests)

    def begin(self, message: Values) -> SessionResources | None:
        """Begins a session on rank 0, and broadcasts the message that makes other ranks join it. Raises ConfigError."""
        self._broadcast(message)
        return self.all_gather

    def join(self, message: Message) -> SessionResources | None:
        """Joins the session that rank 0 announced. Raises ConfigError."""
        return self.all_gather

    @abstractmethod
    def rank_sync(self, should_stop: Callable[[], bool]) -> RankSync:
        """Creates the synchronization of ranks for one session."""

    def require_broadcastable(self, requests: Sequence[Request]) -> None:
        """Raises ConfigError if a request needs results that ranks cannot exchange."""
        # Only a pipeline's last rank has scores and embeddings.
        is_supported = self.way is not Parallelism.pipeline or all(request.generates for request in requests)
        remedy = "set devices=sharded, tensor or one"
        require(is_supported, UNSUPPORTED.format(self.way.value, "scores and embeddings", remedy))

    def _broadcast(self, message: Values, **more: object) -> None:
        self.ranks.broadcast({KIND: SESSION, "plan": message, **more})


class ShardedRun(SharedRun):
    """Data-parallel ranks with sharded weights: each rank reads a share of every layer from disk, and computes its part
    of the requests with all weights."""

    session_kind = RankSession

    def begin(self, message: Values) -> SessionResources:
        memory = SharedMemory.create(self.ranks) if self.ranks.uses_shared_memory else None
        self._broadcast(message, memory=None if memory is None else memory.address)
        return self._begin_session(memory)

    def join(self, message: Message) -> SessionResources:
        address = message["memory"]
        return self._begin_session(None if address is None else SharedMemory.open(self.ranks, address))

    def _begin_session(self, memory: SharedMemory | None) -> SessionResources:
        self.ranks.begin_session()
        return WeightGather(self.ranks) if memory is None else memory

    def rank_sync(self, should_stop: Callable[[], bool]) -> RankSync:
        return RankSync(self.ranks, should_stop)


class TensorRun(SharedRun):
    """Tensor-parallel ranks: each rank has a part of every matrix, and all compute each token together."""

    def __init__(self, ranks: Ranks):
        super().__init__(ranks)
        self.all_gather = AllGather(ranks)
        self.split = TensorSplit(self.all_gather)

    def agree_on_backends(self, measured: BackendTable | None) -> BackendTable | None:
        """Returns rank 0's backends, so that all ranks compute products in the same way."""
        table = self.ranks.exchange({"table": None if measured is None else measured.to_plain()})[0]["table"]
        return None if table is None else BackendTable.from_plain(table)

    def full_shape(self, shape: ModelShape) -> None:
        return None

    def rank_sync(self, should_stop: Callable[[], bool]) -> PassSync:
        return PassSync(self.ranks, should_stop)


class PipelineRun(SharedRun):
    """Pipeline-parallel ranks: each rank has some layers. Rank 0 makes a plan for each rank, with that rank's layers
    and memory. All ranks use the blocks of the plan with the fewest sequences per block."""

    def __init__(self, ranks: Ranks):
        super().__init__(ranks)
        self._full_shape: ModelShape | None = None
        self._shapes: tuple[ModelShape, ...] = ()  # by rank, of its layers
        self._budgets: tuple[Budgets, ...] = ()  # by rank

    def divide_model(self, model: LoadedModel, offload: OffloadConfig, device: ComputeDevice) -> LoadedModel:
        """Returns the model with only this rank's stages (embeddings, layers, or norm and head). Mutates the model's
        modules. Raises ConfigError if ranks have different weights, or the model cannot be split."""
        model, ranks, way = super().divide_model(model, offload, device), self.ranks, self.way.value
        require(
            not model.padding.separate_rows_reason,
            UNSUPPORTED.format(way, f"one row at a time ({model.padding.separate_rows_reason})", "set devices=one"),
        )
        own = make_budgets(offload, device)
        own = replace(own, host_bytes=own.host_bytes // ranks.num_local_ranks)
        replies = ranks.exchange({"budgets": vars(own), "weights": model.fingerprint})
        is_same = all(each["weights"] == replies[0]["weights"] for each in replies)
        require(is_same, f"model.path: with devices={way} all ranks need the same weights as rank 0")
        self._full_shape, self._budgets = model.shape, tuple(Budgets(**each["budgets"]) for each in replies)
        # Balance compute time; if a rank's weights might then not fit its memory, balance bytes.
        parts = split_stages(model.shape.stages, ranks.size)
        heaviest = max(restrict_to_stages(model.shape, part).weight_bytes for part in parts)
        if heaviest > MAX_WEIGHT_SHARE * min(each.compute_bytes for each in self._budgets):
            parts = split_stages(model.shape.stages, ranks.size, count_embeddings=True)
        self._shapes = tuple(restrict_to_stages(model.shape, part) for part in parts)
        self.pipeline_link = PipelineLink(ranks)
        config = copy.deepcopy(model.staged.model.config)
        for each in (config, config.get_text_config(decoder=True)):
            each._attn_implementation = "eager"
        layers = layer_signatures(build_meta_model(config, model.compute_dtype))
        keep_stages(model.staged, parts[ranks.rank], layers, device.torch_device)
        return replace(model, shape=self._shapes[ranks.rank])

    def share_memory(self, offload: OffloadConfig, device: ComputeDevice) -> None:
        pass

    def full_shape(self, shape: ModelShape) -> ModelShape | None:
        return self._full_shape

    def plan(
        self, planner: Planner, requests: Sequence[Request], blocks: tuple[Block, ...] | None, chunk_tokens: int | None
    ) -> Values:
        """Plans for all ranks and returns the message to broadcast. Raises BudgetError if a rank's memory is too
        small."""
        config, policy = planner.config, planner.config.policy
        count = policy.num_micro_batches or LANES_PER_RANK * self.ranks.size
        rows = policy.micro_batch_size or min(MAX_ROWS, max(1, -(-len(requests) // count)))
        policy = replace(policy, num_micro_batches=count, micro_batch_size=rows)
        planner = replace(planner, config=replace(config, policy=policy))
        sizes, plans = [request.size for request in requests], list[RunPlan]()
        for rank in range(self.ranks.size):
            with _name_rank_in_errors(rank):
                plans.append(self._rank_planner(rank, planner).plan(sizes, blocks=blocks, chunk_tokens=chunk_tokens))
        smallest = min(plans, key=lambda plan: (plan.block_size, plan.policy.prefill_chunk_tokens or 0))
        message = plan_to_broadcast(smallest, requests, planner.model.fingerprint)
        for rank in range(self.ranks.size):
            self._plan_for_rank(rank, message, planner, requests)
        return message

    def plan_from_broadcast(self, message: Values, planner: Planner, requests: Sequence[Request]) -> RunPlan:
        return self._plan_for_rank(self.ranks.rank, message, planner, requests)

    def _plan_for_rank(self, rank: int, message: Values, planner: Planner, requests: Sequence[Request]) -> RunPlan:
        with _name_rank_in_errors(rank):
            return plan_from_broadcast(
                {**message, "budgets": vars(self._budgets[rank])}, self._rank_planner(rank, planner), requests
            )

    def _rank_planner(self, rank: int, planner: Planner) -> Planner:
        model = replace(planner.model, shape=self._shapes[rank])
        return replace(planner, model=model, fixed_budgets=self._budgets[rank])

    def rank_sync(self, should_stop: Callable[[], bool]) -> PipelineSync:
        assert self.pipeline_link is not None, "`divide_model` creates the link"
        return PipelineSync(self.pipeline_link, should_stop)


@contextmanager
def _name_rank_in_errors(rank: int) -> Generator[None]:
    """Adds the rank to the message of a BudgetError."""
    try:
        yield
    except BudgetError as error:
        raise BudgetError(f"devices=pipeline, rank {rank}: {error}") from error
