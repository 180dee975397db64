"""The steps of a product of float32 with stored weights, in vectors: both sides lie so that each load is the next one.

Numbers of a row are taken as many at a time as a vector has lanes; of `count` rows side by side these vectors lie one
after the other, then those of the next numbers. Each row of w meets each of x in one sum, which stays in a register
until the inputs end: 4 x 6 of 32 registers of 16 lanes, 2 x 6 of 16 of 8, so that loads are seldomer than products. (Of
4 x 3 the compiler held a third in memory, at half the speed.)

M rows of x, N of w, K inputs.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .attention_vectors import FLOATS, LANES, Builder, Value, load, multiply_add, place_of, shuffle, sums

WEIGHT_ROWS = 4 if LANES == 16 else 2
INPUT_ROWS = 6  # at most
_OUTPUTS = ir.VectorType(ir.FloatType(), WEIGHT_ROWS)


def _for_count(builder: Builder, count: Value, act: Callable[[int], None]) -> None:
    """What `act` makes for the number of rows that `count` is."""
    for num in range(1, max(WEIGHT_ROWS, INPUT_ROWS) + 1):
        with builder.if_then(builder.icmp_signed("==", count, count.type(num))):
            act(num)


@intrinsic
def _lay_out(typing: Any, rows: Any, at: Any, row_numbers: Any, count: Any, steps: Any, place: Any, to: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first, n = place_of(context, builder, rows, *arguments[:2]), arguments[1].type
        target = place_of(context, builder, place, *arguments[5:])

        def copy(num: int) -> None:
            with cgutils.for_range(builder, arguments[4], intp=n) as loop:
                k = builder.mul(loop.index, n(LANES))
                for i in range(num):
                    row = builder.add(builder.mul(arguments[2], n(i)), k)
                    vector = load(builder, rows.dtype, builder.gep(first, [row]), None)
                    own = builder.gep(target, [builder.add(builder.mul(k, n(num)), n(i * LANES))])
                    builder.store(vector, builder.bitcast(own, FLOATS.as_pointer()), align=4)

        _for_count(builder, arguments[3], copy)
        return context.get_dummy_value()

    n = types.intp
    return types.void(rows, n, n, n, n, place, n), build


@intrinsic
def _add_products(
    typing: Any,
    w: Any,
    w_at: Any,
    x: Any,
    x_at: Any,
    count: Any,
    steps: Any,
    out: Any,
    out_at: Any,
    out_numbers: Any,
    is_first: Any,
) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        weights, inputs = (place_of(context, builder, *pair) for pair in ((w, *arguments[:2]), (x, *arguments[2:4])))
        results, n = place_of(context, builder, out, *arguments[6:8]), arguments[1].type

        def multiply(num: int) -> None:
            totals = _totals(builder, weights, inputs, arguments[5], num)
            _give(builder, totals, results, arguments[8], arguments[9])

        with cgutils.if_likely(builder, builder.icmp_signed(">", arguments[5], n(0))):
            _for_count(builder, arguments[4], multiply)
        return context.get_dummy_value()

    n = types.intp
    return types.void(w, n, x, n, n, n, out, n, n, types.boolean), build


def _totals(builder: Builder, weights: Value, inputs: Value, steps: Value, num: int) -> list[Value]:
    """What the lanes of each sum come to: all of w for the first row of x, then for the next."""
    partial = [[cgutils.alloca_once(builder, FLOATS) for _ in range(WEIGHT_ROWS)] for _ in range(num)]
    for place in (place for places in partial for place in places):
        builder.store(FLOATS(None), place)

    def vectors(first: Value, step: Value, count: int) -> list[Value]:
        begin = builder.gep(first, [builder.mul(step, step.type(count * LANES))])
        return [load(builder, types.float32, builder.gep(begin, [step.type(i * LANES)]), None) for i in range(count)]

    with cgutils.for_range(builder, steps, intp=steps.type) as loop:
        w, x = vectors(weights, loop.index, WEIGHT_ROWS), vectors(inputs, loop.index, num)
        for places, number in zip(partial, x, strict=True):
            for place, weight in zip(places, w, strict=True):
                builder.store(multiply_add(builder, weight, number, builder.load(place)), place)
    return [builder.load(place) for places in partial for place in places]


def _give(builder: Builder, totals: list[Value], results: Value, row_numbers: Value, is_first: Value) -> None:
    """The sum of each total's lanes, added to what is there unless it is the first."""
    row = 0
    while totals:
        num = min(LANES, 1 << (len(totals).bit_length() - 1))  # that make a vector of sums
        found, totals = sums(builder, totals[:num]), totals[num:]
        for i in range(num // WEIGHT_ROWS):
            lanes = list(range(i * WEIGHT_ROWS, (i + 1) * WEIGHT_ROWS))
            place = builder.gep(results, [builder.mul(row_numbers, row_numbers.type(row + i))])
            place = builder.bitcast(place, _OUTPUTS.as_pointer())
            before = builder.select(is_first, _OUTPUTS(None), builder.load(place, align=4))
            builder.store(builder.fadd(before, shuffle(builder, found, found, lanes)), place, align=4)
        row += num // WEIGHT_ROWS


# `count` rows from rows[at] on, that lie `row_numbers` apart, as `steps` vectors of each, to place[to].
lay_out: Callable[[np.ndarray, int, int, int, int, np.ndarray, int], None] = cast(Any, _lay_out)
# WEIGHT_ROWS rows of w times `count` of x, over `steps` vectors, into (count, WEIGHT_ROWS) of out from out_at on.
add_products: Callable[[np.ndarray, int, np.ndarray, int, int, int, np.ndarray, int, int, bool], None] = cast(
    Any, _add_products
)
