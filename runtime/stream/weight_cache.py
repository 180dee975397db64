"""Cache of weights between sessions of a process, so that the next session does not read them again."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..plan.placement.experts import ExpertPages
from ..plan.placement.placement import Budgets, Placement
from ..plan.shape.extents import group_tied_stages
from ..plan.shape.model import ModelShape


@dataclass(frozen=True)
class StageBytes:
    """A stage's weights, valid until `WeightStream.free`."""

    buffer: torch.Tensor
    tensor_offsets: Mapping[str, int]  # name of a checkpoint tensor -> its offset in the buffer
    key: int  # identifies the buffer, so that views of it can be cached


@dataclass(frozen=True)
class StreamWeights:
    """Weights of a stream that stay in memory."""

    # Resident stages, in compute memory. A key has all stages that share a buffer, since they share (tied) weights.
    resident: dict[tuple[int, ...], StageBytes] = field(default_factory=dict)
    # Weights in host memory, by stage. They are copied to the device in each pass.
    in_host: dict[int, torch.Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        self.resident.clear()
        self.in_host.clear()


class WeightCache:
    """A model's weights between sessions: `stages`, and `experts` that are streamed one by one. In `experts`, an expert
    (page) takes the place of a stage."""

    def __init__(self) -> None:
        self.stages, self.experts = StreamWeights(), StreamWeights()
        self._paged = frozenset[int]()  # stages whose experts are streamed one by one

    def drop_unused(self, shape: ModelShape, placement: Placement) -> None:
        """Drops weights that a session with this placement does not use. Call it before the session allocates."""
        if placement.paged != self._paged:  # the memory of a stage includes its experts only if it is not paged
            self.stages.in_host.clear()
            for key in [key for key in self.stages.resident if {*key} & (placement.paged ^ self._paged)]:
                del self.stages.resident[key]
            self.experts.clear()
            self._paged = placement.paged
        groups = group_tied_stages([shape.stages[index] for index in sorted(placement.resident)])
        needed = {tuple(stage.index for stage in group) for group in groups}
        for key in self.stages.resident.keys() - needed:
            del self.stages.resident[key]
        for stage in self.stages.in_host.keys() - placement.walk.in_host:
            del self.stages.in_host[stage]
        if self.experts.in_host:
            pages = ExpertPages.from_shape(shape, placement.paged)
            for page in self.experts.in_host.keys() - pages.in_host(placement.walk):
                del self.experts.in_host[page]

    def clear(self) -> None:
        self.stages.clear()
        self.experts.clear()

    @property
    def compute_bytes(self) -> int:
        """Bytes in compute memory."""
        return sum(stage_bytes.buffer.nbytes for stage_bytes in self.stages.resident.values())

    @property
    def pinned_bytes(self) -> int:
        """Bytes in host memory, pinned if there is an accelerator."""
        return sum(buffer.nbytes for buffer in (*self.stages.in_host.values(), *self.experts.in_host.values()))

    def ensure_free(self, num_bytes: int, budgets: Budgets) -> None:
        """Drops all weights if the budgets leave less than `num_bytes` of host or device memory."""
        device_bytes = budgets.device_bytes
        in_host = self.pinned_bytes + (self.compute_bytes if device_bytes is None else 0)
        exceeds_host = in_host + num_bytes > budgets.host_bytes
        if exceeds_host or (device_bytes is not None and self.compute_bytes + num_bytes > device_bytes):
            self.clear()
