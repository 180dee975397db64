"""Splits products x @ w.T for compiled kernels: rows of x into batches that fit a buffer, rows of w into parts whose
scratch memory is limited, and into items for threads.

w is given as blocks of rows (see `blocks.py`), plain or quantized. Kernels multiply the largest multiple of PAIR_ROWS
rows of a block. Torch multiplies the remaining rows, called the tail.

M rows of x of W words (float32, or pairs of bfloat16), N rows of w, K inputs.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple, cast

import numpy as np
import torch

from ..attention.host_attention import BITS
from ..kernels.arguments import PAIR_ROWS, TILE_ROWS, aligned_zeros
from ..plan.placement.memory import PACKED_INPUT_BYTES
from ..shared_work import parallel_for
from ..units import round_down, round_up
from .blocks import Block, float_rows
from .rows import KernelRows, KernelWeights

ITEMS_PER_THREAD = 4  # with several, threads wait only shortly for the one with the last item
INPUT_BYTES = PACKED_INPUT_BYTES  # most bytes of the input buffer, as planned; each batch of x reads all weights again
MIN_WEIGHTS = 1 << 16  # numbers of w; with fewer, a kernel call takes longer than the product
SCRATCH_BYTES = 4 << 20  # most bytes of scratch memory for weights at a time: expanded zero points and factors
SHARED_INPUTS = 1 << 18  # numbers of x, laid out in 0.1 ms; with fewer, waking a thread takes longer


class ProductTarget(NamedTuple):
    """Rows of w as kernel arguments, and their output: columns of `out_MN` from `column` on."""

    weights: KernelWeights
    out_MN: np.ndarray
    column: int


Multiply = Callable[[np.ndarray, Sequence[ProductTarget]], None]  # multiplies x (M, W) by the weights of all targets


class Workspace(NamedTuple):
    """Scratch memory of a thread: `panel` for converted rows of w, and `sums` of products, float32."""

    panel: np.ndarray
    sums: np.ndarray

    @classmethod
    def make(cls, panel_numbers: int, dtype: type) -> "Workspace":
        return cls(aligned_zeros((panel_numbers,), dtype), np.zeros(0, np.float32))

    def with_sums(self, num_sums: int) -> "Workspace":
        """Returns a workspace for at least `num_sums` sums: this one, or a new one with the same panel."""
        return self if len(self.sums) >= num_sums else Workspace(self.panel, aligned_zeros((num_sums,), np.float32))


_input_buffers = [np.zeros(0, np.uint32)]  # x in the kernel's layout; not thread-safe: only the engine's thread uses it


def input_buffer(num_words: int) -> np.ndarray:
    """Returns an uninitialized uint32 buffer. It is reused, so it is valid until the next call."""
    if len(_input_buffers[0]) < num_words:
        _input_buffers[0] = aligned_zeros((num_words,), np.uint32)
    return _input_buffers[0]


def fits_kernel(
    x_MK: torch.Tensor, blocks: Sequence[Block], dtypes: Collection[torch.dtype], step_inputs: int, *, packed: bool
) -> bool:
    """True if a kernel supports this product. Tensors must be in host memory. w must have at least MIN_WEIGHTS
    numbers, and K must be a multiple of `step_inputs`. Plain blocks must be contiguous and all of the same dtype, one
    of `dtypes`. `packed`: True if the kernel also supports KernelRows."""
    num_rows, num_inputs = x_MK.shape
    if not x_MK.is_cpu or num_inputs % step_inputs or not num_rows:
        return False
    num_weights, dtype = 0, next((block.dtype for block in blocks if isinstance(block, torch.Tensor)), None)
    for block in blocks:
        if isinstance(block, torch.Tensor):
            if block.dtype is not dtype or dtype not in dtypes or block.dim() != 2 or not block.is_contiguous():
                return False
        elif not (packed and isinstance(block, KernelRows)):
            return False
        height, width = block.shape
        if width != num_inputs:
            return False
        num_weights += height * width
    return num_weights >= MIN_WEIGHTS


class _Part(NamedTuple):
    """Adjacent rows of a block, and their output: columns of `out_MN` from `column` on."""

    block: Block
    rows: slice
    out_MN: np.ndarray
    column: int

    @property
    def scratch_bytes(self) -> int:
        """Bytes that `target` allocates."""
        num_rows = self.rows.stop - self.rows.start
        return 0 if isinstance(self.block, torch.Tensor) else cast(KernelRows, self.block).row_scratch_bytes * num_rows

    def target(self) -> ProductTarget:
        if isinstance(self.block, torch.Tensor):
            weights = KernelWeights("linear", self.block.view(BITS[self.block.dtype]).numpy(), len(self.block))
        else:
            weights = cast(KernelRows, self.block).kernel_weights(self.rows)
        return ProductTarget(weights, self.out_MN, self.column)


def _parts(block: Block, out_MN: np.ndarray, column: int) -> Iterator[_Part]:
    """Splits a block into parts that need at most SCRATCH_BYTES each, or have PAIR_ROWS rows."""
    num_rows = block.shape[0]
    row_bytes = 0 if isinstance(block, torch.Tensor) else cast(KernelRows, block).row_scratch_bytes
    step = max(PAIR_ROWS, round_down(SCRATCH_BYTES // row_bytes, PAIR_ROWS)) if row_bytes else max(num_rows, 1)
    for first in range(0, num_rows, step):
        yield _Part(block, slice(first, min(first + step, num_rows)), out_MN, column + first)


def product_targets(block: Block, out_MN: np.ndarray, column: int) -> Iterator[ProductTarget]:
    """Yields kernel arguments for the rows of a block, as one or several targets."""
    return (part.target() for part in _parts(block, out_MN, column))


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Yields lists of parts that need at most SCRATCH_BYTES together."""
    batch, num_bytes = list[_Part](), 0
    for part in parts:
        if batch and num_bytes + part.scratch_bytes > SCRATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(part)
        num_bytes += part.scratch_bytes
    yield batch


