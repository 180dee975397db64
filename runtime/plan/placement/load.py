"""Worst-case demand of a run's lanes, from which a placement computes memory.

A **lane** is a micro-batch in execution. A **block** is the set of lanes that run together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..shape.model import ModelShape
from .memory import PAGE_TOKENS, MicroBatch, kv_tokens, lane_entries, pass_tokens, prefill_passes


@dataclass(frozen=True, kw_only=True)
class Load:
    """Worst-case demand of a run.

    `max_*` are maxima over all lanes of the run, `block_*` are maxima over all blocks. They may come from another block
    than `lanes`.
    """

    shape: ModelShape
    lanes: Sequence[MicroBatch]  # of the block that takes most memory without KV cache
    chunk_tokens: int  # prefill tokens per lane and pass
    num_kv_pages: int  # KV pages of all lanes together, with prefixes shared within each lane
    max_pages: int  # KV pages per lane
    max_rows: int  # sequences per lane
    max_tokens: int  # tokens per lane and pass
    max_positions: int  # KV positions per sequence
    block_rows: int  # sequences per block
    block_tokens: int  # tokens per block and pass
    num_spared_pages: int  # reduction of `num_kv_pages` if prefixes are also shared across lanes
    full_pages: int  # KV pages with which every sequence can run to its token limit
    num_prefill_passes: float  # of a block or of the run: only the ratio to `num_decode_passes` is used
    num_decode_passes: float

    @staticmethod
    def from_lanes(shape: ModelShape, lanes: Sequence[MicroBatch], chunk_tokens: int) -> "Load":
        """Makes the load of one block, with KV pages for every sequence to run to its token limit."""
        pages = [kv_tokens(shape, [lane]) // PAGE_TOKENS for lane in lanes]
        tokens = [pass_tokens(shape, lane, chunk_tokens) for lane in lanes]
        shared_pages = kv_tokens(shape, lanes, among_lanes=True) // PAGE_TOKENS
        return Load(
            shape=shape,
            lanes=lanes,
            chunk_tokens=chunk_tokens,
            num_kv_pages=sum(pages),
            num_spared_pages=sum(pages) - shared_pages,
            full_pages=sum(pages),
            max_pages=max(pages, default=0),
            max_rows=max(map(len, lanes), default=0),
            max_tokens=max(tokens, default=0),
            max_positions=max((size.capacity_tokens for lane in lanes for size in lane), default=0),
            block_rows=sum(map(len, lanes)),
            block_tokens=sum(tokens),
            num_prefill_passes=max((prefill_passes(shape, lane, chunk_tokens) for lane in lanes), default=0),
            num_decode_passes=max((size.max_new_tokens - 1 for lane in lanes for size in lane), default=0),
        )

    @staticmethod
    def from_blocks(shape: ModelShape, blocks: Iterable[Sequence[MicroBatch]], chunk_tokens: int) -> "Load":
        """Makes the load of blocks that run one after another and use the same KV pages."""
        loads = [Load.from_lanes(shape, lanes, chunk_tokens) for lanes in [*blocks] or [[]]]
        heaviest = max(loads, key=lambda load: load.lane_bytes)
        num_kv_pages = max(load.num_kv_pages for load in loads)
        return replace(
            heaviest,
            num_kv_pages=num_kv_pages,
            num_spared_pages=num_kv_pages - max(load.num_kv_pages - load.num_spared_pages for load in loads),
            max_pages=max(load.max_pages for load in loads),
            max_rows=max(load.max_rows for load in loads),
            max_tokens=max(load.max_tokens for load in loads),
            max_positions=max(load.max_positions for load in loads),
            block_rows=max(load.block_rows for load in loads),
            block_tokens=max(load.block_tokens for load in loads),
        )

    @cached_property
    def lane_bytes(self) -> int:
        """The compute memory of the lanes, without KV cache."""
        return sum(entry.num_bytes for entry in lane_entries(self.shape, self.lanes, self.chunk_tokens))

    @property
    def keys_at_minimum(self) -> frozenset[str]:
        """The config keys that cannot lower the load further, as their effect is at its minimum already."""
        is_at_minimum = {
            "policy.micro_batch_size": self.max_rows <= 1,
            "policy.num_micro_batches": self.block_rows <= self.max_rows,
            "policy.prefill_chunk_tokens": self.max_tokens <= self.max_rows,
            "sampling.max_new_tokens": self.num_decode_passes <= 0,
        }
        return frozenset(key for key, cannot_lower in is_at_minimum.items() if cannot_lower)

    @property
    def has_enough_pages(self) -> bool:
        """True if half of the sequences can run to their token limits, or all of them halfway."""
        return 2 * self.num_kv_pages >= self.full_pages

    @cached_property
    def lane_tokens(self) -> tuple[int, ...]:
        """The maximum tokens of each lane in one pass."""
        return tuple(pass_tokens(self.shape, lane, self.chunk_tokens) for lane in self.lanes)
