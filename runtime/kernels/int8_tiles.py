"""The steps of a product of int8 in the processor's matrix unit: numbers are rounded on their way into tiles.

M rows of x, N of w, K inputs. Tiles lie as in `product_tiles.py`, with 64 inputs where that has 32: one of w is 16 of
its rows, one of x 16 fours of inputs of 16 rows. Both bring the 64 inputs of a step in the same order, which is not
theirs: even and odd ones of 32 side by side, as bfloat16 comes apart.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .attention_vectors import (
    FLOATS,
    INTS,
    LANES,
    Builder,
    Value,
    call,
    ints,
    load,
    multiply_add,
    place_of,
    prefetch,
    shuffle,
    splat,
    store,
)
from .numerics import ROUND
from .product_tiles import SUM_NUMBERS, adder, transposed
from .tile_layout import EVEN, ODD
from .tile_scratch import TILE_ROWS
from .tile_unit import WORD

STEP_INPUTS = 64  # a row of a tile, and 64 bytes
AHEAD = 4096  # numbers of w, two pages of memory, beyond whose ends no processor guesses: 8.0 GB/s instead of 6.4
HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)  # bfloat16


def _bytes(builder: Builder, vectors: list[Value], factor: Value) -> Value:
    """Four vectors of floats times the factor, to the nearest integer, as the four bytes of 16 words."""
    total = None
    for place, x in enumerate(vectors):
        bits = builder.bitcast(multiply_add(builder, x, factor, FLOATS([float(ROUND)] * LANES)), INTS)
        own = bits if place == 3 else builder.and_(bits, ints(0xFF))
        moved = builder.shl(own, ints(8 * place)) if place else own
        total = moved if total is None else builder.or_(total, moved)
    return total


def _largest(dtype: Any, words: ir.VectorType, mask: int) -> Any:
    """Of the numbers of a row without their signs. Bits of floats are in the order of their sizes, infinity and then
    NaN above all."""

    @intrinsic
    def largest(typing: Any, numbers: Any, at: Any, num: Any) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            first = place_of(context, builder, numbers, *arguments[:2])
            place, num = cgutils.alloca_once(builder, words), arguments[2]
            builder.store(words(None), place)
            step = num.type(words.count)
            with cgutils.for_range_slice(builder, num.type(0), num, step, num.type) as (i, _):
                row = builder.bitcast(builder.gep(first, [i]), words.as_pointer())
                size = builder.and_(builder.load(row, align=2), words([mask] * words.count))
                top = builder.load(place)
                builder.store(builder.select(builder.icmp_unsigned(">", size, top), size, top), place)
            name = f"llvm.vector.reduce.umax.v{words.count}i{words.element.width}"
            top = builder.zext(call(builder, name, words.element, [builder.load(place)]), ir.IntType(32))
            shift = ir.IntType(32)(32 - words.element.width)
            return builder.bitcast(builder.shl(top, shift), ir.FloatType())

        return types.float32(numbers, types.intp, types.intp), build

    return largest


@intrinsic
def _round_weights(typing: Any, w: Any, at: Any, num: Any, factor: Any, tiles: Any, tile_at: Any, step: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first, num = place_of(context, builder, w, *arguments[:2]), arguments[2]
        out, factor = place_of(context, builder, tiles, *arguments[4:6]), splat(builder, arguments[3])
        with cgutils.for_range(builder, num) as loop:
            pairs = builder.gep(first, [builder.mul(loop.index, WORD(STEP_INPUTS))])
            vectors = []
            for i in range(2):
                prefetch(builder, pairs, WORD(AHEAD + i * 2 * LANES))
                place = builder.bitcast(builder.gep(pairs, [WORD(i * 2 * LANES)]), INTS.as_pointer())
                words = builder.load(place, align=2)
                vectors += [builder.shl(words, ints(16)), builder.and_(words, ints(0xFFFF0000))]
            rounded = _bytes(builder, [builder.bitcast(v, FLOATS) for v in vectors], factor)
            store(builder, rounded, builder.gep(out, [builder.mul(loop.index, arguments[6])]))
        return context.get_dummy_value()

    n = types.intp
    return types.void(w, n, n, types.float32, tiles, n, n), build


@intrinsic
def _round_inputs(
    typing: Any, x: Any, at: Any, row_numbers: Any, num_rows: Any, factors: Any, row: Any, tiles: Any, tile_at: Any
) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first, num_rows = place_of(context, builder, x, *arguments[:2]), arguments[3]
        factor_of = place_of(context, builder, factors, *arguments[4:6])
        rows = []
        for row in range(TILE_ROWS):
            is_there = builder.icmp_signed("<", WORD(row), num_rows)
            own = builder.select(is_there, WORD(row), WORD(0))
            place = builder.gep(first, [builder.mul(arguments[2], own)])
            a, b, c, d = (load(builder, types.float32, builder.gep(place, [WORD(i * LANES)]), None) for i in range(4))
            vectors = [shuffle(builder, *pair, lanes) for pair in ((a, b), (c, d)) for lanes in (EVEN, ODD)]
            factor = splat(builder, builder.load(builder.gep(factor_of, [own])))
            rows.append(builder.select(is_there, _bytes(builder, vectors, factor), ints(0)))
        out = place_of(context, builder, tiles, *arguments[6:])
        for four, words in enumerate(transposed(builder, rows)):
            store(builder, words, builder.gep(out, [WORD(four * TILE_ROWS)]))
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, n, n, n, factors, n, tiles, n), build


@intrinsic
def _give_scaled(
    typing: Any, sums: Any, at: Any, num_rows: Any, across: Any, n: Any, down: Any, m: Any, out: Any, to: Any, row: Any
) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first = place_of(context, builder, sums, *arguments[:2])
        vectors = []
        for i in range(TILE_ROWS):
            place = builder.bitcast(builder.gep(first, [WORD(i * SUM_NUMBERS)]), INTS.as_pointer())
            vectors.append(builder.load(place, align=4))
        scales = load(builder, types.float32, place_of(context, builder, across, *arguments[3:5]), None)
        row_scales = place_of(context, builder, down, *arguments[5:7])
        out_first = place_of(context, builder, out, *arguments[7:9])
        for i, vector in enumerate(transposed(builder, vectors)):
            with builder.if_then(builder.icmp_signed("<", WORD(i), arguments[2])):
                scale = splat(builder, builder.load(builder.gep(row_scales, [WORD(i)])))
                found = builder.fmul(builder.fmul(builder.sitofp(vector, FLOATS), scales), scale)
                store(builder, found, builder.gep(out_first, [builder.mul(arguments[9], WORD(i))]))
        return context.get_dummy_value()

    i = types.intp
    return types.void(sums, i, i, across, i, down, i, out, i, i), build


# As float32: of `num` numbers from w[at], bits of bfloat16, or from x[at] on.
largest_weight: Callable[[np.ndarray, int, int], np.float32] = cast(Any, _largest(types.uint16, HALVES, 0x7FFF))
largest_input: Callable[[np.ndarray, int, int], np.float32] = cast(Any, _largest(types.float32, INTS, 0x7FFFFFFF))
# `num` steps of a row of w from w[at] on times a factor, each into the row of a tile, `step` words after the last.
round_weights: Callable[[np.ndarray, int, int, np.float32, np.ndarray, int, int], None] = cast(Any, _round_weights)
# `num_rows` rows of 64 inputs times factors, zeros below them, as one tile.
round_inputs: Callable[[np.ndarray, int, int, int, np.ndarray, int, np.ndarray, int], None] = cast(Any, _round_inputs)
# 16 x 16 of the sums as `num_rows` rows of the result, times the scales of columns and of rows.
give_scaled: Callable[[np.ndarray, int, int, np.ndarray, int, np.ndarray, int, np.ndarray, int, int], None] = cast(
    Any, _give_scaled
)
# Of one or two tiles across; w is in tiles as well.
add_rounded1, add_rounded2 = adder(1, "tdpbssd", 1), adder(2, "tdpbssd", 1)
