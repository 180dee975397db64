"""Products x @ w.T in vectors of 16 lanes and 32 registers (AVX-512). A vector holds the same word of 16 rows of x, and
is multiplied by one word of w. A word is a float32, or a pair of bfloat16 inputs.

| term | meaning |
|---|---|
| chain | up to CHAIN_INPUTS adjacent words of a row, whose products are summed in registers |
| converted rows | a chain of up to WEIGHT_ROWS rows of w as words, in the L1 cache |
| group | up to MAX_VECTORS vectors of rows of x that are multiplied together, laid out as (K, vectors, LANES) |
| block | adjacent groups, which fit the L2 cache for one chain |
| chunk | the rows of w that are multiplied by a block before the next block |
| `sides` | if x has few rows: 4 or 2 rows of w share a vector, side by side, otherwise 1 |

With `sides` > 1, a lane belongs to one row of x and one of these rows of w: each number of x is repeated `sides` times,
and `sides` rows of w are interleaved, so that one load has their numbers of one input.

Converted rows are multiplied by all groups of a block, while the next rows of w are prefetched. The order of summation
of an output does not depend on other rows. `linear_parts.py` has code shared with `linear_narrow.py`. Functions marked
`@intrinsic` are explained in `primitives.py`, and documented at their public names below.

Blocking for caches and registers after Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
(2008). Here x is laid out instead of w, as it is smaller.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import GROUP_NUMBERS, PAIR_ROWS, WINDOW4, Span, VectorProduct
from .compiled import REORDERED
from .grouped import UNIT_ROWS
from .linear_parts import (
    OutputRows,
    PrefetchRows,
    RowBlock,
    add_sums,
    as_output,
    count_blocks,
    group_elements,
    group_start,
    input_index,
    make_cursors,
    output_at,
    row_stride,
    set_cursors,
    write_rows,
)
from .packed import RowPacking, widen_packed, write_escapes
from .primitives import (
    FLOATS,
    INT,
    INTS,
    LANES,
    ArrayAt,
    Builder,
    RowsAt,
    Value,
    add_pairs,
    claim_items,
    equals,
    load,
    multiply_add,
    pointer_of,
    prefetch,
    round_to_words,
    shuffle,
    splat,
    store,
    stride_of,
)
from .squares import SIDES, deinterleave_sums, interleave, transpose

MAX_VECTORS = 3
WEIGHT_ROWS = 24  # also the most sums that fit in registers: vectors of a group times rows of w
CHAIN_INPUTS = 256  # also the words from one converted row to the next
GROUP_SHIFT = GROUP_NUMBERS.bit_length() - 1  # log2 of GROUP_NUMBERS
_AHEAD = 4  # prefetches x to L1 this many words before its use, which saves 3 % of a product of 480 rows


@intrinsic
def _copy_interleaved(typing: Any, rows: Any, num_rows: Any, num_words: Any, sides: Any, out: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        rows_value, count, end, num_sides, out_value = arguments
        first, stride = pointer_of(context, builder, rows, rows_value), stride_of(builder, rows_value)
        target, n = pointer_of(context, builder, out, out_value), end.type
        for sides in SIDES:
            with builder.if_then(equals(builder, num_sides, sides)):
                slices = cgutils.for_range_slice(builder, n(0), count, n(sides), n)
                with slices as (row, _), cgutils.for_range_slice(builder, n(0), end, n(LANES), n) as (k, _):
                    numbers = [builder.add(row, n(i)) for i in range(sides)]
                    pointers = [builder.gep(first, [builder.mul(number, stride)]) for number in numbers]
                    vectors = [_load_words(builder, rows, out, pointer, k) for pointer in pointers]
                    to = builder.add(builder.mul(row, n(CHAIN_INPUTS)), builder.mul(k, n(sides)))
                    for i, vector in enumerate(interleave(builder, vectors)):
                        store(builder, vector, builder.gep(target, [builder.add(to, n(i * LANES))]))
        return context.get_dummy_value()

    n = types.intp
    return types.void(rows, n, n, n, out), build


def _load_words(builder: Builder, row: Any, out: Any, stored: Value, k: Value) -> Value:
    """Loads LANES words from word `k` of a stored row on: float32, or pairs of bfloat16 if `out` has uint32 words."""
    dtype, words = row.types[0].dtype, out.types[0].dtype
    if dtype == words or not _is_paired(out.types[0]):
        return load(builder, dtype, builder.gep(stored, [k]), None)
    address = builder.gep(builder.bitcast(stored, INT.as_pointer()), [k])
    return builder.load(builder.bitcast(address, INTS.as_pointer()), align=dtype.bitwidth // 8)


@intrinsic
def _copy_words(typing: Any, row: Any, num_words: Any, out: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        stored, end = pointer_of(context, builder, row, arguments[0]), arguments[1]
        target, n = pointer_of(context, builder, out, arguments[2]), end.type
        with cgutils.for_range_slice(builder, n(0), end, n(LANES), n) as (k, _):
            store(builder, _load_words(builder, row, out, stored, k), builder.gep(target, [k]))
        return context.get_dummy_value()

    return types.void(row, types.intp, out), build


@intrinsic
def _round_to_pairs(typing: Any, row: Any, num_words: Any, out: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        numbers, end = pointer_of(context, builder, row, arguments[0]), arguments[1]
        rounded, n = pointer_of(context, builder, out, arguments[2]), end.type
        if not _is_paired(out.types[0]):
            return context.get_dummy_value()
        with cgutils.for_range_slice(builder, n(0), end, n(LANES), n) as (k, _):
            at = builder.mul(k, n(2))
            addresses = [builder.gep(numbers, [builder.add(at, n(i * LANES))]) for i in range(2)]
            halves = [load(builder, types.float32, address, None) for address in addresses]
            store(builder, round_to_words(builder, *halves), builder.gep(rounded, [k]))
        return context.get_dummy_value()

    return types.void(row, types.intp, out), build


@intrinsic
def _numbers_per_word(typing: Any, words: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        return context.get_constant(types.intp, 2 if _is_paired(words) else 1)

    return types.intp(words), build


def _is_paired(words: Any) -> bool:
    """True if an array's words are pairs of bfloat16: these are uint32."""
    return words.dtype == types.uint32


