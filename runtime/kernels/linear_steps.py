"""The steps of a product of float32 with stored weights, in vectors of 16 lanes and 32 registers.

A vector holds one input of as many rows of x as it has lanes; a number of w meets all of them at once. Each row of w
has a sum with each vector, which stays in a register until the inputs end: in 24 of them (8 rows x 3 vectors, 12 x 2 or
24 x 1). So rows of w are widened as they lie, and nothing is added up across lanes. Rows of x that are at most half of
the lanes lie there twice, or four times, and meet as many rows of w at once, **side by side**: these lie by turns, word
for word. Each sum is the same to its last bit.

Inputs are float32, or **pairs** of bfloat16 in words, which are multiplied with pairs of w: half as many products, and
all else the same, with words in the place of numbers.

M rows of x, N of w, K inputs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import GROUP_NUMBERS, PAIR_ROWS
from .primitives import (
    FLOATS,
    INT,
    INTS,
    LANES,
    Builder,
    Place,
    RowsAt,
    Value,
    add_pairs,
    apart_of,
    first_of,
    is_equal,
    load,
    multiply_add,
    prefetch,
    round_to_words,
    shuffle,
    splat,
    store,
)
from .squares import SIDES, by_turns

MOST_VECTORS = 3  # of rows of x side by side
WEIGHT_ROWS = 24  # widened at once: as many as there are sums
CHAIN_INPUTS = 256  # words that are added up in registers, at most; widened rows lie as many apart
GROUP_SHIFT = GROUP_NUMBERS.bit_length() - 1
_AHEAD = 4  # inputs ahead of which those of x are asked into the first cache: 3 % of a product of 480 rows


@intrinsic
def _take_side_by_side(typing: Any, rows: Any, num_rows: Any, num_words: Any, sides: Any, out: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        given, count, end, wanted, written = arguments
        first, apart = first_of(context, builder, rows, given), apart_of(builder, given)
        target, n = first_of(context, builder, out, written), end.type
        for sides in SIDES:
            with builder.if_then(is_equal(builder, wanted, sides)):
                slices = cgutils.for_range_slice(builder, n(0), count, n(sides), n)
                with slices as (row, _), cgutils.for_range_slice(builder, n(0), end, n(LANES), n) as (k, _):
                    numbers = [builder.add(row, n(i)) for i in range(sides)]
                    each = [builder.gep(first, [builder.mul(number, apart)]) for number in numbers]
                    vectors = [_words(builder, rows, out, stored, k) for stored in each]
                    to = builder.add(builder.mul(row, n(CHAIN_INPUTS)), builder.mul(k, n(sides)))
                    for i, vector in enumerate(by_turns(builder, vectors)):
                        store(builder, vector, builder.gep(target, [builder.add(to, n(i * LANES))]))
        return context.get_dummy_value()

    n = types.intp
    return types.void(rows, n, n, n, out), build


def _words(builder: Builder, row: Any, out: Any, stored: Value, k: Value) -> Value:
    """Loads as many words as lanes, as those of `out` are, from word `k` of a stored row on."""
    dtype, words = row.types[0].dtype, out.types[0].dtype
    if dtype == words or not _is_paired(out.types[0]):
        return load(builder, dtype, builder.gep(stored, [k]), None)
    place = builder.gep(builder.bitcast(stored, INT.as_pointer()), [k])
    return builder.load(builder.bitcast(place, INTS.as_pointer()), align=dtype.bitwidth // 8)


@intrinsic
def _take(typing: Any, row: Any, num_words: Any, out: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        stored, end = first_of(context, builder, row, arguments[0]), arguments[1]
        taken, n = first_of(context, builder, out, arguments[2]), end.type
        with cgutils.for_range_slice(builder, n(0), end, n(LANES), n) as (k, _):
            store(builder, _words(builder, row, out, stored, k), builder.gep(taken, [k]))
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
    sides: Any


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
    sides: Any,
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

        shapes = [(vectors, 1) for vectors in range(1, MOST_VECTORS + 1)] + [(1, sides) for sides in SIDES]
        for vectors, sides in shapes:
            is_so = builder.and_(is_equal(builder, given.num_vectors, vectors), is_equal(builder, given.sides, sides))
            with builder.if_then(is_so):
                for rows in _heights(vectors):
                    with builder.if_then(is_equal(builder, given.num_rows, rows)):
                        shape = rows // sides, vectors, sides
                        totals = _totals(builder, firsts[0], firsts[1], shape, given.num_inputs, ask_ahead)
                        _give(builder, totals, firsts[2], given.is_first)
        return context.get_dummy_value()

    n = types.intp
    return types.void(weights, n, inputs, n, n, sums, types.boolean, ahead, n, n, n), build


def _heights(vectors: int) -> list[int]:
    """How many rows of w meet so many vectors at once: of WEIGHT_ROWS, and of what is left of any number of
    PAIR_ROWS."""
    most = WEIGHT_ROWS // vectors
    counts = {PAIR_ROWS * i % WEIGHT_ROWS or WEIGHT_ROWS for i in range(1, WEIGHT_ROWS + 1)}
    return sorted({min(most, count - row) for count in counts for row in range(0, count, most)})


def _totals(
    builder: Builder,
    weights: Value,
    inputs: Value,
    shape: tuple[int, int, int],
    num_inputs: Value,
    each_step: Callable[[Value], None],
) -> list[Value]:
    """The sums of the first row of w, or of the first ones side by side, with each vector of x, then those of the next.
    `shape`: such rows, vectors, sides. `each_step` is built once for each LANES inputs."""
    rows, vectors, sides = shape
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
                weight_at = builder.mul(builder.add(k, n(row * CHAIN_INPUTS)), n(sides))
                weight = _repeated(builder, builder.gep(weights, [weight_at]), sides)
                for total, numbers in zip(own, x, strict=True):
                    builder.store(add(builder, weight, numbers, builder.load(total)), total)
    return [builder.load(place) for row in sums for place in row]


def _repeated(builder: Builder, place: Value, count: int) -> Value:
    """So many words from a place on, again and again."""
    if count == 1:
        return splat(builder, builder.load(place))
    words = builder.load(builder.bitcast(place, ir.VectorType(place.type.pointee, count).as_pointer()), align=4)
    return shuffle(builder, words, words, [lane % count for lane in range(LANES)])


def _give(builder: Builder, totals: list[Value], results: Value, is_first: Value) -> None:
    """One behind the other, added to what is there unless they are the first."""
    for i, total in enumerate(totals):
        place = cgutils.gep_inbounds(builder, results, i * LANES)
        before = builder.select(is_first, FLOATS(None), load(builder, types.float32, place, None))
        store(builder, builder.fadd(before, total), place)


# So many words, a multiple of LANES, of `num_rows` stored rows as `take` takes them, each with its next ones by turns.
take_side_by_side: Callable[[RowsAt, int, int, int, Place], None] = cast(Any, _take_side_by_side)
# So many words, a multiple of LANES, of a stored row: float32, or uint32 for pairs of bfloat16, which stay as they are.
take: Callable[[Place, int, Place], None] = cast(Any, _take)
# So many words, a multiple of LANES, of float32, twice as many, that are rounded; nothing where words are float32.
round_to_pairs: Callable[[Place, int, Place], None] = cast(Any, _round_to_pairs)
# A constant: 1 of float32, 2 of uint32.
numbers_per_word: Callable[[np.ndarray], int] = cast(Any, _numbers_per_word)
# `num_rows` rows of words of weights times `num_vectors` vectors, (num_inputs, num_vectors, LANES) of inputs, into
# (num_rows, num_vectors, LANES) of sums, which begin with it where it `is_first`. Meanwhile the same inputs of
# `num_ahead` rows of stored weights are asked into the second cache: neither waits for the other. GROUP_NUMBERS of
# these lie `group_apart` elements apart. Of rows of weights with several `sides`, such have one vector of sums.
add_products: Callable[[Place, int, Place, int, int, Place, bool, RowsAt, int, int, int], None] = cast(
    Any, _add_products
)
