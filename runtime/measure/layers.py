"""Times forward passes of a lane through one layer, and experts of a layer, with the code of a run.

A lane is a micro-batch and the coroutine that runs it through the model's own forward. The coroutine yields an event
whenever it needs something, such as the weights of a stage (one layer, or the embeddings), and goes on with the result.

T (or V) tokens of D numbers, K experts per token.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from ..cache.pages import KVPages, num_pages_for
from ..config.settings import SamplingConfig
from ..engine.experts import BatchedExperts, host_weights
from ..engine.lanes.factory import LaneFactory
from ..engine.lanes.lane import Lane, LaneContext
from ..events import Event, NeedAttention, NeedExperts, NeedStage, Weights
from ..model.expert_groups import run_group
from ..model.experts import (
    Matrices,
    Visits,
    accumulate_outputs,
    bound_matrices,
    is_experts,
    mix_experts,
    run_bare_expert,
)
from ..model.loading import LoadedModel
from ..model.stages import StreamedModule, empty_weights
from ..plan.cost.calibration import LayerSeconds
from ..plan.cost.lane_work import Piece
from ..plan.cost.work import stage_works
from ..plan.shape.extents import slot_layout
from ..plan.shape.shapes import Stage
from ..sequences.sampler import Sampler
from ..sequences.sequence import Encoding, Request
from ..sequences.sequence import Sequence as Running
from ..stream.device import ComputeDevice
from ..stream.experts import ExpertBytes
from ..stream.weight_cache import StageBytes
from .attention import FILL_VALUE
from .timing import Timer

NUM_SINGLE_PASSES = 9  # timed passes of a single token
MAX_PASSES, ENOUGH_SECONDS = 10, 1.5  # packed passes are repeated until one of these limits
HOST_ROWS = 64  # tokens to time an expert on the CPU with: for fewer, reading its weights takes most of the time


@dataclass(frozen=True, kw_only=True)
class ProfilingPass:
    """Times passes of a lane through one layer. `stage`: the layer's stage number; it must be the first layer that the
    model's forward runs. `weights`: the layer's weights. `evict_caches` is called before each packed pass."""

    loaded: LoadedModel
    device: ComputeDevice
    stage: int
    weights: Weights
    evict_caches: Callable[[], object]

    def time_packed(self, pieces: Sequence[Piece]) -> LayerSeconds:
        """The mean seconds of a pass of `pieces` in one packed lane (without padding); their past positions count as
        cached. The mean, not the median, as a run has slow passes too. Allocates one layer's KV pages for all
        positions."""
        lanes = self._lanes(sum(num_pages_for(piece.past + piece.new) for piece in pieces))
        lane = lanes.packed([])

        def time_once() -> LayerSeconds:
            self.evict_caches()
            for index, piece in enumerate(pieces):
                ids = (0,) * (piece.past + piece.new)
                lane.enter(Running(request=Request(id=str(index), prompt_ids=ids, max_new_tokens=1)), past=piece.past)
            return self._time_pass(lane, [piece.new for piece in pieces])

        time_once()
        lanes.pages.fill(FILL_VALUE)
        times = [time_once()]
        while len(times) < MAX_PASSES and sum(seconds.inside for seconds in times) < ENOUGH_SECONDS:
            times.append(time_once())
        return LayerSeconds.mean(times)

    def time_single_token(self) -> LayerSeconds:
        """The median seconds of a prefill pass of one token, in the kind of lane that the model supports. Weights may
        be in the CPU caches, unlike in `time_packed`."""
        encoding = Encoding(num_read=1) if self.loaded.looks_ahead else None
        request = Request(id="", prompt_ids=(0,), max_new_tokens=1, encoding=encoding)
        lanes = self._lanes(1)
        times = [self._time_pass(lanes.lane([Running(request=request)])) for _ in range(NUM_SINGLE_PASSES + 1)][1:]
        return sorted(times, key=lambda seconds: seconds.inside)[NUM_SINGLE_PASSES // 2]

    def _time_pass(self, lane: Lane, new_tokens: Sequence[int] | None = None) -> LayerSeconds:
        """The seconds of one pass: before the layer, in the layer without attention, and of attention. Removes the
        lane's sequences, and does not finish the forward."""
        attention = 0.0
        try:
            start = time.perf_counter()
            event: Event | None = lane.begin_pass(new_tokens)
            while isinstance(event, NeedStage) and event.stage != self.stage:  # embeddings
                event = lane.advance(empty_weights(self.loaded.staged, event.stage, self.device.torch_device))
            self.device.wait_for_compute()
            begin = time.perf_counter()
            while event is not None and not (isinstance(event, NeedStage) and event.stage != self.stage):
                if isinstance(event, NeedStage):
                    event = lane.advance(self.weights)
                elif isinstance(event, NeedExperts):  # skipped: `time_experts` times experts
                    event = lane.advance(torch.zeros_like(event.hidden_TD))
                else:
                    assert isinstance(event, NeedAttention), f"unexpected event {event!r}"
                    self.device.wait_for_compute()
                    attention_begin = time.perf_counter()
                    result = event.compute()
                    self.device.wait_for_compute()
                    attention += time.perf_counter() - attention_begin
                    event = lane.advance(result)
            self.device.wait_for_compute()
            inside = time.perf_counter() - begin - attention
            return LayerSeconds(before=begin - start, inside=inside, attention=attention)
        finally:
            lane.abandon()
            lane.close()

    def _lanes(self, num_pages: int) -> LaneFactory:
        vocab_size, device = self.loaded.shape.vocab_size, self.device.torch_device
        pages = KVPages(num_pages, self.device, dtype=self.loaded.shape.kv_dtype)
        context = LaneContext(
            model=self.loaded.staged.model,
            sampler=Sampler(SamplingConfig(), vocab_size=vocab_size, device=device),
            device=self.device,
            pool=pages.pool,
            offloaded_layers=frozenset(),
            prefill_chunk_tokens=1,
        )
        return LaneFactory(model=self.loaded, context=context, pages=pages)


