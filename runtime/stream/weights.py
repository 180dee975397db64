"""Streams the weights of stages to compute memory, by the schedule's read, copy and free actions.

A stage is the weights of one part of the forward, such as a layer. Resident stages are read once at the start and stay
in compute memory. Streamed stages use slots, which each hold one stage at a time, and are transferred in pages (equal
byte ranges). On an accelerator, a stage is read to a staging slot in host memory, or stays in host memory, and is
copied to a device slot. Experts that are read one by one (of paged stages) are not included, see experts.py.

`Placement.walk` has the streamed stages of a pass in order, and the numbers of slots and pages.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache, partial
from itertools import count
from types import TracebackType

import torch

from ..plan.placement.experts import dense_shape
from ..plan.placement.placement import Placement
from ..plan.shape.extents import (
    HOST_PIECE_BYTES,
    LOADING_BYTES,
    Move,
    device_layout,
    group_layout,
    group_tied_stages,
    slot_layout,
)
from ..plan.shape.model import ModelShape
from ..resources import Resource
from ..store.reader import Reader
from ..trace import Trace
from .clock import StreamCounters
from .device import ComputeDevice, CopyPart
from .slots import Slot, Staging
from .weight_cache import StageBytes, StreamWeights
from .weight_reader import LocalReader, SessionResources, Transfer

NUM_CACHED_MOVES = 4096  # byte ranges of stages for which copies are cached
NUM_CACHED_LAYOUTS = 256  # limited: an expert may be a stage, and ten thousand experts would take 30 MB
IN_TIME_SECONDS = 50e-6  # two events of a stream may be this far apart although it did not wait between them


class WeightStream:
    """Stream of weights; one per run. Not thread-safe: only the engine calls it."""

    def __init__(
        self,
        shape: ModelShape,
        placement: Placement,
        device: ComputeDevice,
        reader: Reader,
        trace: Trace | None = None,
        stage_name: Callable[[int], str] = str,
        loaded: StreamWeights | None = None,
        resources: SessionResources | None = None,
    ):
        """`stage_name`: returns a stage's name for traces. `loaded`: weights in memory that earlier streams read; this
        stream adds its own. `resources`: of several ranks that read together; None: this process reads alone."""
        shape = dense_shape(shape, placement.paged)
        self._shape, self._placement, self._device = shape, placement, device
        self._trace, self._stage_name = trace, stage_name
        self._layout = lru_cache(NUM_CACHED_LAYOUTS)(lambda stage: slot_layout(shape.stages[stage]))
        self._device_layout = lru_cache(NUM_CACHED_LAYOUTS)(
            lambda stage: device_layout([shape.stages[stage]], self._layout(stage))
        )
        self._moves = lru_cache(NUM_CACHED_MOVES)(  # arguments: stage, begin and end of a byte range in its host slot
            lambda stage, *part: tuple(self._device_layout(stage).clip_moves(*part))
        )
        self._num_pages = placement.walk.num_pages
        self._used_slots: dict[int, Slot] = {}  # by stage
        self._resident: dict[int, StageBytes] = {}  # by stage
        self._loaded = loaded or StreamWeights()
        self._counters, self._barrier = StreamCounters(), device.new_event()
        walk, size = placement.walk, placement.slot_bytes
        num_staged, is_accelerator = walk.num_staging_slots, device.is_accelerator
        # The reader's buffers are numbered: first slots, then buffers of weights that stay in host memory, and on an
        # accelerator the bounce buffer for resident weights.
        num_slots = num_staged if is_accelerator else walk.num_slots
        num_filled_once = 1 + len(walk.in_host) if is_accelerator else len(placement.resident)
        self._buffer_numbers = count(num_slots)
        self._reader = (
            LocalReader(device, reader)
            if resources is None
            else resources.weight_reader(device, reader, count=num_slots + num_filled_once)
        )
        buffer = device.compute_buffer if is_accelerator else self._reader.buffer
        self._free_slots = [Slot(n, buffer(size), device) for n in range(walk.num_slots)]
        self._staging = Staging(device, self._reader, num_slots=num_staged, slot_bytes=size) if num_staged else None

    def __enter__(self) -> "WeightStream":
        self._load_resident()
        for stage in sorted(self._placement.walk.in_host - self._loaded.in_host.keys()):
            layout = self._layout(stage)
            self._loaded.in_host[stage] = self._reader.load_once(
                next(self._buffer_numbers), layout.extents, layout.num_bytes
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for reads in flight, since they write to buffers that are freed next."""
        if value is not None:
            self._reader.abandon()  # other ranks may never read their parts
        if self._staging is not None:
            self._staging.close()
        self._reader.close()
        for _, _, read in self._pending_reads():
            try:
                read.wait()
            except Exception as error:  # of a read or a copy
                if value is None:
                    raise
                if error is not value:
                    value.add_note(f"a read in flight failed too: {error}")

    def read(self, stage: int, page: int | None = None) -> None:
        """Starts reading a stage, or one page of it, from disk to host memory. Page 0 assigns a slot to the stage.
        Returns at once."""
        layout = self._layout(stage)
        extents = layout.extents if page is None else layout.page_extents(page, self._num_pages)
        if self._staging is not None:
            self._staging.read(stage, page or 0, extents)
            return
        if not page:
            self._used_slots[stage] = self._free_slots.pop(0)
            self._used_slots[stage].is_fresh = True
        slot = self._used_slots[stage]
        slot.reads[page or 0] = self._reader.fill(slot.number, extents, slot.buffer)

    def copy(self, stage: int, page: int | None = None) -> None:
        """Queues the copy of a stage, or one page of it, from host to device. It begins when the read is done and the
        device slot is free. Page 0 assigns a device slot to the stage. Returns at once."""
        if not page:
            self._used_slots[stage] = self._free_slots.pop(0)
            self._used_slots[stage].is_fresh = True
        slot, layout = self._used_slots[stage], self._layout(stage)
        begin, end = (0, layout.num_bytes) if page is None else layout.page_bounds(page, self._num_pages)
        staging = None if stage in self._placement.walk.in_host else self._staging
        source = self._loaded.in_host[stage] if staging is None else staging.buffer(stage)
        # Copies of limited size, so that urgent small copies can run in between on a device with one copy engine.
        parts = [
            _make_copy_part(0, source, move, slot.buffer)
            for first in range(begin // HOST_PIECE_BYTES * HOST_PIECE_BYTES, end, HOST_PIECE_BYTES)
            for move in self._moves(stage, max(first, begin), min(first + HOST_PIECE_BYTES, end))
        ]
        is_last = page in (None, self._num_pages - 1)
        queue = partial(self._queue_copy, stage, page or 0, slot, parts, is_last)
        if staging is None:
            queue()
        else:
            slot.reads[page or 0] = staging.copy(stage, page or 0, queue, is_last=is_last)
        self._counters.bytes_copied += sum(part.source.numel() for part in parts)

    def acquire(self, stage: int) -> StageBytes:
        """Returns the stage's weights in compute memory, which compute queued from now on may use."""
        if stage in self._resident:
            return self._resident[stage]
        slot, copies = self._used_slots[stage], self._placement.walk.copies
        if slot.is_fresh:  # the first lane waits for the stage
            slot.is_fresh = False
            if not copies:
                self._counters.count_acquire(all(read.is_done for read in slot.reads.values()))
            self._finish_reads(stage, slot)  # waits for the read, or until the copy is queued and `ready` recorded
            if copies:
                stream = self._device.compute_stream()
                begin = self._device.clock.begin(stream)
                self._device.compute_waits_for(slot.ready)
                self._device.clock.end(begin, partial(self._count_wait, stage), stream)
        layout = self._device_layout(stage) if copies else self._layout(stage)
        return StageBytes(slot.buffer, layout.tensor_offsets, id(slot))

    def host_stage(self, stage: int) -> StageBytes:
        """Returns the weights of a stage that stays in host memory, without a copy to the device."""
        buffer = self._loaded.in_host[stage]
        return StageBytes(buffer, self._layout(stage).tensor_offsets, id(buffer))

    def free(self, stage: int) -> None:
        """Frees the stage's slot, for transfers that begin after compute queued so far."""
        slot = self._used_slots.pop(stage)
        self._finish_reads(stage, slot)
        slot.free.record(self._device.compute_stream())  # the next copy waits for compute queued so far
        if not self._device.is_accelerator:
            self._reader.free(slot.number)
        self._free_slots.append(slot)

    def drop(self, kept: Collection[int] = ()) -> None:
        """Frees the slots of all stages that were read ahead, for a pass that begins at another stage, but not those of
        `kept`. Waits for reads in flight."""
        for stage in [stage for stage in self._used_slots if stage not in kept]:
            self.free(stage)
        if self._staging is not None:
            for stage, page, read in self._staging.pending_reads():
                self._count_read(stage, page, read)
            self._staging.drop()

    def sync(self) -> None:
        """Waits for pending reads, and makes compute wait for pending copies. The reads are counted later, when their
        stages are used."""
        for stage, _, read in self._pending_reads():
            self._wait(stage, read)
        if self._device.copy_stream is not None:
            self._barrier.record(self._device.copy_stream)
            self._device.compute_waits_for(self._barrier)

    def take_counters(self) -> StreamCounters:
        """Returns the counters since the last call. Work of an accelerator is counted when `DeviceClock.resolve`
        reports it."""
        counters, self._counters = self._counters, StreamCounters()
        return counters

    def _pending_reads(self) -> Iterator[tuple[int, int, Transfer]]:
        """Yields (stage, page, transfer) of each read that is not counted yet."""
        if self._staging is not None:
            yield from self._staging.pending_reads()
        for stage, slot in self._used_slots.items():
            for page, read in slot.reads.items():
                yield stage, page, read

    def _queue_copy(self, stage: int, page: int, slot: Slot, parts: Sequence[CopyPart], is_last: bool) -> None:
        num_bytes = sum(part.source.nbytes for part in parts)
        self._device.copy_ahead(parts, after=slot.free, then=partial(self._count_copy, stage, page, num_bytes))
        if is_last:
            slot.ready.record(self._device.copy_stream)  # after the stage's last page

    def _finish_reads(self, stage: int, slot: Slot) -> None:
        """Waits for the slot's reads and counts them."""
        for page in list(slot.reads):
            self._count_read(stage, page, slot.reads.pop(page))

    def _count_read(self, stage: int, page: int, read: Transfer) -> None:
        self._wait(stage, read)
        timing = read.timing
        self._counters.bytes_read += timing.num_bytes
        self._counters.reads[self._counter_index(stage)] += timing.end - timing.begin
        self._trace_span(Resource.disk, "read", stage, page, timing.begin, timing.end, timing.num_bytes)
        if (gathered := self._reader.gather_timing(read)) is not None:
            self._trace_span(Resource.host_to_device, "gather", stage, page, gathered.begin, gathered.end)

    def _wait(self, stage: int, read: Transfer) -> None:
        """Waits for a read, and counts the time as a stall."""
        begin = time.monotonic()
        read.wait()
        self._counters.stalls[self._counter_index(stage)] += time.monotonic() - begin

    def _count_copy(self, stage: int, page: int, num_bytes: int, begin: float, end: float) -> None:
        self._counters.copies[self._counter_index(stage)] += end - begin
        self._trace_span(Resource.host_to_device, "copy", stage, page, begin, end, num_bytes)

    def _trace_span(
        self, row: Resource, verb: str, stage: int, page: int, begin: float, end: float, num_bytes: int = 0
    ) -> None:
        if self._trace is not None:
            target = self._stage_name(stage) + (f"#{page}" if self._num_pages > 1 else "")
            self._trace.span(row, f"{verb} {target}", begin, end, num_bytes=num_bytes)

    def _count_wait(self, stage: int, begin: float, end: float) -> None:
        self._counters.stalls[self._counter_index(stage)] += end - begin
        self._counters.count_acquire(end - begin < IN_TIME_SECONDS)

    def _counter_index(self, stage: int) -> int:
        """Returns the stage index for counters; an expert that is streamed as a stage counts for its layer."""
        return self._shape.stages[stage].index

    def _load_resident(self) -> None:
        """Reads resident stages that are not in `_loaded`: on a CPU to their buffers, on an accelerator through a
        bounce buffer."""
        stages = [self._shape.stages[index] for index in sorted(self._placement.resident)]
        groups = {tuple(stage.index for stage in group): group for group in group_tied_stages(stages)}
        missing = {key: group_layout(group) for key, group in groups.items() if key not in self._loaded.resident}
        largest = max((layout.num_bytes for layout in missing.values()), default=0)
        is_staged = self._device.is_accelerator and bool(missing)
        number = next(self._buffer_numbers) if is_staged else 0
        bounce = self._reader.buffer(min(largest, LOADING_BYTES)) if is_staged else None
        for key, layout in missing.items():
            if bounce is None:
                target_layout = layout
                buffer = self._reader.load_once(next(self._buffer_numbers), layout.extents, layout.num_bytes)
            else:
                target_layout = device_layout(groups[key], layout)
                buffer = self._device.compute_buffer(layout.num_bytes)
                for begin, end, extents in layout.windows(len(bounce)):
                    self._reader.fill(number, extents, bounce).wait()
                    for move in target_layout.clip_moves(begin, end):
                        source, target = _make_copy_part(begin, bounce, move, buffer)
                        target.copy_(source)  # blocking: the next window reuses the bounce buffer
                    self._reader.free(number)
            self._loaded.resident[key] = StageBytes(buffer, target_layout.tensor_offsets, id(buffer))
        self._resident = {stage: self._loaded.resident[key] for key in groups for stage in key}


def _make_copy_part(begin: int, source: torch.Tensor, move: Move, target: torch.Tensor) -> CopyPart:
    """Returns the tensors of a move. `source`: host memory with the stage's bytes from `begin` on; `target`: device
    memory of the whole stage."""
    first = move.begin - begin
    return CopyPart(source[first : first + move.num_bytes], target[move.target : move.target + move.num_bytes])
