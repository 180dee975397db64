"""Carries keys and values of travelling layers from their tier to compute and back, as the schedule's fetch and store
actions say. Bytes only: what a page holds is the cache's business.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType

import torch

from ..config.settings import KVTier
from ..errors import KVFileError
from ..plan.placement.kv import KVLayout
from ..resources import Resource
from ..store.kv_file import KVFile
from ..store.transfer import PendingTransfer
from ..trace import Trace
from .counters import StreamCounters
from .device import ComputeDevice
from .kv_pages import DiskPages, KVSlot, PinnedPages


@dataclass(frozen=True)
class Held:
    """A slot that has one lane's pages of one layer, in this order."""

    slot: KVSlot
    pages: tuple[int, ...]


class KVStream:
    """One per run; a context manager. Only the engine's thread calls it. `file` is there for the tier `nvme` alone.

    An error of the background, KVFileError, is raised by the next call that finds it, at the latest when the stream
    closes. `layer` counts decoder layers from 0.
    """

    def __init__(
        self,
        layout: KVLayout,
        device: ComputeDevice,
        file: KVFile | None = None,
        *,
        first_stage: int = 0,
        trace: Trace | None = None,
    ):
        assert (layout.tier is KVTier.nvme) == (file is not None), f"kv={layout.tier.value} with file {file}"
        self._layout, self._device = layout, device
        self._first_stage, self._trace = first_stage, trace  # what decoder layer 0 is called in counters and spans
        told = self._copied
        self._tier = PinnedPages(layout, device, told) if file is None else DiskPages(layout, device, file, told)
        self._slots = [self._new_slot() for _ in range(layout.num_slots)]
        self._free_slots = list(self._slots)
        self._held: dict[tuple[int, int], Held] = {}  # (layer, lane)
        self._counters = StreamCounters()

    def _new_slot(self) -> KVSlot:
        buffer = self._device.compute_buffer(self._layout.slot_bytes)
        is_staged = self._device.is_accelerator and self._layout.tier is KVTier.nvme
        return KVSlot(buffer, self._device.host_buffer(self._layout.slot_bytes) if is_staged else buffer, self._device)

    def __enter__(self) -> "KVStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for everything in flight. Raises what failed unseen, or notes it on the error that ends the run."""
        self._tier.close()
        try:
            self._collect_written()
            for slot in self._slots:
                self._settle(slot, 0)
        except KVFileError as error:
            if value is None:
                raise
            if error is not value:
                value.add_note(f"and keys and values in flight failed too: {error}")

    def fetch(self, layer: int, lane: int, pages: Sequence[int]) -> None:
        """Takes a slot and begins to bring these pages into it; one that was never stored comes as zeros. Pages on
        their way back arrive there first."""
        assert (layer, lane) not in self._held, f"fetch of layer {layer} for lane {lane}, which has it"
        assert len(pages) <= self._layout.slot_pages, f"{len(pages)} pages, slots have {self._layout.slot_pages}"
        self._collect_written()
        slot = self._free_slots.pop(0)
        behind = [other for other in self._slots if other is slot or other.is_carrying(layer, pages)]
        self._counters.bytes_copied += self._tier.fetch(slot, layer, tuple(pages), behind)
        self._held[layer, lane] = Held(slot, tuple(pages))

    def acquire(self, layer: int, lane: int) -> torch.Tensor:
        """The pages, uint8 (len(pages), page_bytes) in compute memory, for compute that is queued from now on. Valid
        until `store`. Waits for a disk; rows may lie further apart than they are long."""
        self._collect_written()
        held = self._held[layer, lane]
        if held.slot.arriving is not None:
            self._counters.count_ask(held.slot.arriving.done() and held.slot.arriving.result().is_done)
        self._settle(held.slot, layer)
        self._device.compute_waits_for(held.slot.ready)
        stride = self._layout.stride_bytes(layer)
        rows = held.slot.buffer[: len(held.pages) * stride].view(-1, stride)
        return rows[:, : self._layout.page_bytes[layer]]

    def store(self, layer: int, lane: int, changed: Sequence[int]) -> None:
        """Begins to carry back the pages at these places of those that were fetched; none of them may be. The slot is
        free for another fetch, which waits until they have left."""
        held = self._held.pop((layer, lane))
        slot = held.slot
        self._settle(slot, layer)
        self._collect_written()
        slot.free.record(self._device.compute_stream())
        if changed:
            places = {held.pages[place]: place for place in changed}
            self._counters.bytes_returned += self._tier.store(slot, layer, places)
        self._free_slots.append(slot)

    def forget(self, pages: Sequence[int]) -> None:
        """These pages were given back: what they held is dropped, in every layer. Waits for those on their way to a
        disk."""
        lost = set(pages)
        for slot in self._slots:
            if slot.departure is not None and slot.departure.written is not None and lost & slot.departure.pages:
                self._wait(slot.departure.written, slot.departure.layer)
        self._collect_written()
        self._tier.forget(pages)

    def sync(self) -> None:
        """Waits for a disk's reads and writes that have begun, and has compute wait for copies."""
        for (layer, _), held in self._held.items():
            self._settle(held.slot, layer)
        for slot in self._slots:
            self._device.compute_waits_for(slot.ready)
            self._device.compute_waits_for(slot.free)
            if slot.departure is not None and slot.departure.written is not None:
                self._wait(slot.departure.written, slot.departure.layer)

    def take_counters(self) -> StreamCounters:
        self._collect_written()
        counters, self._counters = self._counters, StreamCounters()
        return counters

    def _settle(self, slot: KVSlot, layer: int) -> None:
        """Waits for what is being read into the slot, and counts it."""
        if slot.arriving is not None:
            timing = self._wait(slot.arriving, layer).timing
            self._counters.bytes_read += timing.num_bytes
            self._counters.reads[self._first_stage + layer] += timing.end - timing.begin
            self._tell(Resource.disk, "fetch", layer, timing.begin, timing.end)
            slot.arriving = None

    def _wait(self, pending: Future[PendingTransfer], layer: int) -> PendingTransfer:
        begin = time.monotonic()
        try:
            return pending.result()
        finally:
            self._counters.stalls[self._first_stage + layer] += time.monotonic() - begin

    def _collect_written(self) -> None:
        """Counts writes that are done. Raises what one of them raised."""
        for slot in self._slots:
            left = slot.departure
            if left is not None and left.written is not None and left.written.done():
                timing = left.written.result().timing
                self._counters.bytes_written += timing.num_bytes
                self._tell(Resource.disk, "store", left.layer, timing.begin, timing.end)
                slot.departure = None

    def _copied(self, row: Resource, layer: int, begin: float, end: float) -> None:
        self._counters.copies[self._first_stage + layer] += end - begin
        self._tell(row, "fetch" if row is Resource.host_to_device else "store", layer, begin, end)

    def _tell(self, row: Resource, what: str, layer: int, begin: float, end: float) -> None:
        if self._trace is not None and end > begin:
            self._trace.span(row, f"{what} {self._first_stage + layer}", begin, end)
