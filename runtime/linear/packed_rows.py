"""Rows that the CPU's vector kernels decode inside a product (`kernels/packed.py`). Packed rows hold codes instead of
numbers; a group of columns shares a scale, also called factor, and a zero point.

`CodedRows`: codes that `weightstream pack` writes, with a bfloat16 scale per row or per group of columns. int8 and FP8
(E4M3) take a byte per code. int4 takes half a byte, and codes are stored with 8 added. CODE_RUN = 32 adjacent int4
codes take 16 bytes: the first 16 codes are in the low nibbles, the other 16 in the high nibbles. Code times scale is
exact in float32.

`GroupedRows`: codes in formats of published checkpoints, either row by row (`RowCodes`), or in 32-bit words of
neighboring columns or rows (`ColumnCodes`).

Unlike a group of columns, which shares a scale, a run is GROUP_NUMBERS = 64 adjacent columns in any format. Kernels
decode run by run.

N rows of K numbers, B bytes per row, W rows of words, R selected rows; G groups of columns.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ..kernels.arguments import (
    BLOCK_NUMBERS,
    BYTES,
    CODE_RUN,
    FLOAT8,
    GROUP_NUMBERS,
    INT4,
    INT4_MIDDLE,
    INT8,
    ROW_WORDS,
    SIGNED_BYTES,
    WORD_ROWS,
    StoredRows,
)
from ..kernels.arguments import SCALED_FLOAT8 as SCALED_FLOAT8
from ..kernels.compiler import has_compiler
from .rows import Codes, KernelWeights, Rows

ALL_COLUMNS = 31  # column >> ALL_COLUMNS is 0: all columns are in group 0


class Layout(NamedTuple):
    """Integer arguments of `kernels.packed.unpack_arguments`, in its order. `base`: see `kernels.packed.Escapes`.
    `num_groups`: groups per row; a column is in group column >> `shift`. `block_bytes` and `word_stride`: see
    `kernels.packed.RowPacking`; `is_wide`: see `kernels.grouped.GroupArrays`."""

    encoding: int
    num_rows: int
    num_columns: int
    block_bytes: int = 0
    word_stride: int = 0
    base: int = 0
    num_groups: int = 0
    shift: int = 0
    is_wide: bool = False


class Arrays(NamedTuple):
    """Flat array arguments of `kernels.packed.unpack_arguments`, in its order. An encoding uses only some of them; for
    their meaning see `kernels.arguments.StoredRows`."""

    starts: np.ndarray = np.zeros(0, np.uint32)
    columns: np.ndarray = np.zeros(0, np.uint16)
    exponents: np.ndarray = np.zeros(0, np.uint8)
    scales: np.ndarray = np.zeros(0, np.uint16)
    zeros: np.ndarray = np.zeros(0, np.float32)
    factors: np.ndarray = np.zeros(0, np.float32)
    table: np.ndarray = np.zeros(0, np.float32)
    groups: np.ndarray = np.zeros(0, np.int32)
    order: np.ndarray = np.zeros(0, np.int32)


def group_shift(num_columns: int, num_groups: int) -> int:
    """Returns the shift from a column to its group, for groups of a power-of-two width or a single group."""
    return ALL_COLUMNS if num_groups == 1 else (num_columns // num_groups).bit_length() - 1


def make_kernel_weights(body: np.ndarray, layout: Layout, arrays: Arrays) -> KernelWeights:
    """Returns the arguments of kernel `linear_packed`; `body`: codes as a flat array."""
    return KernelWeights("linear_packed", StoredRows(body, np.array(layout, np.int64), *arrays), layout.num_rows)


class PackedRows(ABC):
    """Rows whose arrays are all stored in memory in the form that kernels need; see `KernelRows`."""

    row_scratch_bytes = 0

    def __init__(self, body_NB: torch.Tensor, num_columns: int):
        self._body_NB, self.device = body_NB, body_NB.device
        self.shape = (body_NB.shape[0], num_columns)

    def kernel_weights(self, rows: slice) -> KernelWeights:
        """See `KernelRows`. `rows` must be all rows."""
        assert rows == slice(0, self.shape[0]), "needs all rows"
        return self._kernel_weights

    @cached_property
    def _kernel_weights(self) -> KernelWeights:
        return make_kernel_weights(self._body_NB.reshape(-1).numpy(), *self._layout())

    @abstractmethod
    def _layout(self) -> tuple[Layout, Arrays]:
        """Returns kernel arguments for all rows, which must be in host memory."""

    @abstractmethod
    def decode(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        """Same as `dequantize`, but only with torch operators. Does not synchronize with the device."""

    def dequantize(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        """See `Rows`."""
        if isinstance(rows, slice) and rows.step is None and self.device.type == "cpu" and has_compiler():
            from ..kernels.packed import unpack_rows  # numba takes 0.2 s to import

            unpack_rows(self._kernel_weights.stored, rows.start or 0, out_RK.numpy())
        else:
            self.decode(rows, out_RK)


ROUNDED_ENCODINGS = {"int8-rows": INT8, "int4-groups": INT4, "fp8-rows": FLOAT8}  # by name of the storage format
FORMAT_NAMES = {encoding: name for name, encoding in ROUNDED_ENCODINGS.items()}


def code_bytes(encoding: int, num_codes: int) -> int:
    return num_codes // 2 if encoding == INT4 else num_codes


class CodedRows(PackedRows):
    """Rows of INT8, INT4 or FLOAT8 codes with a scale per group of columns."""

    def __init__(self, codes_NB: torch.Tensor, scales_NG: torch.Tensor, encoding: int):
        """Makes rows of codes `codes_NB` (uint8) in `encoding`. `scales_NG`: bfloat16, for groups of equal,
        power-of-two width, or a single group."""
        codes_per_byte = GROUP_NUMBERS // code_bytes(encoding, GROUP_NUMBERS)
        super().__init__(codes_NB, codes_NB.shape[1] * codes_per_byte)
        self._scales_NG, self._encoding = scales_NG, encoding

    def _layout(self) -> tuple[Layout, Arrays]:
        num_groups, block_bytes = self._scales_NG.shape[1], code_bytes(self._encoding, BLOCK_NUMBERS)
        shift = group_shift(self.shape[1], num_groups)
        scales = self._scales_NG.view(torch.int16).numpy().view(np.uint16).reshape(-1)
        layout = Layout(self._encoding, *self.shape, block_bytes, num_groups=num_groups, shift=shift)
        return layout, Arrays(scales=scales)

    def decode(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        codes, scales_RG = self._body_NB[rows], self._scales_NG[rows].float()
        if self._encoding == INT4:
            halves = codes.unflatten(1, (-1, 1, CODE_RUN // 2))
            out = out_RK.view(len(codes), -1, 2, CODE_RUN // 2)
            out.copy_(torch.cat([halves & 15, halves >> 4], dim=2)).sub_(INT4_MIDDLE)
        else:
            out_RK.copy_(codes.view(torch.int8 if self._encoding == INT8 else torch.float8_e4m3fn))
        out_RK.unflatten(1, (scales_RG.shape[1], -1)).mul_(scales_RG[..., None])

    def codes(self) -> Codes:
        """See `Rows`."""
        return Codes(
            encoding=self._encoding,
            shape=self.shape,
            body=self._body_NB[None],
            scales=self._scales_NG[None],
            width=self.shape[1] // self._scales_NG.shape[1],
            zero_offset=INT4_MIDDLE if self._encoding == INT4 else 0,
        )


def zero_rows(num_rows: int) -> CodedRows:
    """Returns rows of GROUP_NUMBERS zeros, with which to compile the kernel before it is needed."""
    codes = torch.zeros(num_rows, GROUP_NUMBERS, dtype=torch.uint8)
    return CodedRows(codes, torch.ones(num_rows, 1, dtype=torch.bfloat16), INT8)


MIN_GROUP_COLUMNS = 16  # fewest columns per group of RowCodes: one vector
STEP_COLUMNS = 8  # columns of ColumnCodes that a kernel decodes with the same zero points, if groups allow it
BYTE_ENCODINGS = (BYTES, SIGNED_BYTES, SCALED_FLOAT8)  # a byte per code; other RowCodes have two codes per byte
# Zero points (None if the format has none) and scales, each (R, G), or (1, 1) if all are equal.
ZerosAndScales = tuple[torch.Tensor | None, torch.Tensor]
GetZerosAndScales = Callable[[slice], ZerosAndScales]  # slice of R rows -> their zero points and scales


class GroupedRows:
    """Codes in a format of published checkpoints; see `KernelRows`. `plain`: the same rows, to dequantize them without
    vector kernels. `get_scales`: returns zero points and factors of rows, which are expanded for each kernel call."""

    def __init__(self, plain: Rows, num_groups: int, get_scales: GetZerosAndScales):
        self.shape, self.device, self.dequantize = plain.shape, plain.device, plain.dequantize
        self.codes = plain.codes
        self._num_groups, self._get_scales = num_groups, get_scales
        self.row_scratch_bytes = 2 * 4 * num_groups  # a zero point and a factor per group, float32

    def _expand_scales(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns zero points and factors of a slice of rows, broadcast to (R, G) each. Without zero points, kernels
        ignore the first tensor."""
        zeros, factors = self._get_scales(rows)
        shape = (rows.stop - rows.start, self._num_groups)
        factors = factors.float().expand(shape)
        return factors if zeros is None else zeros.float().expand(shape), factors


