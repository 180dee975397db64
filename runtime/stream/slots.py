"""Slots: memory that holds one streamed stage (the weights of one layer, for example) at a time. A device slot is
compute memory. A staging slot is host memory; a stage is read from disk to it, then copied to a device slot.

A stage is transferred in pages: equal byte ranges. Reads to staging slots and copies have one thread each, so that the
engine's thread can queue compute meanwhile. A read waits until the previous copy from its slot is done; a copy waits
until its page is read.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..closing import Closing
from ..plan.shape.extents import Extent
from ..store.transfer import ChunkTiming
from .device import ComputeDevice, Event
from .weight_reader import Transfer, WeightReader


class DeferredTransfer:
    """A transfer that another thread starts or waits for. Has the interface of `PendingTransfer`."""

    def __init__(self, future: Future[Transfer]):
        self.future = future

    @property
    def is_done(self) -> bool:
        return self.future.done() and (self.future.exception() is not None or self.future.result().is_done)

    def wait(self) -> None:
        self.future.result().wait()

    @property
    def timing(self) -> ChunkTiming:
        return self.future.result().timing


class StagingSlot:
    """Host memory for reads of one stage. `is_used`: True after the first read."""

    def __init__(self, number: int, buffer: torch.Tensor, device: ComputeDevice):
        self.number, self.buffer, self.is_used = number, buffer, False
        self.free: Event = device.new_event()  # the previous stage's copy to the device is done
        self.last_copy: Future[Transfer] | None = None  # done once this copy is queued and `free` is recorded
        self.reads: dict[int, DeferredTransfer] = {}  # by page: reads for which `Staging.copy` was not called yet


class Staging(Closing):
    """Staging slots of a weight stream. Not thread-safe. `close` waits for transfers, without raising their errors."""

    def __init__(self, device: ComputeDevice, reader: WeightReader, *, num_slots: int, slot_bytes: int):
        """`reader`: reads to the slots; they are its buffers 0 to `num_slots` - 1."""
        self._device, self._reader = device, reader
        self._free = [StagingSlot(n, reader.buffer(slot_bytes), device) for n in range(num_slots)]
        self._slots_by_stage: dict[int, StagingSlot] = {}
        self._read_pool = ThreadPoolExecutor(1, thread_name_prefix="weights-read")
        self._copy_pool = ThreadPoolExecutor(1, thread_name_prefix="weights-copy")

    def close(self) -> None:
        self._copy_pool.shutdown(wait=True)  # tasks use buffers that are freed next
        self._read_pool.shutdown(wait=True)

    def read(self, stage: int, page: int, extents: Sequence[Extent]) -> None:
        """Queues the read of a page, which starts once the slot's memory is free. Page 0 assigns a slot to the
        stage."""
        if page == 0:
            self._slots_by_stage[stage] = self._free.pop(0)
        slot = self._slots_by_stage[stage]
        slot.reads[page] = DeferredTransfer(
            self._read_pool.submit(self._begin_read, slot, page, slot.last_copy, extents)
        )

    def buffer(self, stage: int) -> torch.Tensor:
        """Returns the buffer to which the stage is read."""
        return self._slots_by_stage[stage].buffer

    def copy(self, stage: int, page: int, queue: Callable[[], None], *, is_last: bool) -> DeferredTransfer:
        """Calls `queue`, which queues the page's copy to the device, on another thread once the page is read. Returns a
        transfer that is done once the copy is queued. The last page frees the slot."""
        slot = self._slots_by_stage[stage]
        queued = self._copy_pool.submit(self._queue_copy, slot, slot.reads.pop(page), queue, is_last)
        if is_last:
            slot.last_copy = queued
            self._free.append(self._slots_by_stage.pop(stage))
        return DeferredTransfer(queued)

    def pending_reads(self) -> Iterator[tuple[int, int, DeferredTransfer]]:
        """Yields (stage, page, transfer) of each read for which `copy` was not called."""
        for stage, slot in self._slots_by_stage.items():
            for page, read in slot.reads.items():
                yield stage, page, read

    def drop(self) -> None:
        """Frees all slots. The `pending_reads` must be done."""
        for slot in self._slots_by_stage.values():
            slot.reads.clear()
            self._free.append(slot)
        self._slots_by_stage.clear()

    def _begin_read(
        self, slot: StagingSlot, page: int, last_copy: Future[Transfer] | None, extents: Sequence[Extent]
    ) -> Transfer:
        """Runs on the read thread: waits until the slot's memory is free, then starts the read."""
        if last_copy is not None:
            last_copy.result()  # `free` is recorded only when this is done
        slot.free.synchronize()  # the copy may still read this memory
        if page == 0 and slot.is_used:
            self._reader.free(slot.number)
        slot.is_used = True
        return self._reader.fill(slot.number, extents, slot.buffer)

    @torch.inference_mode()
    def _queue_copy(
        self, slot: StagingSlot, read: DeferredTransfer, queue: Callable[[], None], is_last: bool
    ) -> Transfer:
        """Runs on the copy thread: waits until the page is read, then queues its copy."""
        read.wait()
        queue()
        if is_last:
            slot.free.record(self._device.copy_stream)
        return read.future.result()


class Slot:
    """Compute memory of one streamed stage."""

    def __init__(self, number: int, buffer: torch.Tensor, device: ComputeDevice):
        self.number, self.buffer = number, buffer
        self.free: Event = device.new_event()  # compute with the previous stage is done
        self.free.record(device.compute_stream())  # queued compute may use a tensor that was in this memory before
        self.ready: Event = device.new_event()  # the stage's bytes have arrived
        self.reads: dict[int, Transfer] = {}  # by page: transfers that are not counted yet
        self.is_fresh = False  # True until a lane (micro-batch) first uses the stage
