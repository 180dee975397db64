"""Products of float32 with weights as they are stored, in the processor's vectors, where they fit no matrix unit.

Rows of w are widened, a few at a time and so many inputs of them that they stay in the second cache, where all rows of
x pass by them; nothing that is widened is ever in memory. An output adds up its inputs in the same order whatever rows
stand beside its own.

Panels that stay in a cache, and sums in registers, after Goto and van de Geijn, "Anatomy of High-Performance Matrix
Multiplication" (2008); here both sides have their inputs side by side, so that few rows of x need no other layout.
"""

import numpy as np
from numba import njit

from .attention_softmax import REORDERED
from .attention_vectors import LANES
from .compiled import kept
from .vector_steps import INPUT_ROWS, WEIGHT_ROWS, add_products, lay_out

# See `compiled.py`.
PARTS_SHA256 = "d1247b47ca17e7c609028744b6add98fafb4a4b8036065a5a25c9732dc6fd30d"
CHUNK_ROWS = 128  # of w, that are widened at a time
CHAIN_INPUTS = 512  # whose widened weights of a call are 256 KiB
PANEL_NUMBERS = CHUNK_ROWS * CHAIN_INPUTS


@njit(fastmath=REORDERED)
def _group(g: int, num_rows: int) -> tuple[int, int]:
    """The first row, and how many there are, of the g-th group of rows of x: sizes differ by one at most."""
    num_groups = -(-num_rows // INPUT_ROWS)
    size, larger = num_rows // num_groups, num_rows % num_groups
    return g * size + min(g, larger), size + (1 if g < larger else 0)


@kept
def lay_out_inputs(x_MK: np.ndarray, first: int, last: int, inputs: np.ndarray) -> None:
    """Groups [first, last) of rows of a contiguous x, one after the other."""
    M, K = x_MK.shape
    for g in range(first, last):
        row, count = _group(g, M)
        lay_out(x_MK, row * K, K, count, K // LANES, inputs, row * K)


@kept
def multiply_in_chains(
    w_NK: np.ndarray,
    first: int,
    last: int,
    inputs: np.ndarray,
    out_MN: np.ndarray,
    begin: int,
    num_rows: int,
    panel: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Rows [first, last) of w, a multiple of WEIGHT_ROWS, times the `num_rows` rows of x in `inputs`, into columns of
    `out_MN` from `begin` + `first` on. `panel` and `sums` are used anew for each CHUNK_ROWS."""
    K, num_groups = w_NK.shape[1], -(-num_rows // INPUT_ROWS)
    for top in range(first, last, CHUNK_ROWS):
        width = min(CHUNK_ROWS, last - top)
        for k in range(0, K, CHAIN_INPUTS):
            num_inputs = min(CHAIN_INPUTS, K - k)
            steps = num_inputs // LANES
            for n in range(0, width, WEIGHT_ROWS):
                lay_out(w_NK, (top + n) * K + k, K, WEIGHT_ROWS, steps, panel, n * num_inputs)
            for g in range(num_groups):
                row, count = _group(g, num_rows)
                x_at = row * K + k * count
                for n in range(0, width, WEIGHT_ROWS):
                    at = row * width + n
                    add_products(panel, n * num_inputs, inputs, x_at, count, steps, sums, at, width, k == 0)
                if k + num_inputs == K:
                    for r in range(row, row + count):
                        for n in range(width):
                            out_MN[r, begin + top + n] = sums[r * width + n]
