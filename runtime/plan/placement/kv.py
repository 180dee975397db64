"""Placement of the KV cache: the layers with offloaded KV, page sizes, and the memory for pages and transfers.

A **page** is `PAGE_TOKENS` positions of one sequence; it has the same number in every layer. The KV of an **offloaded**
layer is in host memory or on disk (its **tier**). It is loaded into a **slot** in compute memory before a lane (a
micro-batch) runs the layer, and stored after it.

With CPU attention next to an accelerator, KV stays in host memory. The device sends queries and new keys and values,
and receives the outputs. A **round trip** is this exchange for one lane in one layer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...config.settings import KVDType, KVTier
from ...units import MIB, round_up
from ..schedule.walk import Walk
from ..shape.dtypes import kv_dtype_obstacle
from ..shape.extents import ALIGNMENT_BYTES, pinned_bytes
from ..shape.model import ModelShape
from ..shape.stage_sizes import evenly_spaced
from .ledger import Entry
from .load import Load
from .memory import PAGE_TOKENS

SEGMENT_BYTES = 16 * MIB  # a layer's pages in host memory are pinned in segments of at most this size
CHECKSUM_BYTES = 8  # in memory, per page on disk


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """The KV pages of offloaded layers."""

    tier: KVTier  # cpu or nvme
    page_bytes: Mapping[int, int]  # bytes of a page, by offloaded decoder layer
    num_pages: int  # per layer
    slot_pages: int  # pages of a slot: the most that a lane has
    num_slots: int  # 0: KV stays in host memory, where the CPU computes attention
    is_quantized: bool = False
    can_be_quantized: bool = False  # kv.dtype is auto, and the model supports a quantized dtype

    @property
    def stays_in_host(self) -> bool:
        """True if the CPU attends to offloaded KV in host memory, so that it is not loaded into slots."""
        return bool(self.page_bytes) and not self.num_slots

    def stride_bytes(self, layer: int) -> int:
        """Returns the distance in bytes between pages, in the tier and in slots. O_DIRECT needs whole disk blocks."""
        size = self.page_bytes[layer]
        return round_up(size, ALIGNMENT_BYTES) if self.tier is KVTier.nvme else size

    def offset_bytes(self, layer: int) -> int:
        """Returns the file offset of the layer's first page."""
        return self.num_pages * sum(self.stride_bytes(other) for other in self.page_bytes if other < layer)

    def segment_pages(self, layer: int) -> tuple[int, ...]:
        """Returns the number of pages in each pinned segment of the layer."""
        if self.stays_in_host:  # the kernel for CPU attention needs all sequences in one segment
            return (self.num_pages,)
        max_pages = max(1, SEGMENT_BYTES // self.stride_bytes(layer))
        whole, rest = divmod(self.num_pages, max_pages)
        return (max_pages,) * whole + ((rest,) if rest else ())

    @property
    def slot_bytes(self) -> int:
        """The size of a slot, which fits any lane and layer."""
        return self.slot_pages * max((self.stride_bytes(layer) for layer in self.page_bytes), default=0)

    @property
    def tier_bytes(self) -> int:
        """The bytes of all pages in the tier."""
        return self.num_pages * sum(self.stride_bytes(layer) for layer in self.page_bytes)


@dataclass(frozen=True, kw_only=True)
class KVCost:
    """Memory of the KV cache, as entries of the ledgers."""

    compute: tuple[Entry, ...]  # in device memory, or without a device in host memory
    host: tuple[Entry, ...] = ()  # in host memory next to a device
    disk_bytes: int = 0  # maximum size of the file


def offloaded_kv_layers(shape: ModelShape, tier: KVTier, fraction: float, *, has_device: bool) -> tuple[int, ...]:
    """Returns the decoder layers, counted from 0, with KV offloaded to `tier`.

    A share of `fraction` of the layers keeps KV in compute memory, evenly spaced over the depth. So do layers with a
    sliding-window cache in padded lanes (lanes with left-padded rows).
    """
    assert tier is not KVTier.auto, "the tier must be resolved"
    if tier is KVTier.device or (tier is KVTier.cpu and not has_device):
        return ()
    layers = [layer for layer, size in enumerate(shape.kv_layer_bytes) if size and layer not in shape.bounded_layers]
    in_compute = {layers[index] for index in evenly_spaced(len(layers), round(fraction * len(layers)))}
    return tuple(layer for layer in layers if layer not in in_compute)


def consecutive_ranges(numbers: Iterable[int], max_length: int | None = None) -> Iterator[range]:
    """Divides numbers into ranges of consecutive numbers, of at most `max_length` each."""
    current = range(0)
    for number in sorted(numbers):
        if current and (number != current.stop or len(current) == max_length):
            yield current
            current = range(0)
        current = range(current.start if current else number, number + 1)
    if current:
        yield current


def kv_layout(
    shape: ModelShape, tier: KVTier, offloaded: Sequence[int], *, num_pages: int, slot_pages: int, num_slots: int
) -> KVLayout:
    return KVLayout(
        tier=tier,
        page_bytes={layer: PAGE_TOKENS * shape.kv_layer_bytes[layer] for layer in offloaded},
        num_pages=num_pages,
        slot_pages=slot_pages,
        num_slots=num_slots,
        is_quantized=shape.kv_dtype.is_quantized,
        can_be_quantized=shape.kv_dtype is KVDType.auto and not kv_dtype_obstacle(shape, KVDType.int8),
    )


def kv_cost(shape: ModelShape, layout: KVLayout, *, has_device: bool) -> KVCost:
    """Returns the memory of all KV pages: in compute memory, and of offloaded layers."""
    in_compute_bytes = sum(size for layer, size in enumerate(shape.kv_layer_bytes) if layer not in layout.page_bytes)
    positions, num_offloaded = layout.num_pages * PAGE_TOKENS, len(layout.page_bytes)
    equation = f"{positions:,} positions x {in_compute_bytes:,} B"
    if num_offloaded:
        num_layers = sum(1 for size in shape.kv_layer_bytes if size)
        equation += f" in {num_layers - num_offloaded} of {num_layers} layers"
    # KV that stays in compute memory.
    compute = [Entry(name="KV cache", num_bytes=positions * in_compute_bytes, equation=equation)]
    if not num_offloaded:
        return KVCost(compute=tuple(compute))
    # Slots for offloaded KV, and its tier: pinned pages in host memory, or a file.
    num_slots, slot_bytes = layout.num_slots, layout.slot_bytes
    if not layout.stays_in_host:
        equation = f"{num_slots} x {slot_bytes:,} B, {layout.slot_pages:,} pages of the largest lane"
        compute.append(Entry(name="KV slots", num_bytes=num_slots * slot_bytes, equation=equation))
    if layout.stays_in_host or layout.tier is KVTier.cpu:
        segments = [(n, layout.stride_bytes(layer)) for layer in layout.page_bytes for n in layout.segment_pages(layer)]
        pages = Entry(
            name="KV pages",
            num_bytes=sum(pinned_bytes(pages * size, is_aligned=False) for pages, size in segments),
            equation=f"{layout.num_pages:,} pages x {sum(layout.page_bytes.values()):,} B in {num_offloaded} layers, "
            "pinned",
        )
        return KVCost(compute=tuple(compute), host=(pages,))
    # Pages in a file have checksums in memory, and with a device go through staging buffers.
    num_pages, pinned = layout.num_pages * num_offloaded, pinned_bytes(slot_bytes)
    equation = f"{num_pages:,} pages x {CHECKSUM_BYTES} B"
    checksums = Entry(name="KV checksums", num_bytes=num_pages * CHECKSUM_BYTES, equation=equation)
    if not has_device:
        return KVCost(compute=(*compute, checksums), disk_bytes=layout.tier_bytes)
    equation = f"{num_slots} x {pinned:,} B, pinned"
    staging = Entry(name="KV staging", num_bytes=num_slots * pinned, equation=equation)
    return KVCost(compute=tuple(compute), host=(staging, checksums), disk_bytes=layout.tier_bytes)


ROUND_TRIP_PARTS = 5  # tensors of a round trip: queries, keys, values, attention sinks; and the output
PART_ALIGNMENT_BYTES = 64  # alignment of each of these tensors, for vector loads
STORES_IN_FLIGHT = 2  # maximum concurrent copies of prompts' KV to the host


@dataclass(frozen=True, kw_only=True)
class ExchangeSize:
    """Sizes of the pinned buffers for round trips between device and CPU. Each buffer serves one at a time."""

    num_round_trips: int  # number of buffers
    round_trip_bytes: int  # size of a buffer


def exchange_size(shape: ModelShape, kv: KVLayout, walk: Walk, load: Load) -> ExchangeSize:
    """Returns the buffers for CPU attention; of size 0 if no KV stays in host memory. `walk`: that of decode passes."""
    if not kv.stays_in_host:
        return ExchangeSize(num_round_trips=0, round_trip_bytes=0)
    fixed_bytes = shape.num_heads * 4 + ROUND_TRIP_PARTS * PART_ALIGNMENT_BYTES  # float32 sinks; padding
    # Per new token: a key and value for each KV head, and a query and output for each head of its group.
    group = -(-shape.num_heads // max(1, shape.num_kv_heads))
    row_bytes = (1 + group) * _position_bytes(shape, kv)
    return ExchangeSize(
        num_round_trips=walk.order.style.num_ahead + 1, round_trip_bytes=load.max_rows * row_bytes + fixed_bytes
    )


def _position_bytes(shape: ModelShape, kv: KVLayout) -> int:
    """Returns the KV bytes of one position in one layer: the maximum over the offloaded layers."""
    return max(shape.kv_layer_bytes[layer] for layer in kv.page_bytes)


def exchange_host_entry(size: ExchangeSize) -> Entry:
    pinned = pinned_bytes(size.round_trip_bytes, is_aligned=False)
    return Entry(
        name="KV exchange",
        num_bytes=size.num_round_trips * pinned,
        equation=f"{size.num_round_trips} x {pinned:,} B, pinned",
    )


def exchange_device_entry(shape: ModelShape, kv: KVLayout, size: ExchangeSize, load: Load) -> Entry:
    """Returns the device memory of CPU attention.

    It has buffers for round trips, the KV of prompts until it is copied to the host, and the KV of the longest
    sequence: a later chunk of a prompt copies the KV of earlier chunks back to the device.
    """
    per_position = _position_bytes(shape, kv)
    positions = (STORES_IN_FLIGHT + 1) * load.max_tokens + load.max_positions
    return Entry(
        name="KV exchange",
        num_bytes=size.num_round_trips * size.round_trip_bytes + positions * per_position,
        equation=f"{size.num_round_trips} x {size.round_trip_bytes:,} B + {positions:,} positions x {per_position:,} B",
    )
