"""Memory of stages in slots, the buffers into which they are read: aligned file ranges, not only the tensors' bytes."""

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...units import round_down
from .extents import (
    ALIGNMENT_BYTES,
    MERGE_GAP_BYTES,
    group_layout,
    group_tied_stages,
    misaligned_bytes,
    pinned_bytes,
    slot_layout,
)
from .shapes import Stage, StageKind


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """Sizes of a stage's experts if each is read by itself."""

    num_experts: int
    slot_bytes: int  # of the largest expert
    pinned_bytes: int  # of all experts, each in its own pinned buffer

    @staticmethod
    def from_stage(stage: Stage) -> "ExpertSizes":
        # Most experts have the same layout: its size is computed once.
        layout_bytes, sizes = dict[Hashable, int](), list[int]()
        for expert in range(stage.num_experts):
            key = _expert_layout_key(stage, expert)
            if key not in layout_bytes:
                layout_bytes[key] = slot_layout(stage.expert(expert)).num_bytes
            sizes.append(layout_bytes[key])
        return ExpertSizes(num_experts=len(sizes), slot_bytes=max(sizes), pinned_bytes=sum(map(pinned_bytes, sizes)))


@dataclass(frozen=True)
class StageSizes:
    """Slot sizes of a model's stages. They are cached, as planning queries them thousands of times."""

    stages: tuple[Stage, ...]

    @cached_property
    def whole_bytes(self) -> tuple[int, ...]:
        """Slot bytes by stage, experts included."""
        return tuple(slot_layout(stage).num_bytes for stage in self.stages)

    @cached_property
    def dense_bytes(self) -> tuple[int, ...]:
        """Slot bytes by stage, without experts that can be read one by one."""
        return tuple(
            slot_layout(stage.dense).num_bytes if stage.experts else whole
            for stage, whole in zip(self.stages, self.whole_bytes, strict=True)
        )

    def slot_bytes(self, paged: Collection[int]) -> Sequence[int]:
        """Returns the slot bytes by stage, without the experts of `paged` stages, which have slots of their own."""
        if not paged:
            return self.whole_bytes
        pairs = zip(self.dense_bytes, self.whole_bytes, strict=True)
        return [dense if index in paged else whole for index, (dense, whole) in enumerate(pairs)]

    @cached_property
    def misaligned_bytes(self) -> tuple[int, ...]:
        """Bytes by stage that a CPU must copy to align them."""
        return tuple(map(misaligned_bytes, self.stages))

    @cached_property
    def experts(self) -> dict[int, ExpertSizes]:
        """Sizes of experts that can be read one by one, by stage."""
        return {stage.index: ExpertSizes.from_stage(stage) for stage in self.stages if stage.experts}

    @cached_property
    def num_layers(self) -> int:
        """The number of decoder and encoder layers with weights on this rank."""
        return sum(stage.kind.is_layer and bool(stage.parameters) for stage in self.stages)

    def choose_resident(
        self, num_layers: int, *, has_outer: bool, is_paged: bool = False
    ) -> tuple[frozenset[int], int]:
        """Chooses stages to keep in memory; returns them and their bytes, with `is_paged` without pageable experts.

        They are `num_layers` layers, and with `has_outer` also all stages that are not layers. Decoder layers are
        chosen before encoder layers: every pass needs them, while encoder layers are needed once per block.
        """
        key = (num_layers, has_outer, is_paged)
        if key not in self._resident_cache:
            chosen = list[int]()
            for kind in (StageKind.layer, StageKind.encoder):
                layers = [stage.index for stage in self.stages if stage.kind is kind and stage.parameters]
                num_chosen = min(num_layers - len(chosen), len(layers))
                chosen += [layers[index] for index in evenly_spaced(len(layers), num_chosen)]
            stages = frozenset(chosen)
            if has_outer:
                stages |= {stage.index for stage in self.stages if stage.parameters and not stage.kind.is_layer}
            self._resident_cache[key] = stages, self.resident_bytes(stages, self.experts if is_paged else ())
        return self._resident_cache[key]

    @cached_property
    def _resident_cache(self) -> dict[tuple[int, bool, bool], tuple[frozenset[int], int]]:
        """Cached results of `choose_resident`, by arguments."""
        return {}

    def resident_bytes(self, resident: Collection[int], paged: Collection[int] = ()) -> int:
        """Returns the bytes of the buffers for `resident` stages, without the experts of `paged` ones.

        Tied weights count once.
        """
        indices, sizes = sorted(self._tied.intersection(resident)), self.slot_bytes(paged)
        tied = [self.stages[index].dense if index in paged else self.stages[index] for index in indices]
        alone = sum(sizes[index] for index in resident if index not in self._tied)
        return alone + sum(group_layout(group).num_bytes for group in group_tied_stages(tied))

    @cached_property
    def _tied(self) -> frozenset[int]:
        """Stages that share a tensor with another stage."""
        names = [{piece.name for p in stage.parameters for piece in p.slices} for stage in self.stages]
        uses = Counter(name for stage_names in names for name in stage_names)
        shared = {name for name, count in uses.items() if count > 1}
        return frozenset(index for index, stage_names in enumerate(names) if stage_names & shared)


def _expert_layout_key(stage: Stage, expert: int) -> Hashable:
    """Returns a key that is equal for experts with equal slot layouts, cheaper than the layout itself.

    It lists the tensors in file order, with their offsets in the merged read to which they belong.
    """
    extents = [extent for parameter in stage.experts for extent in parameter.expert_extents(expert)]
    key, file, begin, end = list[tuple[int, int, int]](), "", 0, 0
    for number in sorted(range(len(extents)), key=lambda number: extents[number]):
        extent = extents[number]
        if extent.file != file or extent.offset > end + MERGE_GAP_BYTES:  # a new read starts
            file, begin = extent.file, round_down(extent.offset, ALIGNMENT_BYTES)
            key.append((-1, 0, 0))
        end = extent.offset + extent.num_bytes
        key.append((number, extent.offset - begin, extent.num_bytes))
    return tuple(key)


def evenly_spaced(num_layers: int, num_chosen: int) -> tuple[int, ...]:
    """Returns `num_chosen` evenly spaced numbers of range(num_layers).

    While a resident layer is computed, the next streamed layer is read, so resident layers should be spread.
    """
    return tuple(int((number + 0.5) * num_layers / num_chosen) for number in range(num_chosen))
