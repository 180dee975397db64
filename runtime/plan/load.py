"""What the lanes of a run ask of memory at worst: the block that takes most, or the longest sequences side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .memory import PAGE_TOKENS, MicroBatch, kv_tokens, pass_tokens
from .shapes import ModelShape


@dataclass(frozen=True, kw_only=True)
class Load:
    """`num_kv_pages` are shared by the lanes; each of `lanes` is prefilled by `chunk_tokens` a pass."""

    shape: ModelShape
    lanes: Sequence[MicroBatch]
    chunk_tokens: int
    num_kv_pages: int

    @staticmethod
    def of(
        shape: ModelShape, lanes: Sequence[MicroBatch], chunk_tokens: int, num_kv_pages: int | None = None
    ) -> "Load":
        """`num_kv_pages` None: so many that every sequence can run to its limit."""
        pages = kv_tokens(shape, lanes) // PAGE_TOKENS if num_kv_pages is None else num_kv_pages
        return Load(shape=shape, lanes=lanes, chunk_tokens=chunk_tokens, num_kv_pages=pages)

    @cached_property
    def lane_tokens(self) -> tuple[int, ...]:
        """Most tokens of each lane in one pass."""
        return tuple(pass_tokens(self.shape, lane, self.chunk_tokens) for lane in self.lanes)

    @cached_property
    def lane_rows(self) -> int:
        return max(map(len, self.lanes), default=0)

    @cached_property
    def lane_pages(self) -> int:
        """KV pages of the lane that has most."""
        most = max((kv_tokens(self.shape, [lane]) for lane in self.lanes), default=0) // PAGE_TOKENS
        return min(most, self.num_kv_pages)
