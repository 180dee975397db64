"""Rows of a quantised matrix as they are stored, and how a run of them becomes numbers.

Shapes: N rows of K numbers, of which R are wanted.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from .codes import Codes


class Rows(Protocol):
    """A matrix of `shape` (N, K) on `device`. Views into a slot: valid as long as its bytes are."""

    shape: tuple[int, int]
    device: torch.device

    def dequantize(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        """Writes the numbers of some rows, or of the rows with these numbers, in that order. `out_RK`: float32,
        contiguous. Allocates a few bytes for each number of them, freed on return."""
        ...

    def codes(self) -> Codes | None:
        """How they lie, for kernels of an accelerator; None for what these do not take."""
        ...


class Words(NamedTuple):
    """Rows as the kernel for vectors of that name takes them: what it is given for them before all else."""

    kernel: str
    arguments: tuple[Any, ...]  # arrays and numbers
    num_rows: int


@runtime_checkable
class KernelRows(Rows, Protocol):
    """Rows that a kernel decodes inside of the product. `made_bytes`: what `words` makes for each row, beside views."""

    made_bytes: int

    def words(self, rows: slice) -> Words:
        """A run of them, from a multiple of 32 on, that is valid as long as the rows are; all of them where nothing is
        made. On a CPU only."""
        ...
