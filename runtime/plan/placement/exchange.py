"""What goes between compute memory and keys and values that stay in host memory: queries and new keys and values down,
the CPU's answers up. A **trip** is one lane's in one layer.
"""

from dataclasses import dataclass

from ..schedule.walk import Walk
from ..shape.extents import pinned_bytes
from ..shape.model import ModelShape
from .kv import KVLayout
from .ledger import Entry
from .load import Load

TRIP_PARTS = 5  # queries, keys, values, sinks; the answer
PART_ALIGNMENT_BYTES = 64  # of each part of a trip, for vector loads
STORES_IN_FLIGHT = 2  # prompts' keys and values on their way down


@dataclass(frozen=True, kw_only=True)
class ExchangeSize:
    """`num_trips` side by side, each through `trip_bytes` of pinned memory."""

    num_trips: int
    trip_bytes: int


def exchange_size(shape: ModelShape, kv: KVLayout, walk: Walk, load: Load) -> ExchangeSize:
    """`walk` is the decode passes'. Nothing where no keys and values stay in host memory."""
    if not kv.stays_in_host:
        return ExchangeSize(num_trips=0, trip_bytes=0)
    sinks = shape.num_heads * 4 + TRIP_PARTS * PART_ALIGNMENT_BYTES
    return ExchangeSize(
        num_trips=walk.order.style.num_ahead + 1, trip_bytes=load.most_rows * _row_bytes(shape, kv) + sinks
    )


def _row_bytes(shape: ModelShape, kv: KVLayout) -> int:
    """The bytes of one new token: its key and value, and for each of their heads a group of queries and answers."""
    group = -(-shape.num_heads // max(1, shape.num_kv_heads))
    return (1 + group) * _position_bytes(shape, kv)


def _position_bytes(shape: ModelShape, kv: KVLayout) -> int:
    return max(shape.kv_layer_bytes[layer] for layer in kv.page_bytes)


def pinned_entry(size: ExchangeSize) -> Entry:
    pinned = pinned_bytes(size.trip_bytes, is_aligned=False)
    return Entry(
        name="KV exchange", num_bytes=size.num_trips * pinned, equation=f"{size.num_trips} x {pinned:,} B, pinned"
    )


def device_entry(shape: ModelShape, kv: KVLayout, size: ExchangeSize, load: Load) -> Entry:
    """Trips' own ends; prompts' keys and values that have not left yet, beside those that are made meanwhile; and what
    the longest row has cached, which is brought up where a prompt goes on."""
    per_position = _position_bytes(shape, kv)
    positions = (STORES_IN_FLIGHT + 1) * load.most_tokens + load.most_positions
    return Entry(
        name="KV exchange",
        num_bytes=size.num_trips * size.trip_bytes + positions * per_position,
        equation=f"{size.num_trips} x {size.trip_bytes:,} B + {positions:,} positions x {per_position:,} B",
    )
