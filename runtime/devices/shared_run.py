"""What a runtime does together with other ranks, in one of three ways."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..batching.balance import Block
from ..config.profiles import BackendTable
from ..config.settings import OffloadConfig, RuntimeConfig, Way
from ..errors import ConfigError, require
from ..model.loading import LoadedModel
from ..plan.placement.placement import Budgets
from ..plan.planner import RunPlan
from ..plan.shape.model import ModelShape
from ..planning.budgets import budgets_of
from ..planning.planner import Planner
from ..ranks.collectives import Collectives, Gathering, PipelineLink
from ..ranks.ranks import Message, Ranks
from ..ranks.shared_memory import SharedMemory
from ..sequences.sequence import Request
from ..stream.device import ComputeDevice
from ..stream.device_choice import choose_device
from ..stream.fillings import Together
from .agreement import KIND, Agreement
from .messages import Values, written_plan
from .pipeline import Pipeline, PipelineAgreement
from .same_rows import PassAgreement, SameRowsSession
from .sharded_session import RankSession
from .told_plan import SESSION, backends_told, for_ranks, plan_told, require_shareable, require_told


def device_of(ranks: Ranks | None, name: str) -> ComputeDevice:
    """The device that this process computes on. Each of several ranks takes another one of its machine's accelerators,
    or where a launcher lets it see but one, that. Raises ConfigError."""
    if ranks is None:
        return ComputeDevice(name)
    found = choose_device(name)
    count = 0 if found.type == "cpu" else torch.accelerator.device_count()
    if count < 2 or ":" in name:
        return ComputeDevice(name)
    return ComputeDevice(str(torch.device(found.type, place_of(ranks.num_before_here, ranks.num_here, count))))


def place_of(place: int, num_here: int, count: int) -> int:
    """The number of the accelerator, of `count`, that rank `place` of the `num_here` on a machine takes. Raises
    ConfigError."""
    require(
        num_here <= count,
        f"devices: {num_here} ranks are on this machine, and torch finds {count} accelerators: start one rank for "
        "each, or set machine=cpu",
    )
    return place


def require_alike(ranks: Ranks, model: LoadedModel, device: ComputeDevice) -> None:
    """All ranks ask at once. Raises ConfigError where two have one accelerator between them, or they would come to
    other numbers."""
    kind = "accelerator" if device.is_accelerator else "processor"
    own = {"kind": kind, "dtype": str(model.compute_dtype).removeprefix("torch."), "device": _identity(device)}
    met = ranks.exchange({**own, "name": _name(device)})
    known = Counter((ranks.machines[rank], each["device"]) for rank, each in enumerate(met) if each["device"])
    shared = [device for (_, device), times in known.items() if times > 1]
    require(
        not shared,
        f"devices: several ranks of a machine have the same accelerator ({', '.join(shared)}): leave its number out of "
        "machine.device, and start as many ranks as there are accelerators",
    )
    for rank, each in enumerate(met):
        _require_same(rank, each["kind"], kind, "on", "set machine=cpu, or machine.device")
        _require_same(rank, each["dtype"], own["dtype"], "in", "set model.dtype")
        if ranks.devices.way is Way.tensor:
            _require_same(rank, each["name"], _name(device), "on", "take devices=sharded or pipeline")


def _require_same(rank: int, found: str, own: str, how: str, remedy: str) -> None:
    if found != own:
        raise ConfigError(f"devices: rank {rank} would compute {how} {found}, this one {how} {own}: {remedy}")


def _identity(device: ComputeDevice) -> str:
    """The name of an accelerator by which all processes know it; empty where nothing tells."""
    if device.torch_device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device.torch_device).uuid)


def _name(device: ComputeDevice) -> str:
    """The kind of an accelerator. Processors of one kind are not told apart here."""
    if device.torch_device.type == "cpu":
        return "a processor"
    return str(torch.get_device_module(device.torch_device).get_device_name(device.torch_device))


class SharedRun(ABC):
    """This rank's part of what all ranks compute; they make the same calls in the same order, but that where rank 0
    plans and begins sessions, the others hear of them, and join. `gathering` and `line`: what they hand one another
    by. `budgets`: of the plan; None: each rank's are its own affair."""

    gathering: Gathering | None = None
    line: PipelineLink | None = None
    budgets: Budgets | None = None
    session_kind: type[RankSession] = SameRowsSession

    def __init__(self, ranks: Ranks):
        self.ranks, self.way = ranks, ranks.devices.way

    @staticmethod
    def of(ranks: Ranks) -> "SharedRun":
        return {Way.tensor: TensorRun, Way.pipeline: PipelineRun}.get(ranks.devices.way, ShardedRun)(ranks)

    def config(self, config: RuntimeConfig) -> RuntimeConfig:
        """`config` without what one process alone can do. Raises ConfigError."""
        return for_ranks(config, self.way)

    def joined(self, model: LoadedModel, offload: OffloadConfig, device: ComputeDevice) -> LoadedModel:
        """What this rank computes of the model, which it may change. Raises ConfigError where they cannot share it."""
        require_shareable(model.shape, self.way)
        require_alike(self.ranks, model, device)
        return model

    def share_memory(self, offload: OffloadConfig, device: ComputeDevice) -> None:
        """Sets `budgets`, once all that is not counted in them is there."""
        self.budgets = budgets_of_ranks(self.ranks, budgets_of(offload, device))

    def products(self, found: BackendTable | None) -> BackendTable | None:
        """How this rank makes products, given what is best for it."""
        return found

    def whole(self, shape: ModelShape) -> ModelShape | None:
        """The model that the class computes by itself, given this rank's part; None: no class does that."""
        return shape

    def plan(
        self, planner: Planner, requests: Sequence[Request], blocks: tuple[Block, ...] | None, chunk_tokens: int | None
    ) -> Values:
        """What rank 0 tells of its plan. Raises ConfigError, BudgetError."""
        sizes = [request.size for request in requests]
        chosen = planner.plan(sizes, blocks=blocks, chunk_tokens=chunk_tokens)
        return written_plan(chosen, requests, planner.model.fingerprint)

    def plan_told(self, told: Values, planner: Planner, requests: Sequence[Request]) -> RunPlan:
        """The plan that rank 0 tells of, as this rank makes it. Raises ConfigError, BudgetError."""
        return plan_told(told, planner, requests)

    def begin(self, told: Values) -> Together | None:
        """Begins a session as rank 0, and has the others join it. Raises ConfigError."""
        self._tell(told)
        return self.gathering

    def join(self, message: Message) -> Together | None:
        """Joins the session that rank 0's message is of. Raises ConfigError."""
        return self.gathering

    @abstractmethod
    def agreement(self, should_stop: Callable[[], bool]) -> Agreement:
        """This rank's part in the agreements of a session."""

    def require_told(self, requests: Sequence[Request]) -> None:
        """Raises ConfigError where they ask for what ranks do not tell one another."""
        require_told(requests, self.way)

    def _tell(self, told: Values, **more: object) -> None:
        self.ranks.tell({KIND: SESSION, "plan": told, **more})


