"""Stored weights as plain numbers in a device's memory, all rows of them at once.

A CPU dequantizes a few rows at a time into its cache, inside of the product. On a device each operator is a launch that
takes the host ten microseconds, and caches hold little: there a matrix, or a run of experts, is dequantized whole by a
handful of launches, so many numbers at a time that launching them is little beside what they move.

Shapes: E matrices of n rows of K numbers; M rows of x, N of all blocks.
"""

from collections.abc import Iterator, Sequence

import torch

from ..plan.placement.memory import DEQUANTIZED_AT_ONCE
from .panels import Block, panels


def experts_at_once(out_EnK: torch.Tensor) -> Iterator[range]:
    """Yields as many matrices at a time as are dequantized together."""
    num_matrices, *size = out_EnK.shape
    step = max(1, DEQUANTIZED_AT_ONCE // max(1, size[0] * size[1]))
    return (range(first, min(first + step, num_matrices)) for first in range(0, num_matrices, step))


def dequantize(block: Block, out_EnK: torch.Tensor) -> None:
    """Writes all rows of a block, those of one matrix or of as many as `experts_at_once` says below each other, rounded
    once to the dtype of `out_EnK`. Takes up to `DEQUANTIZING_BYTES` beside it."""
    if isinstance(block, torch.Tensor):
        out_EnK.copy_(block.view(out_EnK.shape))
        return
    for row, panel in panels([block], torch.float32, on_device=True):
        target = out_EnK[0, row : row + len(panel)] if len(out_EnK) == 1 else out_EnK  # several come at once
        target.copy_(panel.view(target.shape))


def multiply(x_MK: torch.Tensor, blocks: Sequence[Block]) -> torch.Tensor:
    """Returns x @ w.T (M, N) of blocks of rows of w, those that are stored otherwise dequantized on the way."""
    out_MN = x_MK.new_empty(len(x_MK), sum(block.shape[0] for block in blocks))
    for row, panel in panels(blocks, x_MK.dtype, on_device=True):
        torch.mm(x_MK, panel.t(), out=out_MN[:, row : row + panel.shape[0]])
    return out_MN