class _WideArguments(NamedTuple):
    """The arguments of `add_products` in order, as numba types or LLVM values."""

    weights: Any
    num_rows: Any
    inputs: Any
    num_vectors: Any
    num_inputs: Any
    sums: Any
    is_first: Any
    ahead: Any
    num_ahead: Any
    group_stride: Any
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
    group_stride: Any,
    sides: Any,
) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        values = _WideArguments(*arguments)
        firsts = [
            pointer_of(context, builder, kind, value)
            for kind, value in ((weights, values.weights), (inputs, values.inputs), (sums, values.sums))
        ]
        next_rows, stride = pointer_of(context, builder, ahead, values.ahead), stride_of(builder, values.ahead)

        def emit_prefetches(k: Value) -> None:
            # Prefetches the cache line of the step's last input in each next row. Not of its first input: rows of
            # checkpoints are not aligned to cache lines, so a step may end in a new line.
            end = builder.mul(builder.add(k, k.type(LANES)), values.group_stride)
            last = builder.sub(builder.lshr(end, k.type(GROUP_SHIFT)), k.type(1))
            with cgutils.for_range(builder, values.num_ahead, intp=k.type) as loop:
                prefetch(builder, next_rows, builder.add(builder.mul(loop.index, stride), last))

        shapes = [(vectors, 1) for vectors in range(1, MAX_VECTORS + 1)] + [(1, sides) for sides in SIDES]
        for vectors, sides in shapes:
            is_match = builder.and_(equals(builder, values.num_vectors, vectors), equals(builder, values.sides, sides))
            with builder.if_then(is_match):
                for rows in _row_counts(vectors):
                    with builder.if_then(equals(builder, values.num_rows, rows)):
                        shape = rows // sides, vectors, sides
                        totals = _emit_sums(builder, firsts[0], firsts[1], shape, values.num_inputs, emit_prefetches)
                        add_sums(builder, totals, firsts[2], values.is_first)
        return context.get_dummy_value()

    n = types.intp
    return types.void(weights, n, inputs, n, n, sums, types.boolean, ahead, n, n, n), build


