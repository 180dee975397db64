"""How long one lane takes to pass one layer with one token: mostly the model's Python and the switches."""

import time
from dataclasses import dataclass

import torch

from ..cache.paged import PagedKV
from ..cache.pages import KVPages
from ..config import SamplingConfig
from ..model.events import Event, NeedAttention, NeedStage, Weights
from ..model.loading import LoadedModel
from ..model.stages import hollow_weights
from ..stream.device import ComputeDevice
from .lane import Lane, LaneKit
from .packed import PackedLane
from .padded import PaddedLane
from .sampling import Sampler
from .seq2seq import Seq2SeqLane
from .sequence import Request, Sequence


@dataclass(frozen=True, kw_only=True)
class TurnSeconds:
    """`pass_seconds`: from the beginning of a pass to the first layer."""

    turn_seconds: float
    pass_seconds: float


def measure_turn(
    loaded: LoadedModel, device: ComputeDevice, weights: Weights, stage: int, num_times: int
) -> TurnSeconds:
    """`weights` are those of `stage`, the first layer that the forward enters, but for its experts, which are not run.
    Medians; the first time is not counted."""
    times = [_once(loaded, device, weights, stage) for _ in range(num_times + 1)][1:]
    middle = num_times // 2
    return TurnSeconds(
        turn_seconds=sorted(time.turn_seconds for time in times)[middle],
        pass_seconds=sorted(time.pass_seconds for time in times)[middle],
    )


def _once(loaded: LoadedModel, device: ComputeDevice, weights: Weights, stage: int) -> TurnSeconds:
    lane = _lane(loaded, device)
    try:
        start = time.perf_counter()
        event: Event | None = lane.begin_pass()
        while isinstance(event, NeedStage) and event.stage != stage:
            event = lane.advance(hollow_weights(loaded.staged, event.stage, device.torch_device))
        begin = time.perf_counter()
        while event is not None and not (isinstance(event, NeedStage) and event.stage != stage):
            event = lane.advance(_answer(event, weights))
        device.finish()
        return TurnSeconds(turn_seconds=time.perf_counter() - begin, pass_seconds=begin - start)
    finally:
        lane.abandon()
        lane.close()


def _answer(event: Event, weights: Weights) -> Weights | torch.Tensor:
    if isinstance(event, NeedStage):
        return weights
    return event.compute() if isinstance(event, NeedAttention) else torch.zeros_like(event.hidden_TD)


def _lane(loaded: LoadedModel, device: ComputeDevice) -> Lane:
    """Of one token, with a cache of its own."""
    sequences = [Sequence(request=Request(id="", prompt_ids=(0,), max_new_tokens=1))]
    pages = KVPages(1, device)
    kit = LaneKit(
        model=loaded.staged.model,
        sampler=Sampler(SamplingConfig(), vocab_size=loaded.shape.vocab_size, device=device.torch_device),
        device=device,
        pool=pages.pool,
        prefill_chunk_tokens=1,
        travels=frozenset(),
    )
    if loaded.shape.is_packed:
        return PackedLane(kit, sequences, PagedKV(pages, expands=loaded.expands_latents))
    start = loaded.start_token_id
    return PaddedLane(kit, sequences) if start is None else Seq2SeqLane(kit, sequences, start)
