"""Plays lanes through a loaded checkpoint by hand, stage by stage, and answers for their experts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from runtime.config.settings import (
    ExpertPaging,
    Lanes,
    ModelConfig,
    OffloadConfig,
    Prefetch,
    PrefetchConfig,
    RuntimeConfig,
    Tier,
)
from runtime.engine.experts import BatchedExperts
from runtime.events import LaneRun, NeedExperts, NeedStage
from runtime.model.loading import LoadedModel, load_model
from runtime.plan.placement.experts import dense_shape
from runtime.plan.placement.load import Load
from runtime.plan.placement.placement import Budgets, Placement
from runtime.plan.placement.placer import choose_placement
from runtime.plan.shape.model import ModelShape
from runtime.store.reader import Reader
from runtime.stream.device import ComputeDevice
from runtime.stream.experts import ExpertStream
from runtime.stream.weights import WeightStream
from runtime.units import GIB
from runtime.weights.stage_weights import stage_weights

DEVICE = ComputeDevice("cpu")


def load(path: Path, device: ComputeDevice = DEVICE) -> LoadedModel:
    """Padded lanes, which run without a cache."""
    return load_model(ModelConfig(name="test", path=str(path), lanes=Lanes.padded), device.torch_device, None)


def placement_of(
    loaded: LoadedModel, paging: ExpertPaging, tier: Tier = Tier.nvme, device_bytes: int | None = None
) -> Placement:
    """No layer is resident."""
    config = RuntimeConfig(
        offload=OffloadConfig(tier=tier, resident_layers=0, expert_paging=paging),
        prefetch=PrefetchConfig(kind=Prefetch.off),
    )
    budgets = Budgets(host_bytes=GIB, device_bytes=device_bytes)
    return choose_placement(loaded.shape, config, budgets, Load.from_lanes(loaded.shape, [], 512))


@dataclass(frozen=True, kw_only=True)
class Player:
    """What one pass needs; `experts` counts what it brought in."""

    loaded: LoadedModel
    placement: Placement
    weights: WeightStream
    experts: ExpertStream | None

    @torch.inference_mode()
    def logits(self, lanes: Sequence[torch.Tensor], *, is_batched: bool) -> list[torch.Tensor]:
        """`lanes`: ids (B, S) each; (B, S, V) each. Batched: all lanes of a stage wait at its experts."""
        found: dict[int, torch.Tensor] = {}
        runs = [LaneRun(self._forward(ids, lane, found), None) for lane, ids in enumerate(lanes)]
        events: dict[int, object] = {lane: run.switch() for lane, run in enumerate(runs)}
        is_together = self.placement.walk.copies
        batched = BatchedExperts(self.loaded, self.placement.paged, self.experts, is_grouped=is_together)
        for stage in self.placement.walk.stages:
            with self._weights(stage) as weights:
                batched.prefetch(stage)
                for group in [list(events)] if is_batched else [[lane] for lane in events]:
                    waiting = group
                    while waiting:
                        for lane in waiting:
                            while events[lane] == NeedStage(stage):
                                events[lane] = runs[lane].switch(weights)
                        waiting = [lane for lane in waiting if isinstance(events[lane], NeedExperts)]
                        asked = [event for event in map(events.get, waiting) if isinstance(event, NeedExperts)]
                        for lane, out in zip(waiting, batched.run(stage, asked) if asked else [], strict=True):
                            events[lane] = runs[lane].switch(out)
        assert all(run.dead for run in runs)
        return [found[lane] for lane in range(len(lanes))]

    def _forward(self, ids: torch.Tensor, lane: int, logits: dict[int, torch.Tensor]) -> Callable[[], None]:
        def forward() -> None:
            logits[lane] = self.loaded.staged.model(input_ids=ids, use_cache=False).logits

        return forward

    @contextmanager
    def _weights(self, stage: int) -> Iterator[Mapping[str, torch.Tensor]]:
        walk = self.placement.walk
        is_streamed = stage in walk.streamed
        if is_streamed and stage not in walk.in_host:
            self.weights.read(stage)
        if is_streamed and walk.copies:
            self.weights.copy(stage)
        placed = self.weights.acquire(stage)
        part = dense_shape(self.loaded.shape, self.placement.paged).stages[stage]
        yield stage_weights(part, placed.buffer, placed.tensor_offsets, self.loaded.dtypes)
        if is_streamed:
            self.weights.free(stage)


@contextmanager
def player(
    loaded: LoadedModel,
    paging: ExpertPaging,
    *,
    num_slots: int = 2,
    tier: Tier = Tier.nvme,
    device: ComputeDevice = DEVICE,
    reader: Reader | None = None,
) -> Iterator[Player]:
    budget = GIB if device.is_accelerator else None
    placement = placement_of(loaded, paging, tier, budget)
    with reader or Reader(num_threads=2) as opened, WeightStream(loaded.shape, placement, device, opened) as weights:
        if paging is ExpertPaging.off:
            yield Player(loaded=loaded, placement=placement, weights=weights, experts=None)
            return
        with ExpertStream(loaded.shape, placement, device, opened, paging=paging, num_slots=num_slots) as experts:
            yield Player(loaded=loaded, placement=placement, weights=weights, experts=experts)


def lanes_of(num_lanes: int, num_rows: int, num_tokens: int, device: ComputeDevice = DEVICE) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (num_rows, num_tokens)
    return [torch.randint(5, 600, shape, generator=generator).to(device.torch_device) for _ in range(num_lanes)]


def unpageable_stacks(shape: ModelShape) -> tuple[str, ...]:
    """Experts' parameters that stay whole, in the dense part of their stage."""
    return tuple(p.name for stage in shape.stages for p in stage.dense.parameters if p.is_experts)
