"""What stages take as they are placed: not their own bytes alone but the aligned extents that hold them."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from .extents import group_layout, pinned_bytes, resident_groups, slot_layout
from .moves import misaligned_bytes
from .shapes import Stage


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """The sizes of the experts of one stage: the largest one, and all where they live in pinned memory. Making it takes
    some milliseconds."""

    num_experts: int
    slot_bytes: int
    pinned_bytes: int

    @staticmethod
    def of(stage: Stage) -> "ExpertSizes":
        sizes = [slot_layout(stage.expert(expert)).num_bytes for expert in range(stage.num_experts)]
        return ExpertSizes(num_experts=len(sizes), slot_bytes=max(sizes), pinned_bytes=sum(map(pinned_bytes, sizes)))


@dataclass(frozen=True)
class StageSizes:
    """Each stage is laid out once, when its size is first asked for: a model of many experts has tens of thousands of
    tensors, and a plan asks thousands of times."""

    stages: tuple[Stage, ...]

    @cached_property
    def whole_bytes(self) -> tuple[int, ...]:
        return tuple(slot_layout(stage).num_bytes for stage in self.stages)

    @cached_property
    def dense_bytes(self) -> tuple[int, ...]:
        """The bytes of each stage without the experts that can be read by themselves."""
        return tuple(
            slot_layout(stage.dense).num_bytes if stage.experts else whole
            for stage, whole in zip(self.stages, self.whole_bytes, strict=True)
        )

    def slot_bytes(self, paged: Collection[int]) -> Sequence[int]:
        """What each takes in a slot: `paged` ones their dense part alone."""
        if not paged:
            return self.whole_bytes
        pairs = zip(self.dense_bytes, self.whole_bytes, strict=True)
        return [dense if index in paged else whole for index, (dense, whole) in enumerate(pairs)]

    @cached_property
    def misaligned_bytes(self) -> tuple[int, ...]:
        """The bytes of each stage that a CPU computes with a copy of."""
        return tuple(map(misaligned_bytes, self.stages))

    @cached_property
    def experts(self) -> dict[int, ExpertSizes]:
        """The sizes of experts, by stage."""
        return {stage.index: ExpertSizes.of(stage) for stage in self.stages if stage.experts}

    def resident_bytes(self, resident: Collection[int]) -> int:
        """The bytes of the buffers that hold these stages: tied weights once."""
        tied = [self.stages[index] for index in sorted(self._tied.intersection(resident))]
        alone = sum(self.whole_bytes[index] for index in resident if index not in self._tied)
        return alone + sum(group_layout(group).num_bytes for group in resident_groups(tied))

    @cached_property
    def _tied(self) -> frozenset[int]:
        """Stages that share a tensor with another one."""
        names = [{piece.name for p in stage.parameters for piece in p.slices} for stage in self.stages]
        uses = Counter(name for each in names for name in each)
        shared = {name for name, count in uses.items() if count > 1}
        return frozenset(index for index, each in enumerate(names) if each & shared)
