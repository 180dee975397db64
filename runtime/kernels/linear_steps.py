"""The steps of a product of float32 with stored weights, in vectors.

A vector holds one input of as many rows of x as it has lanes; a number of w meets all of them at once. Each row of w
has a sum with each vector, which stays in a register until the inputs end: in 24 of 32 registers of 16 lanes (8 rows x
3 vectors, 12 x 2 or 24 x 1), in 12 of 16 of 8. So rows of w are widened as they lie, and nothing is added up across
lanes.

M rows of x, N of w, K inputs.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .primitives import (
    FLOATS,
    LANES,
    Builder,
    Value,
    load,
    multiply_add,
    place_of,
    prefetch,
    shuffle,
    splat,
    store,
)

MOST_VECTORS = 3 if LANES == 16 else 2  # of rows of x side by side
WEIGHT_ROWS = 24 if LANES == 16 else 12  # widened at once: as many as there are sums
EVEN_ROWS = 4 if LANES == 16 else 2  # rows of w come in multiples of these
CHAIN_INPUTS = 256  # that are added up in registers, at most; widened rows lie as many numbers apart
_AHEAD = 4  # inputs ahead of which those of x are asked into the first cache: 3 % of a product of 480 rows


@intrinsic
def _transpose(
    typing: Any, rows: Any, at: Any, apart: Any, num_rows: Any, place: Any, to: Any, to_apart: Any, num_kept: Any
) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first = place_of(context, builder, rows, *arguments[:2])
        target = place_of(context, builder, place, *arguments[4:6])
        read = [cgutils.alloca_once(builder, FLOATS) for _ in range(LANES)]
        for i, own in enumerate(read):
            builder.store(FLOATS(None), own)
            with builder.if_then(_is_above(builder, arguments[3], i), likely=True):
                builder.store(load(builder, types.float32, _nth(builder, first, i, arguments[2]), None), own)
        for i, vector in enumerate(_transposed(builder, [builder.load(own) for own in read])):
            with builder.if_then(_is_above(builder, arguments[7], i), likely=True):
                store(builder, vector, _nth(builder, target, i, arguments[6]))
        return context.get_dummy_value()

    n = types.intp
    return types.void(rows, n, n, n, place, n, n, n), build


def _transposed(builder: Builder, vectors: list[Value]) -> list[Value]:
    """LANES of them. The square is cut in four, of which two change places; then each of these."""
    vectors, width = list(vectors), LANES
    while width > 1:
        width //= 2
        is_first = [lane // width % 2 == 0 for lane in range(LANES)]
        upper = [lane if first else LANES + lane - width for lane, first in enumerate(is_first)]
        lower = [lane + width if first else LANES + lane for lane, first in enumerate(is_first)]
        for i in (lane for lane in range(LANES) if is_first[lane]):
            a, b = vectors[i], vectors[i + width]
            vectors[i], vectors[i + width] = shuffle(builder, a, b, upper), shuffle(builder, a, b, lower)
    return vectors


def _nth(builder: Builder, first: Value, i: int, apart: Value) -> Value:
    return builder.gep(first, [builder.mul(apart, apart.type(i))])


def _is_above(builder: Builder, number: Value, least: int) -> Value:
    return builder.icmp_signed(">", number, number.type(least))


def _is(builder: Builder, number: Value, wanted: int) -> Value:
    return builder.icmp_signed("==", number, number.type(wanted))


@intrinsic
def _widen(typing: Any, rows: Any, at: Any, num_inputs: Any, place: Any, to: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        stored, n = place_of(context, builder, rows, *arguments[:2]), arguments[1].type
        widened = place_of(context, builder, place, *arguments[3:])
        with cgutils.for_range_slice(builder, n(0), arguments[2], n(LANES), n) as (k, _):
            store(builder, load(builder, rows.dtype, builder.gep(stored, [k]), None), builder.gep(widened, [k]))
        return context.get_dummy_value()

    n = types.intp
    return types.void(rows, n, n, place, n), build


@intrinsic
def _add_products(
    typing: Any,
    tile: Any,
    tile_at: Any,
    num_rows: Any,
    x: Any,
    x_at: Any,
    num_vectors: Any,
    num_inputs: Any,
    sums: Any,
    sums_at: Any,
    is_first: Any,
    w: Any,
    next_at: Any,
    apart: Any,
    num_next: Any,
) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        weights, inputs = (place_of(context, builder, *pair) for pair in ((tile, *arguments[:2]), (x, *arguments[3:5])))
        results = place_of(context, builder, sums, *arguments[7:9])
        ahead = place_of(context, builder, w, *arguments[10:12])

        def ask_ahead(k: Value) -> None:
            with cgutils.for_range(builder, arguments[13], intp=k.type) as loop:
                prefetch(builder, ahead, builder.add(builder.mul(loop.index, arguments[12]), k))

        for vectors in range(1, MOST_VECTORS + 1):
            with builder.if_then(_is(builder, arguments[5], vectors)):
                for rows in range(EVEN_ROWS, WEIGHT_ROWS // vectors + 1, EVEN_ROWS):
                    with builder.if_then(_is(builder, arguments[2], rows)):
                        totals = _totals(builder, weights, rows, inputs, vectors, arguments[6], ask_ahead)
                        _give(builder, totals, results, arguments[9])
        return context.get_dummy_value()

    n = types.intp
    return types.void(tile, n, n, x, n, n, n, sums, n, types.boolean, w, n, n, n), build


def _totals(
    builder: Builder,
    weights: Value,
    rows: int,
    inputs: Value,
    vectors: int,
    num_inputs: Value,
    each_step: Callable[[Value], None],
) -> list[Value]:
    """The sums of the first row of w with each vector of x, then those of the next. `each_step` is built once for each
    LANES inputs."""
    n = num_inputs.type
    sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(vectors)] for _ in range(rows)]
    for place in (place for row in sums for place in row):
        builder.store(FLOATS(None), place)
    with cgutils.for_range_slice(builder, n(0), num_inputs, n(LANES), n) as (step, _):
        each_step(step)
        with cgutils.for_range(builder, n(LANES), intp=n) as loop:
            k = builder.add(step, loop.index)
            places = [builder.add(builder.mul(k, n(vectors * LANES)), n(i * LANES)) for i in range(vectors)]
            x = [load(builder, types.float32, builder.gep(inputs, [place]), None) for place in places]
            for place in places:
                prefetch(builder, inputs, builder.add(place, n(_AHEAD * vectors * LANES)), level=1)
            for row, own in enumerate(sums):
                weight = splat(builder, builder.load(builder.gep(weights, [builder.add(k, n(row * CHAIN_INPUTS))])))
                for total, numbers in zip(own, x, strict=True):
                    builder.store(multiply_add(builder, weight, numbers, builder.load(total)), total)
    return [builder.load(place) for row in sums for place in row]


def _give(builder: Builder, totals: list[Value], results: Value, is_first: Value) -> None:
    """One behind the other, added to what is there unless they are the first."""
    for i, total in enumerate(totals):
        place = cgutils.gep_inbounds(builder, results, i * LANES)
        before = builder.select(is_first, FLOATS(None), load(builder, types.float32, place, None))
        store(builder, builder.fadd(before, total), place)


# `num_rows`, up to LANES, of rows from rows[at] on, `apart` numbers apart, as columns of a square of LANES x LANES; its
# first `num_kept` rows go to place[to] and on, `to_apart` apart. Columns that have no row are 0.
transpose: Callable[[np.ndarray, int, int, int, np.ndarray, int, int, int], None] = cast(Any, _transpose)
# `num_inputs` numbers, a multiple of LANES, from rows[at] on, as float32 to place[to].
widen: Callable[[np.ndarray, int, int, np.ndarray, int], None] = cast(Any, _widen)
# `num_rows` widened rows from tile[tile_at] on times `num_vectors` vectors, (num_inputs, num_vectors, LANES) from
# x[x_at] on, into (num_rows, num_vectors, LANES) from sums[sums_at] on. Meanwhile the same inputs of `num_next` rows
# from w[next_at] on, `apart` numbers apart, are asked into the second cache: neither waits for the other.
add_products: Callable[
    [np.ndarray, int, int, np.ndarray, int, int, int, np.ndarray, int, bool, np.ndarray, int, int, int], None
] = cast(Any, _add_products)
