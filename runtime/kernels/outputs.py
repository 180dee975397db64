"""The numbers of an output: sums of float32 as they are, or the nearest of 16 bits to each.

A kernel is told which as it runs: otherwise one would be compiled for each dtype of outputs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import BFLOAT16, FLOAT16, FLOAT32
from .compiled import REORDERED
from .primitives import (
    FLOATS,
    INTS,
    LANES,
    Builder,
    RowsAt,
    Value,
    apart_of,
    first_of,
    ints,
    is_equal,
    load,
    nearest_bfloat16,
    store,
)

_SHORT = ir.VectorType(ir.IntType(16), LANES)
_EXPONENT = 23  # where a float32's begins; that of float16 begins 13 bits before it, and is 112 less


class Output(NamedTuple):
    """Rows of numbers of a kind, of as many `halves` of 16 bits each as one takes; rows lie `apart` halves apart."""

    halves: np.ndarray
    apart: int
    per_number: int
    kind: int


@njit(fastmath=REORDERED, forceinline=True)
def as_output(halves: np.ndarray, kind: int) -> Output:
    """Rows of all of them, of FLOAT32, BFLOAT16 or FLOAT16."""
    return Output(halves, halves.shape[1], 2 if kind == FLOAT32 else 1, kind)


@njit(fastmath=REORDERED, forceinline=True)
def place_in(out: Output, row: int, column: int) -> RowsAt:
    """Its rows from a number of one of them on."""
    return RowsAt(out.halves, row * out.apart + column * out.per_number, out.apart)


@intrinsic
def _give_rows(typing: Any, rows: Any, num_rows: Any, width: Any, out: Any, kind: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        given, count, end, written, wanted = arguments
        first, target = first_of(context, builder, rows, given), first_of(context, builder, out, written)
        apart, out_apart, n = apart_of(builder, given), apart_of(builder, written), count.type
        for number, round_to_it in _ROUNDED.items():
            with builder.if_then(is_equal(builder, wanted, number)), cgutils.for_range(builder, count, intp=n) as loop:
                own = builder.gep(first, [builder.mul(loop.index, apart)])
                place = builder.gep(target, [builder.mul(loop.index, out_apart)])
                with cgutils.for_range_slice(builder, n(0), end, n(LANES), n) as (i, _):
                    numbers = load(builder, types.float32, builder.gep(own, [i]), None)
                    halves = builder.mul(i, n(2 if number == FLOAT32 else 1))
                    store(builder, round_to_it(builder, numbers), builder.gep(place, [halves]), align=2)
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


_ROUNDED = {FLOAT32: _unchanged, BFLOAT16: _to_bfloat16, FLOAT16: _to_float16}

# The first `width` numbers, a multiple of LANES, of `num_rows` rows of float32, as those of a kind, in rows of halves.
give_rows: Callable[[RowsAt, int, int, RowsAt, int], None] = cast(Any, _give_rows)
