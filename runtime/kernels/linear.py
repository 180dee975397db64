"""Products of float32 with weights as they are stored, in the processor's vectors, where they fit no matrix unit.

So few rows of w are widened at a time, and so few inputs of them, that they stay in the first cache; a block of rows of
x, which stays in the second, passes by them, while the next rows of w are on their way. Nothing that is widened is ever
in memory. An output adds up its inputs in the same order whatever rows stand beside its own.

Blocks for each level of caches, and sums in registers, after Goto and van de Geijn, "Anatomy of High-Performance Matrix
Multiplication" (2008). Here the inputs are what is laid out anew, as they are fewer than the weights.
"""

import numpy as np
from numba import njit

from .arguments import PAIR_ROWS
from .compiled import REORDERED, kept
from .linear_steps import CHAIN_INPUTS, MOST_VECTORS, WEIGHT_ROWS, add_products, transpose, widen
from .primitives import LANES, begin_items

CHUNK_ROWS = 256  # of w, at most, for which a block of x is read once
INPUT_ROWS = MOST_VECTORS * LANES  # of x, at most, in a group whose vectors lie side by side
BLOCK_GROUPS = 240 // INPUT_ROWS  # of rows of x in a block, about: 240 KiB at CHAIN_INPUTS
MOST_GROUPS = BLOCK_GROUPS + BLOCK_GROUPS // 2
TILE_NUMBERS = WEIGHT_ROWS * CHAIN_INPUTS
SUM_NUMBERS = CHUNK_ROWS * MOST_GROUPS * INPUT_ROWS


@njit(fastmath=REORDERED)
def _groups(num_rows: int) -> tuple[int, int, int]:
    """How many groups of vectors of rows of x there are, how many vectors each has at least, and how many groups have
    one more: the first ones."""
    num_vectors = -(-num_rows // LANES)
    num_groups = -(-num_vectors // MOST_VECTORS)
    return num_groups, num_vectors // num_groups, num_vectors % num_groups


@njit(fastmath=REORDERED)
def _num_blocks(num_groups: int) -> int:
    """Weights are widened once for each: a few larger ones, up to MOST_GROUPS, rather than one more of what is left."""
    return max(1, (num_groups + BLOCK_GROUPS // 2) // BLOCK_GROUPS)


@kept
def lay_out_inputs(x_MK: np.ndarray, first: int, last: int, inputs: np.ndarray) -> None:
    """Groups [first, last) of rows of x, one after the other, each (K, vectors, LANES); zeros behind the last row."""
    M, K = x_MK.shape
    _, least, num_larger = _groups(M)
    for g in range(first, last):
        begin, width = (g * least + min(g, num_larger)) * LANES, (least + (g < num_larger)) * LANES
        for m in range(0, width, LANES):
            num_rows = max(0, min(LANES, M - begin - m))
            for k in range(0, K, LANES):
                to = begin * K + k * width + m
                transpose(x_MK, (begin + m) * K + k, K, num_rows, inputs, to, width, LANES)


@njit(fastmath=REORDERED)
def _take_out(
    sums: np.ndarray, width: int, num_rows: int, block: tuple[int, int, int, int], out_MN: np.ndarray, begin: int
) -> None:
    """Sums of `width` rows of w with a block, as columns of out from `begin` on."""
    first, last, least, num_larger = block
    row, N, at = (first * least + min(first, num_larger)) * LANES, out_MN.shape[1], 0
    for g in range(first, last):
        apart = (least + (g < num_larger)) * LANES
        for m in range(0, min(apart, num_rows - row), LANES):
            for n in range(0, width, LANES):
                to = (row + m) * N + begin + n
                transpose(sums, at + n * apart + m, apart, LANES, out_MN, to, N, min(LANES, num_rows - row - m))
        row, at = row + apart, at + CHUNK_ROWS * apart


@njit(fastmath=REORDERED)
def _multiply_tile(
    tile: np.ndarray,
    count: int,
    inputs: np.ndarray,
    k: int,
    num_inputs: int,
    block: tuple[int, int, int, int],
    sums: np.ndarray,
    n: int,
    w_NK: np.ndarray,
    next_at: int,
    num_next: int,
) -> None:
    """`count` widened rows of w, from the n-th of their chunk on, times inputs [k, k + num_inputs) of a block, which is
    groups [first, last) of `least` vectors, those before `num_larger` of one more. `num_next` rows are asked ahead."""
    first, last, least, num_larger = block
    K, vector = w_NK.shape[1], 0
    share = -(-num_next // ((last - first) * -(-count * least // WEIGHT_ROWS)))  # with each of the products
    begin = first * least + min(first, num_larger)
    for g in range(first, last):
        num_vectors = least + (g < num_larger)
        x_at, height = ((begin + vector) * K + k * num_vectors) * LANES, WEIGHT_ROWS // num_vectors
        for r in range(0, count, height):
            rows, now = min(height, count - r), min(share, num_next)
            at, is_first = (vector * CHUNK_ROWS + (n + r) * num_vectors) * LANES, k == 0
            add_products(
                tile,
                r * CHAIN_INPUTS,
                rows,
                inputs,
                x_at,
                num_vectors,
                num_inputs,
                sums,
                at,
                is_first,
                w_NK,
                next_at,
                K,
                now,
            )
            next_at, num_next = next_at + now * K, num_next - now
        vector += num_vectors


@kept
def linear(
    w_NK: np.ndarray,
    step: int,
    begun: np.ndarray,
    inputs: np.ndarray,
    out_MN: np.ndarray,
    begin: int,
    num_rows: int,
    tile: np.ndarray,
    sums: np.ndarray,
) -> None:
    """All rows of w but those behind the last `PAIR_ROWS`, times the `num_rows` rows of x in `inputs`, into columns of
    `out_MN` from `begin` on. Threads that call it with one `begun`, of which the first number was 0, share the rows,
    `step` at a time, a multiple of LANES up to CHUNK_ROWS; each has a `tile` and `sums` of its own, used anew again
    and again."""
    K = w_NK.shape[1]
    num_groups, least, num_larger = _groups(num_rows)
    num_blocks = _num_blocks(num_groups)
    whole = w_NK.shape[0] // PAIR_ROWS * PAIR_ROWS
    top = begin_items(begun, step)
    while top < whole:
        width = min(step, whole - top)
        for b in range(num_blocks):
            block = (b * num_groups // num_blocks, (b + 1) * num_groups // num_blocks, least, num_larger)
            for k in range(0, K, CHAIN_INPUTS):
                num_inputs = min(CHAIN_INPUTS, K - k)
                for n in range(0, width, WEIGHT_ROWS):
                    count = min(WEIGHT_ROWS, width - n)
                    for r in range(count):
                        widen(w_NK, (top + n + r) * K + k, num_inputs, tile, r * CHAIN_INPUTS)
                    next_n, next_k = (n + count, k) if n + count < width else (0, k + num_inputs)
                    num_next = min(WEIGHT_ROWS, width - next_n) if next_k < K else 0
                    next_at = (top + next_n) * K + next_k
                    _multiply_tile(tile, count, inputs, k, num_inputs, block, sums, n, w_NK, next_at, num_next)
            _take_out(sums, width, num_rows, block, out_MN, begin + top)
        top = begin_items(begun, step)
