"""Weights that outlive the session that read them, so that the next one need not read them again."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..plan.placement.experts import ExpertPages
from ..plan.placement.placement import Budgets, Placement
from ..plan.shape.extents import resident_groups
from ..plan.shape.model import ModelShape


@dataclass(frozen=True)
class StageBytes:
    """Valid from `WeightStream.acquire` until the stage's `free`; `key` names the place, so that views can be kept."""

    buffer: torch.Tensor
    tensor_offsets: Mapping[str, int]
    key: int


@dataclass(frozen=True)
class StreamWeights:
    """What one weight stream holds whole: `resident` groups of stages in compute memory, by the indices of the stages
    that share a buffer, and stages `in_host` memory that are copied from there each time. Stages enter when all their
    bytes are there."""

    resident: dict[tuple[int, ...], StageBytes] = field(default_factory=dict)
    in_host: dict[int, torch.Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        self.resident.clear()
        self.in_host.clear()


class KeptWeights:
    """The weights of a model between sessions: those of `stages`, and of `experts` that come one by one."""

    def __init__(self) -> None:
        self.stages, self.experts = StreamWeights(), StreamWeights()
        self._paged = frozenset[int]()

    def fit(self, shape: ModelShape, placement: Placement) -> None:
        """Lets go of what a session with this placement does not hold: before it allocates, so that its ledgers count
        what stays."""
        if placement.paged != self._paged:  # host memory then holds other parts of a stage, and other experts
            self.stages.in_host.clear()
            self.experts.clear()
            self._paged = placement.paged
        groups = resident_groups([shape.stages[index] for index in sorted(placement.resident)])
        wanted = {tuple(stage.index for stage in group) for group in groups}
        for key in self.stages.resident.keys() - wanted:
            del self.stages.resident[key]
        for stage in self.stages.in_host.keys() - placement.walk.in_host:
            del self.stages.in_host[stage]
        if self.experts.in_host:
            pages = ExpertPages.from_shape(shape, placement.paged)
            for page in self.experts.in_host.keys() - pages.in_host(placement.walk):
                del self.experts.in_host[page]

    def clear(self) -> None:
        """Lets go of everything."""
        self.stages.clear()
        self.experts.clear()

    @property
    def compute_bytes(self) -> int:
        """Bytes in compute memory."""
        return sum(placed.buffer.nbytes for placed in self.stages.resident.values())

    @property
    def pinned_bytes(self) -> int:
        """Bytes in host memory in front of an accelerator."""
        return sum(held.nbytes for held in (*self.stages.in_host.values(), *self.experts.in_host.values()))

    def leave_room(self, num_bytes: int, budgets: Budgets) -> None:
        """Lets go of everything where less than `num_bytes` of a memory is left beside it."""
        device_bytes = budgets.device_bytes
        in_host = self.pinned_bytes + (self.compute_bytes if device_bytes is None else 0)
        is_tight = in_host + num_bytes > budgets.host_bytes
        if is_tight or (device_bytes is not None and self.compute_bytes + num_bytes > device_bytes):
            self.clear()
