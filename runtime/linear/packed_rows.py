"""Rows that the vectors decode inside of a product: `kernels/packed.py` says in which ways.

`CodedRows`: codes of eight or four bits times the scale of their row, or of their group of columns, as `weightstream
pack` rounds weights. int8: a byte each. FP8: E4M3, likewise. int4: CODE_RUN numbers are half as many bytes, the first
half of them in the low half bytes, with 8 added to each. A scale is a bfloat16, so code times scale is exact in
float32.

`GroupedRows`: codes that others have published, in rows, where those of neighbouring columns lie side by side, or in
columns, in words of 32 bits.

N rows of K numbers, of which R are wanted; G groups of columns.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ..kernels.arguments import (
    BYTES,
    CODE_RUN,
    FLOAT8,
    GROUP_NUMBERS,
    INT4,
    INT4_MIDDLE,
    INT8,
    ROW_WORDS,
    SIGNED_BYTES,
    StoredRows,
)
from ..kernels.arguments import SCALED_FLOAT8 as SCALED_FLOAT8
from ..kernels.compiler import has_compiler
from .rows import Codes, KernelWeights, Rows

ALL_COLUMNS = 31  # a shift by which every column is in the first group


class Layout(NamedTuple):
    """What `kernels.packed.packing_of` wants to know, in its order. `base` is of window4; `num_groups` of a row, and
    the shift of a column to its group, of codes; for the rest see `kernels.packed.RowPacking` and
    `kernels.grouped.GroupArrays`."""

    encoding: int
    num_rows: int
    num_columns: int
    group_bytes: int = 0
    word_stride: int = 0
    base: int = 0
    num_groups: int = 0
    shift: int = 0
    is_wide: bool = False


class Arrays(NamedTuple):
    """What goes along with the bytes of rows, flat, as `kernels.packed.packing_of` wants it, in its order."""

    starts: np.ndarray = np.zeros(0, np.uint32)
    columns: np.ndarray = np.zeros(0, np.uint16)
    exponents: np.ndarray = np.zeros(0, np.uint8)
    scales: np.ndarray = np.zeros(0, np.uint16)
    zeros: np.ndarray = np.zeros(0, np.float32)
    factors: np.ndarray = np.zeros(0, np.float32)
    table: np.ndarray = np.zeros(0, np.float32)
    groups: np.ndarray = np.zeros(0, np.int32)


def group_shift(num_columns: int, num_groups: int) -> int:
    """Returns that of equal groups whose width is a power of two, or of one group."""
    return ALL_COLUMNS if num_groups == 1 else (num_columns // num_groups).bit_length() - 1


def make_kernel_weights(body: np.ndarray, layout: Layout, arrays: Arrays) -> KernelWeights:
    return KernelWeights("linear_packed", StoredRows(body, np.array(layout, np.int64), *arrays), layout.num_rows)


class PackedRows(ABC):
    """See `KernelRows`."""

    row_scratch_bytes = 0

    def __init__(self, body_NB: torch.Tensor, num_columns: int):
        self._body_NB, self.device = body_NB, body_NB.device
        self.shape = (body_NB.shape[0], num_columns)

    def kernel_weights(self, rows: slice) -> KernelWeights:
        """See `KernelRows`; of all rows."""
        assert rows == slice(0, self.shape[0]), "nothing is made that would have to be made of some rows at a time"
        return self._kernel_weights

    @cached_property
    def _kernel_weights(self) -> KernelWeights:
        return make_kernel_weights(self._body_NB.reshape(-1).numpy(), *self._layout())

    @abstractmethod
    def _layout(self) -> tuple[Layout, Arrays]:
        """How the rows lie; the device is a CPU."""

    @abstractmethod
    def decode(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        """What `dequantize` does, by plain operators, none of which has the host wait for a device."""

    def dequantize(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        """See `Rows`."""
        if isinstance(rows, slice) and rows.step is None and self.device.type == "cpu" and has_compiler():
            from ..kernels.packed import unpack_rows  # numba takes 0.2 s to import

            unpack_rows(self._kernel_weights.stored, rows.start or 0, out_RK.numpy())
        else:
            self.decode(rows, out_RK)


ROUNDED_ENCODINGS = {"int8-rows": INT8, "int4-groups": INT4, "fp8-rows": FLOAT8}  # the ways of storage formats
FORMAT_NAMES = {way: name for name, way in ROUNDED_ENCODINGS.items()}


def code_bytes(encoding: int, num_codes: int) -> int:
    return num_codes // 2 if encoding == INT4 else num_codes


class CodedRows(PackedRows):
    def __init__(self, codes_NB: torch.Tensor, scales_NG: torch.Tensor, way: int):
        """`codes_NB`: uint8; `scales_NG`: bfloat16, of equal groups whose width is a power of two, or one."""
        super().__init__(codes_NB, codes_NB.shape[1] * GROUP_NUMBERS // code_bytes(way, GROUP_NUMBERS))
        self._scales_NG, self._way = scales_NG, way

    def _layout(self) -> tuple[Layout, Arrays]:
        num_groups, group_bytes = self._scales_NG.shape[1], code_bytes(self._way, GROUP_NUMBERS)
        shift = group_shift(self.shape[1], num_groups)
        scales = self._scales_NG.view(torch.int16).numpy().view(np.uint16).reshape(-1)
        return Layout(self._way, *self.shape, group_bytes, num_groups=num_groups, shift=shift), Arrays(scales=scales)

    def decode(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        codes, scales_RG = self._body_NB[rows], self._scales_NG[rows].float()
        if self._way == INT4:
            halves = codes.unflatten(1, (-1, 1, CODE_RUN // 2))
            out = out_RK.view(len(codes), -1, 2, CODE_RUN // 2)
            out.copy_(torch.cat([halves & 15, halves >> 4], dim=2)).sub_(INT4_MIDDLE)
        else:
            out_RK.copy_(codes.view(torch.int8 if self._way == INT8 else torch.float8_e4m3fn))
        out_RK.unflatten(1, (scales_RG.shape[1], -1)).mul_(scales_RG[..., None])

    def codes(self) -> Codes:
        """See `Rows`."""
        width = self.shape[1] // self._scales_NG.shape[1]
        added = INT4_MIDDLE if self._way == INT4 else 0
        body, scales = self._body_NB[None], self._scales_NG[None]
        return Codes(encoding=self._way, shape=self.shape, body=body, scales=scales, width=width, zero_offset=added)


def zero_rows(num_rows: int) -> CodedRows:
    """Rows of GROUP_NUMBERS zeros, to try a kernel with."""
    codes = torch.zeros(num_rows, GROUP_NUMBERS, dtype=torch.uint8)
    return CodedRows(codes, torch.ones(num_rows, 1, dtype=torch.bfloat16), INT8)


LEAST_WIDTH = 16  # columns that share a factor: a vector's
WIDE = 8  # columns that a step of codes in columns takes at once
ROWS_OF_WORD = 8  # rows whose codes are in one word of ROW_WORDS
IN_BYTES = (BYTES, SIGNED_BYTES, SCALED_FLOAT8)
ZerosAndScales = tuple[
    torch.Tensor | None, torch.Tensor
]  # zero points and factors: (R, G) float32, or (1, 1) for all alike
GetZerosAndScales = Callable[[slice], ZerosAndScales]


class GroupedRows:
    """See `KernelRows`. What the vectors do not take goes by `plain`, whose numbers are the same to the bit."""

    def __init__(self, plain: Rows, num_groups: int, get_scales: GetZerosAndScales):
        self.shape, self.device, self.dequantize = plain.shape, plain.device, plain.dequantize
        self.codes = plain.codes
        self._num_groups, self._get_scales = num_groups, get_scales
        self.row_scratch_bytes = 2 * 4 * num_groups

    def _expand_scales(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Zero points and factors of a run of rows, (R, G) each, however many there are of them."""
        zeros, factors = self._get_scales(rows)
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
        get_scales: GetZerosAndScales,
        table: torch.Tensor | None = None,
    ):
        """`table`: 16 numbers, of IN_TABLE."""
        super().__init__(plain, num_groups, get_scales)
        self._raw_NB, self._way, self._table = raw_NB, way, table

    def kernel_weights(self, rows: slice) -> KernelWeights:
        """See `KernelRows`."""
        (zeros, factors), num_columns = self._expand_scales(rows), self.shape[1]
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
            shift=group_shift(num_columns, self._num_groups),
        )
        return make_kernel_weights(self._raw_NB[rows].reshape(-1).numpy(), layout, arrays)


