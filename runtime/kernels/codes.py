"""Codes of eight or four bits times the scale of their row or group, decoded in vectors while they are widened;
`linear/coded_rows.py` says how they lie. All a vector does to a code is exact in float32.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import CODE_RUN
from .primitives import (
    FLOATS,
    INT,
    LANES,
    Builder,
    Place,
    Value,
    first_of,
    load,
    load_pairs,
    multiply_add,
    splat,
    store,
)

_MIDDLE = 8  # what is added to codes of four bits, so that they are not negative


def _scale_at(builder: Builder, scales: Value, k: Value, shift: Value) -> Value:
    """The scale of input k in all lanes."""
    bits = builder.load(builder.gep(scales, [builder.lshr(k, shift)]))
    return splat(builder, builder.bitcast(builder.shl(builder.zext(bits, INT), INT(16)), ir.FloatType()))


def _widen_bytes(kind: Any) -> Any:
    """The step for codes of that type of a byte."""

    @intrinsic
    def widen(typing: Any, row: Any, num_inputs: Any, scales: Any, shift: Any, out: Any) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            stored, factors, widened = (
                first_of(context, builder, each, arguments[i]) for each, i in ((row, 0), (scales, 2), (out, 4))
            )
            end = arguments[1]
            n = end.type
            with cgutils.for_range_slice(builder, n(0), end, n(CODE_RUN), n) as (k, _):
                scale = _scale_at(builder, factors, k, arguments[3])
                for at in range(0, CODE_RUN, LANES):
                    place = builder.add(k, n(at))
                    numbers = load(builder, kind, builder.gep(stored, [place]), None)
                    store(builder, builder.fmul(numbers, scale), builder.gep(widened, [place]))
            return context.get_dummy_value()

        return types.void(row, types.intp, scales, types.intp, out), build

    return widen


@intrinsic
def _widen_halves(typing: Any, row: Any, num_inputs: Any, scales: Any, shift: Any, out: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        stored, factors, widened = (
            first_of(context, builder, each, arguments[i]) for each, i in ((row, 0), (scales, 2), (out, 4))
        )
        end = arguments[1]
        n = end.type
        with cgutils.for_range_slice(builder, n(0), end, n(CODE_RUN), n) as (k, _):
            scale = _scale_at(builder, factors, k, arguments[3])
            less = builder.fmul(scale, FLOATS([-float(_MIDDLE)] * LANES))
            for at in range(0, CODE_RUN // 2, LANES):
                place = builder.add(builder.lshr(k, n(1)), n(at))
                for half, codes in enumerate(load_pairs(builder, builder.gep(stored, [place]), None)):
                    to = builder.add(k, n(half * CODE_RUN // 2 + at))
                    store(builder, multiply_add(builder, codes, scale, less), builder.gep(widened, [to]))
        return context.get_dummy_value()

    return types.void(row, types.intp, scales, types.intp, out), build


# So many numbers, a multiple of CODE_RUN, of a row of codes as float32. The scale of number k is k >> shift behind the
# first of `scales`, bits of bfloat16.
widen_int8: Callable[[Place, int, Place, int, Place], None] = cast(Any, _widen_bytes(types.int8))
widen_float8: Callable[[Place, int, Place, int, Place], None] = cast(Any, _widen_bytes(types.uint8))
widen_int4: Callable[[Place, int, Place, int, Place], None] = cast(Any, _widen_halves)
