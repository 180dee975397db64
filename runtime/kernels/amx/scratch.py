"""What a thread works with where decode attention runs in tiles: registers of up to 16 rows of 64 bytes.

A product takes pairs of bfloat16, so each float32 is there as two of them, `high + low`, which differ from it by 2^-16
of it at most. The four queries of a tile are those of one KV head, zeros where it has no more.

H KV heads, G query heads of each, J tiles of its queries, T tiles of D of a head, S positions of a chunk.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

from ..arguments import aligned_zeros

TILE_ROWS, TILE_DIMS, TILE_QUERIES = 16, 32, 4  # TILE_DIMS bfloat16 are the 64 bytes of a row
PAIRED = 2 * TILE_QUERIES  # what stands side by side: high and low parts, or sums of even and of odd dims


class TileScratch(NamedTuple):
    """`queries`: rows of pairs of dims, in each the high parts of four queries and then the low ones. `products`: of
    each position with the same eight. `weights`: high, then low; of each query with a zero behind it, which meets the
    odd dims of values, and before it. `sums`: of each query the even dims, then the odd ones."""

    queries_HJTRC: np.ndarray
    products_SC: np.ndarray
    scores_HGS: np.ndarray
    weights_HJPCS: np.ndarray
    sums_HGD: np.ndarray
    tops_HG: np.ndarray
    totals_HG: np.ndarray
    shapes: np.ndarray

    @classmethod
    def make(cls, num_kv_heads: int, group: int, key_dim: int, value_dim: int, chunk_tokens: int) -> "TileScratch":
        H, J = num_kv_heads, -(-group // TILE_QUERIES)
        return cls(
            queries_HJTRC=aligned_zeros((H, J, key_dim // TILE_DIMS, TILE_ROWS, PAIRED), np.uint32),
            products_SC=aligned_zeros((chunk_tokens, PAIRED), np.float32),
            scores_HGS=aligned_zeros((H, J * TILE_QUERIES, chunk_tokens), np.float32),
            weights_HJPCS=aligned_zeros((H, J, 2, PAIRED, chunk_tokens), np.uint32),
            sums_HGD=aligned_zeros((H, J * TILE_QUERIES, value_dim), np.float32),
            tops_HG=aligned_zeros((H, group), np.float32),
            totals_HG=aligned_zeros((H, group), np.float32),
            shapes=tile_shapes(),
        )


@cache
def tile_shapes() -> np.ndarray:
    """(2, 16, 64) bytes: how scores, and how values, of 1 to 16 positions of a page have the eight tiles: their numbers
    in `unit.py`, the form in Intel's manual under LDTILECFG."""
    shapes = aligned_zeros((2, TILE_ROWS, 64), np.uint8)
    shapes[..., 0] = 1  # the form
    for n in range(1, TILE_ROWS + 1):
        row_bytes_of = shapes[:, n - 1, 16:32].view(np.uint16)
        rows_of = shapes[:, n - 1, 48:56]
        row_bytes_of[0], rows_of[0] = [32] * 6 + [64] * 2, [TILE_ROWS] * 4 + [n] * 4
        row_bytes_of[1], rows_of[1] = [64] * 4 + [4 * n] * 2 + [64] * 2, [PAIRED] * 6 + [n] * 2
    return shapes
