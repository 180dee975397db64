"""The vectors of the compiled decode attention: what loads, widens, multiplies and adds keys and values.

Written in LLVM's vectors of any machine. Of plain loops the compiler made half of this speed at most, at 32/8 heads of
128 of one AVX-512 thread with data in its cache: 10 GB/s of bfloat16 instead of 18; and without the hints of what comes
next memory gives 6.6 GB/s instead of 9.5.

numba knows no 16-bit floats, so uint16 stands for the bits of bfloat16 and int16 for those of float16.
H KV heads, G query heads of each, D of a head, S positions of a chunk.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any, TypeAlias, cast

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from .kernel_arguments import Span

Builder: TypeAlias = Any  # llvmlite says too little of its types
Value: TypeAlias = Any
CHUNK_TOKENS = 64  # with its queries and sums a chunk's scores stay in 48 KiB of L1, at 32 heads of 128
LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
BLOCK = 4 if LANES == 16 else 2  # positions: times 4 queries, sums that fit in 32 registers, or in 16
AHEAD = 8  # positions: 16 KiB of bfloat16 at 8 heads of 128
INT = ir.IntType(32)
INTS, FLOATS = ir.VectorType(INT, LANES), ir.VectorType(ir.FloatType(), LANES)


def _at(context: Any, builder: Builder, array: Any, value: Value, index: Value) -> Value:
    """Where the number lies that is `index` numbers after the first."""
    return builder.gep(make_array(array)(context, builder, value).data, [index])


def _call(builder: Builder, name: str, result: ir.Type, arguments: list[Value]) -> Value:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _load(builder: Builder, dtype: Any, pointer: Value, mask: Value | None) -> Value:
    """float32 of as many stored numbers as lanes; nothing is read where the mask is off, which gives 0."""
    stored = ir.VectorType(pointer.type.pointee, LANES)
    place, num_bytes = builder.bitcast(pointer, stored.as_pointer()), dtype.bitwidth // 8
    if mask is None:
        vector = builder.load(place, align=num_bytes)
    else:
        name = f"llvm.masked.load.v{LANES}{'f' if dtype == types.float32 else 'i'}{dtype.bitwidth}.p0"
        vector = _call(builder, name, stored, [place, INT(num_bytes), mask, stored(None)])
    if dtype == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(vector, INTS), _ints(16)), FLOATS)
    if dtype == types.int16:
        return _from_float16(builder, builder.zext(vector, INTS))
    return vector


def _from_float16(builder: Builder, bits: Value) -> Value:
    """The product moves the exponent: exact, and right for subnormal numbers. LLVM's own conversion calls, on machines
    without such an instruction, a function that does not exist."""
    shifted = builder.shl(builder.and_(bits, _ints(0x7FFF)), _ints(13))
    moved = builder.fmul(builder.bitcast(shifted, FLOATS), FLOATS([2.0**112] * LANES))
    is_special = builder.icmp_unsigned(">=", shifted, _ints(0x0F800000))
    special = builder.select(is_special, _ints(0x7F800000), _ints(0))
    sign = builder.shl(builder.and_(bits, _ints(0x8000)), _ints(16))
    return builder.bitcast(builder.or_(builder.bitcast(moved, INTS), builder.or_(special, sign)), FLOATS)


def _ints(number: int) -> Value:
    return INTS([number] * LANES)


def _store(builder: Builder, vector: Value, pointer: Value, mask: Value | None = None) -> None:
    place = builder.bitcast(pointer, vector.type.as_pointer())
    if mask is None:
        builder.store(vector, place, align=4)
    else:
        _call(builder, f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), [vector, place, INT(4), mask])


def _prefetch(builder: Builder, pointer: Value, index: Value) -> None:
    """A hint, not a read: it may lie beyond the end."""
    place = builder.bitcast(builder.gep(pointer, [index]), ir.IntType(8).as_pointer())
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, INT(0), INT(3), INT(1)])


def _multiply_add(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """One instruction where there is one."""
    return _call(builder, f"llvm.fmuladd.v{LANES}f32", FLOATS, [a, b, c])


def _splat(builder: Builder, number: Value) -> Value:
    vector = ir.VectorType(number.type, LANES)
    first = builder.insert_element(vector(ir.Undefined), number, INT(0))
    return _shuffle(builder, first, first, [0] * LANES)


def _each_vector(builder: Builder, dim: Value, step: Callable[[Value, ir.Value | None], None]) -> None:
    """A loop of what `step` makes for the place and the mask, and that once more for the last ones, if any are left."""
    whole = builder.and_(dim, dim.type(-LANES))
    with cgutils.for_range_slice(builder, dim.type(0), whole, dim.type(LANES), dim.type) as (d, _):
        step(d, None)
    with builder.if_then(builder.icmp_signed("<", whole, dim), likely=False):
        rest = _splat(builder, builder.trunc(builder.sub(dim, whole), INT))
        step(whole, builder.icmp_signed("<", INTS(list(range(LANES))), rest))


def _shuffle(builder: Builder, a: Value, b: Value, lanes: list[int]) -> Value:
    return builder.shuffle_vector(a, b, ir.VectorType(ir.IntType(32), len(lanes))(lanes))


def _sums(builder: Builder, vectors: list[Value]) -> Value:
    """The sum of each vector in a lane of its own. Two become one whose lanes are, in turns, half as many partial sums
    of either, until one vector is left; its neighbouring lanes are then added."""
    lanes = width = vectors[0].type.count
    while len(vectors) > 1:
        width //= 2
        is_first = [lane // width % 2 == 0 for lane in range(lanes)]
        straight = [lane + (0 if first else lanes) for lane, first in enumerate(is_first)]
        crossed = [lane + (width if first else lanes - width) for lane, first in enumerate(is_first)]
        pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :], strict=True)
        vectors = [builder.fadd(_shuffle(builder, a, b, straight), _shuffle(builder, a, b, crossed)) for a, b in pairs]
    total = vectors[0]
    while width > 1:
        width //= 2
        lower = [lane for lane in range(total.type.count) if lane // width % 2 == 0]
        upper = [lane + width for lane in lower]
        total = builder.fadd(_shuffle(builder, total, total, lower), _shuffle(builder, total, total, upper))
    return total


def _dots(num_keys: int, num_queries: int) -> Callable[..., None]:
    """Scores of keys that lie `step` apart, of queries side by side: each loaded once, their sums in registers."""

    @intrinsic
    def dots(
        typing: Any, queries: Any, query_at: Any, keys: Any, key_at: Any, step: Any, dim: Any, scores: Any, at: Any
    ) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            q, query_at, k, key_at, step, dim, out, at = arguments
            q, out = (_at(context, builder, queries, q, query_at), _at(context, builder, scores, out, at))
            offset = [builder.mul(step, step.type(i)) for i in range(num_keys)]
            ahead = builder.mul(step, step.type(AHEAD))
            rows = [_at(context, builder, keys, k, builder.add(key_at, o)) for o in offset]
            columns = [builder.gep(q, [builder.mul(dim, dim.type(g))]) for g in range(num_queries)]
            sums = [[cgutils.alloca_once(builder, FLOATS) for _ in rows] for _ in columns]
            for place in chain(*sums):
                builder.store(FLOATS(None), place)

            def at_place(d: Value, mask: Value | None) -> None:
                for row in rows:
                    _prefetch(builder, row, builder.add(d, ahead))
                xs = [_load(builder, keys.dtype, builder.gep(row, [d]), mask) for row in rows]
                for column, places in zip(columns, sums, strict=True):
                    y = _load(builder, types.float32, builder.gep(column, [d]), mask)
                    for x, place in zip(xs, places, strict=True):
                        builder.store(_multiply_add(builder, x, y, builder.load(place)), place)

            _each_vector(builder, dim, at_place)
            total = _sums(builder, [builder.load(place) for place in chain(*sums)])
            for g in range(num_queries):
                picked = _shuffle(builder, total, total, list(range(g * num_keys, (g + 1) * num_keys)))
                _store(builder, picked, builder.gep(out, [dim.type(g * CHUNK_TOKENS)]))
            return context.get_dummy_value()

        n = types.intp
        return types.void(queries, n, keys, n, n, n, scores, n), build

    return dots


def _additions(num_values: int, num_queries: int) -> Callable[..., None]:
    """Adds values that lie `step` apart, by their weights, to the sums of queries side by side."""

    @intrinsic
    def additions(
        typing: Any, sums: Any, sum_at: Any, values: Any, value_at: Any, step: Any, dim: Any, weights: Any, at: Any
    ) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            s, sum_at, v, value_at, step, dim, w, at = arguments
            s, w = (_at(context, builder, sums, s, sum_at), _at(context, builder, weights, w, at))
            offset = [builder.mul(step, step.type(i)) for i in range(num_values)]
            ahead = builder.mul(step, step.type(AHEAD))
            rows = [_at(context, builder, values, v, builder.add(value_at, o)) for o in offset]
            columns = [builder.gep(s, [builder.mul(dim, dim.type(g))]) for g in range(num_queries)]
            ws = [
                [
                    _splat(builder, builder.load(builder.gep(w, [at.type(g * CHUNK_TOKENS + i)])))
                    for i in range(num_values)
                ]
                for g in range(num_queries)
            ]

            def at_place(d: Value, mask: Value | None) -> None:
                for row in rows:
                    _prefetch(builder, row, builder.add(d, ahead))
                xs = [_load(builder, values.dtype, builder.gep(row, [d]), mask) for row in rows]
                for column, factors in zip(columns, ws, strict=True):
                    place = builder.gep(column, [d])
                    total = _load(builder, types.float32, place, mask)
                    for x, factor in zip(xs, factors, strict=True):
                        total = _multiply_add(builder, x, factor, total)
                    _store(builder, total, place, mask)

            _each_vector(builder, dim, at_place)
            return context.get_dummy_value()

        n = types.intp
        return types.void(sums, n, values, n, n, n, weights, n), build

    return additions


@intrinsic
def _highest(typing: Any, scores: Any, num: Any, least: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first = make_array(scores)(context, builder, arguments[0]).data
        place = cgutils.alloca_once(builder, FLOATS)
        builder.store(_splat(builder, arguments[2]), place)

        def at_place(i: Value, mask: Value | None) -> None:
            x, top = _load(builder, types.float32, builder.gep(first, [i]), mask), builder.load(place)
            is_higher = builder.fcmp_ordered(">", x, top)
            is_higher = is_higher if mask is None else builder.and_(is_higher, mask)
            builder.store(builder.select(is_higher, x, top), place)

        _each_vector(builder, arguments[1], at_place)
        top, width = builder.load(place), LANES
        while width > 1:
            width //= 2
            other = _shuffle(builder, top, top, list(range(width, 2 * width)))
            top = _shuffle(builder, top, top, list(range(width)))
            top = builder.select(builder.fcmp_ordered(">", top, other), top, other)
        return builder.extract_element(top, INT(0))

    return types.float32(scores, types.intp, types.float32), build


# Of the first `num` scores and `least`, not -inf; NaN is passed over. In plain code each waits for the one before it.
highest_of: Callable[[np.ndarray, int, np.float32], np.float32] = cast(Any, _highest)


def _blocks(make: Callable[[int, int], Callable[..., None]], num: int) -> Callable[..., None]:
    """For `num` positions of a page, the first of which begins at numbers[base], with scores from place `at` on: all
    heads, four queries at a time and then one by one."""
    four, one = make(num, 4), make(num, 1)

    @njit
    def blocks(x_HGD: np.ndarray, numbers: np.ndarray, base: int, heads: Span, scores_HGS: np.ndarray, at: int) -> None:
        H, G, D = x_HGD.shape
        for h in range(heads[0], heads[1]):
            g, begin = 0, base + h * D
            while g < G:
                if G - g >= 4:
                    four(x_HGD, (h * G + g) * D, numbers, begin, H * D, D, scores_HGS, (h * G + g) * CHUNK_TOKENS + at)
                    g += 4
                else:
                    one(x_HGD, (h * G + g) * D, numbers, begin, H * D, D, scores_HGS, (h * G + g) * CHUNK_TOKENS + at)
                    g += 1

    return blocks


score_block, score_one = _blocks(_dots, BLOCK), _blocks(_dots, 1)
add_block, add_one = _blocks(_additions, BLOCK), _blocks(_additions, 1)
