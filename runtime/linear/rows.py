"""Rows of a quantised matrix as they are stored, and how a run of them becomes numbers.

Shapes: N rows of K numbers, of which R are wanted.
"""

from typing import Protocol

import torch


class Rows(Protocol):
    """A matrix of `shape` (N, K) on `device`. Views into a slot: valid as long as its bytes are."""

    shape: tuple[int, int]
    device: torch.device

    def dequantize(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        """Writes the numbers of some rows, or of the rows with these numbers, in that order. `out_RK`: float32,
        contiguous. Allocates a few bytes for each number of them, freed on return."""
        ...
