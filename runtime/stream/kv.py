"""Transfers KV pages of offloaded layers between their tier and KV slots, by the schedule's fetch and store actions.

An offloaded layer keeps its keys and values in another memory than compute memory, its tier: pinned host memory (`cpu`)
or a file (`nvme`). A KV slot is compute memory for the pages of one lane (micro-batch) in one layer.

Tier `cpu`: runs of consecutive pages are copied, with one stream for each direction; the host does not wait.
Tier `nvme`: one thread for each direction keeps the order of fetches and of stores; the threads of `KVFile` read and
write.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from ..config.settings import KVTier
from ..errors import KVFileError
from ..plan.placement.kv import KVLayout, consecutive_ranges
from ..resources import Resource
from ..store.kv_file import KVFile
from ..store.transfer import PendingTransfer
from ..trace import Trace
from .clock import StreamCounters
from .device import ComputeDevice, CopyPart, Event

OnCopy: TypeAlias = Callable[[Resource, int, int, float, float], None]


@dataclass(frozen=True, kw_only=True)
class PendingStore:
    """Pages of a layer that are being stored."""

    layer: int
    pages: frozenset[int]
    written: Future[PendingTransfer] | None  # tier nvme: done once the pages are in the file; None: see `KVSlot.free`

    def includes(self, layer: int, pages: Sequence[int]) -> bool:
        """True if any of these pages is being stored."""
        return self.layer == layer and not self.pages.isdisjoint(pages)


class KVSlot:
    """A slot for the pages of one lane in one layer. Events: `ready` (the pages have arrived), `free` (compute and the
    copy out of the slot are done). `staging`: host memory for disk reads and writes; on a CPU it is `buffer` itself."""

    def __init__(self, buffer: torch.Tensor, staging: torch.Tensor, device: ComputeDevice):
        self.buffer, self.staging = buffer, staging
        self.ready: Event = device.new_event()
        self.free: Event = device.new_event()
        # The allocator may have reused the memory of a freed tensor, which queued compute may still use.
        self.free.record(device.compute_stream())
        self.pending_fetch: Future[PendingTransfer] | None = None
        self.pending_store: PendingStore | None = None

    @property
    def is_staged(self) -> bool:
        """True if pages are copied between `staging` and `buffer`."""
        return self.staging is not self.buffer

    def is_storing(self, layer: int, pages: Sequence[int]) -> bool:
        """True if any of these pages is still being stored from this slot."""
        return self.pending_store is not None and self.pending_store.includes(layer, pages)


class PageRun(NamedTuple):
    """Pages that are consecutive both in the tier and in the slot."""

    page: int  # the first page's number in the tier
    slot_index: int  # the first page's index in the slot
    num_pages: int

    def slot_bytes(self, slot: KVSlot, stride: int) -> torch.Tensor:
        """Returns the run's bytes in the slot. `stride`: bytes per page."""
        return slot.buffer[self.slot_index * stride : (self.slot_index + self.num_pages) * stride]