class ExpertSeconds(NamedTuple):
    """What the experts of a layer take. `rates`: FLOPs per second, by mean rows (tokens) per expert; empty if the
    model's own code runs the experts. `hit_seconds`: how much longer an expert takes by itself than among others."""

    rates: Mapping[int, float]
    hit_seconds: float


def time_experts(
    loaded: LoadedModel,
    device: ComputeDevice,
    stage: Stage,
    weights: Weights,
    paged: Sequence[Weights],
    pass_tokens: Sequence[int],
    decode_tokens: int,
) -> ExpertSeconds:
    """Times the experts of layer `stage` in a pass for each number of tokens in `pass_tokens`, and by themselves in a
    pass of `decode_tokens`, one of these numbers. `weights`: the layer's, by full parameter name, in compute memory.
    `paged`: those of its first experts, likewise by name, if experts are paged; then only these are timed."""
    streamed, path, module = _find_experts(loaded, stage)
    if module is None:
        return ExpertSeconds({}, 0.0)
    prefix, work = f"{streamed.name}.{path}.", stage_works(loaded.shape, frozenset())[stage.index]
    torch_device, rates, hit_seconds = device.torch_device, dict[int, float](), 0.0
    overrides = [{name.removeprefix(prefix): weight[0] for name, weight in expert.items()} for expert in paged]

    def make_hidden(num_tokens: int) -> torch.Tensor:
        return torch.ones(num_tokens, loaded.shape.hidden_size, dtype=loaded.compute_dtype, device=torch_device)

    def random_experts(num_tokens: int) -> tuple[NeedExperts, Visits]:
        """Tokens routed to all experts at random, so that some experts get more than others."""
        hidden_TD, num_chosen = make_hidden(num_tokens), stage.num_experts_per_token
        order = torch.rand(num_tokens, stage.num_experts, generator=torch.Generator().manual_seed(num_tokens))
        weights_TK, experts_TK = order.topk(num_chosen)
        event = NeedExperts(module, hidden_TD, experts_TK.to(torch_device), weights_TK.to(hidden_TD))
        return event, Visits.from_top_k(event.top_k_index_TK, event.top_k_weights_TK, stage.num_experts)

    def paged_experts(num_rows: int) -> tuple[torch.Tensor, Visits]:
        """`num_rows` tokens that visit all experts in `paged`."""
        hidden_TD, experts = make_hidden(num_rows), torch.arange(len(paged), device=torch_device)
        visits = Visits(
            tokens_V=torch.arange(num_rows, device=torch_device).repeat(len(paged)),
            experts_V=experts.repeat_interleave(num_rows),
            weights_V=torch.ones(num_rows * len(paged), dtype=hidden_TD.dtype, device=torch_device),
            ends=[num_rows * (expert + 1) for expert in range(len(paged))],
        )
        return hidden_TD, visits

    batched = BatchedExperts(loaded, frozenset(), None, is_grouped=device.is_accelerator)
    with streamed.binding.bound(weights):
        for num_tokens in pass_tokens:
            num_rows = max(1, round(num_tokens * work.num_experts_per_token / work.hits(num_tokens)))
            if paged:
                hidden_TD, visits = paged_experts(num_rows)
                matrices = {e: bound_matrices(module, e, own) for e, own in enumerate(overrides)}
                together = partial(_mix_together, module, hidden_TD, visits, matrices)
            else:
                event, visits = random_experts(num_tokens)
                hidden_TD, matrices = event.hidden_TD, {e: bound_matrices(module, e) for e in visits.hit}
                together = partial(batched.run, stage.index, [event])
            flops = 2.0 * len(visits.tokens_V) * work.expert_weights
            rates[num_rows] = Timer(flops, together, device.wait_for_compute).rate()
            if num_tokens == decode_tokens and not device.is_accelerator:  # there, each is launched by itself
                alone = Timer(1.0, partial(mix_experts, module, hidden_TD, visits, list(matrices.items())))
                hit_seconds = max(0.0, alone.seconds() - flops / rates[num_rows]) / len(matrices)
    return ExpertSeconds(rates, hit_seconds)


