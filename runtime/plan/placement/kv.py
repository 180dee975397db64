"""Where keys and values live: which layers' travel, in pages of which size, and what that takes of each memory.

A **page** is `PAGE_TOKENS` positions of one sequence in one layer; its number is the same in every layer.

Between compute memory and keys and values that stay in host memory go queries and new keys and values down, and the
CPU's answers up. A **trip** is one lane's in one layer.
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

SEGMENT_BYTES = 16 * MIB  # of pinned memory: attention reads the pages of a lane from few pieces

CHECKSUM_BYTES = 8  # that the file keeps of each page


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """The pages of the layers whose keys and values live in a tier: `num_pages` of each, at most `slot_pages` of one
    lane in a slot. Without slots they stay in host memory, where the CPU attends to them."""

    tier: KVTier  # cpu or nvme
    page_bytes: Mapping[int, int]  # of each such layer
    num_pages: int
    slot_pages: int
    num_slots: int
    is_quantized: bool = False
    can_be_quantized: bool = False  # kv.dtype is left at auto, and a lossy one could be had

    @property
    def stays_in_host(self) -> bool:
        return bool(self.page_bytes) and not self.num_slots

    def stride_bytes(self, layer: int) -> int:
        """The bytes from one page to the next, in the tier and in a slot. A direct write wants whole blocks of the
        disk."""
        size = self.page_bytes[layer]
        return round_up(size, ALIGNMENT_BYTES) if self.tier is KVTier.nvme else size

    def offset_bytes(self, layer: int) -> int:
        """Where the layer's first page begins in the file."""
        return self.num_pages * sum(self.stride_bytes(other) for other in self.page_bytes if other < layer)

    def segment_pages(self, layer: int) -> tuple[int, ...]:
        """Pages in each piece of pinned memory that the layer's pages lie in, one behind the other. Attention reads
        those of all rows from one piece."""
        if self.stays_in_host:
            return (self.num_pages,)
        most = max(1, SEGMENT_BYTES // self.stride_bytes(layer))
        whole, rest = divmod(self.num_pages, most)
        return (most,) * whole + ((rest,) if rest else ())

    @property
    def slot_bytes(self) -> int:
        return self.slot_pages * max((self.stride_bytes(layer) for layer in self.page_bytes), default=0)

    @property
    def tier_bytes(self) -> int:
        return self.num_pages * sum(self.stride_bytes(layer) for layer in self.page_bytes)


@dataclass(frozen=True, kw_only=True)
class KVCost:
    """`compute` and `host` are ledger entries; on a machine without a device `compute` is the host's. `disk_bytes` is
    the size that the file may reach."""

    compute: tuple[Entry, ...]
    host: tuple[Entry, ...] = ()
    disk_bytes: int = 0


def offloaded_kv_layers(shape: ModelShape, tier: KVTier, fraction: float, *, has_device: bool) -> tuple[int, ...]:
    """Decoder layers, from 0, whose keys and values live in `tier`; those of the share `fraction` stay in compute
    memory, evenly over the depth, and so do the windows that padded lanes keep. Host memory is no other tier where
    compute happens in it."""
    assert tier is not KVTier.auto, "a plan settles on a tier first"
    if tier is KVTier.device or (tier is KVTier.cpu and not has_device):
        return ()
    layers = [layer for layer, size in enumerate(shape.kv_layer_bytes) if size and layer not in shape.bounded_layers]
    in_compute = {layers[place] for place in evenly_spaced(len(layers), round(fraction * len(layers)))}
    return tuple(layer for layer in layers if layer not in in_compute)


def layer_ranges(numbers: Iterable[int], max_length: int | None = None) -> Iterator[range]:
    """Neighbouring numbers together, ascending, up to `most` of them."""
    run = range(0)
    for number in sorted(numbers):
        if run and (number != run.stop or len(run) == max_length):
            yield run
            run = range(0)
        run = range(run.start if run else number, number + 1)
    if run:
        yield run


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
    """What the keys and values of `layout.num_pages` pages take, those of the layers that stay included."""
    in_compute_bytes = sum(size for layer, size in enumerate(shape.kv_layer_bytes) if layer not in layout.page_bytes)
    positions, num_offloaded = layout.num_pages * PAGE_TOKENS, len(layout.page_bytes)
    equation = f"{positions:,} positions x {in_compute_bytes:,} B"
    if num_offloaded:
        num_layers = sum(1 for size in shape.kv_layer_bytes if size)
        equation += f" of {num_layers - num_offloaded} of {num_layers} layers"
    compute = [Entry(name="KV cache", num_bytes=positions * in_compute_bytes, equation=equation)]
    if not num_offloaded:
        return KVCost(compute=tuple(compute))
    num_slots, slot_bytes = layout.num_slots, layout.slot_bytes
    if not layout.stays_in_host:
        equation = f"{num_slots} x {slot_bytes:,} B, {layout.slot_pages:,} pages of the largest lane"
        compute.append(Entry(name="KV slots", num_bytes=num_slots * slot_bytes, equation=equation))
    if layout.stays_in_host or layout.tier is KVTier.cpu:
        segments = [(n, layout.stride_bytes(layer)) for layer in layout.page_bytes for n in layout.segment_pages(layer)]
        pages = Entry(
            name="KV pages",
            num_bytes=sum(pinned_bytes(pages * size, is_aligned=False) for pages, size in segments),
            equation=f"{layout.num_pages:,} pages x {sum(layout.page_bytes.values()):,} B of {num_offloaded} layers, "
            "pinned",
        )
        return KVCost(compute=tuple(compute), host=(pages,))
    num_pages, pinned = layout.num_pages * num_offloaded, pinned_bytes(slot_bytes)
    equation = f"{num_pages:,} pages x {CHECKSUM_BYTES} B"
    checksums = Entry(name="KV checksums", num_bytes=num_pages * CHECKSUM_BYTES, equation=equation)
    if not has_device:
        return KVCost(compute=(*compute, checksums), disk_bytes=layout.tier_bytes)
    equation = f"{num_slots} x {pinned:,} B, pinned"
    staging = Entry(name="KV staging", num_bytes=num_slots * pinned, equation=equation)
    return KVCost(compute=tuple(compute), host=(staging, checksums), disk_bytes=layout.tier_bytes)


ROUND_TRIP_PARTS = 5  # queries, keys, values, sinks; the answer
PART_ALIGNMENT_BYTES = 64  # of each part of a trip, for vector loads
STORES_IN_FLIGHT = 2  # prompts' keys and values on their way down


@dataclass(frozen=True, kw_only=True)
class ExchangeSize:
    """`num_round_trips` side by side, each through `round_trip_bytes` of pinned memory."""

    num_round_trips: int
    round_trip_bytes: int


def exchange_size(shape: ModelShape, kv: KVLayout, walk: Walk, load: Load) -> ExchangeSize:
    """`walk` is the decode passes'. Nothing where no keys and values stay in host memory."""
    if not kv.stays_in_host:
        return ExchangeSize(num_round_trips=0, round_trip_bytes=0)
    sinks = shape.num_heads * 4 + ROUND_TRIP_PARTS * PART_ALIGNMENT_BYTES
    # One new token: its key and value, and for each of their heads a group of queries and answers.
    row_bytes = (1 + -(-shape.num_heads // max(1, shape.num_kv_heads))) * _position_bytes(shape, kv)
    return ExchangeSize(
        num_round_trips=walk.order.style.num_ahead + 1, round_trip_bytes=load.max_rows * row_bytes + sinks
    )


def _position_bytes(shape: ModelShape, kv: KVLayout) -> int:
    return max(shape.kv_layer_bytes[layer] for layer in kv.page_bytes)


def exchange_host_entry(size: ExchangeSize) -> Entry:
    pinned = pinned_bytes(size.round_trip_bytes, is_aligned=False)
    return Entry(
        name="KV exchange",
        num_bytes=size.num_round_trips * pinned,
        equation=f"{size.num_round_trips} x {pinned:,} B, pinned",
    )


def exchange_device_entry(shape: ModelShape, kv: KVLayout, size: ExchangeSize, load: Load) -> Entry:
    """Trips' own ends; prompts' keys and values that have not left yet, beside those that are made meanwhile; and what
    the longest row has cached, which is brought up where a prompt goes on."""
    per_position = _position_bytes(shape, kv)
    positions = (STORES_IN_FLIGHT + 1) * load.max_tokens + load.max_positions
    return Entry(
        name="KV exchange",
        num_bytes=size.num_round_trips * size.round_trip_bytes + positions * per_position,
        equation=f"{size.num_round_trips} x {size.round_trip_bytes:,} B + {positions:,} positions x {per_position:,} B",
    )
