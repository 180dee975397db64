"""Pages of keys and values on their way from their tier to a slot of compute memory and back.

From pinned host memory runs of pages are copied, each way on a stream of its own: all of it is queued on the device,
and the host waits for nothing; without a device copies are done at once. From disk they are read and written in the
background by one thread each way, which keeps the order of fetches and that of stores; the file's own threads do the
reading and writing.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from ..plan.placement.kv import KVLayout, stretches
from ..resources import Resource
from ..store.kv_file import KVFile
from ..store.transfer import PendingTransfer
from .device import ComputeDevice, Event, Part


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Pages of a layer on their way back. `written` is done when the file has them; None: `KVSlot.free` tells it."""

    layer: int
    pages: frozenset[int]
    written: Future[PendingTransfer] | None


class KVSlot:
    """`ready`: the pages have arrived. `free`: compute, or the copy that carried them away, has finished. A disk reads
    into `staging` and writes from there: the same memory as `buffer` on a CPU."""

    def __init__(self, buffer: torch.Tensor, staging: torch.Tensor, device: ComputeDevice):
        self.buffer, self.staging = buffer, staging
        self.ready: Event = device.new_event()
        self.free: Event = device.new_event()
        self.free.record(device.compute_stream())  # what lay in this memory before may still be in use
        self.arriving: Future[PendingTransfer] | None = None
        self.departure: Departure | None = None

    @property
    def is_staged(self) -> bool:
        return self.staging is not self.buffer

    def is_carrying(self, layer: int, pages: Sequence[int]) -> bool:
        """Whether any of these is still on its way back from here."""
        left = self.departure
        return left is not None and left.layer == layer and not left.pages.isdisjoint(pages)


class Run(NamedTuple):
    """Pages that are neighbours both in the tier and in the slot."""

    page: int
    place: int
    num_pages: int

    def of(self, slot: KVSlot, stride: int) -> torch.Tensor:
        return slot.buffer[self.place * stride : (self.place + self.num_pages) * stride]


