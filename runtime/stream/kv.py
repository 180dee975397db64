"""Transfers KV pages of offloaded layers between their tier and KV slots, by the schedule's fetch and store actions.

Tier `cpu`: runs of pages are copied from and to pinned host memory, each way on its own stream; the host does not wait.
Tier `nvme`: one thread each way keeps the order of fetches and of stores; the file's own threads read and write.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch

from ..config.settings import KVTier
from ..errors import KVFileError
from ..plan.placement.kv import KVLayout, layer_ranges
from ..resources import Resource
from ..store.kv_file import KVFile
from ..store.transfer import PendingTransfer
from ..trace import Trace
from .clock import StreamCounters
from .device import ComputeDevice, CopyPart, Event


@dataclass(frozen=True, kw_only=True)
class PendingStore:
    """Pages of a layer being stored. `written` is done once they are in the file; None: `KVSlot.free` signals it."""

    layer: int
    pages: frozenset[int]
    written: Future[PendingTransfer] | None

    def includes(self, layer: int, pages: Sequence[int]) -> bool:
        """True if any of these pages is being stored."""
        return self.layer == layer and not self.pages.isdisjoint(pages)


class KVSlot:
    """A slot for the pages of one lane in one layer. Events: `ready` (the pages have arrived) and `free` (compute and
    the copy out of the slot are done). Disk I/O uses `staging`, which is `buffer` itself on a CPU."""

    def __init__(self, buffer: torch.Tensor, staging: torch.Tensor, device: ComputeDevice):
        self.buffer, self.staging = buffer, staging
        self.ready: Event = device.new_event()
        self.free: Event = device.new_event()
        self.free.record(device.compute_stream())  # queued compute may still use this memory's last tensor
        self.pending_fetch: Future[PendingTransfer] | None = None
        self.pending_store: PendingStore | None = None

    @property
    def is_staged(self) -> bool:
        return self.staging is not self.buffer

    def is_storing(self, layer: int, pages: Sequence[int]) -> bool:
        """True if any of these pages is still being stored from this slot."""
        return self.pending_store is not None and self.pending_store.includes(layer, pages)


class PageRun(NamedTuple):
    """Pages that are consecutive both in the tier and in the slot."""

    page: int
    slot_index: int
    num_pages: int

    def slot_bytes(self, slot: KVSlot, stride: int) -> torch.Tensor:
        return slot.buffer[self.slot_index * stride : (self.slot_index + self.num_pages) * stride]


class PinnedPages:
    """KV pages of the tier `cpu`, in pinned memory. Not thread-safe."""

    def __init__(self, layout: KVLayout, device: ComputeDevice, on_copy: Callable[[Resource, int, float, float], None]):
        """`on_copy` is called with the resource, layer, begin and end of each copy."""
        self._layout, self._device, self._on_copy = layout, device, on_copy
        self._fetch_stream, self._store_stream = device.new_stream(), device.new_stream()
        self._segments = {
            layer: [device.host_pages(count * layout.stride_bytes(layer)) for count in layout.segment_pages(layer)]
            for layer in layout.page_bytes
        }
        self._is_stored = {layer: np.zeros(layout.num_pages, bool) for layer in layout.page_bytes}

    def fetch(self, slot: KVSlot, layer: int, pages: Sequence[int], blocking: Sequence[KVSlot]) -> int:
        """Queues copies of `pages` into the slot, once all `blocking` are free. Zeroes pages that were never
        stored. Returns the bytes to copy."""
        if self._fetch_stream is not None:
            for other in blocking:
                self._device.wait(self._fetch_stream, other.free)  # its stores end first: a page must not be stale
        slot.pending_store = None
        stride, numbers = self._layout.stride_bytes(layer), np.array(pages, np.int64)
        is_stored = self._is_stored[layer][numbers]
        new_indices, stored_indices = np.flatnonzero(~is_stored), np.flatnonzero(is_stored)
        targets = [slot.buffer[run.start * stride : run.stop * stride] for run in layer_ranges(new_indices.tolist())]
        if targets:
            self._device.clear_all(targets, on=self._fetch_stream, after=slot.free)
        runs = find_page_runs(numbers[stored_indices], stored_indices, self._segment_pages(layer))
        parts = [CopyPart(self._run_memory(layer, run), run.slot_bytes(slot, stride)) for run in runs]
        if parts:
            on_copy = partial(self._on_copy, Resource.host_to_device, layer)
            self._device.copy_all(parts, on=self._fetch_stream, after=slot.free, then=on_copy)
        slot.ready.record(self._fetch_stream)
        return len(stored_indices) * stride

    def store(self, slot: KVSlot, layer: int, slot_indices: Mapping[int, int]) -> int:
        """Queues copies of pages (page number -> index in the slot) to the tier, after `slot.free`, which then signals
        their end. Returns the bytes to copy."""
        stride = self._layout.stride_bytes(layer)
        on_copy = partial(self._on_copy, Resource.device_to_host, layer)
        numbers = np.array([*slot_indices], np.int64)
        runs = find_page_runs(numbers, np.array([*slot_indices.values()], np.int64), self._segment_pages(layer))
        parts = [CopyPart(run.slot_bytes(slot, stride), self._run_memory(layer, run)) for run in runs]
        self._device.copy_all(parts, on=self._store_stream, after=slot.free, then=on_copy)
        slot.free.record(self._store_stream)  # the slot may be overwritten only after these copies
        slot.pending_store = PendingStore(layer=layer, pages=frozenset(slot_indices), written=None)
        self._is_stored[layer][numbers] = True
        return len(slot_indices) * stride

    def forget(self, pages: Sequence[int]) -> None:
        for is_stored in self._is_stored.values():
            is_stored[list(pages)] = False

    def close(self) -> None:
        """Waits for copies in flight: their memory is freed next."""
        for stream in (self._fetch_stream, self._store_stream):
            if stream is not None:
                stream.synchronize()

    def _run_memory(self, layer: int, run: PageRun) -> torch.Tensor:
        stride, segment_pages = self._layout.stride_bytes(layer), self._segment_pages(layer)
        begin = run.page % segment_pages * stride
        return self._segments[layer][run.page // segment_pages][begin : begin + run.num_pages * stride]

    def _segment_pages(self, layer: int) -> int:
        """Pages in each of the layer's segments except the last."""
        return self._layout.segment_pages(layer)[0]


