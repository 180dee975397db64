"""Products of float32 with bfloat16 weights, as precise as in float32 and at the speed of the processor's matrix unit.

A float32 is the sum of three bfloat16, so x @ w.T is the sum of three products of bfloat16, which the unit adds up in
float32: numbers of w meet all 24 bits of those of x, and each product is exact. Weights are read once, from where they
were stored, and never widened; x alone, which is small, is split and laid out. An output adds up its inputs in the same
order whatever rows stand beside its own. Infinite inputs end as NaN, and parts below 2^-126 count as zero.

Splitting in three for AMX: Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
Higher-Precision Computations" (2019).
"""

import numpy as np
from numba import njit

from .attention_softmax import REORDERED
from .compiled import kept
from .product_tiles import (
    ACROSS,
    STEP_WORDS,
    SUM_NUMBERS,
    add_products1,
    add_products2,
    give_products,
    split_inputs,
    store1,
    store2,
    zero1,
    zero2,
)
from .tile_scratch import TILE_DIMS, TILE_ROWS
from .tile_unit import configure, release

# See `compiled.py`.
PARTS_SHA256 = "d0c3abb868aa98cb0a4e6ee6e903d88706930ebc734935897ada32f4d4530768"
CHUNK_ROWS = 256  # of w: what one call multiplies at most
CHAIN_STEPS = 32  # 1024 inputs: what they add up to is added up in turn, as long sums are less precise
CACHED_STEPS = 340  # of x, 1 MiB: where it stays in the second cache, rows of w are read from end to end
NUM_SUMS = (CHUNK_ROWS + 2 * TILE_ROWS) * SUM_NUMBERS  # of a call, and of a chain of it


@kept
def split(x_MK: np.ndarray, first: int, last: int, tiles: np.ndarray) -> None:
    """Tiles [first, last) of 16 rows of a contiguous x, all depths of each behind one another."""
    M, K = x_MK.shape
    depth = K // TILE_DIMS
    for t in range(first, last):
        for k in range(depth):
            at = t * TILE_ROWS * K + k * TILE_DIMS
            split_inputs(x_MK, at, K, M - t * TILE_ROWS, tiles, (t * depth + k) * STEP_WORDS)


@njit(fastmath=REORDERED)
def _add_chain(
    w_NK: np.ndarray,
    w_at: int,
    tiles: np.ndarray,
    place: int,
    row_words: int,
    num_steps: int,
    is_pair: bool,
    sums: np.ndarray,
    at: int,
) -> None:
    """32 rows of w, from one of their inputs on, times a tile of x or a pair of them."""
    K = w_NK.shape[1]
    if is_pair:
        zero2()
        for k in range(num_steps):
            add_products2(w_NK, w_at + k * TILE_DIMS, K, tiles, place + k * STEP_WORDS, row_words)
        store2(sums, at)
    else:
        zero1()
        for k in range(num_steps):
            add_products1(w_NK, w_at + k * TILE_DIMS, K, tiles, place + k * STEP_WORDS, row_words)
        store1(sums, at)


@kept
def multiply(
    w_NK: np.ndarray,
    first: int,
    last: int,
    tiles: np.ndarray,
    out_MN: np.ndarray,
    begin: int,
    out_numbers: int,
    num_rows: int,
    sums: np.ndarray,
    shape: np.ndarray,
) -> None:
    """Rows [first, last) of w, a multiple of 32 and up to CHUNK_ROWS, times the `num_rows` rows of x in `tiles`, into
    `out_MN` from `begin` on, whose rows lie `out_numbers` apart. `w_NK` holds bits of bfloat16."""
    K = w_NK.shape[1]
    depth = K // TILE_DIMS
    num_tiles, row_words = -(-num_rows // TILE_ROWS), depth * STEP_WORDS
    chain = CHUNK_ROWS * SUM_NUMBERS
    configure(shape, 0)
    for side in range(0, num_tiles, ACROSS):
        end = min(side + ACROSS, num_tiles)
        height = 2 * TILE_ROWS if (end - side) * depth <= CACHED_STEPS else last - first
        for row in range(first, last, height):
            for k_first in range(0, depth, CHAIN_STEPS):
                num_steps = min(CHAIN_STEPS, depth - k_first)
                for n in range(row, min(row + height, last), 2 * TILE_ROWS):
                    own = (n - first) * SUM_NUMBERS
                    for t in range(side, end, 2):
                        at = (chain if k_first else own) + (t - side) * TILE_ROWS
                        place, w_at = (t * depth + k_first) * STEP_WORDS, n * K + k_first * TILE_DIMS
                        _add_chain(w_NK, w_at, tiles, place, row_words, num_steps, t + 1 < end, sums, at)
                    if k_first:
                        for i in range(2 * TILE_ROWS * SUM_NUMBERS):
                            sums[own + i] += sums[chain + i]
        for n in range(first, last, TILE_ROWS):
            for t in range(side, end):
                place = begin + t * TILE_ROWS * out_numbers + n
                at = (n - first) * SUM_NUMBERS + (t - side) * TILE_ROWS
                give_products(sums, at, num_rows - t * TILE_ROWS, out_MN, place, out_numbers)
    release()
