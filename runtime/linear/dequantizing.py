"""Stored weights as plain numbers in a device's memory, all rows of them at once.

A CPU dequantizes a few rows at a time into its cache, inside of the product. On a device each operator is a launch that
takes the host ten microseconds, and caches hold little: there a matrix, or a run of experts, is dequantized whole by a
handful of launches, so many numbers at a time that launching them is little beside what they move.

Shapes: E matrices of n rows of K numbers; M rows of x, N of all blocks.
"""

from collections.abc import Iterator, Sequence

import torch

from ..plan.placement.memory import DEQUANTIZED_AT_ONCE
from . import device_codes
from .codes import Codes
from .panels import Block, panels

MOST_KERNEL_ROWS = 1024  # of x


def experts_at_once(out_EnK: torch.Tensor) -> Iterator[range]:
    """Yields as many matrices at a time as are dequantized together."""
    num_matrices, *size = out_EnK.shape
    step = max(1, DEQUANTIZED_AT_ONCE // max(1, size[0] * size[1]))
    return (range(first, min(first + step, num_matrices)) for first in range(0, num_matrices, step))


def dequantize(block: Block, out_EnK: torch.Tensor) -> None:
    """Writes all rows of a block, those of one matrix or of as many as `experts_at_once` says below each other, rounded
    once to the dtype of `out_EnK`: by a kernel of the device, or by operators that take up to `DEQUANTIZING_BYTES`
    beside it."""
    if isinstance(block, torch.Tensor):
        out_EnK.copy_(block.view(out_EnK.shape))
        return
    if device_codes.try_decode(block, out_EnK):
        return
    for row, panel in panels([block], torch.float32, on_device=True):
        target = out_EnK[0, row : row + len(panel)] if len(out_EnK) == 1 else out_EnK  # several come at once
        target.copy_(panel.view(target.shape))


def multiply(x_MK: torch.Tensor, blocks: Sequence[Block], codes: Sequence[Codes] = ()) -> torch.Tensor:
    """Returns x @ w.T (M, N) of blocks of rows of w, those that are stored otherwise dequantized on the way. `codes`:
    those of all blocks, where a kernel of the device multiplies them; each run of a hundred rows decodes them anew, so
    that it takes no more than so many."""
    if codes and len(x_MK) <= MOST_KERNEL_ROWS:
        outs = [device_codes.multiply(x_MK, each) for each in codes]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
    out_MN = x_MK.new_empty(len(x_MK), sum(block.shape[0] for block in blocks))
    for row, panel in panels(blocks, x_MK.dtype, on_device=True):
        torch.mm(x_MK, panel.t(), out=out_MN[:, row : row + panel.shape[0]])
    return out_MN