class PinnedPages:
    """KV pages of the tier `cpu`, in pinned memory. A layer's memory is divided into segments. Not thread-safe."""

    def __init__(self, layout: KVLayout, device: ComputeDevice, on_copy: OnCopy):
        """`on_copy` is called with the resource, layer, bytes, begin and end (seconds) of each copy."""
        self._layout, self._device, self._on_copy = layout, device, on_copy
        self._fetch_stream, self._store_stream = device.new_stream(), device.new_stream()
        self._segments = {
            layer: [device.host_pages(count * layout.stride_bytes(layer)) for count in layout.segment_pages(layer)]
            for layer in layout.page_bytes
        }
        # For each page: True if it was stored since `forget`. Other pages are fetched as zeros.
        self._is_stored = {layer: np.zeros(layout.num_pages, bool) for layer in layout.page_bytes}

    def fetch(self, slot: KVSlot, layer: int, pages: Sequence[int], blocking: Sequence[KVSlot]) -> int:
        """Queues copies of `pages` to the slot. `blocking`: slots that may still be storing these pages; copies begin
        when they are free. Zeroes pages that were never stored. Returns the bytes to copy."""
        if self._fetch_stream is not None:
            for other in blocking:
                self._device.wait(self._fetch_stream, other.free)  # its stores must end first, or pages would be stale
        slot.pending_store = None
        stride, numbers = self._layout.stride_bytes(layer), np.array(pages, np.int64)
        is_stored = self._is_stored[layer][numbers]
        new_indices, stored_indices = np.flatnonzero(~is_stored), np.flatnonzero(is_stored)  # indices in the slot
        new_runs = consecutive_ranges(new_indices.tolist())
        targets = [slot.buffer[run.start * stride : run.stop * stride] for run in new_runs]
        if targets:
            self._device.clear_all(targets, on=self._fetch_stream, after=slot.free)
        runs = find_page_runs(numbers[stored_indices], stored_indices, self._segment_pages(layer))
        parts = [CopyPart(self._run_memory(layer, run), run.slot_bytes(slot, stride)) for run in runs]
        if parts:
            on_copy = partial(self._on_copy, Resource.host_to_device, layer, len(stored_indices) * stride)
            self._device.copy_all(parts, on=self._fetch_stream, after=slot.free, then=on_copy)
        slot.ready.record(self._fetch_stream)
        return len(stored_indices) * stride

    def store(self, slot: KVSlot, layer: int, slot_indices: Mapping[int, int]) -> int:
        """Queues copies of pages from the slot to the tier; they begin after `slot.free`, which is then recorded again
        at their end. `slot_indices`: page number -> index in the slot. Returns the bytes to copy."""
        stride = self._layout.stride_bytes(layer)
        on_copy = partial(self._on_copy, Resource.device_to_host, layer, len(slot_indices) * stride)
        numbers = np.array([*slot_indices], np.int64)
        runs = find_page_runs(numbers, np.array([*slot_indices.values()], np.int64), self._segment_pages(layer))
        parts = [CopyPart(run.slot_bytes(slot, stride), self._run_memory(layer, run)) for run in runs]
        self._device.copy_all(parts, on=self._store_stream, after=slot.free, then=on_copy)
        slot.free.record(self._store_stream)  # the slot may be overwritten only after these copies
        slot.pending_store = PendingStore(layer=layer, pages=frozenset(slot_indices), written=None)
        self._is_stored[layer][numbers] = True
        return len(slot_indices) * stride

    def forget(self, pages: Sequence[int]) -> None:
        """Marks pages as never stored, in all layers."""
        for is_stored in self._is_stored.values():
            is_stored[list(pages)] = False

    def close(self) -> None:
        """Waits for copies in flight, since their memory is freed next."""
        for stream in (self._fetch_stream, self._store_stream):
            if stream is not None:
                stream.synchronize()

    def _run_memory(self, layer: int, run: PageRun) -> torch.Tensor:
        """Returns the run's bytes in the tier."""
        stride, segment_pages = self._layout.stride_bytes(layer), self._segment_pages(layer)
        begin = run.page % segment_pages * stride
        return self._segments[layer][run.page // segment_pages][begin : begin + run.num_pages * stride]

    def _segment_pages(self, layer: int) -> int:
        """Returns the number of pages in each segment of the layer, except that the last one may have fewer."""
        return self._layout.segment_pages(layer)[0]


def find_page_runs(pages: np.ndarray, slot_indices: np.ndarray, segment_pages: int) -> list[PageRun]:
    """Splits pages into runs that are consecutive in the tier and in the slot. No run crosses a segment boundary.
    `slot_indices`: the index in the slot of each page."""
    if not len(pages):
        return []
    order = np.argsort(pages)
    pages, slot_indices = pages[order], slot_indices[order]
    is_begin = (np.diff(pages) != 1) | (np.diff(slot_indices) != 1) | (pages[1:] % segment_pages == 0)
    firsts = np.flatnonzero(np.concatenate([[True], is_begin]))
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
        on_copy: OnCopy,
    ):
        """`on_copy`: see `PinnedPages`. Times of reads and writes are in `KVSlot.pending_fetch` and `pending_store`."""
        self._layout, self._device, self._file, self._on_copy = layout, device, file, on_copy
        self._fetch_stream, self._store_stream = device.new_stream(), device.new_stream()
        self._fetch_pool = ThreadPoolExecutor(1, thread_name_prefix="kv-fetch")
        self._store_pool = ThreadPoolExecutor(1, thread_name_prefix="kv-store")

    def fetch(self, slot: KVSlot, layer: int, pages: Sequence[int], blocking: Sequence[KVSlot]) -> int:
        """Starts reading `pages` and copying them to the slot, after pending stores of the slots in `blocking`. Returns
        the bytes to copy to the device."""
        pending_writes = [
            other.pending_store.written for other in blocking if other.pending_store and other.pending_store.written
        ]
        slot.pending_fetch = self._fetch_pool.submit(self._fetch, slot, layer, pages, pending_writes)
        return len(pages) * self._layout.stride_bytes(layer) if slot.is_staged else 0

    def store(self, slot: KVSlot, layer: int, slot_indices: Mapping[int, int]) -> int:
        """Starts writing pages from the slot, after `slot.free`. `slot_indices`: page number -> index in the slot.
        Returns the bytes to copy from the device."""
        stride = self._layout.stride_bytes(layer)
        if slot.is_staged:
            on_copy = partial(self._on_copy, Resource.device_to_host, layer, len(slot_indices) * stride)
            runs = [slice(run.start * stride, run.stop * stride) for run in consecutive_ranges(slot_indices.values())]
            parts = [CopyPart(slot.buffer[part], slot.staging[part]) for part in runs]
            self._device.copy_all(parts, on=self._store_stream, after=slot.free, then=on_copy)
            slot.free.record(self._store_stream)
        written = self._store_pool.submit(self._store, slot, layer, slot_indices)
        slot.pending_store = PendingStore(layer=layer, pages=frozenset(slot_indices), written=written)
        return len(slot_indices) * stride if slot.is_staged else 0

    def forget(self, pages: Sequence[int]) -> None:
        self._file.forget(pages)

    def close(self) -> None:
        """Waits for transfers in flight, since their memory is freed next. Their errors stay in `pending_fetch` and
        `pending_store` of the slots."""
        self._fetch_pool.shutdown(wait=True)
        self._store_pool.shutdown(wait=True)
        for stream in (self._fetch_stream, self._store_stream):
            if stream is not None:
                stream.synchronize()

    def _fetch(
        self, slot: KVSlot, layer: int, pages: Sequence[int], pending_writes: Sequence[Future[PendingTransfer]]
    ) -> PendingTransfer:
        """Runs on the fetch thread: waits for `pending_writes`, reads pages, and queues their copy."""
        for written in pending_writes:
            written.result()  # a page must be written before it is read again
        slot.ready.synchronize()  # the previous copy to the device may still read the staging memory
        pending = self._file.read(
            layer, {page: slot_index for slot_index, page in enumerate(pages)}, slot.staging.numpy().data
        )
        pending.wait()
        if slot.is_staged:
            num_bytes = len(pages) * self._layout.stride_bytes(layer)
            on_copy = partial(self._on_copy, Resource.host_to_device, layer, num_bytes)
            source = slot.staging[:num_bytes]
            self._device.copy(source, slot.buffer[:num_bytes], on=self._fetch_stream, after=slot.free, then=on_copy)
            slot.ready.record(self._fetch_stream)
        return pending

    def _store(self, slot: KVSlot, layer: int, slot_indices: Mapping[int, int]) -> PendingTransfer:
        """Runs on the store thread: writes pages."""
        slot.free.synchronize()  # compute, or the copy into staging, must be done before the disk reads the memory
        pending = self._file.write(layer, slot_indices, slot.staging.numpy().data)
        pending.wait()
        return pending


