"""Plays schedules on real lanes: the one interpreter of the actions, and the one loop over a block's passes."""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch

from ..cache.paged import PagedKV
from ..cache.pages import KVPages
from ..errors import Interrupted
from ..model.events import Event, NeedAttention, NeedExperts, NeedStage, Weights
from ..model.experts import sorted_experts
from ..model.loading import LoadedModel
from ..model.weights import stage_weights
from ..plan.placement import Placement
from ..plan.schedule import Action, Op, Schedule, Walk, check_schedule, make_schedule
from ..stream.device import ComputeDevice
from ..stream.host_memory import peak_resident_bytes
from ..stream.weights import WeightStream
from .lane import Lane
from .packed import PackedLane
from .padded import PaddedLane
from .sampling import Sampler
from .seq2seq import Seq2SeqLane
from .sequence import Sequence


class Phase(Enum):
    """`mixed`: prompts and tokens that are decoded in one pass."""

    prefill = "prefill"
    decode = "decode"
    mixed = "mixed"


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """One pass of one block. Seconds are monotonic; `compute` and `stall` are the engine's, `load` the disk's own."""

    block: int
    index: int
    phase: Phase
    num_sequences: int
    real_tokens: int
    padded_tokens: int
    prompt_tokens: int
    issued_tokens: int
    useful_tokens: int
    seconds: float
    compute_seconds: float
    load_seconds: float
    stall_seconds: float
    bytes_read_disk: int
    bytes_copied_device: int
    peak_host_bytes: int
    peak_device_bytes: int


class Engine:
    """Owns order and residency; the model owns the mathematics. Single-threaded; `stream` must be open.

    `should_stop` is asked before every stage; when it says yes, `Interrupted` is raised and the block is lost.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        placement: Placement,
        stream: WeightStream,
        device: ComputeDevice,
        sampler: Sampler,
        prefill_chunk_tokens: int,
        should_stop: Callable[[], bool] = lambda: False,
    ):
        self._loaded, self._placement, self._stream, self._device = loaded, placement, stream, device
        self._sampler, self._chunk_tokens, self._should_stop = sampler, prefill_chunk_tokens, should_stop
        self._pages = KVPages(placement.num_kv_pages, device)
        self._views: dict[tuple[int, int], Weights] = {}
        self._walk: Walk | None = None  # whose next stages lie in the slots
        self._schedule = lru_cache(self._checked_schedule)

    def _checked_schedule(self, walk: Walk, num_lanes: int) -> Schedule:
        schedule = make_schedule(walk, num_lanes)
        check_schedule(schedule, walk, num_lanes)
        return schedule

    def run_block(self, block: int, micro_batches: Rows[Rows[Sequence]]) -> Iterator[PassRecord]:
        """Generates until every sequence is finished, yielding after each pass. Mutates the sequences."""
        lanes = [self._lane(micro_batch) for micro_batch in micro_batches if micro_batch]
        index = 0
        while lanes:
            unfilled = [lane for lane in lanes if not lane.is_prefilled]
            phase = Phase.prefill if unfilled else Phase.decode
            yield self._run_pass(block, index, phase, unfilled or lanes)
            lanes = [lane for lane in lanes if not lane.is_done]
            index += 1

    def _lane(self, sequences: Rows[Sequence]) -> Lane:
        model, device = self._loaded.staged.model, self._device
        if self._loaded.shape.is_packed:
            cache = PagedKV(self._pages, expands=self._loaded.expands_latents)
            return PackedLane(model, sequences, self._sampler, device, cache, self._chunk_tokens)
        if self._loaded.start_token_id is not None:
            return Seq2SeqLane(model, sequences, self._sampler, device, self._loaded.start_token_id)
        return PaddedLane(model, sequences, self._sampler, device, self._chunk_tokens)

    @torch.inference_mode()
    def _run_pass(self, block: int, index: int, phase: Phase, lanes: Rows[Lane]) -> PassRecord:
        begin = time.monotonic()
        walk = self._placement.walk if phase is Phase.prefill else self._placement.decode_walk
        schedule = self._schedule(walk, len(lanes))
        if walk != self._walk:
            self._walk = walk
            self._stream.drop()
            self._play(schedule.prologue, lanes, [])
        waiting: list[Event | None] = [lane.begin_pass() for lane in lanes]
        compute_seconds = self._play(schedule.cycle, lanes, waiting)
        assert not any(waiting), f"lanes still wait for {waiting} after the last stage"
        counts = [lane.end_pass() for lane in lanes]
        self._device.finish()
        counters = self._stream.take_counters()
        return PassRecord(
            block=block,
            index=index,
            phase=phase,
            num_sequences=sum(c.num_sequences for c in counts),
            real_tokens=sum(c.real_tokens for c in counts),
            padded_tokens=sum(c.padded_tokens for c in counts),
            prompt_tokens=sum(c.prompt_tokens for c in counts),
            issued_tokens=sum(c.issued_tokens for c in counts),
            useful_tokens=sum(c.useful_tokens for c in counts),
            seconds=time.monotonic() - begin,
            compute_seconds=compute_seconds,
            load_seconds=counters.read_seconds,
            stall_seconds=counters.stall_seconds,
            bytes_read_disk=counters.bytes_read,
            bytes_copied_device=counters.bytes_copied,
            peak_host_bytes=peak_resident_bytes(),
            peak_device_bytes=self._device.peak_bytes(),
        )

    def _play(self, actions: Rows[Action], lanes: Rows[Lane], waiting: list[Event | None]) -> float:
        """Carries out the actions; returns the seconds spent inside lanes."""
        seconds = 0.0
        for action in actions:
            if action.op is Op.read:
                self._stream.read(action.stage)
            elif action.op is Op.copy:
                self._stream.copy(action.stage)
            elif action.op is Op.free:
                self._stream.free(action.stage)
            else:
                assert action.lane is not None
                weights = self._weights(action.stage)
                begin = time.monotonic()
                waiting[action.lane] = self._advance(lanes[action.lane], waiting[action.lane], action.stage, weights)
                seconds += time.monotonic() - begin
        return seconds

    def _advance(self, lane: Lane, event: Event | None, stage: int, weights: Weights) -> Event | None:
        """Through the whole stage. It may be several modules: the lane runs on while it asks for the same one."""
        if self._should_stop():
            raise Interrupted("stopped on request; start the same command again to go on")
        assert event == NeedStage(stage), f"run {stage}: the lane waits for {event}"
        while event is not None and not (isinstance(event, NeedStage) and event.stage != stage):
            event = lane.advance(self._answer(event, weights))
        return event

    def _answer(self, event: Event, weights: Weights) -> Weights | torch.Tensor:
        if isinstance(event, NeedAttention):
            return event.compute()
        if isinstance(event, NeedExperts):
            return sorted_experts(event)
        return weights

    def _weights(self, stage: int) -> Weights:
        """Views are made once per place: a slot holds the same stages' bytes at the same offsets every time."""
        placed = self._stream.acquire(stage)
        key = (stage, placed.key)
        if key not in self._views:
            self._views[key] = stage_weights(
                self._loaded.shape.stages[stage], placed.buffer, placed.tensor_offsets, self._loaded.dtypes
            )
        return self._views[key]
