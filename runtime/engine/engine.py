"""Runs passes: makes lanes, chooses the schedule of a pass, has it played, and says what it came to."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace
from functools import lru_cache

import torch

from ..cache.paged import PagedKV
from ..cache.pages import KVPages, NeighbourPool, PagePool
from ..config import KVTier
from ..errors import BrokenModelError
from ..events import Weights
from ..plan.placement.defaults import chunk_tokens
from ..plan.placement.experts import dense_shape
from ..plan.placement.kv import KVLayout
from ..plan.schedule.check import check_schedule
from ..plan.schedule.schedule import Schedule, make_schedule
from ..plan.schedule.walk import Walk
from ..stream.host_memory import peak_resident_bytes
from ..weights.stage_weights import stage_weights
from .experts import BatchedExperts
from .lanes.apart import ApartLane
from .lanes.lane import Lane, LaneKit
from .lanes.packed import PackedLane
from .lanes.padded import PaddedLane
from .lanes.seq2seq import Seq2SeqLane
from .monitor import PassMonitor
from .nonfinite import Origin, Watch, repeated
from .player import Crew, PassPlayer
from .records import PassCounts, PassRecord, Phase
from .sampling.sampler import Sampler
from .sequence import Sequence
from .setup import Setup
from .streams import Streams

MOST_EXPLAINED = 16  # passes of a session


class Engine:
    """Owns order and residency; the model owns the mathematics. Single-threaded; the streams must be open.

    `should_stop` is asked before every stage; when it says yes, `Interrupted` is raised. A pass that raises is
    lost, and no other can be run: slots, workers and trips still hold what was on its way.
    """

    def __init__(self, setup: Setup, streams: Streams, sampler: Sampler, should_stop: Callable[[], bool]):
        loaded, placement, device = setup.model, setup.placement, setup.device
        self._loaded, self._placement, self._streams, self._device = loaded, placement, streams, device
        self._monitor = PassMonitor(len(loaded.shape.stages), device, setup.trace)
        self._pages = KVPages(
            placement.kv.num_pages, device, placement.host_layers, streams.exchange, _pool(placement.kv)
        )
        self._kit = LaneKit(
            model=loaded.staged.model,
            sampler=sampler,
            device=device,
            pool=self._pages.pool,
            travels=frozenset(placement.kv.page_bytes) - placement.host_layers,
            prefill_chunk_tokens=chunk_tokens(setup.config.policy),
            has_whole_prompts=loaded.shape.has_whole_prompts,
            rope_lengths=loaded.rope_lengths,
        )
        self._stages = dense_shape(loaded.shape, placement.paged).stages
        self._views: dict[tuple[int, int], Weights] = {}
        misaligned = () if device.is_accelerator else loaded.shape.sizes.misaligned_bytes
        self._copied = {stage for stage, num_bytes in enumerate(misaligned) if num_bytes}
        self._played: Schedule | None = None
        self._has_lost_a_pass = False
        self._num_explained = 0
        self._schedule = lru_cache(self._checked_schedule)
        self._crew = Crew(
            weights=streams.weights,
            weights_of=self._weights,
            experts=BatchedExperts(loaded, placement.paged, streams.experts, is_together=device.is_accelerator),
            monitor=self._monitor,
            should_stop=should_stop,
            workers=streams.workers,
            kv=streams.kv,
            first_layer=loaded.shape.layers[0].index,
        )

    @property
    def torch_device(self) -> torch.device:
        return self._device.torch_device

    @property
    def num_free_pages(self) -> int:
        return self._pages.pool.num_free

    def _checked_schedule(self, walk: Walk, num_lanes: int) -> Schedule:
        schedule = make_schedule(walk, num_lanes)
        check_schedule(schedule, walk, num_lanes)
        return schedule

    def packed_lane(self, sequences: Rows[Sequence], chunk_tokens: int | None = None) -> PackedLane:
        cache = PagedKV(self._pages, expands=self._loaded.expands_latents, travels=self._kit.travels)
        return PackedLane(self._kit_for(chunk_tokens), sequences, cache)

    def lane(self, sequences: Rows[Sequence], chunk_tokens: int | None = None) -> Lane:
        """Of the kind that the model's class allows. `chunk_tokens`: that it prefills in a pass; None: as the policy
        says."""
        if self._loaded.shape.is_packed:
            return self.packed_lane(sequences, chunk_tokens)
        kit, start = self._kit_for(chunk_tokens), self._loaded.start_token_id
        if start is not None:
            return Seq2SeqLane(kit, sequences, start)
        return (ApartLane if self._loaded.habits.apart else PaddedLane)(kit, sequences)

    def _kit_for(self, chunk_tokens: int | None) -> LaneKit:
        return self._kit if chunk_tokens is None else replace(self._kit, prefill_chunk_tokens=chunk_tokens)

    @torch.inference_mode()
    def run_pass(
        self, block: int, index: int, phase: Phase, lanes: Rows[Lane], new_tokens: Rows[Rows[int]] | None = None
    ) -> PassRecord:
        """Every lane passes every stage once. Mutates the lanes' sequences.

        `new_tokens`: of each lane, how many tokens of each of its sequences the pass carries; None: the lane's choice.
        Raises BrokenModelError when none of its sequences gets a finite number.
        """
        groups = [list(lane.sequences) for lane in lanes]
        record = self._run_pass(block, index, phase, lanes, new_tokens)
        if record.counts.useful_tokens < record.counts.issued_tokens:
            self._explain(groups, record)
        return record

    def _explain(self, groups: Rows[Rows[Sequence]], record: PassRecord) -> None:
        """By a pass over the rows that gave no finite numbers, in as many lanes as they had. Once in a while: a run of
        many such rows shall not take twice its time."""
        broken = [[s for s in group if s.is_broken] for group in groups]
        all_broken = [s for group in broken for s in group]
        if not all_broken or self._num_explained >= MOST_EXPLAINED:
            return
        self._num_explained += 1
        has_encoder = self._loaded.start_token_id is not None
        again = [[repeated(s, has_encoder=has_encoder) for s in group] for group in broken if group]
        origins = self._origins(again, record)
        for sequence, copy in zip(all_broken, [s for group in again for s in group], strict=True):
            if (origin := origins.get(id(copy))) is not None:
                sequence.error = f"{sequence.error}; {origin}"
        is_total = record.counts.useful_tokens == 0
        if is_total and (len(all_broken) > 1 or any(origin.is_in_weights for origin in origins.values())):
            raise BrokenModelError(
                f"model.path={self._loaded.checkpoint.path}: all {len(all_broken)} rows of a pass have failed, the "
                f"first with: {all_broken[0].error}. What is committed stays good; mend the weights, or fetch them anew"
            )

    def _origins(self, groups: Rows[Rows[Sequence]], record: PassRecord) -> dict[int, Origin]:
        lanes = [self.lane(group) for group in groups]
        watch = Watch(lanes=lanes, weights_of=self._weights)
        try:
            with watch.over(self._loaded.staged.modules):
                while left := [lane for lane in lanes if not lane.is_done]:
                    self._run_pass(record.block, record.index, Phase.prefill, left, None)
        finally:
            for lane in lanes:
                lane.close()
        return watch.origins

    def _run_pass(
        self, block: int, index: int, phase: Phase, lanes: Rows[Lane], new_tokens: Rows[Rows[int]] | None
    ) -> PassRecord:
        assert not self._has_lost_a_pass, "an earlier pass of this session was lost: open another session"
        begin = time.monotonic()
        self._streams.forget(self._pages.pool.take_given())  # before anybody stores what they hold next
        walk = self._placement.walk if phase is Phase.prefill else self._placement.decode_walk
        schedule = self._schedule(walk, len(lanes))
        try:
            self._play(schedule, walk, lanes, new_tokens or [None] * len(lanes))
        except BaseException:
            self._has_lost_a_pass = True
            for lane in lanes:
                lane.abandon()
            raise
        drawn = self._device.brought([lane.draw() for lane in lanes])
        counts = PassCounts.total([lane.end_pass(part) for lane, part in zip(lanes, drawn, strict=True)])
        times = self._monitor.take(self._streams.counters)
        return PassRecord(
            block=block,
            index=index,
            phase=phase,
            counts=counts,
            seconds=time.monotonic() - begin,
            times=times,
            peak_host_bytes=peak_resident_bytes(),
            peak_device_bytes=self._device.peak_bytes(),
        )

    def _play(self, schedule: Schedule, walk: Walk, lanes: Rows[Lane], new_tokens: Rows[Rows[int] | None]) -> None:
        events = [lane.begin_pass(new) for lane, new in zip(lanes, new_tokens, strict=True)]
        player = PassPlayer(lanes, events, self._crew, walk.travelling)
        if not self._flows_on(schedule):
            self._streams.weights.drop()
            player.play(schedule.prologue)
        self._played = schedule
        player.play(schedule.cycle)
        player.finish()

    def _flows_on(self, schedule: Schedule) -> bool:
        """Whether the slots hold what the schedule expects, because the last pass has left it there."""
        return self._played is not None and self._played.prologue == schedule.prologue

    def _weights(self, stage: int) -> Weights:
        """Views are made once per place: a slot holds the same stages' bytes at the same offsets every time. Those that
        would hold copies of misaligned tensors are kept while their stage is computed."""
        placed = self._streams.weights.acquire(stage)
        key = (stage, placed.key)
        if key not in self._views:
            for other in [other for other in self._views if other[0] in self._copied]:
                del self._views[other]
            self._views[key] = stage_weights(
                self._stages[stage], placed.buffer, placed.tensor_offsets, self._loaded.dtypes
            )
        return self._views[key]


def _pool(layout: KVLayout) -> PagePool:
    """Pages that copies carry lie side by side. Elsewhere memory that was in use is taken again first: it is there
    already, and in a processor's caches."""
    are_copied = layout.tier is KVTier.cpu and layout.num_slots > 0
    return NeighbourPool(layout.num_pages) if are_copied else PagePool(layout.num_pages)
