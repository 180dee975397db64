"""Code shared by both vector kernels: blocks of rows of x, addresses of plain or packed rows of w, and output."""

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
_EXPONENT = 23  # bit position in float32; in float16 it is 13 bits lower and the bias 112 less


class OutputRows(NamedTuple):
    """Output rows of dtype `kind`, as 16-bit `halves` (`per_number` each), with `stride` halves from row to row."""

    halves: np.ndarray
    stride: int
    per_number: int
    kind: int


@njit(fastmath=REORDERED, forceinline=True)
def as_output(halves: np.ndarray, kind: int) -> OutputRows:
    """Views all halves as output rows of FLOAT32, BFLOAT16 or FLOAT16."""
    return OutputRows(halves, halves.shape[1], 2 if kind == FLOAT32 else 1, kind)


@njit(fastmath=REORDERED, forceinline=True)
def output_at(out: OutputRows, row: int, column: int) -> RowsAt:
    """Returns the output rows from a row and column on."""
    return RowsAt(out.halves, row * out.stride + column * out.per_number, out.stride)


@intrinsic
def _write_rows(typing: Any, rows: Any, num_rows: Any, width: Any, out: Any, kind: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        given, count, end, written, wanted = arguments
        first, target = pointer_of(context, builder, rows, given), pointer_of(context, builder, out, written)
        stride, out_stride, n = stride_of(builder, given), stride_of(builder, written), count.type
        for number, round_to_it in _ROUNDING.items():
            with builder.if_then(equals(builder, wanted, number)), cgutils.for_range(builder, count, intp=n) as loop:
                own = builder.gep(first, [builder.mul(loop.index, stride)])
                address = builder.gep(target, [builder.mul(loop.index, out_stride)])
                with cgutils.for_range_slice(builder, n(0), end, n(LANES), n) as (i, _):
                    numbers = load(builder, types.float32, builder.gep(own, [i]), None)
                    halves = builder.mul(i, n(2 if number == FLOAT32 else 1))
                    store(builder, round_to_it(builder, numbers), builder.gep(address, [halves]), align=2)
        return context.get_dummy_value()

    return types.void(rows, types.intp, types.intp, out, types.intp), build


def _unchanged(builder: Builder, numbers: Value) -> Value:
    return numbers


def _to_bfloat16(builder: Builder, numbers: Value) -> Value:
    return builder.trunc(nearest_bfloat16(builder, numbers), _SHORT)


def _to_float16(builder: Builder, numbers: Value) -> Value:
    """Rounds to float16, ties to even. Three ranges: 2^16 and more become infinite, or NaN; rounding of normal numbers
    may carry up to infinity; subnormal ones are rounded by adding 1/2, which moves them to its last bits."""
    bits = builder.bitcast(numbers, INTS)
    size = builder.and_(bits, ints(0x7FFFFFFF))
    is_none = builder.icmp_unsigned(">", size, ints(0x7F800000))
    special = builder.select(is_none, ints(0x7E00), ints(0x7C00))
    last = builder.and_(builder.lshr(size, ints(13)), ints(1))
    moved = builder.add(builder.sub(size, ints(112 << _EXPONENT)), builder.add(last, ints(0xFFF)))
    half = FLOATS([0.5] * LANES)
    summed = builder.bitcast(builder.fadd(builder.bitcast(size, FLOATS), half), INTS)
    small = builder.sub(summed, builder.bitcast(half, INTS))
    normal = builder.select(
        builder.icmp_unsigned("<", size, ints(113 << _EXPONENT)), small, builder.lshr(moved, ints(13))
    )
    nearest = builder.select(builder.icmp_unsigned(">=", size, ints(143 << _EXPONENT)), special, normal)
    sign = builder.lshr(builder.and_(bits, ints(0x80000000)), ints(16))
    return builder.trunc(builder.or_(nearest, sign), _SHORT)


_ROUNDING = {FLOAT32: _unchanged, BFLOAT16: _to_bfloat16, FLOAT16: _to_float16}

# Rounds the first `width` numbers (a multiple of LANES) of `num_rows` float32 rows to a dtype, and writes output rows.
write_rows: Callable[[RowsAt, int, int, RowsAt, int], None] = cast(Any, _write_rows)


class RowBlock(NamedTuple):
    """A block of groups [first, last) of rows of x: `least` rows each, and one more in the first `num_larger`
    groups."""

    first: int
    last: int
    least: int
    num_larger: int


class PrefetchRows(NamedTuple):
    """The rows of w to prefetch because they are multiplied next. They begin at element `at`, `stride` elements apart;
    groups of GROUP_NUMBERS inputs within a row lie `group_stride` elements apart."""

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
    """Returns the total rows (or vectors) of all groups before this one."""
    return group * least + min(group, num_larger)


@njit(fastmath=REORDERED)
def count_blocks(num_groups: int, usual: int) -> int:
    """Returns the number of blocks. Weights are decoded once per block, so blocks may be up to 1.5 times the usual size
    to avoid a small last one."""
    return max(1, (num_groups + usual // 2) // usual)


@njit(fastmath=REORDERED, forceinline=True)
def input_index(K: int, packed: RowPacking | None, row: int, k: int) -> int:
    """Returns the index of input `k` of a row of w: in numbers, or in bytes if it is packed."""
    return row * K + k if packed is None else packed_offset(K, packed.group_bytes, row, k)


@njit(fastmath=REORDERED, forceinline=True)
def group_elements(packed: RowPacking | None) -> int:
    """Returns the elements (numbers, or bytes if packed) of GROUP_NUMBERS inputs of a row."""
    return GROUP_NUMBERS if packed is None else packed.group_bytes


@njit(fastmath=REORDERED, forceinline=True)
def row_stride(w: np.ndarray, num_weights: int, packed: RowPacking | None) -> int:
    """Returns the elements of w from row to row; 0 if it is stored in columns, which are not prefetched, as a cache
    line of them serves many rows."""
    if packed is None:
        return w.size // num_weights
    return 0 if packed.word_stride else w.size // num_weights


@njit(fastmath=REORDERED, forceinline=True)
def make_cursors(packed: RowPacking | None, num_rows: int) -> np.ndarray:
    """Allocates escape cursors for `num_rows` rows; none for plain rows."""
    return np.empty(0 if packed is None else num_rows, np.int64)


@njit(fastmath=REORDERED, forceinline=True)
def set_cursors(packed: RowPacking | None, cursors: np.ndarray, first: int, count: int) -> None:
    """Resets the cursors of rows to their first escapes, for the next block of x."""
    if packed is None:
        return
    if packed.encoding == WINDOW4:
        cursors[:count] = packed.escapes.starts[first : first + count]
