"""Code shared by `linear_wide` and `linear_narrow`: row blocks, addresses of plain or packed weights, and output."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import BFLOAT16, FLOAT16, FLOAT32, GROUP_NUMBERS, WINDOW4
from .compiled import REORDERED
from .packed import RowPacking, packed_offset
from .primitives import (
    FLOATS,
    INTS,
    LANES,
    Builder,
    RowsAt,
    Value,
    equals,
    ints,
    load,
    nearest_bfloat16,
    pointer_of,
    store,
    stride_of,
)

_SHORT = ir.VectorType(ir.IntType(16), LANES)
_EXPONENT = 23  # bit position in float32; in float16 13 bits lower, with a bias 112 less


class OutputRows(NamedTuple):
    """Output rows of dtype `kind` as 16-bit `halves`: `per_number` for each number, `stride` from row to row."""

    halves: np.ndarray
    stride: int
    per_number: int
    kind: int


@njit(fastmath=REORDERED, forceinline=True)
def as_output(halves: np.ndarray, kind: int) -> OutputRows:
    """Views halves (M, N or 2N) as output rows of FLOAT32, BFLOAT16 or FLOAT16."""
    return OutputRows(halves, halves.shape[1], 2 if kind == FLOAT32 else 1, kind)


@njit(fastmath=REORDERED, forceinline=True)
def output_at(out: OutputRows, row: int, column: int) -> RowsAt:
    return RowsAt(out.halves, row * out.stride + column * out.per_number, out.stride)


@intrinsic
def _write_rows(typing: Any, rows: Any, num_rows: Any, width: Any, out: Any, kind: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        rows_value, count, end, out_value, kind_value = arguments
        first, target = pointer_of(context, builder, rows, rows_value), pointer_of(context, builder, out, out_value)
        stride, out_stride, n = stride_of(builder, rows_value), stride_of(builder, out_value), count.type
        for dtype, round_numbers in _ROUNDING.items():
            with builder.if_then(equals(builder, kind_value, dtype)), cgutils.for_range(builder, count, intp=n) as loop:
                row = builder.gep(first, [builder.mul(loop.index, stride)])
                address = builder.gep(target, [builder.mul(loop.index, out_stride)])
                with cgutils.for_range_slice(builder, n(0), end, n(LANES), n) as (i, _):
                    numbers = load(builder, types.float32, builder.gep(row, [i]), None)
                    halves = builder.mul(i, n(2 if dtype == FLOAT32 else 1))
                    store(builder, round_numbers(builder, numbers), builder.gep(address, [halves]), align=2)
        return context.get_dummy_value()

    return types.void(rows, types.intp, types.intp, out, types.intp), build


def _to_float16(builder: Builder, numbers: Value) -> Value:
    """Rounds to float16, ties to even. 2^16 and more become infinite (NaN stays NaN); rounding of normal numbers may
    carry up to infinity. Subnormal results are rounded by adding 1/2, which moves them to its last bits."""
    bits = builder.bitcast(numbers, INTS)
    size = builder.and_(bits, ints(0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", size, ints(0x7F800000))
    special = builder.select(is_nan, ints(0x7E00), ints(0x7C00))
    last_bit = builder.and_(builder.lshr(size, ints(13)), ints(1))
    moved = builder.add(builder.sub(size, ints(112 << _EXPONENT)), builder.add(last_bit, ints(0xFFF)))
    half = FLOATS([0.5] * LANES)
    summed = builder.bitcast(builder.fadd(builder.bitcast(size, FLOATS), half), INTS)
    small = builder.sub(summed, builder.bitcast(half, INTS))
    is_small = builder.icmp_unsigned("<", size, ints(113 << _EXPONENT))
    normal = builder.select(is_small, small, builder.lshr(moved, ints(13)))
    nearest = builder.select(builder.icmp_unsigned(">=", size, ints(143 << _EXPONENT)), special, normal)
    sign = builder.lshr(builder.and_(bits, ints(0x80000000)), ints(16))
    return builder.trunc(builder.or_(nearest, sign), _SHORT)


_ROUNDING: dict[int, Callable[[Builder, Value], Value]] = {
    FLOAT32: lambda builder, numbers: numbers,
    BFLOAT16: lambda builder, numbers: builder.trunc(nearest_bfloat16(builder, numbers), _SHORT),
    FLOAT16: _to_float16,
}

# Rounds `width` numbers (a multiple of LANES) of `num_rows` float32 rows to a dtype, and writes output rows.
write_rows: Callable[[RowsAt, int, int, RowsAt, int], None] = cast(Any, _write_rows)


class RowBlock(NamedTuple):
    """Groups [first, last) of rows of x, with `least` rows (or vectors) each; the first `num_larger` of all groups have
    one more."""

    first: int
    last: int
    least: int
    num_larger: int


class PrefetchRows(NamedTuple):
    """Rows of w that are multiplied next, from element `at` on. Rows are `stride` elements apart, and groups of
    GROUP_NUMBERS inputs in a row `group_stride`."""

    at: int
    num_rows: int
    stride: int
    group_stride: int


def add_sums(builder: Builder, totals: list[Value], results: Value, is_first: Value) -> None:
    """Stores vectors of sums contiguously, added to the previous values unless `is_first`."""
    for i, total in enumerate(totals):
        address = cgutils.gep_inbounds(builder, results, i * LANES)
        before = builder.select(is_first, FLOATS(None), load(builder, types.float32, address, None))
        store(builder, builder.fadd(before, total), address)


@njit(fastmath=REORDERED, forceinline=True)
def group_start(group: int, least: int, num_larger: int) -> int:
    """Returns the first row (or vector) of a group."""
    return group * least + min(group, num_larger)


@njit(fastmath=REORDERED)
def count_blocks(num_groups: int, usual: int) -> int:
    """Returns the number of blocks, with up to 1.5 times the `usual` groups. A small last block would cost as much, as
    weights are decoded once per block."""
    return max(1, (num_groups + usual // 2) // usual)


@njit(fastmath=REORDERED, forceinline=True)
def input_index(K: int, packed: RowPacking | None, row: int, k: int) -> int:
    """Returns the index of input `k` of a row of w, in elements: numbers, or bytes if it is packed."""
    return row * K + k if packed is None else packed_offset(K, packed.group_bytes, row, k)


@njit(fastmath=REORDERED, forceinline=True)
def group_elements(packed: RowPacking | None) -> int:
    """Returns the elements of GROUP_NUMBERS inputs of a row."""
    return GROUP_NUMBERS if packed is None else packed.group_bytes


@njit(fastmath=REORDERED, forceinline=True)
def row_stride(w: np.ndarray, num_weights: int, packed: RowPacking | None) -> int:
    """Returns the elements of w from row to row; 0 if stored in columns: not prefetched, as one cache line serves many
    rows."""
    if packed is None:
        return w.size // num_weights
    return 0 if packed.word_stride else w.size // num_weights


@njit(fastmath=REORDERED, forceinline=True)
def make_cursors(packed: RowPacking | None, num_rows: int) -> np.ndarray:
    """Allocates a cursor into the escapes of each packed row; none for plain rows."""
    return np.empty(0 if packed is None else num_rows, np.int64)


@njit(fastmath=REORDERED, forceinline=True)
def set_cursors(packed: RowPacking | None, cursors: np.ndarray, first: int, count: int) -> None:
    """Resets cursors to the first escapes of rows [first, first + count), for the next block of x."""
    if packed is None:
        return
    if packed.encoding == WINDOW4:
        cursors[:count] = packed.escapes.starts[first : first + count]
