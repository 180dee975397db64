"""Sums of products in registers: the innermost loop of a product, in x86's own instructions where it has FMA.

The compiler would not keep such a set of sums in the sixteen registers of AVX2: of the loop in its own terms it made
two thirds of the rate of this one. Elsewhere it is left to the compiler.
"""

from typing import NamedTuple

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from .primitives import FLOATS, LANES, Builder, Value, add_pairs, load, multiply_add, prefetch, shuffle, splat
from .target import has_fma_alone

binding.initialize_native_asmparser()  # numba leaves it out

UNROLLED = 4  # words of a turn of the loop
WORD_BYTES, VECTOR_BYTES = 4, 4 * LANES
_AHEAD = 4  # words ahead of which those of x are asked into the first cache: 3 % of a product of 480 rows
_BYTES, _COUNT = ir.IntType(8).as_pointer(), ir.IntType(64)
_SPREAD = {1: "vbroadcastss", 2: "vbroadcastsd", 4: "vbroadcastf32x4" if LANES == 16 else "vbroadcastf128"}


class Shape(NamedTuple):
    """So many `rows` of w, or runs of `sides` of them whose words lie by turns, `row_words` apart, that meet vectors of
    rows of x. Words are pairs of bfloat16, or float32."""

    rows: int
    vectors: int
    sides: int
    row_words: int
    are_pairs: bool


def add_words(
    builder: Builder, shape: Shape, weights: Value, inputs: Value, count: Value, sums: list[Value]
) -> list[Value]:
    """Returns the sums, of a row of w with each vector and then those of the next row, with the products of `count`
    words, a multiple of UNROLLED, added one after the other. Inputs are (count, vectors, LANES)."""
    build = _in_assembly if has_fma_alone() else _in_ir
    return build(builder, shape, weights, inputs, count, sums)


def _in_assembly(
    builder: Builder, shape: Shape, weights: Value, inputs: Value, count: Value, sums: list[Value]
) -> list[Value]:
    """Operands: the sums, the vectors of x and what is repeated of w, all in registers of their own; then both places
    and the count."""
    rows, vectors, sides, row_words, are_pairs = shape
    num_kept = len(sums) + vectors + 1
    x, weight = [f"${len(sums) + v}" for v in range(vectors)], f"${num_kept - 1}"
    weight_at, input_at, left = (f"${num_kept + i}" for i in range(3))
    add = "vdpbf16ps" if are_pairs else "vfmadd231ps"
    lines = ["1:"]
    for k in range(UNROLLED):
        for v in range(vectors):
            at = (k * vectors + v) * VECTOR_BYTES
            lines.append(f"vmovups {at}({input_at}), {x[v]}")
            lines.append(f"prefetcht0 {at + _AHEAD * vectors * VECTOR_BYTES}({input_at})")
        for row in range(rows):
            at = (row * row_words + k) * sides * WORD_BYTES
            lines.append(f"{_SPREAD[sides]} {at}({weight_at}), {weight}")
            lines += [f"{add} {x[v]}, {weight}, ${row * vectors + v}" for v in range(vectors)]
    lines.append(f"addq $${UNROLLED * sides * WORD_BYTES}, {weight_at}")
    lines.append(f"addq $${UNROLLED * vectors * VECTOR_BYTES}, {input_at}")
    lines += [f"subq $${UNROLLED}, {left}", "jne 1b"]
    outputs = ["=&v" if LANES == 16 else "=&x"] * num_kept + ["=&r"] * 3
    tied = [*range(len(sums)), *range(num_kept, num_kept + 3)]
    changed = ["~{memory}", "~{dirflag}", "~{fpsr}", "~{flags}"]
    given = [*sums, builder.bitcast(weights, _BYTES), builder.bitcast(inputs, _BYTES), count]
    result = ir.LiteralStructType([FLOATS] * num_kept + [_BYTES, _BYTES, _COUNT])
    kind = ir.FunctionType(result, [value.type for value in given])
    constraints = ",".join([*outputs, *map(str, tied), *changed])
    found = builder.call(ir.InlineAsm(kind, "\n".join(lines), constraints, side_effect=True), given)
    return [builder.extract_value(found, i) for i in range(len(sums))]


def _in_ir(
    builder: Builder, shape: Shape, weights: Value, inputs: Value, count: Value, sums: list[Value]
) -> list[Value]:
    rows, vectors, sides, row_words, are_pairs = shape
    n, add = count.type, add_pairs if are_pairs else multiply_add
    places = [cgutils.alloca_once(builder, FLOATS) for _ in sums]
    for place, total in zip(places, sums, strict=True):
        builder.store(total, place)
    with cgutils.for_range(builder, count, intp=n) as loop:
        k = loop.index
        starts = [builder.add(builder.mul(k, n(vectors * LANES)), n(i * LANES)) for i in range(vectors)]
        x = [load(builder, types.float32, builder.gep(inputs, [start]), None) for start in starts]
        for start in starts:
            prefetch(builder, inputs, builder.add(start, n(_AHEAD * vectors * LANES)), level=1)
        for row in range(rows):
            weight_at = builder.mul(builder.add(k, n(row * row_words)), n(sides))
            weight = _repeated(builder, builder.gep(weights, [weight_at]), sides)
            for place, numbers in zip(places[row * vectors :], x, strict=False):
                builder.store(add(builder, weight, numbers, builder.load(place)), place)
    return [builder.load(place) for place in places]


def _repeated(builder: Builder, place: Value, count: int) -> Value:
    """So many words from a place on, again and again."""
    if count == 1:
        return splat(builder, builder.load(place))
    words = builder.load(builder.bitcast(place, ir.VectorType(place.type.pointee, count).as_pointer()), align=4)
    return shuffle(builder, words, words, [lane % count for lane in range(LANES)])
