"""What the compiled decode attention does with a few positions of a page: scores of keys, sums of values.

While a page's keys are read its values are asked for, and while values are added the next chunk's keys: pages lie
anywhere, so no processor guesses them. From memory that gave 15 GB/s of float32 instead of 13.6 and 10 of bfloat16
instead of 9, of two threads. Pairs of bfloat16 multiplied in one instruction (AVX512-BF16) were no faster: it takes as
long as the two that it replaces.

H KV heads, G query heads of each, D of a head, S positions of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import CHUNK_TOKENS, Span
from .primitives import (
    FLOATS,
    LANES,
    Builder,
    Value,
    each_vector,
    load,
    multiply_add,
    place_of,
    prefetch,
    shuffle,
    splat,
    store,
    sums,
)

SCORE_BLOCK = 4 if LANES == 16 else 2  # positions: times 4 queries, sums that fit in 32 registers, or in 16
ADD_BLOCK = 2 * SCORE_BLOCK  # sums are in memory, the longer the block the seldomer they are loaded


@dataclass(frozen=True, kw_only=True)
class _Block:
    """`rows` are where the keys or values of positions begin, all of one KV head, and `columns` where what belongs to
    its queries does: (D,) each. `scores` are the first query's; those of the next lie CHUNK_TOKENS further."""

    builder: Builder
    dtype: Any  # of keys and values
    dim: Value
    rows: list[Value]
    ahead: list[Value]  # what is asked for beside each row
    columns: list[Value]
    scores: Value

    def score(self, query: int, position: int = 0) -> Value:
        """Where it lies."""
        return self.builder.gep(self.scores, [self.dim.type(query * CHUNK_TOKENS + position)])

    def read(self, d: Value, mask: Value | None) -> list[Value]:
        """Reads as many numbers as lanes of each row."""
        for row in self.ahead:
            prefetch(self.builder, row, d)
        return [load(self.builder, self.dtype, self.builder.gep(row, [d]), mask) for row in self.rows]


def _block(act: Callable[[_Block], None], num_positions: int, num_queries: int) -> Callable[..., None]:
    """A function that does what `act` writes, of queries side by side and of positions that lie `step` apart."""

    @intrinsic
    def block(
        typing: Any,
        x: Any,
        x_at: Any,
        numbers: Any,
        at: Any,
        step: Any,
        dim: Any,
        scores: Any,
        score_at: Any,
        ahead: Any,
        ahead_at: Any,
    ) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            x_value, x_index, number, index, step, dim, score, score_index, next_value, next_index = arguments
            first = place_of(context, builder, x, x_value, x_index)
            offsets = [builder.mul(step, step.type(i)) for i in range(num_positions)]
            act(
                _Block(
                    builder=builder,
                    dtype=numbers.dtype,
                    dim=dim,
                    rows=[place_of(context, builder, numbers, number, builder.add(index, o)) for o in offsets],
                    ahead=[place_of(context, builder, ahead, next_value, builder.add(next_index, o)) for o in offsets],
                    columns=[builder.gep(first, [builder.mul(dim, dim.type(g))]) for g in range(num_queries)],
                    scores=place_of(context, builder, scores, score, score_index),
                )
            )
            return context.get_dummy_value()

        n = types.intp
        return types.void(x, n, numbers, n, n, n, scores, n, ahead, n), build

    return block


def _dots(block: _Block) -> None:
    """Scores of keys: each key and query is loaded once, their sums stay in registers."""
    builder = block.builder
    partial = [[cgutils.alloca_once(builder, FLOATS) for _ in block.rows] for _ in block.columns]
    for place in chain(*partial):
        builder.store(FLOATS(None), place)

    def at_place(d: Value, mask: Value | None) -> None:
        xs = block.read(d, mask)
        for column, places in zip(block.columns, partial, strict=True):
            y = load(builder, types.float32, builder.gep(column, [d]), mask)
            for x, place in zip(xs, places, strict=True):
                builder.store(multiply_add(builder, x, y, builder.load(place)), place)

    each_vector(builder, block.dim, at_place)
    total, num = sums(builder, [builder.load(place) for place in chain(*partial)]), len(block.rows)
    for g in range(len(block.columns)):
        store(builder, shuffle(builder, total, total, list(range(g * num, (g + 1) * num))), block.score(g))


def _additions(block: _Block) -> None:
    """Adds values by their weights to the sums of queries."""
    builder = block.builder
    weights = [
        [splat(builder, builder.load(block.score(g, i))) for i in range(len(block.rows))]
        for g in range(len(block.columns))
    ]

    def at_place(d: Value, mask: Value | None) -> None:
        xs = block.read(d, mask)
        for column, factors in zip(block.columns, weights, strict=True):
            place = builder.gep(column, [d])
            total = load(builder, types.float32, place, mask)
            for x, factor in zip(xs, factors, strict=True):
                total = multiply_add(builder, x, factor, total)
            store(builder, total, place, mask)

    each_vector(builder, block.dim, at_place)


def _blocks(act: Callable[[_Block], None], num: int) -> Callable[..., None]:
    """Acts on `num` positions of a page, the first of which begins at numbers[base], with scores from place `at` on:
    all heads, four queries at a time and then one by one. What lies alike from ahead[ahead_base] on is asked for."""
    four, one = _block(act, num, 4), _block(act, num, 1)

    @njit
    def blocks(
        x_HGD: np.ndarray,
        numbers: np.ndarray,
        base: int,
        heads: Span,
        scores_HGS: np.ndarray,
        at: int,
        ahead: np.ndarray,
        ahead_base: int,
    ) -> None:
        H, G, D = x_HGD.shape
        for h in range(heads[0], heads[1]):
            g, begin, next_begin = 0, base + h * D, ahead_base + h * D
            while g < G:
                x, score = (h * G + g) * D, (h * G + g) * CHUNK_TOKENS + at
                if G - g >= 4:
                    four(x_HGD, x, numbers, begin, H * D, D, scores_HGS, score, ahead, next_begin)
                    g += 4
                else:
                    one(x_HGD, x, numbers, begin, H * D, D, scores_HGS, score, ahead, next_begin)
                    g += 1

    return blocks


score_block, score_one = _blocks(_dots, SCORE_BLOCK), _blocks(_dots, 1)
add_block, add_one = _blocks(_additions, ADD_BLOCK), _blocks(_additions, 1)