def _row_counts(vectors: int) -> list[int]:
    """Returns for which numbers of rows of w to compile code with `vectors` vectors of x: the most rows that give
    WEIGHT_ROWS sums, and all smaller numbers that can be left at the end of a chunk."""
    max_rows = WEIGHT_ROWS // vectors
    # Rows of the last conversion of a chunk, which has a multiple of PAIR_ROWS rows.
    counts = {PAIR_ROWS * i % WEIGHT_ROWS or WEIGHT_ROWS for i in range(1, WEIGHT_ROWS + 1)}
    return sorted({min(max_rows, count - row) for count in counts for row in range(0, count, max_rows)})


def _emit_sums(
    builder: Builder,
    weights: Value,
    inputs: Value,
    shape: tuple[int, int, int],
    num_inputs: Value,
    emit_prefetches: Callable[[Value], None],
) -> list[Value]:
    """Emits a product whose sums are all in registers. Returns them row by row: a vector for each row of w (or `sides`
    rows) and each vector of x. `shape`: (rows, or tuples of `sides` rows; vectors; sides). Calls `emit_prefetches` for
    every LANES words."""
    rows, vectors, sides = shape
    n, add = num_inputs.type, multiply_add if inputs.type.pointee == FLOATS.element else add_pairs
    sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(vectors)] for _ in range(rows)]
    for address in (address for row in sums for address in row):
        builder.store(FLOATS(None), address)
    with cgutils.for_range_slice(builder, n(0), num_inputs, n(LANES), n) as (step, _):
        emit_prefetches(step)
        with cgutils.for_range(builder, n(LANES), intp=n) as loop:
            k = builder.add(step, loop.index)
            addresses = [builder.add(builder.mul(k, n(vectors * LANES)), n(i * LANES)) for i in range(vectors)]
            x = [load(builder, types.float32, builder.gep(inputs, [address]), None) for address in addresses]
            for address in addresses:
                prefetch(builder, inputs, builder.add(address, n(_AHEAD * vectors * LANES)), level=1)
            for row, row_sums in enumerate(sums):
                weight_at = builder.mul(builder.add(k, n(row * CHAIN_INPUTS)), n(sides))
                weight = _load_repeated(builder, builder.gep(weights, [weight_at]), sides)
                for total, numbers in zip(row_sums, x, strict=True):
                    builder.store(add(builder, weight, numbers, builder.load(total)), total)
    return [builder.load(address) for row in sums for address in row]


def _load_repeated(builder: Builder, address: Value, count: int) -> Value:
    """Loads `count` adjacent words, repeated to fill a vector."""
    if count == 1:
        return splat(builder, builder.load(address))
    words = builder.load(builder.bitcast(address, ir.VectorType(address.type.pointee, count).as_pointer()), align=4)
    return shuffle(builder, words, words, [lane % count for lane in range(LANES)])


# Same as `copy_words` for `num_rows` stored rows, `sides` rows at a time interleaved. Arguments: rows, num_rows,
# num_words, sides, out.
copy_interleaved: Callable[[RowsAt, int, int, int, ArrayAt], None] = cast(Any, _copy_interleaved)
# Copies `num_words` words of a stored row, a multiple of LANES: converts to float32, or keeps pairs of bfloat16.
# Arguments: row, num_words, out.
copy_words: Callable[[ArrayAt, int, ArrayAt], None] = cast(Any, _copy_words)
# Rounds float32 numbers to `num_words` pairs of bfloat16, a multiple of LANES. Does nothing if out has float32 words.
# Arguments: row, num_words, out.
round_to_pairs: Callable[[ArrayAt, int, ArrayAt], None] = cast(Any, _round_to_pairs)
# A compile-time constant: 1 if an array has words of float32, 2 for pairs of bfloat16.
numbers_per_word: Callable[[np.ndarray], int] = cast(Any, _numbers_per_word)
# Multiplies `num_rows` converted rows of weights by inputs (num_inputs, num_vectors, LANES) and adds the products to
# sums (num_rows / sides, num_vectors, LANES), or overwrites them if `is_first`. Inputs are words. Prefetches to L2 as
# many inputs of `num_ahead` rows of stored weights, from `ahead` on. Arguments: see `_WideArguments`.
add_products: Callable[[ArrayAt, int, ArrayAt, int, int, ArrayAt, bool, RowsAt, int, int, int], None] = cast(
    Any, _add_products
)


