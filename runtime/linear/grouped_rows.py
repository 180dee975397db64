"""Rows of codes that others have published, which the vectors decode inside of a product: in rows, where those of
neighbouring columns lie side by side, or in columns, in words of 32 bits.

N rows of K numbers, R of them; G groups of columns.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

from ..kernels.arguments import BYTES, GROUP_NUMBERS, ROW_WORDS, SIGNED_BYTES
from ..kernels.arguments import SCALED_FLOAT8 as SCALED_FLOAT8
from .packed_rows import Arrays, Layout, packed_words, shift_to_group
from .rows import Rows, Words

LEAST_WIDTH = 16  # columns that share a factor: a vector's
WIDE = 8  # columns that a step of codes in columns takes at once
ROWS_OF_WORD = 8  # rows whose codes are in one word of ROW_WORDS
IN_BYTES = (BYTES, SIGNED_BYTES, SCALED_FLOAT8)
Shared = tuple[torch.Tensor | None, torch.Tensor]  # zero points and factors: (R, G) float32, or (1, 1) for all alike
SharedOf = Callable[[slice], Shared]


class GroupedRows:
    """See `KernelRows`. What the vectors do not take goes by `plain`, whose numbers are the same to the bit."""

    def __init__(self, plain: Rows, num_groups: int, shared_of: SharedOf):
        self.shape, self.device, self.dequantize = plain.shape, plain.device, plain.dequantize
        self.codes = plain.codes
        self._num_groups, self._shared_of = num_groups, shared_of
        self.made_bytes = 2 * 4 * num_groups

    def _filled(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Zero points and factors of a run of rows, (R, G) each, however many there are of them."""
        zeros, factors = self._shared_of(rows)
        shape = (rows.stop - rows.start, self._num_groups)
        factors = factors.float().expand(shape)
        return factors if zeros is None else zeros.float().expand(shape), factors


class RowCodes(GroupedRows):
    def __init__(
        self,
        plain: Rows,
        raw_NB: torch.Tensor,
        way: int,
        num_groups: int,
        shared_of: SharedOf,
        table: torch.Tensor | None = None,
    ):
        """`table`: 16 numbers, of IN_TABLE."""
        super().__init__(plain, num_groups, shared_of)
        self._raw_NB, self._way, self._table = raw_NB, way, table

    def words(self, rows: slice) -> Words:
        """See `KernelRows`."""
        (zeros, factors), num_columns = self._filled(rows), self.shape[1]
        arrays = Arrays(
            zeros=_flat(zeros),
            factors=_flat(factors),
            table=np.zeros(16, np.float32) if self._table is None else _flat(self._table.float()),
        )
        layout = Layout(
            self._way,
            rows.stop - rows.start,
            num_columns,
            GROUP_NUMBERS if self._way in IN_BYTES else GROUP_NUMBERS // 2,
            num_groups=self._num_groups,
            shift=shift_to_group(num_columns, self._num_groups),
        )
        return packed_words(self._raw_NB[rows].reshape(-1).numpy(), layout, arrays)


class ColumnCodes(GroupedRows):
    def __init__(
        self,
        plain: Rows,
        words_WN: torch.Tensor,
        way: int,
        first_row: int,
        num_groups: int,
        shared_of: SharedOf,
        width: int,
        groups: torch.Tensor | None = None,
    ):
        """`words_WN`: int32, (W, N) or of ROW_WORDS (K, N / 8), in which these rows begin at `first_row`; `width`: the
        columns of a group; `groups` (K,): the group of each column, where they do not lie in turn."""
        super().__init__(plain, num_groups, shared_of)
        self._words_WN, self._way, self._first_row, self._width, self._groups = words_WN, way, first_row, width, groups

    def words(self, rows: slice) -> Words:
        """See `KernelRows`."""
        zeros, factors = self._filled(rows)
        groups = self._groups_of_columns()
        at = self._first_row + rows.start
        body = self._words_WN.reshape(-1)[at // ROWS_OF_WORD if self._way == ROW_WORDS else at :]
        layout = Layout(
            self._way,
            rows.stop - rows.start,
            self.shape[1],
            apart=4 * self._words_WN.shape[1],
            is_wide=self._groups is None and self._width % WIDE == 0,
        )
        arrays = Arrays(zeros=_flat(zeros.t()), factors=_flat(factors.t()), groups=groups)
        return packed_words(body.view(torch.uint8).numpy(), layout, arrays)

    def _groups_of_columns(self) -> np.ndarray:
        if self._groups is None:
            return groups_in_turn(self.shape[1], self._width)
        return self._groups.int().numpy()


def fits_in_rows(shape: tuple[int, int], device: torch.device, num_groups: int) -> bool:
    """Whether RowCodes are for such rows: runs of whole vectors, in groups of a power of two."""
    width, rest = divmod(shape[1], num_groups) if num_groups else (0, 1)
    is_grouped = num_groups == 1 or (not rest and width >= LEAST_WIDTH and width.bit_count() == 1)
    return device.type == "cpu" and shape[1] % GROUP_NUMBERS == 0 and is_grouped


def fits_in_columns(shape: tuple[int, int], device: torch.device, way: int, first_row: int) -> bool:
    """Whether ColumnCodes are for such rows."""
    is_aligned = way != ROW_WORDS or first_row % ROWS_OF_WORD == 0
    return device.type == "cpu" and shape[1] % GROUP_NUMBERS == 0 and is_aligned


@lru_cache(maxsize=8)
def groups_in_turn(num_columns: int, width: int) -> np.ndarray:
    """The group of each column."""
    return np.arange(num_columns, dtype=np.int32) // np.int32(width)


def _flat(matrix: torch.Tensor) -> np.ndarray:
    return matrix.contiguous().view(-1).numpy()
