"""What the lanes of a run ask of memory at worst: the block that takes most, or the longest sequences side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .memory import PAGE_TOKENS, MicroBatch, kv_tokens, pass_tokens, prefill_passes
from .model_shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Load:
    """`num_kv_pages` are shared by the lanes; each of `lanes` is prefilled by `chunk_tokens` a pass. A lane of another
    block may have more pages or rows than any of `lanes`, see `lane_pages` and `lane_rows`."""

    shape: ModelShape
    lanes: Sequence[MicroBatch]
    chunk_tokens: int
    num_kv_pages: int
    lane_pages: int  # KV pages of the lane that has most
    lane_rows: int  # sequences of the lane that has most
    num_prefill_passes: float  # of the whole run or of one block: what counts is how they compare
    num_decode_passes: float

    @staticmethod
    def of(shape: ModelShape, lanes: Sequence[MicroBatch], chunk_tokens: int) -> "Load":
        """Pages so many that every sequence can run to its limit."""
        return Load(
            shape=shape,
            lanes=lanes,
            chunk_tokens=chunk_tokens,
            num_kv_pages=kv_tokens(shape, lanes) // PAGE_TOKENS,
            lane_pages=max((kv_tokens(shape, [lane]) for lane in lanes), default=0) // PAGE_TOKENS,
            lane_rows=max(map(len, lanes), default=0),
            num_prefill_passes=max((prefill_passes(shape, lane, chunk_tokens) for lane in lanes), default=0),
            num_decode_passes=max((size.max_new_tokens - 1 for lane in lanes for size in lane), default=0),
        )

    @property
    def is_roomy(self) -> bool:
        """Every other sequence could run to its limit, or all of them halfway."""
        return 2 * self.num_kv_pages >= kv_tokens(self.shape, self.lanes) // PAGE_TOKENS

    @cached_property
    def lane_tokens(self) -> tuple[int, ...]:
        """Most tokens of each lane in one pass."""
        return tuple(pass_tokens(self.shape, lane, self.chunk_tokens) for lane in self.lanes)