class KVStream:
    """Stream of KV pages; one per run. Not thread-safe. Arguments `layer` are decoder layers, from 0 on. A KVFileError
    of a background thread is raised by a later call, at the latest on exit."""

    def __init__(
        self,
        layout: KVLayout,
        device: ComputeDevice,
        file: KVFile | None = None,
        *,
        first_stage: int = 0,
        trace: Trace | None = None,
    ):
        """`file`: for the tier `nvme` only. `first_stage`: stage index of decoder layer 0, for counters and traces."""
        assert (layout.tier is KVTier.nvme) == (file is not None), f"kv={layout.tier.value} with file {file}"
        self._layout, self._device = layout, device
        self._first_stage, self._trace = first_stage, trace
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
                self._finish_fetch(slot, 0)  # the layer is unknown here; it only labels counters and the trace
        except KVFileError as error:
            if value is None:
                raise
            if error is not value:
                value.add_note(f"a KV transfer in flight failed too: {error}")

    def fetch(self, layer: int, lane: int, pages: Sequence[int]) -> None:
        """Starts fetching a lane's pages to a free slot, after pending stores of the same pages. New pages are
        zeros."""
        assert (layer, lane) not in self._fetched, f"layer {layer} of lane {lane} is fetched already"
        assert len(pages) <= self._layout.slot_pages, f"{len(pages)} pages, slots have {self._layout.slot_pages}"
        self._collect_stores()
        slot = self._free_slots.pop(0)
        blocking = [other for other in self._slots if other is slot or other.is_storing(layer, pages)]
        self._counters.bytes_copied += self._tier.fetch(slot, layer, tuple(pages), blocking)
        self._fetched[layer, lane] = slot, tuple(pages)

    def acquire(self, layer: int, lane: int) -> torch.Tensor:
        """Returns the fetched pages, uint8 (pages, page bytes) in compute memory, perhaps strided. Compute queued from
        now on may use them, until `store`. Waits for disk reads."""
        self._collect_stores()
        slot, pages = self._fetched[layer, lane]
        if slot.pending_fetch is not None:
            is_in_time = slot.pending_fetch.done() and slot.pending_fetch.result().is_done
            self._counters.count_acquire(is_in_time)
        self._finish_fetch(slot, layer)
        self._device.compute_waits_for(slot.ready)
        stride = self._layout.stride_bytes(layer)
        rows = slot.buffer[: len(pages) * stride].view(-1, stride)
        return rows[:, : self._layout.page_bytes[layer]]

    def store(self, layer: int, lane: int, dirty: Sequence[int]) -> None:
        """Starts storing the fetched pages that changed (`dirty`: their indices in the slot), and frees the slot. The
        next fetch to this slot waits until they are stored."""
        slot, pages = self._fetched.pop((layer, lane))
        self._finish_fetch(slot, layer)
        self._collect_stores()
        slot.free.record(self._device.compute_stream())
        if dirty:
            slot_indices = {pages[index]: index for index in dirty}
            self._counters.bytes_returned += self._tier.store(slot, layer, slot_indices)
        self._free_slots.append(slot)

    def forget(self, pages: Sequence[int]) -> None:
        """Drops the contents of freed pages in all layers. Waits for pending disk writes of these pages."""
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
        """Returns the counters since the last call."""
        self._collect_stores()
        counters, self._counters = self._counters, StreamCounters()
        return counters

    def _finish_fetch(self, slot: KVSlot, layer: int) -> None:
        """Waits for the slot's pending read and counts it."""
        if slot.pending_fetch is not None:
            timing = self._wait(slot.pending_fetch, layer).timing
            self._counters.bytes_read += timing.num_bytes
            self._counters.reads[self._first_stage + layer] += timing.end - timing.begin
            self._trace_span(Resource.disk, "fetch", layer, timing.num_bytes, timing.begin, timing.end)
            slot.pending_fetch = None

    def _wait(self, pending: Future[PendingTransfer], layer: int) -> PendingTransfer:
        """Waits for a transfer, and counts the time as a stall."""
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
                self._trace_span(Resource.disk, "store", store.layer, timing.num_bytes, timing.begin, timing.end)
                slot.pending_store = None

    def _count_copy(self, row: Resource, layer: int, num_bytes: int, begin: float, end: float) -> None:
        self._counters.copies[self._first_stage + layer] += end - begin
        verb = "fetch" if row is Resource.host_to_device else "store"
        self._trace_span(row, verb, layer, num_bytes, begin, end)

    def _trace_span(self, row: Resource, verb: str, layer: int, num_bytes: int, begin: float, end: float) -> None:
        if self._trace is not None and end > begin:
            self._trace.span(row, f"{verb} {self._first_stage + layer}", begin, end, num_bytes=num_bytes)