class ColumnCodes(GroupedRows):
    def __init__(
        self,
        plain: Rows,
        words_WN: torch.Tensor,
        way: int,
        first_row: int,
        num_groups: int,
        get_scales: GetZerosAndScales,
        width: int,
        groups: torch.Tensor | None = None,
    ):
        """`words_WN`: int32, (W, N) or of ROW_WORDS (K, N / 8), in which these rows begin at `first_row`; `width`: the
        columns of a group; `groups` (K,): the group of each column, where they do not lie in turn."""
        super().__init__(plain, num_groups, get_scales)
        self._words_WN, self._way, self._first_row, self._width, self._groups = words_WN, way, first_row, width, groups

    def kernel_weights(self, rows: slice) -> KernelWeights:
        """See `KernelRows`."""
        zeros, factors = self._expand_scales(rows)
        groups = consecutive_groups(self.shape[1], self._width) if self._groups is None else self._groups.int().numpy()
        at = self._first_row + rows.start
        body = self._words_WN.reshape(-1)[at // ROWS_OF_WORD if self._way == ROW_WORDS else at :]
        layout = Layout(
            self._way,
            rows.stop - rows.start,
            self.shape[1],
            word_stride=4 * self._words_WN.shape[1],
            is_wide=self._groups is None and self._width % WIDE == 0,
        )
        arrays = Arrays(zeros=_flat(zeros.t()), factors=_flat(factors.t()), groups=groups)
        return make_kernel_weights(body.view(torch.uint8).numpy(), layout, arrays)


def supports_row_codes(shape: tuple[int, int], device: torch.device, num_groups: int) -> bool:
    """Whether RowCodes are for such rows: runs of whole vectors, in groups of a power of two."""
    width, rest = divmod(shape[1], num_groups) if num_groups else (0, 1)
    is_grouped = num_groups == 1 or (not rest and width >= LEAST_WIDTH and width.bit_count() == 1)
    return device.type == "cpu" and shape[1] % GROUP_NUMBERS == 0 and is_grouped


def supports_column_codes(shape: tuple[int, int], device: torch.device, encoding: int, first_row: int) -> bool:
    """Whether ColumnCodes are for such rows."""
    is_aligned = encoding != ROW_WORDS or first_row % ROWS_OF_WORD == 0
    return device.type == "cpu" and shape[1] % GROUP_NUMBERS == 0 and is_aligned


@lru_cache(maxsize=8)
def consecutive_groups(num_columns: int, width: int) -> np.ndarray:
    """The group of each column."""
    return np.arange(num_columns, dtype=np.int32) // np.int32(width)


def _flat(matrix: torch.Tensor) -> np.ndarray:
    return matrix.contiguous().view(-1).numpy()
