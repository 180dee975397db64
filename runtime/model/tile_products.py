"""Products of float32 with bfloat16 weights in the processor's matrix unit, cut into pieces for threads.

M rows of x, N of w, K inputs.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from ..kernels.tile_scratch import PAIR_ROWS, TILE_DIMS, TILE_ROWS, aligned_zeros
from .pieces import Piece, fit_kernel, has_compiler, in_runs_of_rows, pieces_of, share_layout
from .shared_work import Spares, share

NOTHING = np.zeros(0, np.float32)
PART_BYTES = 6  # three bfloat16 for each float32


class Workspace(NamedTuple):
    """A thread's own: rows of w laid out or widened, and sums of products."""

    panel: np.ndarray
    sums: np.ndarray

    def with_room(self, num_sums: int) -> "Workspace":
        return self if len(self.sums) >= num_sums else Workspace(self.panel, aligned_zeros((num_sums,), np.float32))


class _Scratch:
    """Reused memory: x laid out, and what each piece that is under way needs. Owned by the engine's one thread."""

    def __init__(self) -> None:
        self._words = np.zeros(0, np.uint32)
        self.spares = Spares[Workspace]()
        self.shape = aligned_zeros((64,), np.uint8)  # of all eight tiles, as Intel's manual has it under LDTILECFG
        self.shape[0], self.shape[16:32].view(np.uint16)[:], self.shape[48:56] = 1, 64, TILE_ROWS

    def tiles(self, num_words: int) -> np.ndarray:
        """Valid until the next call."""
        if len(self._words) < num_words:
            self._words = aligned_zeros((num_words,), np.uint32)
        return self._words


@cache
def tile_scratch() -> _Scratch:
    return _Scratch()


def fit_tiles(x_MK: torch.Tensor, blocks: Sequence[object]) -> bool:
    """Whether `multiply_in_tiles` takes these blocks of rows of w, where there is a matrix unit."""
    return fit_kernel(x_MK, blocks, {torch.bfloat16}, TILE_DIMS)


def multiply_in_tiles(x_MK: torch.Tensor, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """x @ w.T of the blocks of w below each other: (M, N), as precise as in float32."""
    return in_runs_of_rows(x_MK, blocks, PART_BYTES, _multiply)


def _multiply(x_MK: torch.Tensor, blocks: Sequence[torch.Tensor], out_MN: torch.Tensor) -> None:
    """All but the rows of w behind the last pair of tiles. numba takes 0.2 s to import."""
    from ..kernels.product_kernel import CHUNK_ROWS, PANEL_NUMBERS, multiply, num_sums, split

    scratch, num_threads = tile_scratch(), torch.get_num_threads()
    x, out, num_rows = x_MK.numpy(), out_MN.numpy(), len(x_MK)
    num_tiles = -(-num_rows // TILE_ROWS)
    tiles = scratch.tiles(num_tiles * TILE_ROWS * x_MK.shape[1] * PART_BYTES // 4)

    def split_some(span: tuple[int, int]) -> None:
        split(x, *span, tiles)

    def multiply_some(piece: Piece) -> None:
        words_NK, first, last, column = piece
        own = scratch.spares.take(lambda: Workspace(aligned_zeros((PANEL_NUMBERS,), np.uint16), NOTHING))
        own = own.with_room(num_sums(num_rows))
        multiply(words_NK, first, last, tiles, out, column, out.shape[1], num_rows, *own, scratch.shape)
        scratch.spares.give_back(own)

    share_layout(x_MK, TILE_ROWS, split_some)
    share(pieces_of(blocks, CHUNK_ROWS), multiply_some, num_threads)


@cache
def has_matrix_unit() -> bool:
    """Whether there is one, and a compiler for it, which this loads."""
    if not has_compiler():
        return False
    from ..kernels.tile_unit import may_use_tiles

    return may_use_tiles()


def prepare_tiles() -> None:
    multiply_in_tiles(torch.zeros(1, TILE_DIMS), [torch.zeros(PAIR_ROWS, TILE_DIMS, dtype=torch.bfloat16)])
