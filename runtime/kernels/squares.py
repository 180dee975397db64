"""Transposes squares of LANES x LANES numbers in vector registers, to lay out inputs of a product and to write outputs.

A square is LANES vectors of LANES lanes. Rows that a square lacks are zeros. Interleaved vectors: the first lane of
each vector, then the second lane of each, and so on. A word is 32 bits, a quad four adjacent words.

Functions marked `@intrinsic` are explained in `primitives.py`, and documented at their public names below.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .primitives import (
    FLOATS,
    INT,
    LANES,
    ArrayAt,
    Builder,
    RowsAt,
    Value,
    equals,
    load,
    pointer_of,
    shuffle,
    store,
    stride_of,
)

QUAD = 4  # words in 128 bits; shuffles within such a part of a vector are cheap
SIDES = (4, 2)  # values of `sides`: rows of w whose numbers share a vector, side by side, if x has few rows


@intrinsic
def _transpose(typing: Any, rows: Any, num_rows: Any, shift: Any, out: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first, target = (pointer_of(context, builder, *pair) for pair in ((rows, arguments[0]), (out, arguments[3])))
        stride, out_stride = stride_of(builder, arguments[0]), stride_of(builder, arguments[3])
        for i, vector in enumerate(_load_transposed(builder, rows.types[0].dtype, first, stride, *arguments[1:3])):
            store(builder, vector, builder.gep(target, [builder.mul(out_stride, out_stride.type(i))]))
        return context.get_dummy_value()

    return types.void(rows, types.intp, types.intp, out), build


@intrinsic
def _deinterleave_sums(typing: Any, sums: Any, num_sums: Any, sides: Any, out: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        sums_value, num_rows, num_sides, out_value = arguments
        first, target = pointer_of(context, builder, sums, sums_value), pointer_of(context, builder, out, out_value)
        n = num_rows.type
        vectors = _load_transposed(builder, types.float32, first, n(LANES), num_rows, n(0))
        for count in SIDES:
            with builder.if_then(equals(builder, num_sides, count)):
                for m in range(LANES // count):
                    for i, vector in enumerate(interleave(builder, vectors[m * count : (m + 1) * count])):
                        store(builder, vector, builder.gep(target, [n((m * count + i) * LANES)]))
        return context.get_dummy_value()

    return types.void(sums, types.intp, types.intp, out), build


def interleave(builder: Builder, vectors: list[Value]) -> list[Value]:
    """Returns as many vectors as given, with the first lane of each, then the second lane of each, and so on."""
    if len(vectors) == 1:
        return vectors
    even, odd = interleave(builder, vectors[::2]), interleave(builder, vectors[1::2])
    lanes = [lane for i in range(LANES) for lane in (i, LANES + i)]
    halves = lanes[:LANES], lanes[LANES:]
    return [shuffle(builder, a, b, half) for a, b in zip(even, odd, strict=True) for half in halves]


def _load_transposed(
    builder: Builder, dtype: Any, first: Value, stride: Value, num_rows: Value, shift: Value
) -> list[Value]:
    """Loads `num_rows` rows as float32, each repeated 2^shift times, and returns the LANES columns of this square. The
    lanes of missing rows are 0."""
    addresses = [cgutils.alloca_once(builder, FLOATS) for _ in range(LANES)]
    for i, target in enumerate(addresses):
        builder.store(FLOATS(None), target)
        source_row = builder.lshr(shift.type(i), shift)
        with builder.if_then(builder.icmp_signed("<", source_row, num_rows), likely=True):  # reads no row past the end
            address = builder.gep(first, [builder.mul(stride, source_row)])
            builder.store(load(builder, dtype, address, None), target)
    return transpose_vectors(builder, [builder.load(target) for target in addresses])


def transpose_vectors(builder: Builder, vectors: list[Value]) -> list[Value]:
    """Transposes n vectors within each run of n lanes: result i has lane i of each vector. n: a power of two up to
    LANES."""
    vectors, width = list(vectors), len(vectors)
    while width > 1:  # swaps the upper right and lower left quarter of each square of 2 x `width` rows
        width //= 2
        is_first = [lane // width % 2 == 0 for lane in range(LANES)]
        upper = [lane if first else LANES + lane - width for lane, first in enumerate(is_first)]
        lower = [lane + width if first else LANES + lane for lane, first in enumerate(is_first)]
        for i in (lane for lane in range(len(vectors)) if is_first[lane]):
            a, b = vectors[i], vectors[i + width]
            vectors[i], vectors[i + width] = shuffle(builder, a, b, upper), shuffle(builder, a, b, lower)
    return vectors


def load_columns(builder: Builder, rows: list[Value], num_columns: int) -> list[Value]:
    """Loads the first `num_columns` words, a multiple of QUAD, of LANES rows. Vector i has word i of each row.

    First loads vectors of one quad from each of rows r, r + 4, r + 8, ... Then only squares of four words within 128
    bits are left to transpose, with two shuffles per vector: loads are cheaper than shuffles across 128-bit parts."""
    columns = list[Value]()
    for first in range(0, num_columns, QUAD):
        vectors = [_load_quads(builder, rows[r::QUAD], first) for r in range(QUAD)]
        for words in ((0, 1), (2, 3)):
            pair = [_interleave_words(builder, vectors[i], vectors[i + 1], words) for i in (0, 2)]
            for half in ((0, 1), (2, 3)):
                quads = range(0, LANES, QUAD)
                lanes = [quad + side + i for quad in quads for side in (0, LANES) for i in half]
                columns.append(shuffle(builder, pair[0], pair[1], lanes))
    return columns


def _interleave_words(builder: Builder, a: Value, b: Value, words: tuple[int, int]) -> Value:
    """Interleaves a and b within each 128 bits: word `words[0]` of a and of b, then word `words[1]` of a and of b."""
    return shuffle(
        builder, a, b, [quad + word + side for quad in range(0, LANES, QUAD) for word in words for side in (0, LANES)]
    )


def _load_quads(builder: Builder, rows: list[Value], first: int) -> Value:
    """Loads the four words from `first` on of each row, and concatenates them to one vector."""
    kind = ir.VectorType(INT, QUAD)
    addresses = [builder.gep(builder.bitcast(row, INT.as_pointer()), [INT(first)]) for row in rows]
    parts = [builder.load(builder.bitcast(address, kind.as_pointer()), align=1) for address in addresses]
    while len(parts) > 1:
        lanes = list(range(2 * parts[0].type.count))
        parts = [shuffle(builder, a, b, lanes) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


# Transposes `num_rows` rows of LANES stored numbers, each repeated 2^shift times, into a float32 square padded with
# zeros. Arguments: rows, num_rows, shift, out.
transpose: Callable[[RowsAt, int, int, RowsAt], None] = cast(Any, _transpose)
# Writes sums of interleaved rows of w row by row: `num_sums` vectors (LANES at most) become LANES / sides rows of out,
# one per row of x, LANES x sides apart. A row holds the sums of `num_sums` x sides rows of w, then undefined numbers.
# Arguments: sums, num_sums, sides, out.
deinterleave_sums: Callable[[ArrayAt, int, int, ArrayAt], None] = cast(Any, _deinterleave_sums)
