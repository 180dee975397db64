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

from ..arguments import PAIR_ROWS
from ..compiled import REORDERED, kept
from .linear_steps import (
    PAIR_NUMBERS,
    STEP_WORDS,
    SUM_NUMBERS,
    add_products1,
    add_products2,
    copy_inputs,
    give_products,
    split_inputs,
    store1,
    store2,
    zero1,
    zero2,
)
from .scratch import TILE_DIMS, TILE_ROWS
from .unit import configure, release

CHUNK_ROWS = 256  # of w: what one call multiplies at most
CHAIN_STEPS = 32  # 1024 inputs: what they add up to is added up in turn, as long sums are less precise
CACHED_STEPS = 340  # of x, 1 MiB: where all of it stays in the second cache, rows of w pass by once
BLOCK_NUMBERS = PAIR_ROWS * SUM_NUMBERS
PANEL_NUMBERS = CHUNK_ROWS * CHAIN_STEPS * TILE_DIMS  # of a chain of a call's rows of w


def num_sums(num_rows: int) -> int:
    """How many sums a call with so many rows of x holds; a chain of it holds as many."""
    return (1 + CHUNK_ROWS // PAIR_ROWS * -(-num_rows // SUM_NUMBERS)) * BLOCK_NUMBERS


@kept
def lay_out_inputs(x_MK: np.ndarray, first: int, last: int, tiles: np.ndarray) -> None:
    """Tiles [first, last) of 16 rows of a contiguous x, all depths of each behind one another."""
    M, K = x_MK.shape
    depth = K // TILE_DIMS
    for t in range(first, last):
        for k in range(depth):
            at = t * TILE_ROWS * K + k * TILE_DIMS
            split_inputs(x_MK, at, K, M - t * TILE_ROWS, tiles, (t * depth + k) * STEP_WORDS)


@njit(fastmath=REORDERED)
def _lay_out(w_NK: np.ndarray, at: int, num_steps: int, panel: np.ndarray, place: int) -> None:
    """32 rows of w, from one of their inputs on, as pairs of tiles one after the other. Where they lie a multiple of
    4 KiB apart, as most do, one set of the first cache would have to hold all lines of a tile."""
    K = w_NK.shape[1]
    for row in range(PAIR_ROWS):
        for k in range(num_steps):
            copy_inputs(w_NK, at + row * K + k * TILE_DIMS, panel, place + k * PAIR_NUMBERS + row * TILE_DIMS)


@njit(fastmath=REORDERED)
def _add_chain(
    w: np.ndarray,
    at: int,
    step: int,
    row_numbers: int,
    tiles: np.ndarray,
    x_at: int,
    x_words: int,
    num_steps: int,
    is_pair: bool,
) -> None:
    """A pair of tiles of w, `step` numbers further at each step, times one of x or a pair of them, into the sums."""
    if is_pair:
        zero2()
        for k in range(num_steps):
            add_products2(w, at + k * step, row_numbers, tiles, x_at + k * STEP_WORDS, x_words)
    else:
        zero1()
        for k in range(num_steps):
            add_products1(w, at + k * step, row_numbers, tiles, x_at + k * STEP_WORDS, x_words)


@njit(fastmath=REORDERED)
def _give_block(sums: np.ndarray, at: int, num_rows: int, out_MN: np.ndarray, to: int, out_numbers: int) -> None:
    """What a pair of tiles of w came to, for the first `num_rows` rows of a pair of tiles of x."""
    for j in range(2 if num_rows > TILE_ROWS else 1):
        top = j * TILE_ROWS
        for i in range(2):
            place, own = to + top * out_numbers + i * TILE_ROWS, at + i * TILE_ROWS * SUM_NUMBERS + top
            give_products(sums, own, num_rows - top, out_MN, place, out_numbers)


# Not in named tuples: from Python these take a microsecond to unpack at each call, and as arguments of a chain they
# took more instructions of its loop.
@kept
def linear(
    w_NK: np.ndarray,
    first: int,
    last: int,
    tiles: np.ndarray,
    out_MN: np.ndarray,
    begin: int,
    out_numbers: int,
    num_rows: int,
    panel: np.ndarray,
    sums: np.ndarray,
    shape: np.ndarray,
) -> None:
    """Rows [first, last) of w, a multiple of 32 and up to CHUNK_ROWS, times the `num_rows` rows of x in `tiles`, into
    `out_MN` from `begin` on, whose rows lie `out_numbers` apart. `w_NK` holds bits of bfloat16."""
    K = w_NK.shape[1]
    depth = K // TILE_DIMS
    num_tiles, row_words = -(-num_rows // TILE_ROWS), depth * STEP_WORDS
    is_laid_out = num_tiles * depth > CACHED_STEPS
    height = last - first if is_laid_out else PAIR_ROWS
    configure(shape, 0)
    for row in range(first, last, height):
        num_pairs = (min(row + height, last) - row) // PAIR_ROWS
        for k_first in range(0, depth, CHAIN_STEPS):
            num_steps = min(CHAIN_STEPS, depth - k_first)
            for n in range(num_pairs if is_laid_out else 0):
                at = (row + n * PAIR_ROWS) * K + k_first * TILE_DIMS
                _lay_out(w_NK, at, num_steps, panel, n * CHAIN_STEPS * PAIR_NUMBERS)
            for t in range(0, num_tiles, 2):
                is_pair = t + 1 < num_tiles
                for n in range(num_pairs):
                    x_at = (t * depth + k_first) * STEP_WORDS
                    if is_laid_out:
                        place = n * CHAIN_STEPS * PAIR_NUMBERS
                        _add_chain(panel, place, PAIR_NUMBERS, TILE_DIMS, tiles, x_at, row_words, num_steps, is_pair)
                    else:
                        at = row * K + k_first * TILE_DIMS
                        _add_chain(w_NK, at, TILE_DIMS, K, tiles, x_at, row_words, num_steps, is_pair)
                    own = (1 + t // 2 * num_pairs + n) * BLOCK_NUMBERS
                    at = 0 if k_first else own
                    if is_pair:
                        store2(sums, at)
                    else:
                        store1(sums, at)
                    if k_first:
                        for i in range(BLOCK_NUMBERS):
                            sums[own + i] += sums[i]
                    if k_first + num_steps == depth:
                        top = t * TILE_ROWS
                        to = begin + top * out_numbers + row + n * PAIR_ROWS
                        _give_block(sums, own, num_rows - top, out_MN, to, out_numbers)
    release()
