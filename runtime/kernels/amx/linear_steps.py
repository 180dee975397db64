"""The steps of a product of float32 with bfloat16 weights, in the processor's matrix unit (`unit.py`).

M rows of x, N of w, K inputs. A tile of w is 16 of its rows as they lie, 32 inputs of each; one of x holds 16 pairs of
inputs of 16 rows; what their products add up to is 16 x 16 of the result, N down and M across. The eight tiles:

    0-3 sums: tile 2j + i of the i-th 16 rows of w and the j-th 16 of x    4, 5 weights    6, 7 inputs

so that each tile of weights is loaded once for two of inputs. With one of inputs, tiles 2, 3 and 7 are idle.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba import types
from numba.extending import intrinsic

from ..arguments import PAIR_ROWS
from ..primitives import FLOATS, INTS, LANES, Builder, Value, ints, load, place_of, shuffle, store
from .layout import EVEN, ODD, nearest, paired
from .scratch import TILE_DIMS, TILE_ROWS
from .unit import BYTE, WORD, tile_op

PARTS = 3  # bfloat16 that add up to a float32: 8 bits of its 24 each
TILE_WORDS = TILE_ROWS * TILE_ROWS  # of 32 bits
STEP_WORDS = PARTS * TILE_WORDS  # of the inputs of 16 rows at one depth: the tile of each part
PAIR_NUMBERS = PAIR_ROWS * TILE_DIMS
SUM_NUMBERS = 2 * TILE_ROWS  # of a row of sums


def _move(builder: Builder, name: str, tile: int, first: Value, at: Value, row_bytes: Value) -> None:
    place = builder.bitcast(builder.gep(first, [at]), BYTE.as_pointer())
    tile_op(builder, name, BYTE(tile), place, row_bytes)


def _adder(across: int) -> Any:
    """Adds, for one or two tiles across, the products with 32 rows of w from w[at] on, at one depth of all parts."""

    @intrinsic
    def add(typing: Any, w: Any, w_at: Any, row_numbers: Any, x: Any, x_at: Any, x_numbers: Any) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            weights, first_weight, row, all_inputs, first_input, tile = arguments
            rows = place_of(context, builder, w, weights, first_weight)
            inputs = place_of(context, builder, x, all_inputs, first_input)
            for i in range(2):
                at = builder.mul(row, WORD(i * TILE_ROWS))
                _move(builder, "tileloadd64", 4 + i, rows, at, builder.mul(row, WORD(2)))
            for part in range(PARTS):
                for j in range(across):
                    at = builder.add(builder.mul(tile, WORD(j)), WORD(part * TILE_WORDS))
                    _move(builder, "tileloadd64", 6 + j, inputs, at, WORD(4 * TILE_ROWS))
                    for i in range(2):
                        tile_op(builder, "tdpbf16ps", BYTE(2 * j + i), BYTE(4 + i), BYTE(6 + j))
            return context.get_dummy_value()

        n = types.intp
        return types.void(w, n, n, x, n, n), build

    return add


@intrinsic
def _copy_inputs(typing: Any, w: Any, at: Any, panel: Any, place: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        source = place_of(context, builder, w, *arguments[:2])
        target = place_of(context, builder, panel, *arguments[2:])
        line = builder.load(builder.bitcast(source, INTS.as_pointer()), align=2)
        builder.store(line, builder.bitcast(target, INTS.as_pointer()), align=64)
        return context.get_dummy_value()

    return types.void(w, types.intp, panel, types.intp), build


def _zero(across: int) -> Any:
    @intrinsic
    def zero(typing: Any) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            for tile in range(2 * across):
                tile_op(builder, "tilezero", BYTE(tile))
            return context.get_dummy_value()

        return types.void(), build

    return zero


def _store(across: int) -> Any:
    @intrinsic
    def stored(typing: Any, sums: Any, at: Any) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            first = place_of(context, builder, sums, *arguments)
            for j in range(across):
                for i in range(2):
                    place = WORD((i * SUM_NUMBERS + j) * TILE_ROWS)
                    _move(builder, "tilestored64", 2 * j + i, first, place, WORD(4 * SUM_NUMBERS))
            return context.get_dummy_value()

        return types.void(sums, types.intp), build

    return stored


def _transposed(builder: Builder, vectors: list[Value]) -> list[Value]:
    """16 vectors of 16 lanes: blocks of 1, 2, 4 and 8 lanes change places with those across the diagonal."""
    width = 1
    while width < LANES:
        is_first = [not lane & width for lane in range(LANES)]
        upper = [lane if first else LANES + lane - width for lane, first in enumerate(is_first)]
        lower = [lane + width if first else LANES + lane for lane, first in enumerate(is_first)]
        swapped = list(vectors)
        for i in (i for i in range(LANES) if not i & width):
            a, b = vectors[i], vectors[i + width]
            swapped[i], swapped[i + width] = shuffle(builder, a, b, upper), shuffle(builder, a, b, lower)
        vectors, width = swapped, 2 * width
    return vectors


def _split(builder: Builder, x: Value) -> list[Value]:
    """Bits of bfloat16, in the upper halves, that add up to x: what is left after each has 8 bits less."""
    found = []
    for _ in range(PARTS):
        found.append(nearest(builder, x))
        x = builder.fsub(x, builder.bitcast(found[-1], FLOATS))
    return found


@intrinsic
def _split_inputs(typing: Any, x: Any, at: Any, row_numbers: Any, num_rows: Any, tiles: Any, tile_at: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first, num_rows = place_of(context, builder, x, *arguments[:2]), arguments[3]
        parts: list[list[Value]] = [[] for _ in range(PARTS)]
        for row in range(TILE_ROWS):
            is_there = builder.icmp_signed("<", WORD(row), num_rows)
            place = builder.gep(first, [builder.select(is_there, builder.mul(arguments[2], WORD(row)), WORD(0))])
            a, b = (load(builder, types.float32, builder.gep(place, [WORD(i * LANES)]), None) for i in range(2))
            even, odd = (_split(builder, shuffle(builder, a, b, lanes)) for lanes in (EVEN, ODD))
            for part in range(PARTS):
                parts[part].append(builder.select(is_there, paired(builder, even[part], odd[part]), ints(0)))
        out = place_of(context, builder, tiles, *arguments[4:])
        for part, rows in enumerate(parts):
            for pair, words in enumerate(_transposed(builder, rows)):
                place = builder.gep(out, [WORD(part * TILE_WORDS + pair * TILE_ROWS)])
                builder.store(words, builder.bitcast(place, INTS.as_pointer()), align=4)
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, n, n, n, tiles, n), build


@intrinsic
def _give_products(typing: Any, sums: Any, at: Any, num_rows: Any, out: Any, out_at: Any, row_numbers: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first = place_of(context, builder, sums, *arguments[:2])
        places = [builder.gep(first, [WORD(row * SUM_NUMBERS)]) for row in range(TILE_ROWS)]
        vectors = [load(builder, types.float32, place, None) for place in places]
        out_first = place_of(context, builder, out, *arguments[3:5])
        for row, vector in enumerate(_transposed(builder, vectors)):
            with builder.if_then(builder.icmp_signed("<", WORD(row), arguments[2])):
                store(builder, vector, builder.gep(out_first, [builder.mul(arguments[5], WORD(row))]))
        return context.get_dummy_value()

    n = types.intp
    return types.void(sums, n, n, out, n, n), build


# Of one or two tiles across.
add_products1, add_products2 = _adder(1), _adder(2)
zero1, zero2 = _zero(1), _zero(2)
store1, store2 = _store(1), _store(2)
# 32 inputs of a row, from anywhere to a line of the cache.
copy_inputs: Callable[[np.ndarray, int, np.ndarray, int], None] = cast(Any, _copy_inputs)
# `num_rows` rows of 32 inputs, zeros below them, as one step of tiles.
split_inputs: Callable[[np.ndarray, int, int, int, np.ndarray, int], None] = cast(Any, _split_inputs)
# 16 x 16 of the sums as `num_rows` rows of the result.
give_products: Callable[[np.ndarray, int, int, np.ndarray, int, int], None] = cast(Any, _give_products)