class RowCodes(GroupedRows):
    """Codes stored row by row."""

    def __init__(
        self,
        plain: Rows,
        raw_NB: torch.Tensor,
        encoding: int,
        num_groups: int,
        get_scales: GetZerosAndScales,
        table: torch.Tensor | None = None,
    ):
        """Makes rows of codes `raw_NB`, stored row by row in `encoding`. `table`: the 16 numbers that codes index, for
        TABLE_NIBBLES."""
        super().__init__(plain, num_groups, get_scales)
        self._raw_NB, self._encoding, self._table = raw_NB, encoding, table

    def kernel_weights(self, rows: slice) -> KernelWeights:
        """See `KernelRows`."""
        (zeros, factors), num_columns = self._expand_scales(rows), self.shape[1]
        table = np.zeros(16, np.float32) if self._table is None else _flat(self._table.float())
        arrays = Arrays(zeros=_flat(zeros), factors=_flat(factors), table=table)
        layout = Layout(
            self._encoding,
            rows.stop - rows.start,
            num_columns,
            BLOCK_NUMBERS if self._encoding in BYTE_ENCODINGS else BLOCK_NUMBERS // 2,
            num_groups=self._num_groups,
            shift=group_shift(num_columns, self._num_groups),
        )
        return make_kernel_weights(self._raw_NB[rows].reshape(-1).numpy(), layout, arrays)


