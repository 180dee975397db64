"""Code shared by `linear_wide` and `linear_narrow`: blocks of x, addresses of weights in w, and output.

Both multiply x (M rows of K inputs) by w (N rows). Rows of x are split into groups of nearly equal size, multiplied at
once; a block is several adjacent groups that fit the L2 cache. Rows of w are plain (float32, bfloat16 or float16) or
packed (encoded, see `packed.py`); their elements are numbers or, if packed, bytes. Functions marked `@intrinsic`
are explained in `primitives.py`, and documented at their public names below.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import BFLOAT16, BLOCK_NUMBERS, FLOAT16, FLOAT32, GROUP_NUMBERS, WINDOW4
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
_EXPONENT = 23  # bit position of the exponent in float32; float16 has it 13 bits lower, with a bias that is 112 less


class OutputRows(NamedTuple):
    """The output matrix, viewed as uint16 `halves`: `per_number` is 2 for float32 and 1 for 16-bit dtypes. `stride`:
    halves from row to row. `kind`: FLOAT32, BFLOAT16 or FLOAT16."""

    halves: np.ndarray
    stride: int
    per_number: int
    kind: int


@njit(fastmath=REORDERED, forceinline=True)
def as_output(halves: np.ndarray, kind: int) -> OutputRows:
    """Returns an output of dtype `kind` whose halves are (M, N), or (M, 2N) for FLOAT32."""
    return OutputRows(halves, halves.shape[1], 2 if kind == FLOAT32 else 1, kind)


@njit(fastmath=REORDERED, forceinline=True)
def output_at(out: OutputRows, row: int, column: int) -> RowsAt:
    """Returns the halves of the output from a row and column on."""
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
    """Rounds float32 to float16 bits, ties to even. Numbers from 2^16 on become infinite; NaN stays NaN."""
    bits = builder.bitcast(numbers, INTS)
    size = builder.and_(bits, ints(0x7FFFFFFF))  # bits without the sign
    is_nan = builder.icmp_unsigned(">", size, ints(0x7F800000))
    special = builder.select(is_nan, ints(0x7E00), ints(0x7C00))
    # Normal results: rounds the low 13 bits. A carry increases the exponent, up to infinity, as it should.
    last_bit = builder.and_(builder.lshr(size, ints(13)), ints(1))
    moved = builder.add(builder.sub(size, ints(112 << _EXPONENT)), builder.add(last_bit, ints(0xFFF)))
    # Subnormal results, below 2^-14: adding 1/2 moves the bits that stay to the end of the sum, and rounds them.
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

# Rounds `width` numbers (a multiple of LANES) of `num_rows` float32 rows to dtype `kind`, and writes them as output
# rows. Arguments: rows, num_rows, width, out, kind.
write_rows: Callable[[RowsAt, int, int, RowsAt, int], None] = cast(Any, _write_rows)


class RowBlock(NamedTuple):
    """A block of x: its groups [first, last). Groups have `least` rows (in `linear_wide`: vectors of rows); the first
    `num_larger` groups of x have one more."""

    first: int
    last: int
    least: int
    num_larger: int


class PrefetchRows(NamedTuple):
    """The rows of w that are multiplied next, to be prefetched: `num_rows` rows from element `at` on, `stride` elements
    apart. GROUP_NUMBERS inputs of a row take `group_stride` elements."""

    at: int
    num_rows: int
    stride: int
    group_stride: int


def add_sums(builder: Builder, totals: list[Value], results: Value, is_first: Value) -> None:
    """Emits code that stores vectors of sums one after the other. Adds them to the previous values, unless `is_first`:
    then overwrites these, as it handles the first inputs of a row."""
    for i, total in enumerate(totals):
        address = cgutils.gep_inbounds(builder, results, i * LANES)
        before = builder.select(is_first, FLOATS(None), load(builder, types.float32, address, None))
        store(builder, builder.fadd(before, total), address)


@njit(fastmath=REORDERED, forceinline=True)
def group_start(group: int, least: int, num_larger: int) -> int:
    """Returns the first row of x (or vector of rows) in a group, see `RowBlock`."""
    return group * least + min(group, num_larger)


@njit(fastmath=REORDERED)
def count_blocks(num_groups: int, usual: int) -> int:
    """Returns into how many blocks to split the groups: a block may have 1.5 times the `usual` groups. All weights are
    decoded again for each block, so a small last block would take long."""
    return max(1, (num_groups + usual // 2) // usual)


@njit(fastmath=REORDERED, forceinline=True)
def input_index(K: int, packed: RowPacking | None, row: int, k: int) -> int:
    """Returns the index of input `k` of a row of w, in elements."""
    return row * K + k if packed is None else packed_offset(K, packed.block_bytes, row, k)


@njit(fastmath=REORDERED, forceinline=True)
def group_elements(packed: RowPacking | None) -> int:
    """Returns how many elements GROUP_NUMBERS inputs of a row take, rounded down: it is for prefetches only."""
    return GROUP_NUMBERS if packed is None else packed.block_bytes * GROUP_NUMBERS // BLOCK_NUMBERS


@njit(fastmath=REORDERED, forceinline=True)
def row_stride(w: np.ndarray, num_weights: int, packed: RowPacking | None) -> int:
    """Returns the elements of w from row to row. Returns 0 if words hold neighboring columns or rows: then rows are not
    prefetched, as a cache line has words of many rows."""
    if packed is None:
        return w.size // num_weights
    return 0 if packed.word_stride else w.size // num_weights


@njit(fastmath=REORDERED, forceinline=True)
def make_cursors(packed: RowPacking | None, num_rows: int) -> np.ndarray:
    """Allocates cursors: per packed row, the index of its next escape (see `packed.Escapes`). Empty for plain rows."""
    return np.empty(0 if packed is None else num_rows, np.int64)


@njit(fastmath=REORDERED, forceinline=True)
def set_cursors(packed: RowPacking | None, cursors: np.ndarray, first: int, count: int) -> None:
    """Sets cursors to the first escapes of rows [first, first + count), because each block of x starts at input 0."""
    if packed is None:
        return
    if packed.encoding == WINDOW4:
        cursors[:count] = packed.escapes.starts[first : first + count]
