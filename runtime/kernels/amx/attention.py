"""Compiled decode attention on the CPU's matrix unit over bfloat16 pages. For pages of other dtypes and for other CPUs
there is `../attention.py`. `unit.py` explains tiles, which are registers.

Positions of a page are rows of a tile, so keys and values are loaded as stored. Queries and softmax weights are float32
and split into two bfloat16 parts, high and low, laid out as `arguments.TileScratch` says. A row is the new token of one
sequence, as in `../attention.py`.

The CPU loads tiles ahead of their use, so kernels prefetch nothing: from memory, two threads reached 16.0 GB/s, and
15.8 to 16.8 with several kinds of prefetches. From a cache, a position of 32/8 heads of 128 takes 0.16 us; the vector
kernel takes 0.28.

Functions marked `@intrinsic` are explained in `../primitives.py`, and documented at their public names below.

H KV heads, G query heads per KV head, J groups of TILE_QUERIES of these, T tiles in the D numbers of a head, R rows of
a tile, C = PAIRED columns, S positions of a chunk, n pages of a row.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..arguments import (
    CHUNK_TOKENS,
    PAIRED,
    TILE_DIMS,
    TILE_QUERIES,
    TILE_ROWS,
    AttentionItem,
    Pages,
    RowTables,
    Softmax,
    Span,
    TileScratch,
    WorkItems,
)
from ..attention import apply_softmax, get_item, locate_in_page, reset_softmax
from ..compiled import REORDERED, cached_kernel
from ..primitives import (
    FLOATS,
    INTS,
    LANES,
    ONE,
    ZERO,
    Builder,
    Value,
    claim_items,
    ints,
    load,
    pointer_at,
    shuffle,
    splat,
    store,
)
from .unit import NUM_TILES, WORD, add, configure, load_queries, load_sums, release, score, store_sums

BFLOAT16_VECTOR = ir.VectorType(ir.IntType(16), 2 * LANES)
# Lanes of two vectors: the even and the odd ones, and those that interleave a vector of even and one of odd dims.
EVEN, ODD = list(range(0, 2 * LANES, 2)), list(range(1, 2 * LANES, 2))
INTERLEAVED = [address for pair in zip(range(LANES), range(LANES, 2 * LANES), strict=True) for address in pair]


def round_to_bfloat16(builder: Builder, x: Value) -> Value:
    """Rounds float32 to bfloat16, in the upper half of each 32-bit lane, with zeros below. Ties to even and NaN stays
    NaN, as in torch."""
    bits = builder.bitcast(x, INTS)
    is_odd = builder.and_(builder.lshr(bits, ints(16)), ints(1))
    rounded = builder.and_(builder.add(bits, builder.add(is_odd, ints(0x7FFF))), ints(0xFFFF0000))
    return builder.select(builder.fcmp_unordered("uno", x, x), ints(0x7FC00000), rounded)


def _split_number(builder: Builder, x: Value) -> list[Value]:
    """Splits float32 into a high and a low bfloat16, in the upper halves of words. Together they keep 16 of its 24 bits
    of precision."""
    high = round_to_bfloat16(builder, x)
    return [high, round_to_bfloat16(builder, builder.fsub(x, builder.bitcast(high, FLOATS)))]


def pack_pair(builder: Builder, even: Value, odd: Value) -> Value:
    """Packs pairs of bfloat16 into words: `even` into the lower halves, `odd` into the upper halves. Both arguments
    have their numbers in the upper halves of words."""
    return builder.or_(builder.lshr(even, ints(16)), odd)


@intrinsic
def _split_query(typing: Any, q: Any, offset: Any, scale: Any, queries: Any, query_offset: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first = pointer_at(context, builder, q, *arguments[:2])
        a, b = (load(builder, q.dtype, builder.gep(first, [WORD(i * LANES)]), None) for i in range(2))
        factor = splat(builder, arguments[2])
        even, odd = (_split_number(builder, builder.fmul(shuffle(builder, a, b, dims), factor)) for dims in (EVEN, ODD))
        rows = pointer_at(context, builder, queries, *arguments[3:])
        for part in range(2):
            pairs = pack_pair(builder, even[part], odd[part])
            for row in range(TILE_ROWS):
                address = builder.gep(rows, [WORD(row * PAIRED + part * TILE_QUERIES)])
                builder.store(builder.extract_element(pairs, ir.IntType(32)(row)), address)
        return context.get_dummy_value()

    n = types.intp
    return types.void(q, n, types.float32, queries, n), build


@intrinsic
def _write_sum(typing: Any, sums: Any, even_offset: Any, odd_offset: Any, inverse: Any, out: Any, offset: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        factor = splat(builder, arguments[3])
        addresses = [pointer_at(context, builder, sums, arguments[0], index) for index in arguments[1:3]]
        even, odd = (builder.fmul(load(builder, types.float32, address, None), factor) for address in addresses)
        address = pointer_at(context, builder, out, *arguments[4:])
        if out.dtype == types.uint16:
            bits = pack_pair(builder, round_to_bfloat16(builder, even), round_to_bfloat16(builder, odd))
            store(builder, builder.bitcast(bits, BFLOAT16_VECTOR), address)
        else:
            store(builder, shuffle(builder, even, odd, INTERLEAVED), address)
        return context.get_dummy_value()

    n = types.intp
    return types.void(sums, n, n, types.float32, out, n), build


@njit
def split_queries(q_BHGD: np.ndarray, row: int, scale: np.float32, heads: Span, queries_HJTRC: np.ndarray) -> None:
    """Writes the queries of one row, times `scale`, as high and low bfloat16 parts."""
    H, G, D = q_BHGD.shape[1:]
    J, T = queries_HJTRC.shape[1:3]
    for h in range(heads[0], heads[1]):
        for g in range(G):
            for t in range(T):
                offset = (((h * J + g // TILE_QUERIES) * T + t) * TILE_ROWS) * PAIRED + g % TILE_QUERIES
                split_query(q_BHGD, ((row * H + h) * G + g) * D + t * TILE_DIMS, scale, queries_HJTRC, offset)


@njit
def write_sums(sums_HGD: np.ndarray, totals_HG: np.ndarray, heads: Span, out_BHGD: np.ndarray, row: int) -> None:
    """Writes a row's output: its sums divided by the totals of softmax weights, with even and odd dims interleaved."""
    H, G, D = out_BHGD.shape[1:]
    for h in range(heads[0], heads[1]):
        for g in range(G):
            inverse = ONE / totals_HG[h, g] if totals_HG[h, g] != ZERO else ZERO  # a row without positions
            for d in range(0, D // 2, LANES):
                even = (h * sums_HGD.shape[1] + g) * D + d
                write_sum(sums_HGD, even, even + D // 2, inverse, out_BHGD, ((row * H + h) * G + g) * D + 2 * d)


def _transpose_queries(builder: Builder, vectors: list[Value]) -> list[Value]:
    """Transposes four vectors of (4 positions, 4 queries) to four vectors of 16 positions of one query."""
    lanes = [[4 * p + g for p in range(8)] for g in range(4)]  # per query: lanes of its 8 positions in two vectors
    upper, lower = (
        [shuffle(builder, a, b, lanes[0] + lanes[1]), shuffle(builder, a, b, lanes[2] + lanes[3])]
        for a, b in (vectors[:2], vectors[2:])
    )
    halves = [[*range(begin, begin + 8), *range(LANES + begin, LANES + begin + 8)] for begin in (0, 8)]
    return [shuffle(builder, upper[g // 2], lower[g // 2], halves[g % 2]) for g in range(4)]


@intrinsic
def _write_scores(typing: Any, products: Any, offset: Any, num: Any, scores: Any, score_offset: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first = pointer_at(context, builder, products, *arguments[:2])
        addresses = [builder.gep(first, [WORD(LANES * i)]) for i in range(PAIRED)]
        pairs = [load(builder, types.float32, address, None) for address in addresses]  # two positions in each
        # A position has four products with high parts of queries, then four with low parts; a score is the sum of two.
        high = [lane for lane in range(2 * LANES) if lane % PAIRED < TILE_QUERIES]
        low = [lane + TILE_QUERIES for lane in high]
        vectors = [
            builder.fadd(shuffle(builder, a, b, high), shuffle(builder, a, b, low))
            for a, b in zip(pairs[::2], pairs[1::2], strict=True)
        ]
        score = pointer_at(context, builder, scores, *arguments[3:])
        count = splat(builder, builder.trunc(arguments[2], ir.IntType(32)))
        mask = builder.icmp_signed("<", INTS(list(range(LANES))), count)
        for g, vector in enumerate(_transpose_queries(builder, vectors)):
            store(builder, vector, builder.gep(score, [WORD(g * CHUNK_TOKENS)]), mask)
        return context.get_dummy_value()

    n = types.intp
    return types.void(products, n, n, scores, n), build


@intrinsic
def _split_weights(typing: Any, scores: Any, score_offset: Any, num: Any, weights: Any, weight_offset: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        score = pointer_at(context, builder, scores, *arguments[:2])
        weight = pointer_at(context, builder, weights, *arguments[3:])
        num = arguments[2]
        with cgutils.for_range_slice(builder, num.type(0), num, num.type(LANES), num.type) as (i, _):
            x = load(builder, types.float32, builder.gep(score, [i]), None)
            for part, bits in enumerate(_split_number(builder, x)):
                # A row of weights for even dims of values, in lower halves of words, then one for odd dims.
                even = builder.gep(weight, [builder.add(i, num.type(part * PAIRED * CHUNK_TOKENS))])
                store(builder, builder.lshr(bits, ints(16)), even)
                store(builder, bits, builder.gep(even, [num.type(CHUNK_TOKENS)]))
        return context.get_dummy_value()

    n = types.intp
    return types.void(scores, n, n, weights, n), build


# Reads TILE_DIMS numbers of a query (float32 or bits of bfloat16), multiplies them by `scale`, and writes both parts to
# a tile of queries. Arguments: q, offset, scale, queries, query_offset.
split_query: Callable[[np.ndarray, int, np.float32, np.ndarray, int], None] = cast(Any, _split_query)
# Writes TILE_DIMS sums of a query times `inverse` (float32 or bits of bfloat16). Arguments: sums, even_offset,
# odd_offset, inverse, out, offset.
write_sum: Callable[[np.ndarray, int, int, np.float32, np.ndarray, int], None] = cast(Any, _write_sum)
# Adds the products with high and low parts for `num` positions, at most 16, and writes them to the scores of four
# queries. Arguments: products, offset, num, scores, score_offset.
write_scores: Callable[[np.ndarray, int, int, np.ndarray, int], None] = cast(Any, _write_scores)
# Splits `num` weights of one query, in whole vectors: may write past `num`, but not past the chunk. Arguments: scores,
# score_offset, num, weights, weight_offset.
split_weights: Callable[[np.ndarray, int, int, np.ndarray, int], None] = cast(Any, _split_weights)


@njit(fastmath=REORDERED)
def _next_span(position: int, last: int, page_tokens: int) -> Span:
    """Returns which positions to compute with one tile configuration, which needs equally many per page: several whole
    pages, or a part of one page. Returns the number per page, and the end of these positions."""
    num = min(page_tokens - position % page_tokens, last - position)
    if num == page_tokens:
        return num, position + (last - position) // num * num
    return num, position + num


@njit(fastmath=REORDERED)
def _score_span(
    pages: Pages, table_n: np.ndarray, first: int, position: int, stop: int, num: int, heads: Span, scratch: TileScratch
) -> None:
    """Computes scores of positions [position, stop), `num` per page. `first`: first position of their chunk."""
    H, J, T = scratch.queries_HJTRC.shape[:3]
    row = H * T * TILE_DIMS  # numbers from one position to the next
    for h in range(heads[0], heads[1]):
        for j in range(J):
            for t in range(0, T, NUM_TILES):
                tiles = min(NUM_TILES, T - t)
                # Tiles after the first four (t > 0) add to the products of the previous ones.
                load_queries(scratch.queries_HJTRC, ((h * J + j) * T + t) * TILE_ROWS * PAIRED, tiles)
                for p in range(position, stop, num):
                    page, offset = table_n[p // pages.page_tokens], p % pages.page_tokens
                    key = page * pages.key_stride + offset * row + (h * T + t) * TILE_DIMS
                    score(pages.keys, key, 2 * row, tiles, scratch.products_SC, (p - position) * PAIRED, t > 0)
            for p in range(position, stop, num):
                score_offset = (h * J + j) * TILE_QUERIES * CHUNK_TOKENS + p - first
                write_scores(scratch.products_SC, (p - position) * PAIRED, num, scratch.scores_HGS, score_offset)


@njit(fastmath=REORDERED)
def _add_span(
    pages: Pages, table_n: np.ndarray, first: int, position: int, stop: int, num: int, heads: Span, scratch: TileScratch
) -> None:
    """Adds values of positions [position, stop), `num` per page, times their weights to the sums."""
    H, J, D = len(scratch.sums_HGD), scratch.weights_HJPCS.shape[1], scratch.sums_HGD.shape[2]
    T = D // TILE_DIMS
    for h in range(heads[0], heads[1]):
        for j in range(J):
            for t in range(0, T, NUM_TILES):
                tiles, sums = min(NUM_TILES, T - t), (h * J + j) * TILE_QUERIES * D + t * TILE_DIMS // 2
                load_sums(scratch.sums_HGD, sums, 2 * D, tiles)
                for p in range(position, stop, num):
                    page, offset = table_n[p // pages.page_tokens], p % pages.page_tokens
                    value = page * pages.value_stride + (offset * H + h) * D + t * TILE_DIMS
                    weight = (h * J + j) * 2 * PAIRED * CHUNK_TOKENS + p - first
                    add(pages.values, value, 2 * H * D, tiles, scratch.weights_HJPCS, weight)
                store_sums(scratch.sums_HGD, sums, 2 * D, tiles)


@njit(fastmath=REORDERED)
def _score_chunk(pages: Pages, table_n: np.ndarray, first: int, last: int, heads: Span, scratch: TileScratch) -> None:
    """Computes scores of positions [first, last), a chunk at most."""
    position = first
    while position < last:
        num, stop = _next_span(position, last, pages.page_tokens)
        configure(scratch.shapes, (num - 1) * 64)
        _score_span(pages, table_n, first, position, stop, num, heads, scratch)
        position = stop


@njit(fastmath=REORDERED)
def _add_chunk(pages: Pages, table_n: np.ndarray, first: int, last: int, heads: Span, scratch: TileScratch) -> None:
    """Adds the values of positions [first, last), a chunk at most, times their weights in `scores_HGS`."""
    J = scratch.weights_HJPCS.shape[1]
    for h in range(heads[0], heads[1]):
        for g in range(scratch.maxima_HG.shape[1]):
            weight_offset = (((h * J + g // TILE_QUERIES) * 2) * PAIRED + 2 * (g % TILE_QUERIES)) * CHUNK_TOKENS
            score_offset = (h * J * TILE_QUERIES + g) * CHUNK_TOKENS
            split_weights(scratch.scores_HGS, score_offset, last - first, scratch.weights_HJPCS, weight_offset)
    position = first
    while position < last:
        num, stop = _next_span(position, last, pages.page_tokens)
        configure(scratch.shapes, (TILE_ROWS + num - 1) * 64)
        _add_span(pages, table_n, first, position, stop, num, heads, scratch)
        position = stop


@njit(fastmath=REORDERED)
def _check_pages(pages: Pages, table_n: np.ndarray, first: int, end: int) -> None:
    """Raises IndexError if the page of a position in [first, end) does not exist."""
    if first < end:
        for position in range(first - first % pages.page_tokens, end, pages.page_tokens):
            locate_in_page(pages, table_n, position, end)


@njit(fastmath=REORDERED)
def _attend_item(
    q_BHGD: np.ndarray,
    scale: np.float32,
    pages: Pages,
    rows: RowTables,
    softmax: Softmax,
    out_BHGD: np.ndarray,
    item: AttentionItem,
    scratch: TileScratch,
) -> None:
    """Computes the rows of one item, a chunk of positions at a time."""
    own_rows, heads = item
    for row in range(own_rows[0], own_rows[1]):
        first, end, table_n = rows.begins_B[row], rows.ends_B[row], rows.tables_Bn[row]
        _check_pages(pages, table_n, first, end)  # tile loads do not check page numbers
        split_queries(q_BHGD, row, scale, heads, scratch.queries_HJTRC)
        reset_softmax(softmax, heads, scratch)
        for h in range(heads[0], heads[1]):
            for g in range(q_BHGD.shape[2]):
                for d in range(scratch.sums_HGD.shape[2]):
                    scratch.sums_HGD[h, g, d] = ZERO
        while first < end:
            last = min(end, (first // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
            _score_chunk(pages, table_n, first, last, heads, scratch)
            apply_softmax(last - first, heads, softmax.softcap, scratch, scratch.sums_HGD)
            _add_chunk(pages, table_n, first, last, heads, scratch)
            first = last
        release()
        write_sums(scratch.sums_HGD, scratch.totals_HG, heads, out_BHGD, row)


@cached_kernel
def attend(
    q_BHGD: np.ndarray,
    scale: np.float32,
    pages: Pages,
    rows: RowTables,
    softmax: Softmax,
    out_BHGD: np.ndarray,
    items: WorkItems,
    scratch: TileScratch,
) -> None:
    """Same as `attention.attend`, for bfloat16 pages of up to TILE_ROWS positions and D a multiple of TILE_DIMS.
    Requires `may_use_tiles`. `q_BHGD` (not scaled yet, unlike there) and `out_BHGD` are float32, or both bits of
    bfloat16; the output is overwritten. Infinite keys and values may give NaN; subnormal numbers count as zero."""
    i = claim_items(items.counter, 1)
    while i < items.spans_W4.shape[0]:
        _attend_item(q_BHGD, scale, pages, rows, softmax, out_BHGD, get_item(items, i), scratch)
        i = claim_items(items.counter, 1)