def find_page_runs(pages: np.ndarray, slot_indices: np.ndarray, segment_pages: int) -> list[PageRun]:
    """Splits pages into runs that are consecutive in the tier and in the slot. No run crosses a segment boundary."""
    if not len(pages):
        return []
    order = np.argsort(pages)
    pages, slot_indices = pages[order], slot_indices[order]
    begins = (np.diff(pages) != 1) | (np.diff(slot_indices) != 1) | (pages[1:] % segment_pages == 0)
    firsts = np.flatnonzero(np.concatenate([[True], begins]))
    sizes = np.diff(firsts, append=len(pages))
    return [
        PageRun(*each)
        for each in zip(pages[firsts].tolist(), slot_indices[firsts].tolist(), sizes.tolist(), strict=True)
    ]


class DiskPages:
    """KV pages of the tier `nvme`, in a file. Not thread-safe."""

    def __init__(
        self,
        layout: KVLayout,
        device: ComputeDevice,
        file: KVFile,
        on_copy: Callable[[Resource, int, float, float], None],
    ):
        """`on_copy` as for `PinnedPages`; reads and writes report their times in the slots' futures."""
        self._layout, self._device, self._file, self._on_copy = layout, device, file, on_copy
        self._fetch_stream, self._store_stream = device.new_stream(), device.new_stream()
        self._fetch_pool = ThreadPoolExecutor(1, thread_name_prefix="kv-fetch")
        self._store_pool = ThreadPoolExecutor(1, thread_name_prefix="kv-store")

    def fetch(self, slot: KVSlot, layer: int, pages: Sequence[int], blocking: Sequence[KVSlot]) -> int:
        """Starts reading `pages` into the slot and copying them to the device, after the stores from `blocking`.
        Returns the bytes to copy."""
        pending_writes = [
            other.pending_store.written for other in blocking if other.pending_store and other.pending_store.written
        ]
        slot.pending_fetch = self._fetch_pool.submit(self._fetch, slot, layer, pages, pending_writes)
        return len(pages) * self._layout.stride_bytes(layer) if slot.is_staged else 0

    def store(self, slot: KVSlot, layer: int, slot_indices: Mapping[int, int]) -> int:
        """Starts writing pages (page number -> index in the slot), after `slot.free`. Returns the bytes to copy."""
        stride = self._layout.stride_bytes(layer)
        if slot.is_staged:
            on_copy = partial(self._on_copy, Resource.device_to_host, layer)
            runs = [slice(run.start * stride, run.stop * stride) for run in layer_ranges(slot_indices.values())]
            parts = [CopyPart(slot.buffer[part], slot.staging[part]) for part in runs]
            self._device.copy_all(parts, on=self._store_stream, after=slot.free, then=on_copy)
            slot.free.record(self._store_stream)
        written = self._store_pool.submit(self._store, slot, layer, slot_indices)
        slot.pending_store = PendingStore(layer=layer, pages=frozenset(slot_indices), written=written)
        return len(slot_indices) * stride if slot.is_staged else 0

    def forget(self, pages: Sequence[int]) -> None:
        self._file.forget(pages)

    def close(self) -> None:
        """Waits for transfers in flight: their memory is freed next. Errors stay in the slots' futures."""
        self._fetch_pool.shutdown(wait=True)
        self._store_pool.shutdown(wait=True)
        for stream in (self._fetch_stream, self._store_stream):
            if stream is not None:
                stream.synchronize()

    def _fetch(
        self, slot: KVSlot, layer: int, pages: Sequence[int], pending_writes: Sequence[Future[PendingTransfer]]
    ) -> PendingTransfer:
        for written in pending_writes:
            written.result()  # a page must be written before it is read again
        slot.ready.synchronize()  # the last copy may still read the staging memory
        pending = self._file.read(
            layer, {page: slot_index for slot_index, page in enumerate(pages)}, slot.staging.numpy().data
        )
        pending.wait()
        if slot.is_staged:
            num_bytes = len(pages) * self._layout.stride_bytes(layer)
            on_copy, source = partial(self._on_copy, Resource.host_to_device, layer), slot.staging[:num_bytes]
            self._device.copy(source, slot.buffer[:num_bytes], on=self._fetch_stream, after=slot.free, then=on_copy)
            slot.ready.record(self._fetch_stream)
        return pending

    def _store(self, slot: KVSlot, layer: int, slot_indices: Mapping[int, int]) -> PendingTransfer:
        slot.free.synchronize()  # compute, or the copy into staging, must be done before the disk reads the memory
        pending = self._file.write(layer, slot_indices, slot.staging.numpy().data)
        pending.wait()
        return pending


