"""Products of float32 with bfloat16 weights in the processor's matrix unit, cut into pieces for threads.

M rows of x, N of w, K inputs.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch

from ..kernels.tile_scratch import PAIR_ROWS, TILE_DIMS, TILE_ROWS, aligned_zeros
from ..plan.memory import LAID_OUT_BYTES
from ..units import round_down, round_up
from .shared_work import share

PIECES_PER_THREAD = 4  # so that nobody waits long for the last piece
INPUT_BYTES = LAID_OUT_BYTES  # of x in tiles, at most, as the ledger has it: for more rows weights pass by once more
_NOTHING = np.zeros(0, np.float32)
PART_BYTES = 6  # three bfloat16 for each float32
LEAST_WEIGHTS = 1 << 16  # below it, calls take longer than products
SHARED_INPUTS = 1 << 18  # take 0.1 ms to split: below it, to wake a thread takes longer

Multiply = Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor], None]  # x (M, K), w, out (M, N)


class Piece(NamedTuple):
    """Rows [first, last) of a block of w, bits of bfloat16, which begins at a column of the result."""

    words_NK: np.ndarray
    first: int
    last: int
    column: int


class _Workspace(NamedTuple):
    """A thread's own: rows of w in tiles, and sums of products."""

    panel: np.ndarray
    sums: np.ndarray


class _Scratch:
    """Reused memory: x in tiles, and what each piece that is under way needs. Owned by the engine's one thread."""

    def __init__(self) -> None:
        self._words = np.zeros(0, np.uint32)
        self._idle: list[_Workspace] = []
        self.shape = aligned_zeros((64,), np.uint8)  # of all eight tiles, as Intel's manual has it under LDTILECFG
        self.shape[0], self.shape[16:32].view(np.uint16)[:], self.shape[48:56] = 1, 64, TILE_ROWS

    def tiles(self, num_words: int) -> np.ndarray:
        """Valid until the next call."""
        if len(self._words) < num_words:
            self._words = aligned_zeros((num_words,), np.uint32)
        return self._words

    def take(self, panel_numbers: int, num_sums: int) -> "_Workspace":
        own = self._idle.pop() if self._idle else _Workspace(aligned_zeros((panel_numbers,), np.uint16), _NOTHING)
        return own if len(own.sums) >= num_sums else _Workspace(own.panel, aligned_zeros((num_sums,), np.float32))

    def give_back(self, own: "_Workspace") -> None:
        self._idle.append(own)


@cache
def tile_scratch() -> _Scratch:
    return _Scratch()


def fit_tiles(x_MK: torch.Tensor, blocks: Sequence[object]) -> bool:
    """Whether `multiply_in_tiles` takes these blocks of rows of w, where there is a matrix unit."""
    if x_MK.dtype != torch.float32 or x_MK.device.type != "cpu" or x_MK.shape[1] % TILE_DIMS or not len(x_MK):
        return False
    are_plain = all(
        isinstance(block, torch.Tensor) and block.dtype == torch.bfloat16 and block.is_contiguous() for block in blocks
    )
    return are_plain and sum(block.numel() for block in blocks if isinstance(block, torch.Tensor)) >= LEAST_WEIGHTS


def multiply_in_tiles(x_MK: torch.Tensor, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """x @ w.T of the blocks of w below each other: (M, N), as precise as in float32."""
    return in_runs_of_rows(x_MK, blocks, PART_BYTES, _multiply)


def in_runs_of_rows(
    x_MK: torch.Tensor, blocks: Sequence[torch.Tensor], number_bytes: int, multiply: Multiply
) -> torch.Tensor:
    """As many rows of x at a time as `INPUT_BYTES` hold; the rows of w behind the last pair of tiles go by torch."""
    x_MK = x_MK.contiguous()
    out_MN = x_MK.new_empty(len(x_MK), sum(map(len, blocks)))
    most = max(1, INPUT_BYTES // (number_bytes * x_MK.shape[1] * TILE_ROWS)) * TILE_ROWS
    for rows_MK, out_rows_MN in zip(x_MK.split(most), out_MN.split(most), strict=True):
        multiply(rows_MK, blocks, out_rows_MN)
    column = 0
    for block in blocks:
        column, whole = column + len(block), round_down(len(block), PAIR_ROWS)
        if whole < len(block):
            torch.mm(x_MK, block[whole:].float().t(), out=out_MN[:, column - len(block) + whole : column])
    return out_MN


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
        own = scratch.take(PANEL_NUMBERS, num_sums(num_rows))
        multiply(words_NK, first, last, tiles, out, column, out.shape[1], num_rows, *own, scratch.shape)
        scratch.give_back(own)

    share_tiles(x_MK, split_some)
    share(pieces_of(blocks, CHUNK_ROWS), multiply_some, num_threads)


def share_tiles(x_MK: torch.Tensor, act: Callable[[tuple[int, int]], None]) -> None:
    """Runs of tiles of 16 rows."""
    num_threads, num_tiles = torch.get_num_threads(), -(-len(x_MK) // TILE_ROWS)
    width = max(2, -(-num_tiles // (2 * num_threads)))
    spans = [(t, min(t + width, num_tiles)) for t in range(0, num_tiles, width)]
    share(spans, act, num_threads if x_MK.numel() >= SHARED_INPUTS else 1)


def pieces_of(blocks: Sequence[torch.Tensor], most_rows: int) -> list[Piece]:
    """All but the rows behind the last pair of tiles."""
    pieces, column, num_threads = list[Piece](), 0, torch.get_num_threads()
    for block in blocks:
        words_NK, whole = block.view(torch.uint16).numpy(), round_down(len(block), PAIR_ROWS)
        height = min(most_rows, round_up(max(1, whole // (PIECES_PER_THREAD * num_threads)), PAIR_ROWS))
        pieces += [Piece(words_NK, row, min(row + height, whole), column) for row in range(0, whole, height)]
        column += len(block)
    return pieces


@cache
def has_matrix_unit() -> bool:
    """Whether there is one, and a compiler for it, which this loads."""
    if find_spec("numba") is None:
        return False
    from ..kernels.tile_unit import may_use_tiles

    return may_use_tiles()


def prepare_products() -> None:
    """Loads, and at the first time compiles, the kernel, so that no pass takes its time and memory."""
    if has_matrix_unit():
        multiply_in_tiles(torch.zeros(1, TILE_DIMS), [torch.zeros(PAIR_ROWS, TILE_DIMS, dtype=torch.bfloat16)])
