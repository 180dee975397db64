"""Carries stages from where they live to where they are computed, as the schedule's read, copy and free actions say.

Resident stages are read once at the start and stay. Streamed ones pass through slots, of paged ones only the dense
part. A stage is handed out as its bytes: a uint8 buffer and the layout that says where each tensor begins.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType

import torch

from ..errors import CheckpointError
from ..plan.experts import dense_shape
from ..plan.extents import group_layout, resident_groups, slot_layout
from ..plan.placement import Placement
from ..plan.shapes import ModelShape
from ..store.reader import Reader
from ..store.transfer import PendingTransfer
from .device import ComputeDevice, Event

NUM_LAYOUTS = 256  # kept; experts as stages number ten thousand and more, and their layouts 30 MB


@dataclass(frozen=True)
class StageBytes:
    """Valid from `WeightStream.acquire` until the stage's `free`; `key` names the place, so that views can be kept."""

    buffer: torch.Tensor
    tensor_offsets: Mapping[str, int]
    key: int


class Slot:
    """A piece of memory that stages pass through. `free`: its last user has finished; `ready`: its bytes have
    arrived."""

    def __init__(self, buffer: torch.Tensor, device: ComputeDevice):
        self.buffer = buffer
        self.free: Event = device.new_event()
        self.ready: Event = device.new_event()
        self.pending: PendingTransfer | None = None

    def wait_read(self) -> float:
        """Returns the seconds waited."""
        if self.pending is None:
            return 0.0
        begin = time.monotonic()
        self.pending.wait()
        return time.monotonic() - begin


@dataclass
class StreamCounters:
    """Since the last `take_counters`. `read_seconds` is the disk's busy time, `stall_seconds` the engine's waiting."""

    bytes_read: int = 0
    bytes_copied: int = 0
    read_seconds: float = 0.0
    stall_seconds: float = 0.0


class WeightStream:
    """One per run; a context manager. Not thread-safe: only the engine calls it."""

    def __init__(self, shape: ModelShape, placement: Placement, device: ComputeDevice, reader: Reader):
        shape = dense_shape(shape, placement.paged)
        self._shape, self._placement, self._device, self._reader = shape, placement, device, reader
        self._layout = lru_cache(NUM_LAYOUTS)(lambda stage: slot_layout(shape.stages[stage]))
        self._staged: dict[int, Slot] = {}
        self._present: dict[int, Slot] = {}
        self._resident: dict[int, StageBytes] = {}
        self._in_host: dict[int, torch.Tensor] = {}
        self._counters = StreamCounters()
        walk, size = placement.walk, placement.slot_bytes
        self._free_slots = [Slot(device.compute_buffer(size), device) for _ in range(walk.num_slots)]
        self._free_staging = [Slot(device.host_buffer(size), device) for _ in range(walk.num_staging_slots)]

    def __enter__(self) -> "WeightStream":
        self._load_resident()
        if not self._placement.walk.reads:
            self._load_host_tier()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for reads in flight: their threads write into buffers that are about to go."""
        for slot in [*self._staged.values(), *self._present.values()]:
            if slot.pending is not None:
                try:
                    slot.pending.wait()
                except CheckpointError as error:
                    if value is None:
                        raise
                    if error is not value:
                        value.add_note(f"and a read in flight failed too: {error}")

    def read(self, stage: int) -> None:
        """Begins disk -> host."""
        copies = self._placement.walk.copies
        slot = (self._free_staging if copies else self._free_slots).pop(0)
        slot.free.synchronize()  # a staging slot is reused only when its copy has left it
        layout = self._layout(stage)
        slot.pending = self._reader.submit(layout.extents, slot.buffer.numpy().data)
        (self._staged if copies else self._present)[stage] = slot

    def copy(self, stage: int) -> None:
        """Waits for the stage's read, then queues host -> device behind the device slot's last user."""
        target = self._free_slots.pop(0)
        num_bytes = self._layout(stage).num_bytes
        if self._placement.walk.reads:
            staged = self._staged.pop(stage)
            self._settle(staged)
            source = staged.buffer
        else:
            staged, source = None, self._in_host[stage]
        self._device.copy_ahead(source[:num_bytes], target.buffer[:num_bytes], after=target.free)
        target.ready.record(self._device.copy_stream)
        if staged is not None:
            staged.free.record(self._device.copy_stream)
            self._free_staging.append(staged)
        self._counters.bytes_copied += num_bytes
        self._present[stage] = target

    def acquire(self, stage: int) -> StageBytes:
        """The stage's bytes, in compute memory, ready for compute that is queued from now on."""
        if stage in self._resident:
            return self._resident[stage]
        slot = self._present[stage]
        self._settle(slot)
        self._device.compute_waits_for(slot.ready)
        return StageBytes(slot.buffer, self._layout(stage).tensor_offsets, id(slot))

    def free(self, stage: int) -> None:
        slot = self._present.pop(stage)
        self._settle(slot)
        slot.free.record(self._device.compute_stream())
        self._free_slots.append(slot)

    def drop(self) -> None:
        """Frees what was brought in ahead, for a pass that begins at another stage. Waits for reads in flight."""
        for stage in list(self._present):
            self.free(stage)
        for slot in self._staged.values():
            self._settle(slot)
            self._free_staging.append(slot)
        self._staged.clear()

    def take_counters(self) -> StreamCounters:
        counters, self._counters = self._counters, StreamCounters()
        return counters

    def _settle(self, slot: Slot) -> None:
        if slot.pending is not None:
            self._counters.stall_seconds += slot.wait_read()
            self._counters.bytes_read += slot.pending.num_bytes
            self._counters.read_seconds += slot.pending.seconds
            slot.pending = None

    def _load_resident(self) -> None:
        stages = [self._shape.stages[index] for index in sorted(self._placement.resident)]
        for group in resident_groups(stages):
            layout = group_layout(group)
            host = self._device.host_buffer(layout.num_bytes)
            self._reader.submit(layout.extents, host.numpy().data).wait()
            buffer = host
            if self._device.is_accelerator:
                buffer = self._device.compute_buffer(layout.num_bytes)
                buffer.copy_(host[: buffer.numel()])
            for stage in group:
                self._resident[stage.index] = StageBytes(buffer, layout.tensor_offsets, id(buffer))

    def _load_host_tier(self) -> None:
        for stage in self._placement.walk.streamed:
            layout = self._layout(stage)
            self._in_host[stage] = self._device.host_buffer(layout.num_bytes)
            self._reader.submit(layout.extents, self._in_host[stage].numpy().data).wait()
