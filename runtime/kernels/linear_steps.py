"""The steps of a product of float32 with stored weights, in vectors.

A vector holds one input of as many rows of x as it has lanes; a number of w meets all of them at once. Each row of w
has a sum with each vector, which stays in a register until the inputs end: in 24 of 32 registers of 16 lanes (8 rows x
3 vectors, 12 x 2 or 24 x 1), in 12 of 16 of 8. So rows of w are widened as they lie, and nothing is added up across
lanes.

Inputs are float32, or **pairs** of bfloat16 in words, which are multiplied with pairs of w: half as many products, and
all else the same, with words in the place of numbers.

M rows of x, N of w, K inputs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import GROUP_NUMBERS
from .primitives import (
    FLOATS,
    INTS,
    LANES,
    Builder,
    Place,
    RowsAt,
    Value,
    add_pairs,
    apart_of,
    first_of,
    load,
    multiply_add,
    prefetch,
    round_to_words,
    shuffle,
    splat,
    store,
)

MOST_VECTORS = 3 if LANES == 16 else 2  # of rows of x side by side
WEIGHT_ROWS = 24 if LANES == 16 else 12  # widened at once: as many as there are sums
EVEN_ROWS = 4 if LANES == 16 else 2  # rows of w come in multiples of these
CHAIN_INPUTS = 256  # words that are added up in registers, at most; widened rows lie as many apart
GROUP_SHIFT = GROUP_NUMBERS.bit_length() - 1
_AHEAD = 4  # inputs ahead of which those of x are asked into the first cache: 3 % of a product of 480 rows


@intrinsic
def _transpose(typing: Any, rows: Any, num_rows: Any, out: Any, num_kept: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        columns, num_read, written, num_written = arguments
        first, apart = first_of(context, builder, rows, columns), apart_of(builder, columns)
        target, out_apart = first_of(context, builder, out, written), apart_of(builder, written)
        read = [cgutils.alloca_once(builder, FLOATS) for _ in range(LANES)]
        for i, own in enumerate(read):
            builder.store(FLOATS(None), own)
            with builder.if_then(_is_above(builder, num_read, i), likely=True):
                builder.store(load(builder, types.float32, _nth(builder, first, i, apart), None), own)
        for i, vector in enumerate(_transposed(builder, [builder.load(own) for own in read])):
            with builder.if_then(_is_above(builder, num_written, i), likely=True):
                store(builder, vector, _nth(builder, target, i, out_apart))
        return context.get_dummy_value()

    n = types.intp
    return types.void(rows, n, out, n), build


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
def _take(typing: Any, row: Any, num_words: Any, out: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        stored, end = first_of(context, builder, row, arguments[0]), arguments[1]
        taken, dtype, n = first_of(context, builder, out, arguments[2]), row.types[0].dtype, end.type
        with cgutils.for_range_slice(builder, n(0), end, n(LANES), n) as (k, _):
            if _is_paired(out.types[0]):
                words = builder.bitcast(builder.bitcast(stored, taken.type), INTS.as_pointer())
                vector = builder.load(builder.gep(words, [builder.udiv(k, n(LANES))]), align=dtype.bitwidth // 8)
            else:
                vector = load(builder, dtype, builder.gep(stored, [k]), None)
            store(builder, vector, builder.gep(taken, [k]))
        return context.get_dummy_value()

    return types.void(row, types.intp, out), build


@intrinsic
def _round_to_pairs(typing: Any, row: Any, num_words: Any, out: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        numbers, end = first_of(context, builder, row, arguments[0]), arguments[1]
        rounded, n = first_of(context, builder, out, arguments[2]), end.type
        if not _is_paired(out.types[0]):
            return context.get_dummy_value()
        with cgutils.for_range_slice(builder, n(0), end, n(LANES), n) as (k, _):
            at = builder.mul(k, n(2))
            places = [builder.gep(numbers, [builder.add(at, n(i * LANES))]) for i in range(2)]
            halves = [load(builder, types.float32, place, None) for place in places]
            store(builder, round_to_words(builder, *halves), builder.gep(rounded, [k]))
        return context.get_dummy_value()

    return types.void(row, types.intp, out), build


@intrinsic
def _numbers_per_word(typing: Any, words: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        return context.get_constant(types.intp, 2 if _is_paired(words) else 1)

    return types.intp(words), build


def _is_paired(words: Any) -> bool:
    return words.dtype == types.uint32


class _Given(NamedTuple):
    """What `add_products` is given, in its order: the compiler's types of arguments, or their values."""

    weights: Any
    num_rows: Any
    inputs: Any
    num_vectors: Any
    num_inputs: Any
    sums: Any
    is_first: Any
    ahead: Any
    num_ahead: Any
    group_apart: Any