class KVStream:
    """Stream of KV pages; one per run. Not thread-safe. `file`: for the tier `nvme` only. `layer` counts decoder layers
    from 0. A KVFileError of a background thread is raised by a later call, at the latest on exit."""

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
        self._first_stage, self._trace = first_stage, trace  # stage index of decoder layer 0, for counters and traces
        on_copy = self._count_copy
        self._tier = PinnedPages(layout, device, on_copy) if file is None else DiskPages(layout, device, file, on_copy)
        self._slots = list[KVSlot]()
        for _ in range(layout.num_slots):
            buffer = staging = device.compute_buffer(layout.slot_bytes)
            if device.is_accelerator and layout.tier is KVTier.nvme:
                staging = device.host_buffer(layout.slot_bytes)
            self._slots.append(KVSlot(buffer, staging, device))
        self._free_slots = list(self._slots)
        self._fetched: dict[tuple[int, int], tuple[KVSlot, tuple[int, ...]]] = {}  # (layer, lane) -> slot and its pages
        self._counters = StreamCounters()

    def __enter__(self) -> "KVStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Waits for all transfers. Raises their errors, or adds a note to the error that ends the run."""
        self._tier.close()
        try:
            self._collect_stores()
            for slot in self._slots:
                self._finish_fetch(slot, 0)
        except KVFileError as error:
            if value is None:
                raise
            if error is not value:
                value.add_note(f"a KV transfer in flight failed too: {error}")

    def fetch(self, layer: int, lane: int, pages: Sequence[int]) -> None:
        """Starts fetching pages into a free slot, after pending stores of the same pages. New pages are zeros."""
        assert (layer, lane) not in self._fetched, f"layer {layer} of lane {lane} is fetched already"
        assert len(pages) <= self._layout.slot_pages, f"{len(pages)} pages, slots have {self._layout.slot_pages}"
        self._collect_stores()
        slot = self._free_slots.pop(0)
        blocking = [other for other in self._slots if other is slot or other.is_storing(layer, pages)]
        self._counters.bytes_copied += self._tier.fetch(slot, layer, tuple(pages), blocking)
        self._fetched[layer, lane] = slot, tuple(pages)

    def acquire(self, layer: int, lane: int) -> torch.Tensor:
        """The fetched pages, uint8 (len(pages), page_bytes) in compute memory, perhaps strided, for compute queued from
        now on. Valid until `store`. Blocks on disk reads."""
        self._collect_stores()
        slot, pages = self._fetched[layer, lane]
        if slot.pending_fetch is not None:
            self._counters.count_acquire(slot.pending_fetch.done() and slot.pending_fetch.result().is_done)
        self._finish_fetch(slot, layer)
        self._device.compute_waits_for(slot.ready)
        stride = self._layout.stride_bytes(layer)
        rows = slot.buffer[: len(pages) * stride].view(-1, stride)
        return rows[:, : self._layout.page_bytes[layer]]

    def store(self, layer: int, lane: int, dirty: Sequence[int]) -> None:
        """Starts storing the fetched pages with indices `dirty`, possibly none, and frees the slot. The next fetch into
        it waits for the store."""
        slot, pages = self._fetched.pop((layer, lane))
        self._finish_fetch(slot, layer)
        self._collect_stores()
        slot.free.record(self._device.compute_stream())
        if dirty:
            slot_indices = {pages[index]: index for index in dirty}
            self._counters.bytes_returned += self._tier.store(slot, layer, slot_indices)
        self._free_slots.append(slot)

    def forget(self, pages: Sequence[int]) -> None:
        """Drops the contents of freed pages in all layers. Waits for their pending disk writes."""
        freed = set(pages)
        for slot in self._slots:
            if (
                slot.pending_store is not None
                and slot.pending_store.written is not None
                and freed & slot.pending_store.pages
            ):
                self._wait(slot.pending_store.written, slot.pending_store.layer)
        self._collect_stores()
        self._tier.forget(pages)

    def sync(self) -> None:
        """Waits for pending disk reads and writes, and makes compute wait for pending copies."""
        for (layer, _), (slot, _) in self._fetched.items():
            self._finish_fetch(slot, layer)
        for slot in self._slots:
            self._device.compute_waits_for(slot.ready)
            self._device.compute_waits_for(slot.free)
            if slot.pending_store is not None and slot.pending_store.written is not None:
                self._wait(slot.pending_store.written, slot.pending_store.layer)

    def take_counters(self) -> StreamCounters:
        self._collect_stores()
        counters, self._counters = self._counters, StreamCounters()
        return counters

    def _finish_fetch(self, slot: KVSlot, layer: int) -> None:
        """Waits for the slot's pending read and counts it."""
        if slot.pending_fetch is not None:
            timing = self._wait(slot.pending_fetch, layer).timing
            self._counters.bytes_read += timing.num_bytes
            self._counters.reads[self._first_stage + layer] += timing.end - timing.begin
            self._trace_span(Resource.disk, "fetch", layer, timing.begin, timing.end)
            slot.pending_fetch = None

    def _wait(self, pending: Future[PendingTransfer], layer: int) -> PendingTransfer:
        begin = time.monotonic()
        try:
            return pending.result()
        finally:
            self._counters.stalls[self._first_stage + layer] += time.monotonic() - begin

    def _collect_stores(self) -> None:
        """Counts finished writes. Raises their errors."""
        for slot in self._slots:
            store = slot.pending_store
            if store is not None and store.written is not None and store.written.done():
                timing = store.written.result().timing
                self._counters.bytes_written += timing.num_bytes
                self._trace_span(Resource.disk, "store", store.layer, timing.begin, timing.end)
                slot.pending_store = None

    def _count_copy(self, row: Resource, layer: int, begin: float, end: float) -> None:
        self._counters.copies[self._first_stage + layer] += end - begin
        self._trace_span(row, "fetch" if row is Resource.host_to_device else "store", layer, begin, end)

    def _trace_span(self, row: Resource, verb: str, layer: int, begin: float, end: float) -> None:
        if self._trace is not None and end > begin:
            self._trace.span(row, f"{verb} {self._first_stage + layer}", begin, end)