def multiply_in_batches(
    x_MK: torch.Tensor, weights: Sequence[Sequence[Block]], multiply: Multiply, *, words: torch.dtype, number_bytes: int
) -> list[torch.Tensor]:
    """Returns x @ w.T (M, N), of x's dtype, for each of several weights w. `multiply` gets batches of rows of x that
    fit INPUT_BYTES, and the parts of all weights as targets. `words`: dtype as which it gets x. `number_bytes`: bytes
    per number of x in the input buffer. Torch multiplies the tails: the last N % PAIR_ROWS rows of each block."""
    x_MK = x_MK.contiguous()
    num_rows, num_inputs = x_MK.shape
    outs, parts, has_tails = list[torch.Tensor](), list[_Part](), False
    for blocks in weights:
        out_MN = x_MK.new_empty(num_rows, sum(block.shape[0] for block in blocks))
        out, column = out_MN.view(BITS[out_MN.dtype]).numpy(), 0
        outs.append(out_MN)
        for block in blocks:
            parts += _parts(block, out, column)
            column += block.shape[0]
            has_tails = has_tails or block.shape[0] % PAIR_ROWS > 0
    x = x_MK.view(words).numpy()
    max_rows = max(1, INPUT_BYTES // (number_bytes * num_inputs * TILE_ROWS)) * TILE_ROWS
    for batch in _batches(parts):
        targets = [part.target() for part in batch]
        if num_rows <= max_rows:
            multiply(x, targets)
        else:
            for first in range(0, num_rows, max_rows):
                rows = slice(first, first + max_rows)
                multiply(x[rows], [target._replace(out_MN=target.out_MN[rows]) for target in targets])
    for blocks, out_MN in zip(weights, outs, strict=True) if has_tails else ():
        column = 0
        for block in blocks:
            column, num_tail = column + block.shape[0], block.shape[0] % PAIR_ROWS
            if num_tail:
                rows = float_rows(block, slice(block.shape[0] - num_tail, block.shape[0])).to(x_MK.dtype)
                out_MN[:, column - num_tail : column] = torch.mm(x_MK.float(), rows.float().t())
    return outs


@cache
def rows_per_item(height: int, num_threads: int, max_rows: int) -> int:
    """Returns how many of `height` rows of w a thread takes at a time: a multiple of PAIR_ROWS, at most `max_rows`."""
    return min(max_rows, round_up(max(1, height // (ITEMS_PER_THREAD * num_threads)), PAIR_ROWS))


def parallel_for_groups(x: np.ndarray, group_rows: int, act: Callable[[tuple[int, int]], None]) -> None:
    """Calls `act` with ranges (first, last) of groups, in parallel if that is faster. A group is `group_rows` rows of
    x."""
    num_groups = -(-x.shape[0] // group_rows)
    num_threads = torch.get_num_threads() if x.size >= SHARED_INPUTS else 1
    if num_threads == 1:
        act((0, num_groups))
    else:
        width = max(2, -(-num_groups // (2 * num_threads)))
        parallel_for([(g, min(g + width, num_groups)) for g in range(0, num_groups, width)], act, num_threads)
