"""Products of float32 with bfloat16 weights, both rounded to int8, at the speed of the processor's matrix unit.

A row of x, and a row of w, becomes 8-bit integers times its own scale, the largest of its numbers over 127: nothing is
calibrated or kept. Rows of w are rounded as they come, a panel that stays in the second cache, so that weights still
are read once, from where they were stored. Integers add up exactly, whatever rows stand beside. A row with a number
that is not finite ends as NaN, all of it.

Scales by row of x and by row of w: Dettmers, Lewis, Belkada and Zettlemoyer, "LLM.int8()" (2022), section 2.1.
"""

import numpy as np
from numba import njit

from .compiled import kept
from .int8_tiles import (
    STEP_INPUTS,
    add_rounded1,
    add_rounded2,
    give_scaled,
    largest_input,
    largest_weight,
    round_inputs,
    round_weights,
)
from .numerics import REORDERED, ZERO
from .product_tiles import SUM_NUMBERS, TILE_WORDS, store1, store2, zero1, zero2
from .tile_scratch import PAIR_ROWS, TILE_ROWS
from .tile_unit import configure, release

# See `compiled.py`.
PARTS_SHA256 = "28e3c63986d6e90ca5f31b5cf042fa1794954e11bec06d6eafb8630bac15eaf4"
LARGEST = np.float32(127)
NUM_SUMS = PAIR_ROWS * SUM_NUMBERS


@njit(fastmath=REORDERED)
def _factor(top: np.float32) -> np.float32:
    return LARGEST / top if top > ZERO else ZERO


@kept
def round_rows(
    x_MK: np.ndarray, first: int, last: int, tiles: np.ndarray, scales_M: np.ndarray, factors_M: np.ndarray
) -> None:
    """Tiles [first, last) of 16 rows of a contiguous x, all depths of each behind one another, and the rows' scales."""
    M, K = x_MK.shape
    depth = K // STEP_INPUTS
    for t in range(first, last):
        row = t * TILE_ROWS
        for m in range(row, min(row + TILE_ROWS, M)):
            top = largest_input(x_MK, m * K, K)
            scales_M[m], factors_M[m] = top / LARGEST, _factor(top)
        for k in range(depth):
            place = (t * depth + k) * TILE_WORDS
            round_inputs(x_MK, row * K + k * STEP_INPUTS, K, M - row, factors_M, row, tiles, place)


@njit(fastmath=REORDERED)
def _round_panel(w_NK: np.ndarray, first: int, last: int, panel: np.ndarray, scales_N: np.ndarray) -> None:
    """Rows [first, last) of w, in pairs of tiles at each depth."""
    K = w_NK.shape[1]
    depth = K // STEP_INPUTS
    for n in range(first, last):
        pair, row = (n - first) // PAIR_ROWS, (n - first) % PAIR_ROWS
        top = largest_weight(w_NK, n * K, K)
        scales_N[n - first] = top / LARGEST
        place = pair * depth * 2 * TILE_WORDS + row * TILE_ROWS
        round_weights(w_NK, n * K, depth, _factor(top), panel, place, 2 * TILE_WORDS)


@kept
def multiply_rounded(
    w_NK: np.ndarray,
    first: int,
    last: int,
    tiles: np.ndarray,
    scales_M: np.ndarray,
    out_MN: np.ndarray,
    begin: int,
    out_numbers: int,
    num_rows: int,
    panel: np.ndarray,
    scales_N: np.ndarray,
    sums: np.ndarray,
    shape: np.ndarray,
) -> None:
    """Rows [first, last) of w, a multiple of 32 that `panel` holds, times the `num_rows` rows of x in `tiles`, into
    `out_MN` from `begin` on, whose rows lie `out_numbers` apart. `w_NK` holds bits of bfloat16."""
    depth = w_NK.shape[1] // STEP_INPUTS
    num_tiles, row_words = -(-num_rows // TILE_ROWS), depth * TILE_WORDS
    _round_panel(w_NK, first, last, panel, scales_N)
    configure(shape, 0)
    for t in range(0, num_tiles, 2):
        for n in range(0, last - first, PAIR_ROWS):
            place, at = t * row_words, n // PAIR_ROWS * 2 * row_words
            if t + 1 < num_tiles:
                zero2()
                for k in range(depth):
                    step = k * TILE_WORDS
                    add_rounded2(panel, at + 2 * step, TILE_ROWS, tiles, place + step, row_words)
                store2(sums, 0)
            else:
                zero1()
                for k in range(depth):
                    step = k * TILE_WORDS
                    add_rounded1(panel, at + 2 * step, TILE_ROWS, tiles, place + step, row_words)
                store1(sums, 0)
            for i in range(2):
                for j in range(min(2, num_tiles - t)):
                    row, column = (t + j) * TILE_ROWS, n + i * TILE_ROWS
                    own = i * TILE_ROWS * SUM_NUMBERS + j * TILE_ROWS
                    to = begin + row * out_numbers + first + column
                    left = num_rows - row
                    give_scaled(sums, own, left, scales_N, column, scales_M, row, out_MN, to, out_numbers)
    release()