@intrinsic
def _add_products(
    typing: Any,
    weights: Any,
    num_rows: Any,
    inputs: Any,
    num_vectors: Any,
    num_inputs: Any,
    sums: Any,
    is_first: Any,
    ahead: Any,
    num_ahead: Any,
    group_apart: Any,
) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        given = _Given(*arguments)
        firsts = [
            first_of(context, builder, kind, value)
            for kind, value in ((weights, given.weights), (inputs, given.inputs), (sums, given.sums))
        ]
        next_rows, apart = first_of(context, builder, ahead, given.ahead), apart_of(builder, given.ahead)

        def ask_ahead(k: Value) -> None:
            # Up to the last of a step's inputs: rows of published files begin inside a cache line and end inside one.
            behind = builder.mul(builder.add(k, k.type(LANES)), given.group_apart)
            last = builder.sub(builder.lshr(behind, k.type(GROUP_SHIFT)), k.type(1))
            with cgutils.for_range(builder, given.num_ahead, intp=k.type) as loop:
                prefetch(builder, next_rows, builder.add(builder.mul(loop.index, apart), last))

        for vectors in range(1, MOST_VECTORS + 1):
            with builder.if_then(_is(builder, given.num_vectors, vectors)):
                for rows in range(EVEN_ROWS, WEIGHT_ROWS // vectors + 1, EVEN_ROWS):
                    with builder.if_then(_is(builder, given.num_rows, rows)):
                        totals = _totals(builder, firsts[0], rows, firsts[1], vectors, given.num_inputs, ask_ahead)
                        _give(builder, totals, firsts[2], given.is_first)
        return context.get_dummy_value()

    n = types.intp
    return types.void(weights, n, inputs, n, n, sums, types.boolean, ahead, n, n), build


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
    n, add = num_inputs.type, multiply_add if inputs.type.pointee == FLOATS.element else add_pairs
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
                    builder.store(add(builder, weight, numbers, builder.load(total)), total)
    return [builder.load(place) for row in sums for place in row]


def _give(builder: Builder, totals: list[Value], results: Value, is_first: Value) -> None:
    """One behind the other, added to what is there unless they are the first."""
    for i, total in enumerate(totals):
        place = cgutils.gep_inbounds(builder, results, i * LANES)
        before = builder.select(is_first, FLOATS(None), load(builder, types.float32, place, None))
        store(builder, builder.fadd(before, total), place)


# `num_rows`, up to LANES, of rows as columns of a square of LANES x LANES, the first `num_kept` rows of which go to
# `out`. Columns that have no row are 0.
transpose: Callable[[RowsAt, int, RowsAt, int], None] = cast(Any, _transpose)
# So many words, a multiple of LANES, of a stored row: float32, or uint32 for pairs of bfloat16, which stay as they are.
take: Callable[[Place, int, Place], None] = cast(Any, _take)
# So many words, a multiple of LANES, of float32, twice as many, that are rounded; nothing where words are float32.
round_to_pairs: Callable[[Place, int, Place], None] = cast(Any, _round_to_pairs)
# A constant: 1 of float32, 2 of uint32.
numbers_per_word: Callable[[np.ndarray], int] = cast(Any, _numbers_per_word)
# `num_rows` rows of words of weights times `num_vectors` vectors, (num_inputs, num_vectors, LANES) of inputs, into
# (num_rows, num_vectors, LANES) of sums, which begin with it where it `is_first`. Meanwhile the same inputs of
# `num_ahead` rows of stored weights are asked into the second cache: neither waits for the other. GROUP_NUMBERS of
# these lie `group_apart` elements apart.
add_products: Callable[[Place, int, Place, int, int, Place, bool, RowsAt, int, int], None] = cast(Any, _add_products)
