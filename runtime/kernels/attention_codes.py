"""What the compiled decode attention does with codes of a quantised page, which know no scales: those of keys are
multiplied into queries, those of values into weights, once for a page, and what zeros add is one number.

H KV heads, G query heads of each, D of a head, S positions of a chunk.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import CHUNK_TOKENS, Span
from .attention_blocks import ADD_BLOCK, SCORE_BLOCK
from .primitives import (
    FLOATS,
    INT,
    Builder,
    Value,
    each_vector,
    load,
    load_pairs,
    multiply_add,
    place_of,
    prefetch,
    shuffle,
    splat,
    store,
    sums,
)

LINE_BYTES = 64
Part = tuple[list[Value], Value]  # a vector of each row, and how far behind the byte its numbers lie in a query


@intrinsic
def _scale(
    typing: Any, x: Any, at: Any, num: Any, scales: Any, scale_at: Any, zeros: Any, zero_at: Any, out: Any, out_at: Any
) -> Any:
    has_zeros = zeros.dtype == types.int8

    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        x_value, x_index, num, scale, scale_index, zero, zero_index, out_value, out_index = arguments
        first, scale_first, zero_first, out_first = (
            place_of(context, builder, kind, value, index)
            for kind, value, index in (
                (x, x_value, x_index),
                (scales, scale, scale_index),
                (zeros, zero, zero_index),
                (out, out_value, out_index),
            )
        )
        added = cgutils.alloca_once(builder, FLOATS)
        builder.store(FLOATS(None), added)

        def at_place(i: Value, mask: Value | None) -> None:
            number = load(builder, types.float32, builder.gep(first, [i]), mask)
            number = builder.fmul(number, load(builder, types.uint16, builder.gep(scale_first, [i]), mask))
            store(builder, number, builder.gep(out_first, [i]), mask)
            if has_zeros:
                far = load(builder, types.int8, builder.gep(zero_first, [i]), mask)
                builder.store(multiply_add(builder, number, far, builder.load(added)), added)

        each_vector(builder, num, at_place)
        total = sums(builder, [builder.load(added)])
        return builder.extract_element(total, INT(0))

    n = types.intp
    return types.float32(x, n, n, scales, n, zeros, n, out, n), build


# Of `num` numbers from x[at] on, each times its scale, into `out`; returns the sum of these times their zeros, 0 where
# there are none.
scale_by: Callable[[np.ndarray, int, int, np.ndarray, int, np.ndarray, int, np.ndarray, int], np.float32] = cast(
    Any, _scale
)


@intrinsic
def _ask_for(typing: Any, numbers: Any, at: Any, num_bytes: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first, count = place_of(context, builder, numbers, *arguments[:2]), arguments[2]
        zero, line = count.type(0), count.type(LINE_BYTES)
        with cgutils.for_range_slice(builder, zero, count, line, count.type) as (i, _):
            prefetch(builder, first, i)
        return context.get_dummy_value()

    return types.void(numbers, types.intp, types.intp), build


ask_for: Callable[[np.ndarray, int, int], None] = cast(Any, _ask_for)  # so many bytes from numbers[at] on, of bytes


class _Codes:
    """Codes of a few positions of a page, all of one KV head, and what belongs to its queries. `width`: bytes of a
    head, half as many as its numbers where two codes share one."""

    def __init__(self, builder: Builder, kind: Any, width: Value, rows: list[Value], first: Value, scores: Value):
        self.builder, self.width, self.rows, self.scores = builder, width, rows, scores
        self.is_paired, self._dtype, self._first = kind.dtype == types.uint8, kind.dtype, first

    def column(self, query: int) -> Value:
        """Where the numbers of a query begin."""
        dim = self.builder.shl(self.width, self.width.type(1)) if self.is_paired else self.width
        return self.builder.gep(self._first, [self.builder.mul(dim, dim.type(query))])

    def score(self, query: int, position: int = 0) -> Value:
        return self.builder.gep(self.scores, [self.width.type(query * CHUNK_TOKENS + position)])

    def read(self, d: Value, mask: Value | None) -> list[Part]:
        places = [self.builder.gep(row, [d]) for row in self.rows]
        if not self.is_paired:
            return [([load(self.builder, self._dtype, place, mask) for place in places], d)]
        low, high = zip(*(load_pairs(self.builder, place, mask) for place in places), strict=True)
        return [([*low], d), ([*high], self.builder.add(d, self.width))]


def _dots(codes: _Codes, num_queries: int) -> None:
    """Scores of keys: each code and query is loaded once, their sums stay in registers."""
    builder, num = codes.builder, len(codes.rows)
    partial = [[cgutils.alloca_once(builder, FLOATS) for _ in codes.rows] for _ in range(num_queries)]
    places = [place for each in partial for place in each]
    for place in places:
        builder.store(FLOATS(None), place)

    def at_place(d: Value, mask: Value | None) -> None:
        for xs, at in codes.read(d, mask):
            for g, own in enumerate(partial):
                y = load(builder, types.float32, builder.gep(codes.column(g), [at]), mask)
                for x, place in zip(xs, own, strict=True):
                    builder.store(multiply_add(builder, x, y, builder.load(place)), place)

    each_vector(builder, codes.width, at_place)
    total = sums(builder, [builder.load(place) for place in places])
    for g in range(num_queries):
        store(builder, shuffle(builder, total, total, list(range(g * num, (g + 1) * num))), codes.score(g))


def _additions(codes: _Codes, num_queries: int) -> None:
    """Adds codes by the weights of their positions to the sums of queries."""
    builder, positions = codes.builder, range(len(codes.rows))
    weights = [
        [splat(builder, builder.load(codes.score(g, position))) for position in positions] for g in range(num_queries)
    ]

    def at_place(d: Value, mask: Value | None) -> None:
        for xs, at in codes.read(d, mask):
            for g, factors in enumerate(weights):
                place = builder.gep(codes.column(g), [at])
                total = load(builder, types.float32, place, mask)
                for x, factor in zip(xs, factors, strict=True):
                    total = multiply_add(builder, x, factor, total)
                store(builder, total, place, mask)

    each_vector(builder, codes.width, at_place)


def _block(act: Callable[[_Codes, int], None], num_positions: int, num_queries: int) -> Callable[..., None]:
    """A function that does what `act` writes, of queries side by side and of positions that lie `step` bytes apart."""

    @intrinsic
    def block(
        typing: Any, x: Any, x_at: Any, codes: Any, at: Any, step: Any, width: Any, scores: Any, score_at: Any
    ) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            x_value, x_index, code, index, step, width, score, score_index = arguments
            offsets = [builder.mul(step, step.type(i)) for i in range(num_positions)]
            rows = [place_of(context, builder, codes, code, builder.add(index, offset)) for offset in offsets]
            first = place_of(context, builder, x, x_value, x_index)
            score_place = place_of(context, builder, scores, score, score_index)
            act(_Codes(builder, codes, width, rows, first, score_place), num_queries)
            return context.get_dummy_value()

        n = types.intp
        return types.void(x, n, codes, n, n, n, scores, n), build

    return block


def _blocks(act: Callable[[_Codes, int], None], num: int) -> Callable[..., None]:
    """Acts on `num` positions of a page, the first of which begins at codes[base], with scores from place `at` on: all
    heads, four queries at a time and then one by one."""
    four, one = _block(act, num, 4), _block(act, num, 1)

    @njit
    def blocks(
        x_HGD: np.ndarray, codes: np.ndarray, base: int, width: int, heads: Span, scores_HGS: np.ndarray, at: int
    ) -> None:
        H, G, D = x_HGD.shape
        for h in range(heads[0], heads[1]):
            g, begin = 0, base + h * width
            while g < G:
                x, score = (h * G + g) * D, (h * G + g) * CHUNK_TOKENS + at
                if G - g >= 4:
                    four(x_HGD, x, codes, begin, H * width, width, scores_HGS, score)
                    g += 4
                else:
                    one(x_HGD, x, codes, begin, H * width, width, scores_HGS, score)
                    g += 1

    return blocks


score_codes, score_code = _blocks(_dots, SCORE_BLOCK), _blocks(_dots, 1)
add_codes, add_code = _blocks(_additions, ADD_BLOCK), _blocks(_additions, 1)