CHUNK_ROWS = 256  # most rows of w in a chunk
INPUT_ROWS = MAX_VECTORS * LANES  # most rows of x in a group, which `lay_out` writes at once
BLOCK_GROUPS = 240 // INPUT_ROWS  # usual groups in a block: 240 rows, whose chain takes 240 KiB
MAX_GROUPS = BLOCK_GROUPS + BLOCK_GROUPS // 2
TILE_NUMBERS = WEIGHT_ROWS * CHAIN_INPUTS
SUM_NUMBERS = CHUNK_ROWS * MAX_GROUPS * INPUT_ROWS  # sums of a chunk and a block
WORK_NUMBERS = 3 * TILE_NUMBERS


def split_workspace(work: np.ndarray, *, pairs: bool) -> tuple[np.ndarray, np.ndarray]:
    """Splits a thread's WORK_NUMBERS of scratch memory. Returns `words`, for converted rows and then the same rows
    interleaved, and `tile`, for decoded rows of packed weights. For float32 x the tile is the first part of the words:
    decoded rows need no conversion. For `pairs` it is separate, and words are uint32."""
    words = work[TILE_NUMBERS:].view(np.uint32) if pairs else work[: 2 * TILE_NUMBERS]
    return words, work[:TILE_NUMBERS]


@njit(fastmath=REORDERED)
def _groups(num_rows: int) -> tuple[int, int, int]:
    """Splits vectors of rows of x into groups. Returns the number of groups, the least vectors per group, and the
    number of groups with one more vector, which are the first ones."""
    num_vectors = -(-num_rows // LANES)
    num_groups = -(-num_vectors // MAX_VECTORS)
    return num_groups, num_vectors // num_groups, num_vectors % num_groups


@njit(fastmath=REORDERED)
def _rows_per_vector(num_rows: int) -> int:
    """Returns `sides`: 4 or 2 if x has so few rows that this many rows of w fit in a vector, otherwise 1."""
    for sides in SIDES:
        if num_rows * sides <= LANES:
            return sides
    return 1


@njit(fastmath=REORDERED)
def lay_out(x_MK: np.ndarray, first: int, last: int, inputs: np.ndarray) -> None:
    """Writes groups [first, last) of rows of x, each as (K, vectors, LANES), zero-padded after the last row. See
    `linear.lay_out_inputs`."""
    M, K = x_MK.shape
    (_, least, num_larger), shift = _groups(M), _rows_per_vector(M) // 2  # shift: log2 of `sides`
    for g in range(first, last):
        begin, width = group_start(g, least, num_larger) * LANES, (least + (g < num_larger)) * LANES
        for m in range(0, width, LANES):
            num_rows = max(0, min(LANES, M - begin - m))
            for k in range(0, K, LANES):
                to = begin * K + k * width + m
                transpose(RowsAt(x_MK, (begin + m) * K + k, K), num_rows, shift, RowsAt(inputs, to, width))


@njit(fastmath=REORDERED)
def _write_output(
    sums: np.ndarray, width: int, num_rows: int, block: RowBlock, out: OutputRows, begin: int, square: RowsAt
) -> None:
    """Writes sums of `width` rows of w and a block of x to columns of `out` from `begin` on. `square`: scratch memory
    of LANES x LANES numbers."""
    row, at = group_start(block.first, block.least, block.num_larger) * LANES, 0
    for g in range(block.first, block.last):
        stride = (block.least + (g < block.num_larger)) * LANES
        for m in range(0, min(stride, num_rows - row), LANES):
            for n in range(0, width, LANES):
                transpose(RowsAt(sums, at + n * stride + m, stride), LANES, 0, square)
                write_rows(square, min(LANES, num_rows - row - m), LANES, output_at(out, row + m, begin + n), out.kind)
        row, at = row + stride, at + CHUNK_ROWS * stride


@njit(fastmath=REORDERED)
def _write_interleaved_output(
    sums: np.ndarray, width: int, num_rows: int, sides: int, out: OutputRows, begin: int, square: RowsAt
) -> None:
    """Same as `_write_output` for sums with `sides` > 1, for which all rows of x are in one vector."""
    for n in range(0, width, LANES * sides):
        num_sums = min(LANES, (width - n) // sides)
        deinterleave_sums(ArrayAt(sums, n // sides * LANES), num_sums, sides, ArrayAt(square.numbers, square.at))
        rows = RowsAt(square.numbers, square.at, LANES * sides)
        write_rows(rows, num_rows, num_sums * sides, output_at(out, 0, begin + n), out.kind)


@njit(fastmath=REORDERED)
def _multiply_tile(
    words: np.ndarray,
    span: Span,
    inputs: np.ndarray,
    chain: Span,
    block: RowBlock,
    sums: np.ndarray,
    num_words: int,
    w: np.ndarray,
    ahead: PrefetchRows,
    sides: int,
) -> None:
    """Multiplies converted rows, `span` of their chunk, by a chain of inputs of a block of x. Prefetches the rows of
    `ahead`, an equal part of them per call of `add_products`."""
    k, vector, n, count = chain[0], 0, span[0], span[1] - span[0]
    num_products = (block.last - block.first) * -(-count * block.least // WEIGHT_ROWS)
    next_at, num_left, stride, group_stride = ahead.at, ahead.num_rows, ahead.stride, ahead.group_stride
    prefetch_share = -(-num_left // num_products)  # prefetched per product
    begin = group_start(block.first, block.least, block.num_larger)
    tile_at = TILE_NUMBERS if sides > 1 else 0  # interleaved rows are after the tile
    for g in range(block.first, block.last):
        num_vectors = block.least + (g < block.num_larger)
        x_at, height = ((begin + vector) * num_words + k * num_vectors) * LANES, WEIGHT_ROWS // num_vectors
        for r in range(0, count, height):
            rows, num = min(height, count - r), min(prefetch_share, num_left)
            out = ArrayAt(sums, (vector * CHUNK_ROWS + (n + r) // sides * num_vectors) * LANES)
            weights, next_rows = ArrayAt(words, tile_at + r * CHAIN_INPUTS), RowsAt(w, next_at, stride)
            x, num_inputs = ArrayAt(inputs, x_at), chain[1] - k
            add_products(weights, rows, x, num_vectors, num_inputs, out, k == 0, next_rows, num, group_stride, sides)
            next_at, num_left = next_at + num * stride, num_left - num
        vector += num_vectors


@njit(fastmath=REORDERED, forceinline=True)
def _widen_rows(
    w: np.ndarray,
    K: int,
    packed: RowPacking | None,
    cursors: np.ndarray,
    first_cursor: int,
    rows: Span,
    chain: Span,
    words: np.ndarray,
    tile: np.ndarray,
    bits: np.ndarray,
    sides: int,
) -> None:
    """Writes a chain of the given rows of w to `words`, with `sides` > 1 interleaved from TILE_NUMBERS on. Decodes
    packed rows to `tile` before (`bits`: the tile viewed as uint32). Entries of `cursors` from `first_cursor` on are
    for these rows, see `make_cursors`."""
    first, per_word, num_words = rows[0], numbers_per_word(words), chain[1] - chain[0]
    k, last = chain[0] * per_word, chain[1] * per_word  # numbers of a row of w; `chain` counts words
    if packed is None:
        if sides > 1:
            address = ArrayAt(words, TILE_NUMBERS)
            copy_interleaved(RowsAt(w, first * K + k, K), rows[1] - first, num_words, sides, address)
            return
        for row in range(first, rows[1]):
            copy_words(ArrayAt(w, row * K + k), num_words, ArrayAt(words, (row - first) * CHAIN_INPUTS))
        return
    step = UNIT_ROWS if sides > 1 else rows[1] - first  # few enough to stay in L1 until interleaved
    for top in range(first, rows[1], step):
        for begin in range(k, last, CHAIN_INPUTS):
            end = min(last, begin + CHAIN_INPUTS)
            widen_packed(packed, w, K, (top, top + step), (begin, end), tile, CHAIN_INPUTS)
            if packed.encoding == WINDOW4:
                escapes = packed.escapes
                for row in range(top, top + step):
                    at, address = first_cursor + row - first, (row - top) * CHAIN_INPUTS
                    cursors[at] = write_escapes(escapes, cursors[at], row, begin, end, bits, address)
            for row in range(step):
                address = ArrayAt(words, row * CHAIN_INPUTS + (begin - k) // per_word)
                round_to_pairs(ArrayAt(tile, row * CHAIN_INPUTS), (end - begin) // per_word, address)
        if sides > 1:
            address = ArrayAt(words, TILE_NUMBERS + (top - first) * CHAIN_INPUTS)
            copy_interleaved(RowsAt(words, 0, CHAIN_INPUTS), step, num_words, sides, address)


@njit(fastmath=REORDERED)
def multiply(w: np.ndarray, num_weights: int, K: int, packed: RowPacking | None, product: VectorProduct) -> None:
    """Multiplies rows of x by the rows of w that this thread takes, see `linear.linear`. `num_weights`: rows of w.
    `packed`: None for plain rows."""
    step, counter, inputs, halves, kind, begin, num_rows, words, tile, sums = product
    num_groups, least, num_larger = _groups(num_rows)
    num_blocks, cursors = count_blocks(num_groups, BLOCK_GROUPS), make_cursors(packed, CHUNK_ROWS)
    # Views of arrays are made once: counting references to an array takes as long as a row.
    out, bits = as_output(halves, kind), tile.view(np.uint32)
    stride, per_word = row_stride(w, num_weights, packed), numbers_per_word(words)
    num_words, group_stride, sides = K // per_word, group_elements(packed) * per_word, _rows_per_vector(num_rows)
    # The square for output is in the tile, which is free by then.
    whole, square = num_weights // PAIR_ROWS * PAIR_ROWS, RowsAt(tile, 0, LANES)
    top = claim_items(counter, step)
    while top < whole:
        width = min(step, whole - top)  # of the chunk: multiplied by each block of x, chain by chain
        for b in range(num_blocks):
            block = RowBlock(b * num_groups // num_blocks, (b + 1) * num_groups // num_blocks, least, num_larger)
            set_cursors(packed, cursors, top, width)
            for k in range(0, num_words, CHAIN_INPUTS):
                chain = (k, min(num_words, k + CHAIN_INPUTS))
                for n in range(0, width, WEIGHT_ROWS):
                    count = min(WEIGHT_ROWS, width - n)
                    _widen_rows(w, K, packed, cursors, n, (top + n, top + n + count), chain, words, tile, bits, sides)
                    # Next are the chunk's next rows, else its first rows in the next chain, else none is prefetched.
                    next_n, next_k = (n + count, k) if n + count < width else (0, chain[1])
                    num_next = min(WEIGHT_ROWS, width - next_n) if next_k < num_words and stride else 0
                    next_at = input_index(K, packed, top + next_n, next_k * per_word)
                    ahead, span = PrefetchRows(next_at, num_next, stride, group_stride), (n, n + count)
                    _multiply_tile(words, span, inputs, chain, block, sums, num_words, w, ahead, sides)
            if sides > 1:
                _write_interleaved_output(sums, width, num_rows, sides, out, begin + top, square)
            else:
                _write_output(sums, width, num_rows, block, out, begin + top, square)
        top = claim_items(counter, step)