class ShardedRun(SharedRun):
    """Each reads a share of every layer, and computes its part of the rows."""

    session_kind = RankSession

    def begin(self, told: Values) -> Together:
        memory = SharedMemory.made(self.ranks) if self.ranks.sees_memory else None
        self._tell(told, memory=None if memory is None else memory.place)
        return self._begun(memory)

    def join(self, message: Message) -> Together:
        place = message["memory"]
        return self._begun(None if place is None else SharedMemory.opened(self.ranks, place))

    def _begun(self, memory: SharedMemory | None) -> Together:
        self.ranks.begin_session()
        return Collectives(self.ranks) if memory is None else memory

    def agreement(self, should_stop: Callable[[], bool]) -> Agreement:
        return Agreement(self.ranks, should_stop)


class TensorRun(SharedRun):
    """Each has a part of every matrix, and all compute each token together."""

    def __init__(self, ranks: Ranks):
        super().__init__(ranks)
        self.gathering = Gathering(ranks)

    def products(self, found: BackendTable | None) -> BackendTable | None:
        return backends_told(self.ranks, found)

    def whole(self, shape: ModelShape) -> None:
        return None

    def agreement(self, should_stop: Callable[[], bool]) -> PassAgreement:
        return PassAgreement(self.ranks, should_stop)


class PipelineRun(SharedRun):
    """Each has some of the layers, and plans for them by its own budget."""

    _pipeline: Pipeline | None = None

    @property
    def pipeline(self) -> Pipeline:
        assert self._pipeline is not None, "it is there once the model is"
        return self._pipeline

    def joined(self, model: LoadedModel, offload: OffloadConfig, device: ComputeDevice) -> LoadedModel:
        model = super().joined(model, offload, device)
        self._pipeline = Pipeline(self.ranks, model, offload, device)
        self.line = self._pipeline.line
        return self._pipeline.part_of(model)

    def share_memory(self, offload: OffloadConfig, device: ComputeDevice) -> None:
        pass

    def whole(self, shape: ModelShape) -> ModelShape:
        return self.pipeline.whole

    def plan(
        self, planner: Planner, requests: Sequence[Request], blocks: tuple[Block, ...] | None, chunk_tokens: int | None
    ) -> Values:
        return self.pipeline.plan(planner, requests, blocks, chunk_tokens)

    def plan_told(self, told: Values, planner: Planner, requests: Sequence[Request]) -> RunPlan:
        return self.pipeline.plan_told(told, planner, requests)

    def agreement(self, should_stop: Callable[[], bool]) -> PipelineAgreement:
        return PipelineAgreement(self.pipeline.line, should_stop)


def budgets_of_ranks(ranks: Ranks, own: Budgets) -> Budgets:
    """What all ranks together may use, given what this one's machine and device may: the machine's, where they see its
    memory; otherwise as many times what a rank has where that is least, as all are given equally many rows; or that
    once, where each plans for its part of the model. Of devices the same. All ranks ask at once."""
    met = ranks.exchange({"host_bytes": own.host_bytes, "device_bytes": own.device_bytes})
    least = min(each["host_bytes"] // ranks.machines.count(ranks.machines[rank]) for rank, each in enumerate(met))
    device = None if own.device_bytes is None else min(each["device_bytes"] for each in met)
    if ranks.devices.way is Way.tensor:
        return replace(own, host_bytes=least, device_bytes=device)
    if device is not None:
        own = replace(own, device_bytes=ranks.size * device, num_devices=ranks.size)
    if ranks.sees_memory:
        return own
    return replace(own, host_bytes=ranks.size * least, num_copies=ranks.size)
