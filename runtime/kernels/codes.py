"""Codes of eight or four bits times the scale of their row or group, decoded in vectors while they are widened;
`linear/coded_rows.py` says how they lie. All a vector does to a code is exact in float32.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import CODE_RUN, INT4_MIDDLE
from .primitives import (
    FLOATS,
    INT,
    LANES,
    Builder,
    RowsAt,
    Value,
    for_rows,
    load,
    load_pairs,
    multiply_add,
    run_of,
    splat,
    store,
)

# Makes numbers of one run: where it begins as stored and widened, its first input, and its scale in all lanes.
Run = Callable[[Builder, Value, Value, Value, Value], None]


def _scale_at(builder: Builder, scales: Value, k: Value, shift: Value) -> Value:
    """The scale of input k in all lanes."""
    bits = builder.load(builder.gep(scales, [builder.lshr(k, shift)]))
    return splat(builder, builder.bitcast(builder.shl(builder.zext(bits, INT), INT(16)), ir.FloatType()))


def _widen(run: Run) -> Any:
    """The step that makes numbers of rows, a run at a time."""

    @intrinsic
    def widen(typing: Any, rows: Any, num_rows: Any, num_inputs: Any, scales: Any, shift: Any, out: Any) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            runs = [run_of(context, builder, each, arguments[i]) for each, i in ((rows, 0), (scales, 3), (out, 5))]
            end, n = arguments[2], arguments[2].type

            def widen_row(places: list[Value]) -> None:
                stored, factors, widened = places
                with cgutils.for_range_slice(builder, n(0), end, n(CODE_RUN), n) as (k, _):
                    run(builder, stored, widened, k, _scale_at(builder, factors, k, arguments[4]))

            for_rows(builder, arguments[1], runs, widen_row)
            return context.get_dummy_value()

        n = types.intp
        return types.void(rows, n, n, scales, n, out), build

    return widen


def _bytes(kind: Any) -> Run:
    """Codes of that type of a byte."""

    def run(builder: Builder, stored: Value, widened: Value, k: Value, scale: Value) -> None:
        for at in range(0, CODE_RUN, LANES):
            place = builder.add(k, k.type(at))
            numbers = load(builder, kind, builder.gep(stored, [place]), None)
            store(builder, builder.fmul(numbers, scale), builder.gep(widened, [place]))

    return run


def _halves(builder: Builder, stored: Value, widened: Value, k: Value, scale: Value) -> None:
    """Codes of four bits: the first half of a run in the low halves of bytes."""
    n = k.type
    less = builder.fmul(scale, FLOATS([-float(INT4_MIDDLE)] * LANES))
    for at in range(0, CODE_RUN // 2, LANES):
        place = builder.add(builder.lshr(k, n(1)), n(at))
        for half, codes in enumerate(load_pairs(builder, builder.gep(stored, [place]), None)):
            to = builder.add(k, n(half * CODE_RUN // 2 + at))
            store(builder, multiply_add(builder, codes, scale, less), builder.gep(widened, [to]))


# Of so many rows of codes as many numbers, a multiple of CODE_RUN, as float32. The scale of number k is k >> shift
# behind the first of its row's `scales`, bits of bfloat16.
widen_int8: Callable[[RowsAt, int, int, RowsAt, int, RowsAt], None] = cast(Any, _widen(_bytes(types.int8)))
widen_float8: Callable[[RowsAt, int, int, RowsAt, int, RowsAt], None] = cast(Any, _widen(_bytes(types.uint8)))
widen_int4: Callable[[RowsAt, int, int, RowsAt, int, RowsAt], None] = cast(Any, _widen(_halves))
