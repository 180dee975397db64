"""What rows have in common that the vectors decode inside of a product: `kernels/packed.py` says in which ways.

N rows of K numbers, of which R are wanted.
"""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from ..kernels.compiler import has_compiler
from .rows import Words

ALL_COLUMNS = 31  # a shift by which every column is in the first group


class Layout(NamedTuple):
    """What `kernels.packed.as_packed` wants to know, in its order. `base` is of window4; `num_groups` of a row, and the
    shift of a column to its group, of codes; see `kernels.packed.Packed` and `kernels.grouped.Groups` for the rest."""

    way: int
    num_rows: int
    num_columns: int
    group_bytes: int = 0
    apart: int = 0
    base: int = 0
    num_groups: int = 0
    shift: int = 0
    is_wide: bool = False


class Arrays(NamedTuple):
    """What goes along with the bytes of rows, flat, as `kernels.packed.as_packed` wants it, in its order."""

    starts: np.ndarray = np.zeros(0, np.uint32)
    columns: np.ndarray = np.zeros(0, np.uint16)
    exponents: np.ndarray = np.zeros(0, np.uint8)
    scales: np.ndarray = np.zeros(0, np.uint16)
    zeros: np.ndarray = np.zeros(0, np.float32)
    factors: np.ndarray = np.zeros(0, np.float32)
    table: np.ndarray = np.zeros(0, np.float32)
    groups: np.ndarray = np.zeros(0, np.int32)


def shift_to_group(num_columns: int, num_groups: int) -> int:
    """Returns that of equal groups whose width is a power of two, or of one group."""
    return ALL_COLUMNS if num_groups == 1 else (num_columns // num_groups).bit_length() - 1


def packed_words(body: np.ndarray, layout: Layout, arrays: Arrays) -> Words:
    return Words("linear_packed", (body, np.array(layout, np.int64), *arrays), layout.num_rows)


class PackedRows(ABC):
    """See `KernelRows`."""

    made_bytes = 0

    def __init__(self, body_NB: torch.Tensor, num_columns: int):
        self._body_NB, self.device = body_NB, body_NB.device
        self.shape = (body_NB.shape[0], num_columns)

    def words(self, rows: slice) -> Words:
        """See `KernelRows`; of all rows."""
        assert rows == slice(0, self.shape[0]), "nothing is made that would have to be made of some rows at a time"
        return self._whole

    @cached_property
    def _whole(self) -> Words:
        return packed_words(self._body_NB.reshape(-1).numpy(), *self._laid_out())

    @abstractmethod
    def _laid_out(self) -> tuple[Layout, Arrays]:
        """How the rows lie; the device is a CPU."""

    @abstractmethod
    def decode(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        """What `dequantize` does, by plain operators, none of which has the host wait for a device."""

    def dequantize(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        """See `Rows`."""
        if isinstance(rows, slice) and rows.step is None and self.device.type == "cpu" and has_compiler():
            from ..kernels.packed import unpack_rows  # numba takes 0.2 s to import

            arguments: tuple[Any, ...] = (*self._whole.arguments, rows.start or 0, out_RK.numpy())
            unpack_rows(*arguments)
        else:
            self.decode(rows, out_RK)