class ColumnCodes(GroupedRows):
    """Codes stored in 32-bit words of neighboring columns, or of neighboring rows (ROW_WORDS)."""

    def __init__(
        self,
        plain: Rows,
        words_WN: torch.Tensor,
        encoding: int,
        first_row: int,
        num_groups: int,
        get_scales: GetZerosAndScales,
        width: int,
        groups: torch.Tensor | None = None,
    ):
        """Makes rows of codes in words. `words_WN`: int32, stored transposed: (W, N) if a word has neighboring columns
        of one row, (K, N / 8) for ROW_WORDS. These rows are the rows from `first_row` on of the N stored ones. `width`:
        columns per group. `groups` (K,): the group of each column, if groups are not adjacent columns."""
        super().__init__(plain, num_groups, get_scales)
        self._words_WN, self._encoding, self._first_row = words_WN, encoding, first_row
        self._width, self._groups = width, groups

    def kernel_weights(self, rows: slice) -> KernelWeights:
        """See `KernelRows`."""
        zeros, factors = self._expand_scales(rows)
        groups = consecutive_groups(self.shape[1], self._width) if self._groups is None else self._groups.int().numpy()
        start = self._first_row + rows.start
        # Begins with the first row's first word. From there, the kernel steps by `word_stride` to the row's next word.
        body = self._words_WN.reshape(-1)[start // WORD_ROWS if self._encoding == ROW_WORDS else start :]
        layout = Layout(
            self._encoding,
            rows.stop - rows.start,
            self.shape[1],
            word_stride=4 * self._words_WN.shape[1],
            is_wide=self._groups is None and self._width % STEP_COLUMNS == 0,
        )
        arrays = Arrays(zeros=_flat(zeros.t()), factors=_flat(factors.t()), groups=groups)
        return make_kernel_weights(body.view(torch.uint8).numpy(), layout, arrays)


def supports_row_codes(shape: tuple[int, int], device: torch.device, num_groups: int) -> bool:
    """True if RowCodes supports such rows: they must be in host memory, with K a multiple of GROUP_NUMBERS. Groups that
    share a scale must have a power-of-two width, unless there is a single group."""
    width, remainder = divmod(shape[1], num_groups) if num_groups else (0, 1)
    has_valid_groups = num_groups == 1 or (not remainder and width >= MIN_GROUP_COLUMNS and width.bit_count() == 1)
    return device.type == "cpu" and shape[1] % GROUP_NUMBERS == 0 and has_valid_groups


def supports_column_codes(shape: tuple[int, int], device: torch.device, encoding: int, first_row: int) -> bool:
    """True if ColumnCodes supports such rows: they must be in host memory, with K a multiple of GROUP_NUMBERS. With
    ROW_WORDS, they must begin with the first row of a word."""
    is_aligned = encoding != ROW_WORDS or first_row % WORD_ROWS == 0
    return device.type == "cpu" and shape[1] % GROUP_NUMBERS == 0 and is_aligned


@lru_cache(maxsize=8)
def consecutive_groups(num_columns: int, width: int) -> np.ndarray:
    """Returns the group of each column (K,), for groups of `width` adjacent columns."""
    return np.arange(num_columns, dtype=np.int32) // np.int32(width)


def _flat(matrix: torch.Tensor) -> np.ndarray:
    return matrix.contiguous().view(-1).numpy()
