"""Memory that stages pass through: slots where they are computed, and host memory on their way from a disk to a
device.

A read has to wait until the copy before it has left the memory, and a copy until its read is done. Both wait on threads
of their own, so that the engine's goes on and queues the compute that is due meanwhile.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..closing import Closing
from ..plan.shape.extents import Extent
from ..store.transfer import ChunkTiming
from .device import ComputeDevice, Event
from .filling import Transfer, WeightReader


class DeferredTransfer:
    """A transfer that another thread begins, or waits for; to whoever waits for it, as `PendingTransfer`."""

    def __init__(self, begun: Future[Transfer]):
        self.begun = begun

    @property
    def is_done(self) -> bool:
        return self.begun.done() and (self.begun.exception() is not None or self.begun.result().is_done)

    def wait(self) -> None:
        self.begun.result().wait()

    @property
    def timing(self) -> ChunkTiming:
        return self.begun.result().timing


class StagingSlot:
    """`number` counts from 0. `left` is the last copy out of it, done when that has been queued; then `free` says when
    it has left. `is_used`: something was read into it."""

    def __init__(self, number: int, buffer: torch.Tensor, device: ComputeDevice):
        self.number, self.buffer, self.is_used = number, buffer, False
        self.free: Event = device.new_event()
        self.left: Future[Transfer] | None = None
        self.reads: dict[int, DeferredTransfer] = {}  # by page


class Staging(Closing):
    """Only the engine's thread calls it. Closing waits for all that has begun; what failed is in the transfers."""

    def __init__(self, device: ComputeDevice, filling: WeightReader, *, num_slots: int, slot_bytes: int):
        """`filling` fills what is in host memory; its numbers below `num_slots` are those of these slots."""
        self._device, self._filling = device, filling
        self._free = [StagingSlot(n, filling.buffer(slot_bytes), device) for n in range(num_slots)]
        self._staged: dict[int, StagingSlot] = {}  # by stage
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="weights-read")
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="weights-copy")

    def close(self) -> None:
        self._copying.shutdown(wait=True)
        self._reading.shutdown(wait=True)

    def read(self, stage: int, page: int, extents: Sequence[Extent]) -> None:
        """Has them read once their memory is free. Page 0 takes a slot."""
        if page == 0:
            self._staged[stage] = self._free.pop(0)
        slot = self._staged[stage]
        slot.reads[page] = DeferredTransfer(self._reading.submit(self._begin_read, slot, page, slot.left, extents))

    def buffer(self, stage: int) -> torch.Tensor:
        """What it is read into."""
        return self._staged[stage].buffer

    def copy(self, stage: int, page: int, queue: Callable[[], None], *, is_last: bool) -> DeferredTransfer:
        """Has `queue` called once the page is read, to queue its copy. Returns the read, which counts as done when that
        has been. The last page gives the slot back."""
        slot = self._staged[stage]
        queued = self._copying.submit(self._queue_copy, slot, slot.reads.pop(page), queue, is_last)
        if is_last:
            slot.left = queued
            self._free.append(self._staged.pop(stage))
        return DeferredTransfer(queued)

    def waiting(self) -> Iterator[tuple[int, int, DeferredTransfer]]:
        """Stage, page and transfer of each read that no copy has been asked for."""
        for stage, slot in self._staged.items():
            for page, read in slot.reads.items():
                yield stage, page, read

    def drop(self) -> None:
        """Nobody will ask for the copies of what `waiting` names, which is done."""
        for slot in self._staged.values():
            slot.reads.clear()
            self._free.append(slot)
        self._staged.clear()

    def _begin_read(
        self, slot: StagingSlot, page: int, left: Future[Transfer] | None, extents: Sequence[Extent]
    ) -> Transfer:
        if left is not None:
            left.result()
        slot.free.synchronize()
        if page == 0 and slot.is_used:
            self._filling.free(slot.number)
        slot.is_used = True
        return self._filling.fill(slot.number, extents, slot.buffer)

    @torch.inference_mode()
    def _queue_copy(
        self, slot: StagingSlot, read: DeferredTransfer, queue: Callable[[], None], is_last: bool
    ) -> Transfer:
        read.wait()
        queue()
        if is_last:
            slot.free.record(self._device.copy_stream)
        return read.begun.result()


class Slot:
    """`number` counts from 0. `free`: its last user has finished; `ready`: its bytes have arrived; `is_fresh`: no lane
    has asked for them. `reads`: those in flight, by page."""

    def __init__(self, number: int, buffer: torch.Tensor, device: ComputeDevice):
        self.number, self.buffer = number, buffer
        self.free: Event = device.new_event()
        self.free.record(device.compute_stream())  # what lay in this memory before may still be in use
        self.ready: Event = device.new_event()
        self.reads: dict[int, Transfer] = {}
        self.is_fresh = False
