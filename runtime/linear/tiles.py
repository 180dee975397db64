"""Products of float32 with bfloat16 weights in the processor's matrix unit, cut into work items for threads.

M rows of x, N of w, K inputs.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from ..kernels.amx.scratch import TILE_DIMS, TILE_ROWS
from ..kernels.arguments import PAIR_ROWS, aligned_zeros
from ..shared_work import Spares
from .panels import Block
from .work_items import Target, WorkItem, Workspace, fit_kernel, in_runs_of_rows, room_for_inputs, run_work_items

PART_BYTES = 6  # three bfloat16 for each float32


@cache
def tiles_shape() -> np.ndarray:
    """That of all eight, as Intel's manual has it under LDTILECFG."""
    shape = aligned_zeros((64,), np.uint8)
    shape[0], shape[16:32].view(np.uint16)[:], shape[48:56] = 1, 64, TILE_ROWS
    return shape


@cache
def _spares() -> Spares[Workspace]:
    return Spares()


def fit_tiles(x_MK: torch.Tensor, blocks: Sequence[Block]) -> bool:
    """Whether `multiply_in_tiles` takes these blocks of rows of w, where there is a matrix unit."""
    return x_MK.dtype is torch.float32 and fit_kernel(x_MK, blocks, {torch.bfloat16}, TILE_DIMS, packed=False)


def multiply_in_tiles(x_MK: torch.Tensor, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """x @ w.T of the blocks of w below each other: (M, N), as precise as in float32."""
    return multiply_all_in_tiles(x_MK, [blocks])[0]


def multiply_all_in_tiles(x_MK: torch.Tensor, weights: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """That of several weights, for which x is laid out once."""
    return in_runs_of_rows(x_MK, weights, _multiply, words=torch.float32, number_bytes=PART_BYTES)


def _multiply(x_MK: np.ndarray, targets: Sequence[Target]) -> None:
    """All but the rows of w behind the last pair of tiles. numba takes 0.2 s to import."""
    from ..kernels.amx.linear import CHUNK_ROWS, PANEL_NUMBERS, lay_out_inputs, linear, num_sums

    num_rows = x_MK.shape[0]
    num_tiles = -(-num_rows // TILE_ROWS)
    tiles = room_for_inputs(num_tiles * TILE_ROWS * x_MK.shape[1] * PART_BYTES // 4)

    def lay_out_some(span: tuple[int, int]) -> None:
        lay_out_inputs(x_MK, *span, tiles)

    def multiply_some(item: WorkItem) -> None:
        (words, out, column), first, last = item
        own = _spares().take(lambda: Workspace.make(PANEL_NUMBERS, np.uint16)).with_room(num_sums(num_rows))
        (words_NK,) = words.arguments
        linear(words_NK, first, last, tiles, out, column, out.shape[1], num_rows, *own, tiles_shape())
        _spares().give_back(own)

    run_work_items(x_MK, targets, TILE_ROWS, CHUNK_ROWS, lay_out_some, multiply_some)


def prepare_tiles() -> None:
    multiply_in_tiles(torch.zeros(1, TILE_DIMS), [torch.zeros(PAIR_ROWS, TILE_DIMS, dtype=torch.bfloat16)])
