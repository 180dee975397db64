"""Between the plain layout of the compiled decode attention and that of tiles (`scratch.py`): queries and weights
are split, scores and sums put back.

H KV heads, G query heads of each, J tiles of its queries, D of a head, S positions of a chunk.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..arguments import CHUNK_TOKENS, Span
from ..primitives import (
    FLOATS,
    INTS,
    LANES,
    ONE,
    ZERO,
    Builder,
    Value,
    ints,
    load,
    place_of,
    shuffle,
    splat,
    store,
)
from .scratch import PAIRED, TILE_DIMS, TILE_QUERIES, TILE_ROWS

WORD = ir.IntType(64)
HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)
EVEN, ODD = list(range(0, 2 * LANES, 2)), list(range(1, 2 * LANES, 2))
IN_TURNS = [place for pair in zip(range(LANES), range(LANES, 2 * LANES), strict=True) for place in pair]


def nearest(builder: Builder, x: Value) -> Value:
    """bfloat16 in the upper half of each 32 bits; of those that lie as near the even one, as torch does."""
    bits = builder.bitcast(x, INTS)
    is_odd = builder.and_(builder.lshr(bits, ints(16)), ints(1))
    rounded = builder.and_(builder.add(bits, builder.add(is_odd, ints(0x7FFF))), ints(0xFFFF0000))
    return builder.select(builder.fcmp_unordered("uno", x, x), ints(0x7FC00000), rounded)


def _parts(builder: Builder, x: Value) -> list[Value]:
    """High and low."""
    high = nearest(builder, x)
    return [high, nearest(builder, builder.fsub(x, builder.bitcast(high, FLOATS)))]


def paired(builder: Builder, even: Value, odd: Value) -> Value:
    return builder.or_(builder.lshr(even, ints(16)), odd)


@intrinsic
def _split_query(typing: Any, q: Any, at: Any, scale: Any, queries: Any, query_at: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first = place_of(context, builder, q, *arguments[:2])
        a, b = (load(builder, q.dtype, builder.gep(first, [WORD(i * LANES)]), None) for i in range(2))
        factor = splat(builder, arguments[2])
        even, odd = (_parts(builder, builder.fmul(shuffle(builder, a, b, dims), factor)) for dims in (EVEN, ODD))
        rows = place_of(context, builder, queries, *arguments[3:])
        for part in range(2):
            pairs = paired(builder, even[part], odd[part])
            for row in range(TILE_ROWS):
                place = builder.gep(rows, [WORD(row * PAIRED + part * TILE_QUERIES)])
                builder.store(builder.extract_element(pairs, ir.IntType(32)(row)), place)
        return context.get_dummy_value()

    n = types.intp
    return types.void(q, n, types.float32, queries, n), build


@intrinsic
def _give_sum(typing: Any, sums: Any, even_at: Any, odd_at: Any, share: Any, out: Any, at: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        factor = splat(builder, arguments[3])
        places = [place_of(context, builder, sums, arguments[0], index) for index in arguments[1:3]]
        even, odd = (builder.fmul(load(builder, types.float32, place, None), factor) for place in places)
        place = place_of(context, builder, out, *arguments[4:])
        if out.dtype == types.uint16:
            bits = paired(builder, nearest(builder, even), nearest(builder, odd))
            store(builder, builder.bitcast(bits, HALVES), place)
        else:
            store(builder, shuffle(builder, even, odd, IN_TURNS), place)
        return context.get_dummy_value()

    n = types.intp
    return types.void(sums, n, n, types.float32, out, n), build


@njit
def split_queries(q_BHGD: np.ndarray, row: int, scale: np.float32, heads: Span, queries_HJTRC: np.ndarray) -> None:
    """Those of one row, times the scale."""
    H, G, D = q_BHGD.shape[1:]
    J, T = queries_HJTRC.shape[1:3]
    for h in range(heads[0], heads[1]):
        for g in range(G):
            for t in range(T):
                at = (((h * J + g // TILE_QUERIES) * T + t) * TILE_ROWS) * PAIRED + g % TILE_QUERIES
                split_query(q_BHGD, ((row * H + h) * G + g) * D + t * TILE_DIMS, scale, queries_HJTRC, at)


@njit
def give_sums(sums_HGD: np.ndarray, totals_HG: np.ndarray, heads: Span, out_BHGD: np.ndarray, row: int) -> None:
    """Divided by their query's total, even and odd dims in turns."""
    H, G, D = out_BHGD.shape[1:]
    for h in range(heads[0], heads[1]):
        for g in range(G):
            share = ONE / totals_HG[h, g] if totals_HG[h, g] != ZERO else ZERO  # which a row is that sees nothing
            for d in range(0, D // 2, LANES):
                even = (h * sums_HGD.shape[1] + g) * D + d
                give_sum(sums_HGD, even, even + D // 2, share, out_BHGD, ((row * H + h) * G + g) * D + 2 * d)


def _transposed(builder: Builder, vectors: list[Value]) -> list[Value]:
    """Turns four positions of four queries in each of four vectors into 16 positions in the vector of each query."""
    eight = [[4 * p + g for p in range(8)] for g in range(4)]  # positions of two vectors
    upper, lower = (
        [shuffle(builder, a, b, eight[0] + eight[1]), shuffle(builder, a, b, eight[2] + eight[3])]
        for a, b in (vectors[:2], vectors[2:])
    )
    sides = [[*range(begin, begin + 8), *range(LANES + begin, LANES + begin + 8)] for begin in (0, 8)]
    return [shuffle(builder, upper[g // 2], lower[g // 2], sides[g % 2]) for g in range(4)]


@intrinsic
def _give_scores(typing: Any, products: Any, at: Any, num: Any, scores: Any, score_at: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first = place_of(context, builder, products, *arguments[:2])
        at = [builder.gep(first, [WORD(LANES * i)]) for i in range(PAIRED)]
        pairs = [load(builder, types.float32, place, None) for place in at]  # two positions in each
        high = [lane for lane in range(2 * LANES) if lane % PAIRED < TILE_QUERIES]
        low = [lane + TILE_QUERIES for lane in high]
        vectors = [
            builder.fadd(shuffle(builder, a, b, high), shuffle(builder, a, b, low))
            for a, b in zip(pairs[::2], pairs[1::2], strict=True)
        ]
        score = place_of(context, builder, scores, *arguments[3:])
        count = splat(builder, builder.trunc(arguments[2], ir.IntType(32)))
        mask = builder.icmp_signed("<", INTS(list(range(LANES))), count)
        for g, vector in enumerate(_transposed(builder, vectors)):
            store(builder, vector, builder.gep(score, [WORD(g * CHUNK_TOKENS)]), mask)
        return context.get_dummy_value()

    n = types.intp
    return types.void(products, n, n, scores, n), build


@intrinsic
def _split_weights(typing: Any, scores: Any, score_at: Any, num: Any, weights: Any, weight_at: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        score, weight = (place_of(context, builder, *x) for x in ((scores, *arguments[:2]), (weights, *arguments[3:])))

        num = arguments[2]
        with cgutils.for_range_slice(builder, num.type(0), num, num.type(LANES), num.type) as (i, _):
            x = load(builder, types.float32, builder.gep(score, [i]), None)
            for part, bits in enumerate(_parts(builder, x)):
                even = builder.gep(weight, [builder.add(i, num.type(part * PAIRED * CHUNK_TOKENS))])
                store(builder, builder.lshr(bits, ints(16)), even)
                store(builder, bits, builder.gep(even, [num.type(CHUNK_TOKENS)]))
        return context.get_dummy_value()

    n = types.intp
    return types.void(scores, n, n, weights, n), build


# Of one query, TILE_DIMS numbers from q[at] on, float32 or the bits of bfloat16, and so into `out`.
split_query: Callable[[np.ndarray, int, np.float32, np.ndarray, int], None] = cast(Any, _split_query)
give_sum: Callable[[np.ndarray, int, int, np.float32, np.ndarray, int], None] = cast(Any, _give_sum)
# Of up to 16 positions: from `products` to the rows of four queries.
give_scores: Callable[[np.ndarray, int, int, np.ndarray, int], None] = cast(Any, _give_scores)
# Of one query, as many vectors as hold `num`: those of the chunk hold whole ones.
split_weights: Callable[[np.ndarray, int, int, np.ndarray, int], None] = cast(Any, _split_weights)
