"""Products of float32 with bfloat16 weights, both rounded to int8 on their way into the processor's matrix unit.

M rows of x, N of w, K inputs.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from ..kernels.compiler import has_matrix_unit
from ..kernels.tile_scratch import PAIR_ROWS, TILE_DIMS, TILE_ROWS, aligned_zeros
from ..linear.pieces import Piece, Target, in_pieces, in_runs_of_rows, room_for_inputs
from ..linear.tile_products import fit_tiles, tiles_shape
from ..shared_work import Spares
from ..units import KIB, round_down, round_up

STEP_INPUTS = 2 * TILE_DIMS  # int8 in a row of a tile
PANEL_BYTES = 512 * KIB  # of w as int8, or a pair of tiles: it stays in the second cache beside rows of x
MOST_INPUTS = round_down((2**31 - 1) // 127**2, STEP_INPUTS)  # more might not fit in a sum of 32 bits


class _Panel:
    """A thread's own: rows of w as int8, their scales, and sums of products."""

    def __init__(self, num_rows: int, num_inputs: int):
        from ..kernels.int8_kernel import NUM_SUMS  # numba takes 0.2 s to import

        self.words = aligned_zeros((num_rows * num_inputs // 4,), np.uint32)
        self.scales_N = aligned_zeros((num_rows,), np.float32)
        self.sums = aligned_zeros((NUM_SUMS,), np.int32)


@cache
def _panels(num_rows: int, num_inputs: int) -> Spares[_Panel]:
    return Spares()


@cache
def has_int8_unit() -> bool:
    """Whether there is a matrix unit for int8, and a compiler for it, which this loads."""
    if not has_matrix_unit():
        return False
    from ..kernels.tile_unit import has_int8_tiles

    return has_int8_tiles()


def fit_int8(x_MK: torch.Tensor, blocks: Sequence[object]) -> bool:
    """Whether `multiply_in_int8` takes these blocks of rows of w, where there is an `has_int8_unit`."""
    return fit_tiles(x_MK, blocks) and fits_inputs(x_MK.shape[1])


def fits_inputs(num_inputs: int) -> bool:
    return num_inputs % STEP_INPUTS == 0 and num_inputs <= MOST_INPUTS


def multiply_in_int8(x_MK: torch.Tensor, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """x @ w.T of the blocks of w below each other: (M, N), each row of x and of w rounded to multiples of 1/127 of its
    largest number."""
    return in_runs_of_rows(x_MK, [blocks], 1, _multiply)[0]


def _multiply(x_MK: np.ndarray, targets: Sequence[Target]) -> None:
    """All but the rows of w behind the last pair of tiles."""
    from ..kernels.int8_kernel import multiply_rounded, round_rows

    num_rows, num_inputs = x_MK.shape
    num_places = round_up(num_rows, TILE_ROWS)
    tiles = room_for_inputs(num_places * num_inputs // 4)
    scales_M, factors_M = (np.empty(num_places, np.float32) for _ in range(2))
    height = max(PAIR_ROWS, round_down(PANEL_BYTES // num_inputs, PAIR_ROWS))
    spares = _panels(height, num_inputs)

    def round_some(span: tuple[int, int]) -> None:
        round_rows(x_MK, *span, tiles, scales_M, factors_M)

    def multiply_some(piece: Piece) -> None:
        (words_NK, out, column), first, last = piece
        panel = spares.take(lambda: _Panel(height, num_inputs))
        own = (panel.words, panel.scales_N, panel.sums, tiles_shape())
        multiply_rounded(words_NK, first, last, tiles, scales_M, out, column, out.shape[1], num_rows, *own)
        spares.give_back(panel)

    in_pieces(x_MK, targets, TILE_ROWS, height, round_some, multiply_some)


def prepare_int8_products() -> None:
    """Loads, and at the first time compiles, the kernel, so that no pass takes its time and memory."""
    multiply_in_int8(torch.zeros(1, STEP_INPUTS), [torch.zeros(PAIR_ROWS, STEP_INPUTS, dtype=torch.bfloat16)])
