"""Keys and values in pinned host memory: runs of pages are copied to a slot and back, each way on a stream of its own.

All of it is queued on the device, and the host waits for nothing. Without a device copies are done at once.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from ..plan.placement.kv import KVLayout, stretches
from ..trace import Row
from .device import ComputeDevice, Part
from .kv_slot import Departure, KVSlot


class Run(NamedTuple):
    """Pages that are neighbours both in the tier and in the slot."""

    page: int
    place: int
    num_pages: int

    def of(self, slot: KVSlot, stride: int) -> torch.Tensor:
        return slot.buffer[self.place * stride : (self.place + self.num_pages) * stride]


class PinnedPages:
    """The tier `cpu`. Only the engine's thread calls it."""

    def __init__(self, layout: KVLayout, device: ComputeDevice, told: Callable[[Row, int, float, float], None]):
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
            told = partial(self._told, Row.host_to_device, layer)
            self._device.copy_all(parts, on=self._into, after=slot.free, then=told)
        slot.ready.record(self._into)
        return len(known) * stride

    def store(self, slot: KVSlot, layer: int, places: Mapping[int, int]) -> int:
        """Queues the copies of pages, which are where `places` says, behind `slot.free`; that event then tells when
        they have left. Returns the bytes to be copied."""
        stride = self._layout.stride_bytes(layer)
        told = partial(self._told, Row.device_to_host, layer)
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
