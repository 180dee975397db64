"""Vector code of decode attention: scores of keys and weighted sums of values, for positions of one page.

A block is a few positions times four queries (or one) of a KV head. Its code is emitted as LLVM instructions for
vectors of LANES numbers, because numba's own loops take twice as long (see `primitives.py`). Two loops call it: over
heads and queries, and over the positions of a page.

Hardware cannot predict the next page. A page's values are therefore prefetched while its keys are read, and the next
chunk's keys while values are added: on two threads 15 GB/s of float32 instead of 13.6, and 10 of bfloat16 instead of 9.
Multiplying pairs of bfloat16 in one instruction (AVX512-BF16) was not faster.

These kernels multiply quantized pages as codes, without scales. Their caller applies scales and zero points once per
page: see `attention_quantized.py`.

Functions marked `@intrinsic` are explained in `primitives.py`, and documented at their public names below.

H KV heads, G query heads per KV head, D numbers per head, S positions of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import CHUNK_TOKENS, Span
from .primitives import (
    FLOATS,
    INT,
    LANES,
    ArrayAt,
    Builder,
    RowsAt,
    Value,
    for_vectors,
    load,
    load_pairs,
    multiply_add,
    pointer_at,
    pointer_of,
    prefetch,
    shuffle,
    splat,
    store,
    stride_of,
    sum_lanes,
)

SCORE_BLOCK = 4 if LANES == 16 else 2  # positions per block of scores: with 4 queries, the sums fit the registers
ADD_BLOCK = 2 * SCORE_BLOCK  # positions per block of sums, which are in memory: longer blocks load them less often
LINE_BYTES = 64  # of a cache line

# Loads LANES elements of a dtype from a pointer on, masked: one vector, or two for elements with two codes each.
LoadElements = Callable[[Builder, Any, Value, Value | None], list[Value]]
LoadedPart = tuple[list[Value], Value]  # one vector per position, and the index of its first number in a query


def _load_numbers(builder: Builder, dtype: Any, address: Value, mask: Value | None) -> list[Value]:
    return [load(builder, dtype, address, mask)]


def _load_codes(builder: Builder, dtype: Any, address: Value, mask: Value | None) -> list[Value]:
    """Loads codes as float32: one int8 per element, or two nibbles per uint8. In the latter, the low nibbles hold the
    first half of a head."""
    return [*load_pairs(builder, address, mask)] if dtype == types.uint8 else [load(builder, dtype, address, mask)]


@dataclass(frozen=True, kw_only=True)
class _BlockEmitter:
    """Emits LLVM code for a block of positions and queries of one KV head."""

    builder: Builder
    load: LoadElements
    dtype: Any  # of keys and values
    width: Value  # elements of a key or value: D, or D / 2 with two codes per element
    rows: list[Value]  # per position: pointer to its key or value
    ahead: list[Value]  # per position: pointer to `width` elements to prefetch; empty for none
    columns: list[Value]  # per query: pointer to its D numbers, or to its D sums of values
    scores: Value  # pointer to the first query's scores or weights; the next query's are CHUNK_TOKENS further

    def score(self, query: int, position: int = 0) -> Value:
        """Returns the pointer to the score of a query of the block at a position."""
        return self.builder.gep(self.scores, [self.width.type(query * CHUNK_TOKENS + position)])

    def read(self, d: Value, mask: Value | None) -> list[LoadedPart]:
        """Loads LANES elements of each row from element `d` on, and prefetches the same elements of `ahead`. Returns
        one part, or with two codes per element a part for each half of a head."""
        for row in self.ahead:
            prefetch(self.builder, row, d)
        loaded = [self.load(self.builder, self.dtype, self.builder.gep(row, [d]), mask) for row in self.rows]
        first, *second = ([*vectors] for vectors in zip(*loaded, strict=True))
        return [(first, d), *((vectors, self.builder.add(d, self.width)) for vectors in second)]


Emit = Callable[[_BlockEmitter], None]


def _make_block(emit: Emit, load_elements: LoadElements, num_positions: int, num_queries: int) -> Callable[..., None]:
    """Returns a compiled function with the code that `emit` emits for adjacent positions and queries. Its arguments:
    first query, first key or value, `width`, first score, and what to prefetch: elements `ahead_by` after `ahead`."""

    @intrinsic
    def block(typing: Any, x: Any, rows: Any, width: Any, scores: Any, ahead: Any, ahead_by: Any) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            width, dtype, stride = arguments[2], rows.types[0].dtype, stride_of(builder, arguments[1])
            offsets, prefetched = [builder.mul(stride, stride.type(i)) for i in range(num_positions)], list[Value]()
            if ahead != types.none:
                start = builder.gep(pointer_of(context, builder, ahead, arguments[4]), [arguments[5]])
                prefetched = [builder.gep(start, [offset]) for offset in offsets]
            begin = pointer_of(context, builder, rows, arguments[1])
            is_paired = load_elements is _load_codes and dtype == types.uint8
            dim = builder.shl(width, width.type(1)) if is_paired else width
            first = pointer_of(context, builder, x, arguments[0])
            emit(
                _BlockEmitter(
                    builder=builder,
                    load=load_elements,
                    dtype=dtype,
                    width=width,
                    rows=[builder.gep(begin, [offset]) for offset in offsets],
                    ahead=prefetched,
                    columns=[builder.gep(first, [builder.mul(dim, dim.type(g))]) for g in range(num_queries)],
                    scores=pointer_of(context, builder, scores, arguments[3]),
                )
            )
            return context.get_dummy_value()

        return types.void(x, rows, types.intp, scores, ahead, types.intp), build

    return block


def _emit_scores(block: _BlockEmitter) -> None:
    """Emits products of keys and queries. Keys and queries are loaded once, and sums stay in registers."""
    builder = block.builder
    partial = [[cgutils.alloca_once(builder, FLOATS) for _ in block.rows] for _ in block.columns]
    for address in chain(*partial):
        builder.store(FLOATS(None), address)

    def step(d: Value, mask: Value | None) -> None:
        for xs, at in block.read(d, mask):
            for column, addresses in zip(block.columns, partial, strict=True):  # per query
                y = load(builder, types.float32, builder.gep(column, [at]), mask)
                for x, address in zip(xs, addresses, strict=True):
                    builder.store(multiply_add(builder, x, y, builder.load(address)), address)

    for_vectors(builder, block.width, step)
    total, num = sum_lanes(builder, [builder.load(address) for address in chain(*partial)]), len(block.rows)
    for g in range(len(block.columns)):
        store(builder, shuffle(builder, total, total, list(range(g * num, (g + 1) * num))), block.score(g))


def _emit_additions(block: _BlockEmitter) -> None:
    """Emits additions of values, times their softmax weights, to the sums of queries."""
    builder = block.builder
    num_rows, num_queries = len(block.rows), len(block.columns)
    weights = [[splat(builder, builder.load(block.score(g, i))) for i in range(num_rows)] for g in range(num_queries)]

    def step(d: Value, mask: Value | None) -> None:
        for xs, at in block.read(d, mask):
            for column, factors in zip(block.columns, weights, strict=True):
                address = builder.gep(column, [at])
                total = load(builder, types.float32, address, mask)
                for x, factor in zip(xs, factors, strict=True):
                    total = multiply_add(builder, x, factor, total)
                store(builder, total, address, mask)

    for_vectors(builder, block.width, step)


def _make_head_loop(emit: Emit, load_elements: LoadElements, num: int) -> Callable[..., None]:
    """Returns a compiled loop over heads and queries for `num` positions from position `p` on: four queries at a time,
    then the remaining ones singly. Arguments: see `_make_position_loop`."""
    four, one = _make_block(emit, load_elements, num, 4), _make_block(emit, load_elements, num, 1)

    @njit
    def blocks(
        x_HGD: np.ndarray, numbers: ArrayAt, width: int, heads: Span, scores: ArrayAt, ahead: ArrayAt | None, p: int
    ) -> None:
        H, G, D = x_HGD.shape
        for h in range(heads[0], heads[1]):
            g, offset = 0, (p * H + h) * width
            while g < G:
                x, score = (h * G + g) * D, (h * G + g) * CHUNK_TOKENS + scores.at + p
                rows = RowsAt(numbers.numbers, numbers.at + offset, H * width)
                if G - g >= 4:
                    four(ArrayAt(x_HGD, x), rows, width, ArrayAt(scores.numbers, score), ahead, offset)
                    g += 4
                else:
                    one(ArrayAt(x_HGD, x), rows, width, ArrayAt(scores.numbers, score), ahead, offset)
                    g += 1

    return blocks


def _make_position_loop(emit: Emit, load_elements: LoadElements, block_size: int) -> Callable[..., None]:
    """Returns a compiled loop over `num` positions of a page: `block_size` at a time, then the remaining ones singly.

    Its arguments: `x_HGD`, queries or sums of values; `numbers`, keys or values from the first position on, `width`
    elements per head; `scores`, scores or weights from the first position on; `ahead`, as many elements to prefetch.
    """
    block_loop, single_loop = _make_head_loop(emit, load_elements, block_size), _make_head_loop(emit, load_elements, 1)

    @njit
    def loop(
        x_HGD: np.ndarray, numbers: ArrayAt, width: int, num: int, heads: Span, scores: ArrayAt, ahead: ArrayAt | None
    ) -> None:
        whole = num // block_size * block_size
        for p in range(0, whole, block_size):
            block_loop(x_HGD, numbers, width, heads, scores, ahead, p)
        for p in range(whole, num):
            single_loop(x_HGD, numbers, width, heads, scores, ahead, p)

    return loop


# Write scores of keys, or add weighted values to sums; for plain pages, or for codes of quantized pages.
score_numbers = _make_position_loop(_emit_scores, _load_numbers, SCORE_BLOCK)
add_numbers = _make_position_loop(_emit_additions, _load_numbers, ADD_BLOCK)
score_codes = _make_position_loop(_emit_scores, _load_codes, SCORE_BLOCK)
add_codes = _make_position_loop(_emit_additions, _load_codes, ADD_BLOCK)


@intrinsic
def _scale_numbers(typing: Any, x: Any, num: Any, scales: Any, zeros: Any, out: Any) -> Any:
    has_zeros = zeros.types[0].dtype == types.int8

    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first, scale_first, zero_first, out_first = (
            pointer_of(context, builder, kind, arguments[i]) for kind, i in ((x, 0), (scales, 2), (zeros, 3), (out, 4))
        )  # scales are bfloat16 bits, which `load` converts to float32
        added = cgutils.alloca_once(builder, FLOATS)
        builder.store(FLOATS(None), added)

        def step(i: Value, mask: Value | None) -> None:
            number = load(builder, types.float32, builder.gep(first, [i]), mask)
            number = builder.fmul(number, load(builder, types.uint16, builder.gep(scale_first, [i]), mask))
            store(builder, number, builder.gep(out_first, [i]), mask)
            if has_zeros:
                zero = load(builder, types.int8, builder.gep(zero_first, [i]), mask)
                builder.store(multiply_add(builder, number, zero, builder.load(added)), added)

        for_vectors(builder, arguments[1], step)
        total = sum_lanes(builder, [builder.load(added)])
        return builder.extract_element(total, INT(0))

    return types.float32(x, types.intp, scales, zeros, out), build


# Writes `num` numbers of x times their scales to `out`. Returns the sum of these products times their zero points; 0 if
# there are none. Arguments: x, num, scales, zeros, out.
scale_numbers: Callable[[ArrayAt, int, ArrayAt, ArrayAt, ArrayAt], np.float32] = cast(Any, _scale_numbers)


@intrinsic
def _prefetch_bytes(typing: Any, numbers: Any, at: Any, num_bytes: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first, count = pointer_at(context, builder, numbers, *arguments[:2]), arguments[2]
        zero, line = count.type(0), count.type(LINE_BYTES)
        with cgutils.for_range_slice(builder, zero, count, line, count.type) as (i, _):
            prefetch(builder, first, i)
        return context.get_dummy_value()

    return types.void(numbers, types.intp, types.intp), build


# Prefetches `num_bytes` of a byte array from index `at` on.
prefetch_bytes: Callable[[np.ndarray, int, int], None] = cast(Any, _prefetch_bytes)
