"""Runs passes: fills a batch, plays its schedule, samples tokens and records counts and times."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import TypeAlias, cast

import torch

from ..cache.pages import ContiguousPool, KVPages, PagePool
from ..config.settings import Admission, KVTier
from ..events import Weights
from ..model.experts import Experts, is_experts, matrix_names
from ..model.head import slice_head
from ..model.loading import LoadedModel
from ..plan.placement.defaults import chunk_tokens
from ..plan.placement.experts import Routing, dense_shape
from ..plan.placement.memory import FEW_ROWS, head_rows
from ..plan.schedule.check import check_schedule
from ..plan.schedule.schedule import Schedule, make_schedule
from ..plan.schedule.walk import Walk
from ..ranks.collectives import PipelineLink
from ..sequences.drafts import Drafts, Guesser
from ..sequences.sampler import Sampler
from ..stream.host_memory import peak_resident_bytes, resident_bytes
from .batcher import Batch, Batcher, empty_batch
from .dequantized_weights import DequantizedWeights
from .experts import BatchedExperts, CpuExperts
from .lanes.factory import LaneFactory
from .lanes.lane import LaneContext
from .monitor import PassMonitor
from .nonfinite import NonFiniteProbe
from .player import PipelinePeers, Player
from .recorded import RecordedPasses
from .records import PassCounts, PassRecord, Phase
from .setup import Setup, Streams

Agree: TypeAlias = Callable[[int, Phase], tuple[int, Phase]]


def agree_alone(num_lanes: int, phase: Phase) -> tuple[int, Phase]:
    """Default for `agree`, for a single rank."""
    return num_lanes, phase


class Engine:
    """Runs passes over the model: owns stage order and weight residency, while transformers computes. Single-threaded.
    After a pass that raises, it cannot run another.

    `streams` must be open. `should_stop` is polled before every stage; True raises `Interrupted`. `agree` maps this
    rank's lane count and phase to those that all ranks play. `pipeline_link` connects pipeline-parallel ranks.
    `draft_model` guesses tokens."""

    def __init__(
        self,
        setup: Setup,
        streams: Streams,
        sampler: Sampler,
        should_stop: Callable[[], bool],
        agree: Agree = agree_alone,
        pipeline_link: PipelineLink | None = None,
        draft_model: Guesser | None = None,
    ):
        self._agree = agree
        self._peers = (
            PipelinePeers(pipeline_link, sampler.row_width, setup.device) if pipeline_link is not None else None
        )
        loaded, placement, device = setup.model, setup.placement, setup.device
        self._loaded, self._placement, self._streams, self._device = loaded, placement, streams, device
        self._monitor = PassMonitor(len(loaded.shape.stages), device, setup.trace)
        self.lanes = _make_lane_factory(setup, streams, sampler, draft_model)
        self._stages = dense_shape(loaded.shape, placement.paged).stages
        self._views: dict[tuple[int, int], Weights] = {}  # by stage and slot
        size = placement.dequantized
        self._dequantized = None
        if size is not None:
            self._dequantized = DequantizedWeights(device, size, loaded.compute_dtype, _transposed_stacks(loaded))
        self._has_few_rows = False  # in all lanes of the pass together
        self._most_tokens = 1 + (setup.config.policy.draft_tokens or 0)  # of a sequence in a decode pass
        misaligned = () if device.is_accelerator else loaded.shape.sizes.misaligned_bytes
        self._copied = {stage for stage, num_bytes in enumerate(misaligned) if num_bytes}
        self._schedule = lru_cache(_checked_schedule)
        self._nonfinite_probe = NonFiniteProbe(loaded, self.lanes, partial(self.step, may_replay=False), self._weights)
        cpu = None
        if placement.cpu_share is not None and streams.experts is not None and streams.round_trips is not None:
            cpu = CpuExperts(
                loaded=loaded,
                share=placement.cpu_share,
                host_stages=placement.cpu_expert_stages,
                stream=streams.experts,
                exchange=streams.round_trips,
                monitor=self._monitor,
                first_layer=loaded.shape.layers[0].index,
            )
        is_grouped = device.is_accelerator
        experts = BatchedExperts(loaded, placement.paged, streams.experts, is_grouped=is_grouped, cpu=cpu)
        is_alone = agree is agree_alone and pipeline_link is None
        self._recorded = None
        if setup.config.model.graphs and not self.lanes.context.keeps_hidden:  # recordings keep none
            self._recorded = RecordedPasses(
                setup, self._weights, experts, self._monitor, should_stop, is_alone=is_alone
            )
        self._player = Player(
            streams,
            self._weights,
            experts,
            self._monitor,
            should_stop,
            first_layer=loaded.shape.layers[0].index,
            peers=self._peers,
        )

    @property
    def torch_device(self) -> torch.device:
        return self._device.torch_device

    @property
    def routing(self) -> Routing | None:
        """How often decode passes hit each paged expert so far; None if that is not known."""
        return self._streams.experts.routing if self._streams.experts is not None else None

    @torch.inference_mode()
    def step(self, batcher: Batcher, *, may_replay: bool = True) -> PassRecord | None:
        """Runs one pass and appends its tokens to the sequences of the batcher's lanes. Returns None when no rank has
        sequences left. `may_replay=False` forbids recorded graphs, in which module hooks do not run. Raises
        Interrupted, BrokenModelError if no sequence gets finite logits, and any error of the streams."""
        assert not self._player.has_failed, "an earlier pass of this session failed: open another session"
        batch = batcher.next_batch() or empty_batch()
        num_lanes, phase = self._agree(len(batch.lanes), batch.phase)
        if not num_lanes:
            return None
        batch = replace(batch, phase=phase)
        begin, groups = time.monotonic(), [list(lane.sequences) for lane in batch.lanes]
        walk = self._placement.walk if phase is Phase.prefill else self._placement.decode_walk
        has_whole_experts = self._loaded.split_heads is None  # a rank multiplies parts of experts one by one
        most_rows = sum(map(len, groups)) * self._most_tokens
        self._has_few_rows = phase is Phase.decode and has_whole_experts and most_rows <= FEW_ROWS
        self._monitor.begin_pass()
        self._streams.discard_pages(self.lanes.pages.pool.take_freed())  # before their next owner stores anything
        launch = partial(self._player.play, self._schedule(walk, num_lanes), walk, batch.lanes, batch.new_tokens)
        if self._recorded is not None and may_replay and phase is Phase.decode and num_lanes == 1:
            if self._dequantized is not None:
                self._dequantized.invalidate()  # a recording must not depend on earlier contents, nor leave any
            self._recorded.play(batch.lanes[0], batch.new_tokens[0] if batch.new_tokens else None, launch)
            if self._dequantized is not None:
                self._dequantized.invalidate()
        else:
            launch()
        record = self._postprocess(batch, begin)
        if self._streams.experts is not None:
            is_counted = phase is not Phase.prefill
            self._streams.experts.end_pass(batch.block, record.counts.padded_tokens, is_counted=is_counted)
        is_alone = self._agree is agree_alone  # the other ranks would not play the probe's passes
        is_whole = self._loaded.mtp_embedding is None  # a head that gives NaN guesses nothing
        if is_alone and is_whole and record.counts.useful_tokens < record.counts.issued_tokens:
            self._nonfinite_probe.explain(groups, record.counts)
        return record

    def _postprocess(self, batch: Batch, begin: float) -> PassRecord:
        """Samples the next tokens of all lanes, appends them, removes finished sequences and summarizes the pass."""
        if self._peers is not None:
            drawn = self._peers.draw_tokens(batch.lanes)
        else:
            drawn = self._device.to_host([lane.sample() for lane in batch.lanes])  # a decode pass waits only here
        counts = PassCounts.total([lane.end_pass(part) for lane, part in zip(batch.lanes, drawn, strict=True)])
        times = self._monitor.take_times(self._streams.counters)
        record = PassRecord(
            block=batch.block,
            index=batch.index,
            phase=batch.phase,
            counts=counts,
            seconds=time.monotonic() - begin,
            times=times,
            host_bytes=resident_bytes(self._device.num_sharers),
            device_bytes=self._device.used_bytes(),
            peak_host_bytes=peak_resident_bytes(self._device.num_sharers),
            peak_device_bytes=self._device.peak_bytes(),
        )
        self._monitor.trace_pass(record.phase.value, begin, record.seconds, counts.num_sequences)
        return record

    def _weights(self, stage: int) -> Weights:
        """The stage's weights in compute memory. Views are cached by stage and slot, as a stage's offsets in a slot do
        not change. Stages with misaligned tensors are copied instead; only the last such stage is cached."""
        tables = self._streams.tables.weights(stage) if self._streams.tables is not None else {}
        if tables and not self._stages[stage].parameters:
            return tables
        placed = self._streams.weights.acquire(stage)
        key = (stage, placed.key)
        if key not in self._views:
            for other in [other for other in self._views if other[0] in self._copied]:
                del self._views[other]
            weights = self._loaded.weights_of(
                self._stages[stage], placed.buffer, placed.tensor_offsets, on_device=self._device.is_accelerator
            )
            self._views[key] = {**tables, **weights}
        views = self._views[key]
        if self._dequantized is None:
            return views
        return self._dequantized.get(stage, views, has_few_rows=self._has_few_rows)


def _transposed_stacks(loaded: LoadedModel) -> frozenset[str]:
    """Full names of expert stacks that store each expert as (inputs, outputs)."""
    return frozenset(
        ".".join(part for part in (streamed.name, path, name) if part)
        for streamed in loaded.staged.modules
        for path, module in streamed.inner.named_modules()
        if is_experts(module) and cast("Experts", module).is_transposed
        for name in matrix_names(module)
    )


def _make_lane_factory(setup: Setup, streams: Streams, sampler: Sampler, draft_model: Guesser | None) -> LaneFactory:
    loaded, placement, device, kv = setup.model, setup.placement, setup.device, setup.placement.kv
    drafted = setup.config.policy.draft_tokens if loaded.rope_lengths is None else 0
    # Copied pages should be contiguous. Otherwise the page freed last is reused first: it is mapped and in CPU caches.
    are_copied = kv.tier is KVTier.cpu and kv.num_slots > 0
    pool = (ContiguousPool if are_copied else PagePool)(kv.num_pages)
    kv_dtype = loaded.shape.kv_dtype
    pages = KVPages(kv.num_pages, device, placement.host_layers, streams.exchange, pool, dtype=kv_dtype)
    keeps_hidden = loaded.mtp_embedding is not None or (draft_model is not None and draft_model.needs_hidden)
    if keeps_hidden:
        slice_head(loaded.staged)
    context = LaneContext(
        model=loaded.staged.model,
        sampler=sampler,
        device=device,
        pool=pages.pool,
        offloaded_layers=frozenset(kv.page_bytes) - placement.host_layers,
        prefill_chunk_tokens=chunk_tokens(setup.config.policy),
        has_whole_prompts=loaded.shape.has_whole_prompts,
        head_rows=head_rows(loaded.shape.vocab_size),
        last_stage=len(loaded.shape.stages) - 1,
        rope_lengths=loaded.rope_lengths,
        drafts=Drafts(drafted, setup.drafts.token_cost, draft_model, setup.drafts.model_cost) if drafted else None,
        drafts_beside_prompts=setup.config.policy.admission is Admission.continuous,
        keeps_hidden=keeps_hidden,
        skipped_layers=frozenset(
            layer for layer, stage in enumerate(loaded.shape.layers) if stage.index not in loaded.shape.own_stages
        ),
    )
    return LaneFactory(model=loaded, context=context, pages=pages, rule=placement.sharing_rule)


def _checked_schedule(walk: Walk, num_lanes: int) -> Schedule:
    schedule = make_schedule(walk, num_lanes)
    check_schedule(schedule, walk, num_lanes)
    return schedule
