"""Keys and values on disk: read into a slot and written from it in the background, by one thread each way.

A thread each way keeps the order of fetches and that of stores; the file's own threads do the reading and writing.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from ..plan.placement.kv import KVLayout, stretches
from ..store.kv_file import KVFile
from ..store.transfer import PendingTransfer
from ..trace import Row
from .device import ComputeDevice, Part
from .kv_slot import Departure, KVSlot


class DiskPages:
    """The tier `nvme`. Only the engine's thread calls it."""

    def __init__(
        self, layout: KVLayout, device: ComputeDevice, file: KVFile, told: Callable[[Row, int, float, float], None]
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
            told = partial(self._told, Row.device_to_host, layer)
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
            told, source = partial(self._told, Row.host_to_device, layer), slot.staging[:num_bytes]
            self._device.copy(source, slot.buffer[:num_bytes], on=self._into, after=slot.free, then=told)
            slot.ready.record(self._into)
        return pending

    def _store(self, slot: KVSlot, layer: int, places: Mapping[int, int]) -> PendingTransfer:
        slot.free.synchronize()
        pending = self._file.write(layer, places, slot.staging.numpy().data)
        pending.wait()
        return pending
