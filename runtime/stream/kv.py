"""Carries keys and values of travelling layers from their tier to compute and back, as the schedule's fetch and store
actions say. Bytes only: what a page holds is the cache's business.

From pinned host memory runs of pages are copied, each way on a stream of its own: all of it is queued on the device,
and the host waits for nothing; without a device copies are done at once. From disk they are read and written in the
background by one thread each way, which keeps the order of fetches and that of stores; the file's own threads do the
reading and writing.
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
    """Pages of a layer on their way back. `written` is done when the file has them; None: `KVSlot.free` tells it."""

    layer: int
    pages: frozenset[int]
    written: Future[PendingTransfer] | None

    def includes(self, layer: int, pages: Sequence[int]) -> bool:
        """Whether any of these pages is among them."""
        return self.layer == layer and not self.pages.isdisjoint(pages)


class KVSlot:
    """`ready`: the pages have arrived. `free`: compute, or the copy that carried them away, has finished. A disk reads
    into `staging` and writes from there: the same memory as `buffer` on a CPU."""

    def __init__(self, buffer: torch.Tensor, staging: torch.Tensor, device: ComputeDevice):
        self.buffer, self.staging = buffer, staging
        self.ready: Event = device.new_event()
        self.free: Event = device.new_event()
        self.free.record(device.compute_stream())  # what lay in this memory before may still be in use
        self.pending_fetch: Future[PendingTransfer] | None = None
        self.pending_store: PendingStore | None = None

    @property
    def is_staged(self) -> bool:
        return self.staging is not self.buffer

    def is_storing(self, layer: int, pages: Sequence[int]) -> bool:
        """Whether any of these is still on its way back from here."""
        return self.pending_store is not None and self.pending_store.includes(layer, pages)


class PageRun(NamedTuple):
    """Pages that are neighbours both in the tier and in the slot."""

    page: int
    place: int
    num_pages: int

    def slot_bytes(self, slot: KVSlot, stride: int) -> torch.Tensor:
        return slot.buffer[self.place * stride : (self.place + self.num_pages) * stride]


class PinnedPages:
    """The tier `cpu`. Only the engine's thread calls it."""

    def __init__(self, layout: KVLayout, device: ComputeDevice, on_copy: Callable[[Resource, int, float, float], None]):
        """`on_copy` hears of each copy's row and layer, and when it ran."""
        self._layout, self._device, self._on_copy = layout, device, on_copy
        self._fetch_stream, self._store_stream = device.new_stream(), device.new_stream()
        self._segments = {
            layer: [device.host_pages(count * layout.stride_bytes(layer)) for count in layout.segment_pages(layer)]
            for layer in layout.page_bytes
        }
        self._is_stored = {layer: np.zeros(layout.num_pages, bool) for layer in layout.page_bytes}

    def fetch(self, slot: KVSlot, layer: int, pages: Sequence[int], after: Sequence[KVSlot]) -> int:
        """Queues the copies of `pages` into the slot, behind what frees the slots `behind`; zeros for a page that was
        never stored. Returns the bytes to be copied."""
        if self._fetch_stream is not None:
            for other in after:
                self._device.wait(self._fetch_stream, other.free)
        slot.pending_store = None
        stride, numbers = self._layout.stride_bytes(layer), np.array(pages, np.int64)
        is_stored = self._is_stored[layer][numbers]
        fresh, known = np.flatnonzero(~is_stored), np.flatnonzero(is_stored)
        targets = [slot.buffer[run.start * stride : run.stop * stride] for run in layer_ranges(fresh.tolist())]
        if targets:
            self._device.clear_all(targets, on=self._fetch_stream, after=slot.free)
        runs = find_page_runs(numbers[known], known, self._segment_pages(layer))
        parts = [CopyPart(self._run_memory(layer, run), run.slot_bytes(slot, stride)) for run in runs]
        if parts:
            on_copy = partial(self._on_copy, Resource.host_to_device, layer)
            self._device.copy_all(parts, on=self._fetch_stream, after=slot.free, then=on_copy)
        slot.ready.record(self._fetch_stream)
        return len(known) * stride

    def store(self, slot: KVSlot, layer: int, places: Mapping[int, int]) -> int:
        """Queues the copies of pages, which are where `places` says, behind `slot.free`; that event then tells when
        they have left. Returns the bytes to be copied."""
        stride = self._layout.stride_bytes(layer)
        on_copy = partial(self._on_copy, Resource.device_to_host, layer)
        numbers = np.array([*places], np.int64)
        runs = find_page_runs(numbers, np.array([*places.values()], np.int64), self._segment_pages(layer))
        parts = [CopyPart(run.slot_bytes(slot, stride), self._run_memory(layer, run)) for run in runs]
        self._device.copy_all(parts, on=self._store_stream, after=slot.free, then=on_copy)
        slot.free.record(self._store_stream)
        slot.pending_store = PendingStore(layer=layer, pages=frozenset(places), written=None)
        self._is_stored[layer][numbers] = True
        return len(places) * stride

    def forget(self, pages: Sequence[int]) -> None:
        for is_stored in self._is_stored.values():
            is_stored[list(pages)] = False

    def close(self) -> None:
        """Waits for copies in flight, whose memory is about to go."""
        for stream in (self._fetch_stream, self._store_stream):
            if stream is not None:
                stream.synchronize()

    def _run_memory(self, layer: int, run: PageRun) -> torch.Tensor:
        stride, most = self._layout.stride_bytes(layer), self._segment_pages(layer)
        begin = run.page % most * stride
        return self._segments[layer][run.page // most][begin : begin + run.num_pages * stride]

    def _segment_pages(self, layer: int) -> int:
        """Pages of each of the layer's segments but the last."""
        return self._layout.segment_pages(layer)[0]


def find_page_runs(pages: np.ndarray, places: np.ndarray, most: int) -> list[PageRun]:
    """The runs of pages at these places, in ascending order. No run goes beyond a segment of `most` pages."""
    if not len(pages):
        return []
    order = np.argsort(pages)
    pages, places = pages[order], places[order]
    begins = (np.diff(pages) != 1) | (np.diff(places) != 1) | (pages[1:] % most == 0)
    firsts = np.flatnonzero(np.concatenate([[True], begins]))
    sizes = np.diff(firsts, append=len(pages))
    return [
        PageRun(*each) for each in zip(pages[firsts].tolist(), places[firsts].tolist(), sizes.tolist(), strict=True)
    ]


class DiskPages:
    """The tier `nvme`. Only the engine's thread calls it."""

    def __init__(
        self,
        layout: KVLayout,
        device: ComputeDevice,
        file: KVFile,
        on_copy: Callable[[Resource, int, float, float], None],
    ):
        """`on_copy` hears of each copy's row and layer, and when it ran; of reading and writing the futures tell."""
        self._layout, self._device, self._file, self._on_copy = layout, device, file, on_copy
        self._fetch_stream, self._store_stream = device.new_stream(), device.new_stream()
        self._fetching = ThreadPoolExecutor(1, thread_name_prefix="kv-fetch")
        self._storing = ThreadPoolExecutor(1, thread_name_prefix="kv-store")

    def fetch(self, slot: KVSlot, layer: int, pages: Sequence[int], after: Sequence[KVSlot]) -> int:
        """Begins to read `pages` into the slot, and to copy them on, once what left the slots `behind` is written.
        Returns the bytes to be copied."""
        leaving = [
            other.pending_store.written for other in after if other.pending_store and other.pending_store.written
        ]
        slot.pending_fetch = self._fetching.submit(self._fetch, slot, layer, pages, leaving)
        return len(pages) * self._layout.stride_bytes(layer) if slot.is_staged else 0

    def store(self, slot: KVSlot, layer: int, places: Mapping[int, int]) -> int:
        """Begins to write pages, which are where `places` says, behind `slot.free`. Returns the bytes to be copied."""
        stride = self._layout.stride_bytes(layer)
        if slot.is_staged:
            on_copy = partial(self._on_copy, Resource.device_to_host, layer)
            runs = [slice(run.start * stride, run.stop * stride) for run in layer_ranges(places.values())]
            parts = [CopyPart(slot.buffer[there], slot.staging[there]) for there in runs]
            self._device.copy_all(parts, on=self._store_stream, after=slot.free, then=on_copy)
            slot.free.record(self._store_stream)
        written = self._storing.submit(self._store, slot, layer, places)
        slot.pending_store = PendingStore(layer=layer, pages=frozenset(places), written=written)
        return len(places) * stride if slot.is_staged else 0

    def forget(self, pages: Sequence[int]) -> None:
        self._file.forget(pages)

    def close(self) -> None:
        """Waits for what is in flight, whose memory is about to go. What failed is in the slots' futures."""
        self._fetching.shutdown(wait=True)
        self._storing.shutdown(wait=True)
        for stream in (self._fetch_stream, self._store_stream):
            if stream is not None:
                stream.synchronize()

    def _fetch(
        self, slot: KVSlot, layer: int, pages: Sequence[int], leaving: Sequence[Future[PendingTransfer]]
    ) -> PendingTransfer:
        for written in leaving:
            written.result()
        slot.ready.synchronize()  # the last copy has left the staging memory
        pending = self._file.read(layer, {page: place for place, page in enumerate(pages)}, slot.staging.numpy().data)
        pending.wait()
        if slot.is_staged:
            num_bytes = len(pages) * self._layout.stride_bytes(layer)
            on_copy, source = partial(self._on_copy, Resource.host_to_device, layer), slot.staging[:num_bytes]
            self._device.copy(source, slot.buffer[:num_bytes], on=self._fetch_stream, after=slot.free, then=on_copy)
            slot.ready.record(self._fetch_stream)
        return pending

    def _store(self, slot: KVSlot, layer: int, places: Mapping[int, int]) -> PendingTransfer:
        slot.free.synchronize()
        pending = self._file.write(layer, places, slot.staging.numpy().data)
        pending.wait()
        return pending


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
        """Waits for everything in flight. Raises what failed unseen, or notes it on the error that ends the run."""
        self._tier.close()
        try:
            self._collect_stores()
            for slot in self._slots:
                self._finish_fetch(slot, 0)
        except KVFileError as error:
            if value is None:
                raise
            if error is not value:
                value.add_note(f"and keys and values in flight failed too: {error}")

    def fetch(self, layer: int, lane: int, pages: Sequence[int]) -> None:
        """Takes a slot and begins to bring these pages into it; one that was never stored comes as zeros. Pages on
        their way back arrive there first."""
        assert (layer, lane) not in self._fetched, f"fetch of layer {layer} for lane {lane}, which has it"
        assert len(pages) <= self._layout.slot_pages, f"{len(pages)} pages, slots have {self._layout.slot_pages}"
        self._collect_stores()
        slot = self._free_slots.pop(0)
        behind = [other for other in self._slots if other is slot or other.is_storing(layer, pages)]
        self._counters.bytes_copied += self._tier.fetch(slot, layer, tuple(pages), behind)
        self._fetched[layer, lane] = slot, tuple(pages)

    def acquire(self, layer: int, lane: int) -> torch.Tensor:
        """The pages, uint8 (len(pages), page_bytes) in compute memory, for compute that is queued from now on. Valid
        until `store`. Waits for a disk; rows may lie further apart than they are long."""
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
        """Begins to carry back the pages at these places of those that were fetched; none of them may be. The slot is
        free for another fetch, which waits until they have left."""
        slot, pages = self._fetched.pop((layer, lane))
        self._finish_fetch(slot, layer)
        self._collect_stores()
        slot.free.record(self._device.compute_stream())
        if dirty:
            places = {pages[place]: place for place in dirty}
            self._counters.bytes_returned += self._tier.store(slot, layer, places)
        self._free_slots.append(slot)

    def forget(self, pages: Sequence[int]) -> None:
        """These pages were given back: what they held is dropped, in every layer. Waits for those on their way to a
        disk."""
        lost = set(pages)
        for slot in self._slots:
            if (
                slot.pending_store is not None
                and slot.pending_store.written is not None
                and lost & slot.pending_store.pages
            ):
                self._wait(slot.pending_store.written, slot.pending_store.layer)
        self._collect_stores()
        self._tier.forget(pages)

    def sync(self) -> None:
        """Waits for a disk's reads and writes that have begun, and has compute wait for copies."""
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
        """Waits for what is being read into the slot, and counts it."""
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
        """Counts writes that are done. Raises what one of them raised."""
        for slot in self._slots:
            left = slot.pending_store
            if left is not None and left.written is not None and left.written.done():
                timing = left.written.result().timing
                self._counters.bytes_written += timing.num_bytes
                self._trace_span(Resource.disk, "store", left.layer, timing.begin, timing.end)
                slot.pending_store = None

    def _count_copy(self, row: Resource, layer: int, begin: float, end: float) -> None:
        self._counters.copies[self._first_stage + layer] += end - begin
        self._trace_span(row, "fetch" if row is Resource.host_to_device else "store", layer, begin, end)

    def _trace_span(self, row: Resource, what: str, layer: int, begin: float, end: float) -> None:
        if self._trace is not None and end > begin:
            self._trace.span(row, f"{what} {self._first_stage + layer}", begin, end)
