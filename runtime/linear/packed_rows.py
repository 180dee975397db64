"""What rows have in common that the vectors decode inside of a product: `kernels/packed.py` says in which ways.

N rows of K numbers, of which R are wanted.
"""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from ..kernels.compiler import has_compiler
from .rows import Words

NONE = tuple(np.zeros(0, dtype) for dtype in (np.uint32, np.uint16, np.uint8, np.uint16))


class Layout(NamedTuple):
    """What `kernels.packed.as_packed` wants to know, in its order."""

    way: int
    group_bytes: int
    base: int = 0
    num_groups: int = 0
    shift: int = 0


class PackedRows(ABC):
    """See `KernelRows`."""

    def __init__(self, body_NB: torch.Tensor, num_columns: int):
        self._body_NB, self.device = body_NB, body_NB.device
        self.shape = (body_NB.shape[0], num_columns)

    @cached_property
    def words(self) -> Words:
        """See `KernelRows`."""
        return self._words()

    @abstractmethod
    def _words(self) -> Words:
        """The rows as a kernel takes them; the device is a CPU."""

    @abstractmethod
    def decode(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        """What `dequantize` does, by plain operators, none of which has the host wait for a device."""

    def dequantize(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        """See `Rows`."""
        if isinstance(rows, slice) and rows.step is None and self.device.type == "cpu" and has_compiler():
            from ..kernels.packed import unpack_rows  # numba takes 0.2 s to import

            body, layout, starts, columns, exponents, scales = self.words.arguments
            unpack_rows(body, layout, starts, columns, exponents, scales, rows.start or 0, out_RK.numpy())
        else:
            self.decode(rows, out_RK)

    def _laid_out(
        self,
        layout: Layout,
        starts: np.ndarray = NONE[0],
        columns: np.ndarray = NONE[1],
        exponents: np.ndarray = NONE[2],
        scales: np.ndarray = NONE[3],
    ) -> Words:
        arguments = (self._body_NB.numpy(), np.array(layout), starts, columns, exponents, scales)
        return Words("linear_packed", arguments, self.shape[0])
