"""What both ways in which the vectors multiply have in common: blocks of rows of x, and where rows of w lie, stored as
they are or packed."""

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
_EXPONENT = 23  # where a float32's begins; that of float16 begins 13 bits before it, and is 112 less


class OutputRows(NamedTuple):
    """Rows of numbers of a kind, of as many `halves` of 16 bits each as one takes; rows lie `stride` halves apart."""

    halves: np.ndarray
    stride: int
    per_number: int
    kind: int


@njit(fastmath=REORDERED, forceinline=True)
def as_output(halves: np.ndarray, kind: int) -> OutputRows:
    """Rows of all of them, of FLOAT32, BFLOAT16 or FLOAT16."""
    return OutputRows(halves, halves.shape[1], 2 if kind == FLOAT32 else 1, kind)


@njit(fastmath=REORDERED, forceinline=True)
def output_at(out: OutputRows, row: int, column: int) -> RowsAt:
    """Its rows from a number of one of them on."""
    return RowsAt(out.halves, row * out.stride + column * out.per_number, out.stride)


@intrinsic
def _write_rows(typing: Any, rows: Any, num_rows: Any, width: Any, out: Any, kind: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        given, count, end, written, wanted = arguments
        first, target = pointer_of(context, builder, rows, given), pointer_of(context, builder, out, written)
        stride, out_stride, n = stride_of(builder, given), stride_of(builder, written), count.type
        for number, round_to_it in _ROUND_TO.items():
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
    """Numbers are of three ranges: 2^16 and more, infinite or NaN; normal ones, whose last bit may carry up to
    infinity; and subnormal ones, which a sum with 1/2 moves to its last bits."""
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


_ROUND_TO = {FLOAT32: _unchanged, BFLOAT16: _to_bfloat16, FLOAT16: _to_float16}

# The first `width` numbers, a multiple of LANES, of `num_rows` rows of float32, as those of a kind, in rows of halves.
write_rows: Callable[[RowsAt, int, int, RowsAt, int], None] = cast(Any, _write_rows)


class RowBlock(NamedTuple):
    """Groups [first, last) of rows of x, of a `least` height each; those before `num_larger` have one more."""

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
    """One behind the other, added to what is there unless they are the first."""
    for i, total in enumerate(totals):
        address = cgutils.gep_inbounds(builder, results, i * LANES)
        before = builder.select(is_first, FLOATS(None), load(builder, types.float32, address, None))
        store(builder, builder.fadd(before, total), address)


@njit(fastmath=REORDERED, forceinline=True)
def group_start(group: int, least: int, num_larger: int) -> int:
    """The height of the groups before it."""
    return group * least + min(group, num_larger)


@njit(fastmath=REORDERED)
def num_blocks(num_groups: int, usual: int) -> int:
    """Weights are widened once for each: a few larger ones, up to one and a half times the usual number of groups,
    rather than one more of what is left."""
    return max(1, (num_groups + usual // 2) // usual)


@njit(fastmath=REORDERED, forceinline=True)
def input_index(K: int, packed: RowPacking | None, row: int, k: int) -> int:
    """Where input `k` of a row of w lies, in its stored numbers or, if it is packed, bytes."""
    return row * K + k if packed is None else packed_offset(K, packed.group_bytes, row, k)


@njit(fastmath=REORDERED, forceinline=True)
def group_elements(packed: RowPacking | None) -> int:
    """How many of those GROUP_NUMBERS inputs of a row take."""
    return GROUP_NUMBERS if packed is None else packed.group_bytes


@njit(fastmath=REORDERED, forceinline=True)
def row_stride(w: np.ndarray, num_weights: int, packed: RowPacking | None) -> int:
    """How many elements of w there are from one row to the next; 0 where it lies in columns, of which none are asked
    for ahead: a line of them serves many rows."""
    if packed is None:
        return w.size // num_weights
    return 0 if packed.word_stride else w.size // num_weights


@njit(fastmath=REORDERED, forceinline=True)
def make_cursors(packed: RowPacking | None, num_rows: int) -> np.ndarray:
    """Room for those of as many rows."""
    return np.empty(0 if packed is None else num_rows, np.int64)


@njit(fastmath=REORDERED, forceinline=True)
def set_cursors(packed: RowPacking | None, cursors: np.ndarray, first: int, count: int) -> None:
    """Each block of x meets the rows from their first inputs on."""
    if packed is None:
        return
    if packed.encoding == WINDOW4:
        cursors[:count] = packed.escapes.starts[first : first + count]