def _mix_together(
    module: torch.nn.Module, hidden_TD: torch.Tensor, visits: Visits, matrices: Mapping[int, Matrices]
) -> torch.Tensor:
    """Same as `mix_experts`, with products of all experts in a group if that is likely faster."""
    return accumulate_outputs(hidden_TD, visits, run_group(module, matrices, hidden_TD, visits).items())


def _find_experts(loaded: LoadedModel, stage: Stage) -> tuple[StreamedModule, str, torch.nn.Module | None]:
    """Finds a layer, and the path and module of its experts in it. Path and module are "" and None if the model's own
    code runs the experts."""
    streamed = next(module for module in loaded.staged.modules if module.stage == stage.index)
    candidates = ((path, module) for path, module in streamed.inner.named_modules() if is_experts(module))
    path, module = next(candidates, ("", None))
    return streamed, path, module


def cpu_expert_timer(loaded: LoadedModel, stage: Stage, host: torch.Tensor) -> Timer:
    """Times expert 0 of layer `stage` on the CPU, as a run with an accelerator would compute it, in FLOPs. `host`: the
    expert's bytes as read."""
    streamed, path, module = _find_experts(loaded, stage)
    assert module is not None, "experts run in the model's own code"
    expert = stage.expert(0)
    bare = ExpertBytes(0, expert, StageBytes(host, slot_layout(expert).tensor_offsets, 0))
    matrices = bare.matrices(partial(host_weights, loaded), prefix=f"{streamed.name}.{path}.")
    x_VD = torch.ones(HOST_ROWS, loaded.shape.hidden_size)
    work = stage_works(loaded.shape, frozenset())[stage.index]
    return Timer(2.0 * HOST_ROWS * work.expert_weights, lambda: run_bare_expert(module, matrices, x_VD))
