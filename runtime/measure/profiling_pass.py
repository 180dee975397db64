"""A profiling pass: how long a lane such as a run's takes to pass a layer, with the lane's and the model's own code."""

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from statistics import fmean

import torch

from ..cache.pages import KVPages, num_pages_for
from ..config.settings import SamplingConfig
from ..engine.lanes.factory import LaneFactory
from ..engine.lanes.lane import Lane, LaneContext
from ..events import Event, NeedAttention, NeedExperts, NeedStage, Weights
from ..model.loading import LoadedModel
from ..model.stages import hollow_weights
from ..plan.cost.calibration import LayerSeconds
from ..plan.cost.lane_work import Piece
from ..sequences.sampler import Sampler
from ..sequences.sequence import Encoding, Request
from ..sequences.sequence import Sequence as Running
from ..stream.device import ComputeDevice
from .attention import ANYTHING

NUM_SINGLE = 9
MOST_TIMES, ENOUGH_SECONDS = 10, 1.5


@dataclass(frozen=True, kw_only=True)
class ProfilingPass:
    """Passes of a lane through one layer. `weights` are those of `stage`, the first layer that the forward enters.
    `forget` is called before each time: it pushes them out of the processor's caches."""

    loaded: LoadedModel
    device: ComputeDevice
    stage: int
    weights: Weights
    forget: Callable[[], object]

    def packed(self, pieces: Sequence[Piece]) -> LayerSeconds:
        """The seconds of a pass of these, all in one lane; positions that are past are taken for cached. The mean, as
        what a run adds up has its slow turns among them.

        Allocates the pages of a layer for all positions.
        """
        lanes = self._lanes(sum(num_pages_for(piece.past + piece.new) for piece in pieces))
        lane = lanes.packed([])

        def once() -> LayerSeconds:
            self.forget()
            for index, piece in enumerate(pieces):
                ids = (0,) * (piece.past + piece.new)
                lane.enter(Running(request=Request(id=str(index), prompt_ids=ids, max_new_tokens=1)), past=piece.past)
            return self._once(lane, [piece.new for piece in pieces])

        once()
        lanes.pages.fill(ANYTHING)
        times = [once()]
        while len(times) < MOST_TIMES and sum(each.inside for each in times) < ENOUGH_SECONDS:
            times.append(once())
        before, inside, attention = (fmean(part) for part in zip(*map(astuple, times), strict=True))
        return LayerSeconds(before=before, inside=inside, attention=attention)

    def single(self) -> LayerSeconds:
        """The seconds of a first pass of one token, in a lane of the kind that the model's class allows. The median;
        weights may come from the processor's caches."""
        encoding = Encoding(num_read=1) if self.loaded.looks_ahead else None
        request = Request(id="", prompt_ids=(0,), max_new_tokens=1, encoding=encoding)
        lanes = self._lanes(1)
        times = [self._once(lanes.lane([Running(request=request)])) for _ in range(NUM_SINGLE + 1)][1:]
        return sorted(times, key=lambda each: each.inside)[NUM_SINGLE // 2]

    def _once(self, lane: Lane, new_tokens: Sequence[int] | None = None) -> LayerSeconds:
        """The seconds of one pass, behind which the lane's sequences leave it."""
        attention = 0.0
        try:
            start = time.perf_counter()
            event: Event | None = lane.begin_pass(new_tokens)
            while isinstance(event, NeedStage) and event.stage != self.stage:
                event = lane.advance(hollow_weights(self.loaded.staged, event.stage, self.device.torch_device))
            self.device.finish()
            begin = time.perf_counter()
            while event is not None and not (isinstance(event, NeedStage) and event.stage != self.stage):
                answer, seconds = self._answer(event)
                attention += seconds
                event = lane.advance(answer)
            self.device.finish()
            inside = time.perf_counter() - begin - attention
            return LayerSeconds(before=begin - start, inside=inside, attention=attention)
        finally:
            lane.abandon()
            lane.close()

    def _answer(self, event: Event) -> tuple[Weights | torch.Tensor, float]:
        """The answer, and the seconds of attention."""
        if isinstance(event, NeedStage):
            return self.weights, 0.0
        if isinstance(event, NeedExperts):
            return torch.zeros_like(event.hidden_TD), 0.0
        assert isinstance(event, NeedAttention), f"a lane asked for {event!r}"
        self.device.finish()
        begin = time.perf_counter()
        answer = event.compute()
        self.device.finish()
        return answer, time.perf_counter() - begin

    def _lanes(self, num_pages: int) -> LaneFactory:
        vocab_size, place = self.loaded.shape.vocab_size, self.device.torch_device
        pages = KVPages(num_pages, self.device, dtype=self.loaded.shape.kv_dtype)
        context = LaneContext(
            model=self.loaded.staged.model,
            sampler=Sampler(SamplingConfig(), vocab_size=vocab_size, device=place),
            device=self.device,
            pool=pages.pool,
            travels=frozenset(),
            prefill_chunk_tokens=1,
        )
        return LaneFactory(model=self.loaded, context=context, pages=pages)