class PinnedPages:
    """The tier `cpu`. Only the engine's thread calls it."""

    def __init__(self, layout: KVLayout, device: ComputeDevice, told: Callable[[Resource, int, float, float], None]):
        """`told` hears of each copy's row and layer, and when it ran."""
        self._layout, self._device, self._told = layout, device, told
        self._into, self._out = device.new_stream(), device.new_stream()
        self._segments = {
            layer: [device.host_pages(count * layout.stride_bytes(layer)) for count in layout.segment_pages(layer)]
            for layer in layout.page_bytes
        }
        self._is_stored = {layer: np.zeros(layout.num_pages, bool) for layer in layout.page_bytes}

    def fetch(self, slot: KVSlot, layer: int, pages: Sequence[int], behind: Sequence[KVSlot]) -> int:
        """Queues the copies of `pages` into the slot, behind what frees the slots `behind`; zeros for a page that was
        never stored. Returns the bytes to be copied."""
        if self._into is not None:
            for other in behind:
                self._device.wait(self._into, other.free)
        slot.departure = None
        stride, numbers = self._layout.stride_bytes(layer), np.array(pages, np.int64)
        is_stored = self._is_stored[layer][numbers]
        fresh, known = np.flatnonzero(~is_stored), np.flatnonzero(is_stored)
        targets = [slot.buffer[run.start * stride : run.stop * stride] for run in stretches(fresh.tolist())]
        if targets:
            self._device.clear_all(targets, on=self._into, after=slot.free)
        runs = runs_of(numbers[known], known, self._most(layer))
        parts = [Part(self._at(layer, run), run.of(slot, stride)) for run in runs]
        if parts:
            told = partial(self._told, Resource.host_to_device, layer)
            self._device.copy_all(parts, on=self._into, after=slot.free, then=told)
        slot.ready.record(self._into)
        return len(known) * stride

    def store(self, slot: KVSlot, layer: int, places: Mapping[int, int]) -> int:
        """Queues the copies of pages, which are where `places` says, behind `slot.free`; that event then tells when
        they have left. Returns the bytes to be copied."""
        stride = self._layout.stride_bytes(layer)
        told = partial(self._told, Resource.device_to_host, layer)
        numbers = np.array([*places], np.int64)
        runs = runs_of(numbers, np.array([*places.values()], np.int64), self._most(layer))
        parts = [Part(run.of(slot, stride), self._at(layer, run)) for run in runs]
        self._device.copy_all(parts, on=self._out, after=slot.free, then=told)
        slot.free.record(self._out)
        slot.departure = Departure(layer=layer, pages=frozenset(places), written=None)
        self._is_stored[layer][numbers] = True
        return len(places) * stride

    def forget(self, pages: Sequence[int]) -> None:
        for is_stored in self._is_stored.values():
            is_stored[list(pages)] = False

    def close(self) -> None:
        """Waits for copies in flight, whose memory is about to go."""
        for stream in (self._into, self._out):
            if stream is not None:
                stream.synchronize()

    def _at(self, layer: int, run: Run) -> torch.Tensor:
        stride, most = self._layout.stride_bytes(layer), self._most(layer)
        begin = run.page % most * stride
        return self._segments[layer][run.page // most][begin : begin + run.num_pages * stride]

    def _most(self, layer: int) -> int:
        """Pages of each of the layer's segments but the last."""
        return self._layout.segment_pages(layer)[0]


def runs_of(pages: np.ndarray, places: np.ndarray, most: int) -> list[Run]:
    """The runs of pages at these places, in ascending order. No run goes beyond a segment of `most` pages."""
    if not len(pages):
        return []
    order = np.argsort(pages)
    pages, places = pages[order], places[order]
    begins = (np.diff(pages) != 1) | (np.diff(places) != 1) | (pages[1:] % most == 0)
    firsts = np.flatnonzero(np.concatenate([[True], begins]))
    sizes = np.diff(firsts, append=len(pages))
    return [Run(*each) for each in zip(pages[firsts].tolist(), places[firsts].tolist(), sizes.tolist(), strict=True)]


class DiskPages:
    """The tier `nvme`. Only the engine's thread calls it."""

    def __init__(
        self, layout: KVLayout, device: ComputeDevice, file: KVFile, told: Callable[[Resource, int, float, float], None]
    ):
        """`told` hears of each copy's row and layer, and when it ran; of reading and writing the futures tell."""
        self._layout, self._device, self._file, self._told = layout, device, file, told
        self._into, self._out = device.new_stream(), device.new_stream()
        self._fetching = ThreadPoolExecutor(1, thread_name_prefix="kv-fetch")
        self._storing = ThreadPoolExecutor(1, thread_name_prefix="kv-store")

    def fetch(self, slot: KVSlot, layer: int, pages: Sequence[int], behind: Sequence[KVSlot]) -> int:
        """Begins to read `pages` into the slot, and to copy them on, once what left the slots `behind` is written.
        Returns the bytes to be copied."""
        leaving = [other.departure.written for other in behind if other.departure and other.departure.written]
        slot.arriving = self._fetching.submit(self._fetch, slot, layer, pages, leaving)
        return len(pages) * self._layout.stride_bytes(layer) if slot.is_staged else 0

    def store(self, slot: KVSlot, layer: int, places: Mapping[int, int]) -> int:
        """Begins to write pages, which are where `places` says, behind `slot.free`. Returns the bytes to be copied."""
        stride = self._layout.stride_bytes(layer)
        if slot.is_staged:
            told = partial(self._told, Resource.device_to_host, layer)
            runs = [slice(run.start * stride, run.stop * stride) for run in stretches(places.values())]
            parts = [Part(slot.buffer[there], slot.staging[there]) for there in runs]
            self._device.copy_all(parts, on=self._out, after=slot.free, then=told)
            slot.free.record(self._out)
        written = self._storing.submit(self._store, slot, layer, places)
        slot.departure = Departure(layer=layer, pages=frozenset(places), written=written)
        return len(places) * stride if slot.is_staged else 0

    def forget(self, pages: Sequence[int]) -> None:
        self._file.forget(pages)

    def close(self) -> None:
        """Waits for what is in flight, whose memory is about to go. What failed is in the slots' futures."""
        self._fetching.shutdown(wait=True)
        self._storing.shutdown(wait=True)
        for stream in (self._into, self._out):
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
            told, source = partial(self._told, Resource.host_to_device, layer), slot.staging[:num_bytes]
            self._device.copy(source, slot.buffer[:num_bytes], on=self._into, after=slot.free, then=told)
            slot.ready.record(self._into)
        return pending

    def _store(self, slot: KVSlot, layer: int, places: Mapping[int, int]) -> PendingTransfer:
        slot.free.synchronize()
        pending = self._file.write(layer, places, slot.staging.numpy().data)
        pending.wait()
        return pending
