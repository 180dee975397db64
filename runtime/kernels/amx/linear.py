"""Products of float32 with bfloat16 weights on the CPU's matrix unit, as precise as in float32.

x is split exactly into three bfloat16 parts, so x @ w.T is the sum of three bfloat16 products. Products are exact, sums
are float32. Weights are read once, as stored. The order of summation of an output does not depend on other rows.
Infinite inputs give NaN, and parts below 2^-126 count as zero.

A tile (register, see `unit.py`) holds 16 rows of TILE_DIMS = 32 bfloat16 inputs. A step multiplies two tiles of w (32
rows) by one or two tiles of x (16 rows each, with three parts of 16 pairs) at the same 32 inputs. Tiles 0 to 3 are
sums, 4 and 5 are w, 6 and 7 are x. A chain is CHAIN_STEPS steps that are summed in tiles; sums of chains are added in
memory. The depth of an input is its step: k // TILE_DIMS.

Functions marked `@intrinsic` are explained in `../primitives.py`, and documented at their public names below.

M rows of x, N rows of w, K inputs.

Splitting in three for AMX: Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
Higher-Precision Computations" (2019).
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from ..arguments import PAIR_ROWS, TILE_DIMS, TILE_ROWS
from ..compiled import REORDERED, cached_kernel
from ..primitives import FLOATS, INTS, LANES, Builder, Value, ints, load, pointer_at, shuffle, store
from ..squares import transpose_vectors
from .attention import EVEN, ODD, pack_pair, round_to_bfloat16
from .unit import BYTE, WORD, configure, emit_tile_op, release

PARTS = 3  # bfloat16 numbers that add up to a float32: each has 8 of its 24 bits
TILE_WORDS = TILE_ROWS * TILE_ROWS  # 32-bit words of a tile
STEP_WORDS = PARTS * TILE_WORDS  # words of 16 rows of x at one depth: a tile per part
PAIR_NUMBERS = PAIR_ROWS * TILE_DIMS  # numbers in two tiles of w
SUM_NUMBERS = 2 * TILE_ROWS  # numbers in a row of sums: one row of w by two tiles of x


def _move(builder: Builder, name: str, tile: int, first: Value, at: Value, row_bytes: Value) -> None:
    """Emits the load or store instruction `name` for register `tile` and the memory at first[at]."""
    address = builder.bitcast(builder.gep(first, [at]), BYTE.as_pointer())
    emit_tile_op(builder, name, BYTE(tile), address, row_bytes)


def _make_adder(num_tiles: int) -> Any:
    """Returns a compiled function for one step: it adds the products of `num_tiles` tiles of x, all parts, and 32 rows
    of w to the sums in tiles. Its arguments: w, index of its first number, numbers from row to row of w; x, index of
    its first word, words from one tile of 16 rows to the next."""

    @intrinsic
    def add(typing: Any, w: Any, w_at: Any, row_numbers: Any, x: Any, x_at: Any, x_numbers: Any) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            weights, first_weight, row, all_inputs, first_input, tile = arguments
            rows = pointer_at(context, builder, w, weights, first_weight)
            inputs = pointer_at(context, builder, x, all_inputs, first_input)
            for i in range(2):
                at = builder.mul(row, WORD(i * TILE_ROWS))
                _move(builder, "tileloadd64", 4 + i, rows, at, builder.mul(row, WORD(2)))
            for part in range(PARTS):
                for j in range(num_tiles):
                    at = builder.add(builder.mul(tile, WORD(j)), WORD(part * TILE_WORDS))
                    _move(builder, "tileloadd64", 6 + j, inputs, at, WORD(4 * TILE_ROWS))
                    for i in range(2):
                        emit_tile_op(builder, "tdpbf16ps", BYTE(2 * j + i), BYTE(4 + i), BYTE(6 + j))
            return context.get_dummy_value()

        n = types.intp
        return types.void(w, n, n, x, n, n), build

    return add


@intrinsic
def _copy_inputs(typing: Any, w: Any, at: Any, panel: Any, address: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        source = pointer_at(context, builder, w, *arguments[:2])
        target = pointer_at(context, builder, panel, *arguments[2:])
        line = builder.load(builder.bitcast(source, INTS.as_pointer()), align=2)
        builder.store(line, builder.bitcast(target, INTS.as_pointer()), align=64)
        return context.get_dummy_value()

    return types.void(w, types.intp, panel, types.intp), build


def _make_zero(num_tiles: int) -> Any:
    """Returns a compiled function that sets the sums for `num_tiles` tiles of x to zero."""

    @intrinsic
    def zero(typing: Any) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            for tile in range(2 * num_tiles):
                emit_tile_op(builder, "tilezero", BYTE(tile))
            return context.get_dummy_value()

        return types.void(), build

    return zero


def _make_store(num_tiles: int) -> Any:
    """Returns a compiled function that writes the sums for `num_tiles` tiles of x from sums[at] on."""

    @intrinsic
    def store_tiles(typing: Any, sums: Any, at: Any) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            first = pointer_at(context, builder, sums, *arguments)
            for j in range(num_tiles):
                for i in range(2):
                    address = WORD((i * SUM_NUMBERS + j) * TILE_ROWS)
                    _move(builder, "tilestored64", 2 * j + i, first, address, WORD(4 * SUM_NUMBERS))
            return context.get_dummy_value()

        return types.void(sums, types.intp), build

    return store_tiles


def _split(builder: Builder, x: Value) -> list[Value]:
    """Splits float32 into PARTS bfloat16, in the upper halves of words, that add up to x."""
    parts = []
    for _ in range(PARTS):
        parts.append(round_to_bfloat16(builder, x))
        x = builder.fsub(x, builder.bitcast(parts[-1], FLOATS))  # exact: the bits that are left
    return parts


@intrinsic
def _split_inputs(typing: Any, x: Any, at: Any, row_numbers: Any, num_rows: Any, tiles: Any, tile_at: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first, num_rows = pointer_at(context, builder, x, *arguments[:2]), arguments[3]
        parts: list[list[Value]] = [[] for _ in range(PARTS)]
        for row in range(TILE_ROWS):
            exists = builder.icmp_signed("<", WORD(row), num_rows)  # a missing row reads row 0 instead, and counts as 0
            address = builder.gep(first, [builder.select(exists, builder.mul(arguments[2], WORD(row)), WORD(0))])
            a, b = (load(builder, types.float32, builder.gep(address, [WORD(i * LANES)]), None) for i in range(2))
            even, odd = (_split(builder, shuffle(builder, a, b, lanes)) for lanes in (EVEN, ODD))
            for part in range(PARTS):
                parts[part].append(builder.select(exists, pack_pair(builder, even[part], odd[part]), ints(0)))
        out = pointer_at(context, builder, tiles, *arguments[4:])
        for part, rows in enumerate(parts):
            for pair, words in enumerate(transpose_vectors(builder, rows)):
                address = builder.gep(out, [WORD(part * TILE_WORDS + pair * TILE_ROWS)])
                builder.store(words, builder.bitcast(address, INTS.as_pointer()), align=4)
        return context.get_dummy_value()

    n = types.intp
    return types.void(x, n, n, n, tiles, n), build


@intrinsic
def _write_products(typing: Any, sums: Any, at: Any, num_rows: Any, out: Any, out_at: Any, row_numbers: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first = pointer_at(context, builder, sums, *arguments[:2])
        addresses = [builder.gep(first, [WORD(row * SUM_NUMBERS)]) for row in range(TILE_ROWS)]
        vectors = [load(builder, types.float32, address, None) for address in addresses]
        out_first = pointer_at(context, builder, out, *arguments[3:5])
        for row, vector in enumerate(transpose_vectors(builder, vectors)):
            with builder.if_then(builder.icmp_signed("<", WORD(row), arguments[2])):
                store(builder, vector, builder.gep(out_first, [builder.mul(arguments[5], WORD(row))]))
        return context.get_dummy_value()

    n = types.intp
    return types.void(sums, n, n, out, n, n), build


# Versions for one and for two tiles of x.
add_products1, add_products2 = _make_adder(1), _make_adder(2)
zero1, zero2 = _make_zero(1), _make_zero(2)
store1, store2 = _make_store(1), _make_store(2)
# Copies 32 inputs of a row of w, from any address to an aligned cache line. Arguments: w, at, panel, address.
copy_inputs: Callable[[np.ndarray, int, np.ndarray, int], None] = cast(Any, _copy_inputs)
# Writes 32 inputs of `num_rows` rows of x, padded with zero rows, as a tile for each part. Arguments: x, at,
# row_numbers, num_rows, tiles, tile_at.
split_inputs: Callable[[np.ndarray, int, int, int, np.ndarray, int], None] = cast(Any, _split_inputs)
# Transposes 16 x 16 sums, and writes the first `num_rows` rows as rows of the output. Arguments: sums, at, num_rows,
# out, out_at, row_numbers.
write_products: Callable[[np.ndarray, int, int, np.ndarray, int, int], None] = cast(Any, _write_products)


CHUNK_ROWS = 256  # most rows of w per call
CHAIN_STEPS = 32  # 1024 inputs: longer sums are less precise
CACHED_STEPS = 340  # groups of 16 rows of x times depths: 1 MiB, which fits the L2 cache; with more, w is copied
BLOCK_NUMBERS = PAIR_ROWS * SUM_NUMBERS  # sums of two tiles of w and two tiles of x
PANEL_NUMBERS = CHUNK_ROWS * CHAIN_STEPS * TILE_DIMS  # a panel: a copy of one chain of a call's rows of w


def num_sums(num_rows: int) -> int:
    """Returns the number of sums to allocate for `num_rows` rows of x: those of a call, after one block for the sums of
    a chain that is not the first."""
    return (1 + CHUNK_ROWS // PAIR_ROWS * -(-num_rows // SUM_NUMBERS)) * BLOCK_NUMBERS


@cached_kernel
def lay_out_inputs(x_MK: np.ndarray, first: int, last: int, tiles: np.ndarray) -> None:
    """Writes rows of x as tiles, for groups [first, last) of 16 rows. x is float32 and contiguous; the tiles of a group
    are adjacent in order of depth."""
    M, K = x_MK.shape
    depth = K // TILE_DIMS
    for t in range(first, last):
        for k in range(depth):
            at = t * TILE_ROWS * K + k * TILE_DIMS
            split_inputs(x_MK, at, K, M - t * TILE_ROWS, tiles, (t * depth + k) * STEP_WORDS)


@njit(fastmath=REORDERED)
def _copy_weights(w_NK: np.ndarray, at: int, num_steps: int, panel: np.ndarray, address: int) -> None:
    """Copies `num_steps` steps of 32 rows of w to a panel: per step, two adjacent tiles. Without a copy, rows are often
    a multiple of 4 KiB apart, so all cache lines of a tile would be in one set of the L1 cache."""
    K = w_NK.shape[1]
    for row in range(PAIR_ROWS):
        for k in range(num_steps):
            copy_inputs(w_NK, at + row * K + k * TILE_DIMS, panel, address + k * PAIR_NUMBERS + row * TILE_DIMS)


@njit(fastmath=REORDERED)
def _add_chain(
    w: np.ndarray,
    at: int,
    step: int,
    row_numbers: int,
    tiles: np.ndarray,
    x_at: int,
    x_words: int,
    num_steps: int,
    is_pair: bool,
) -> None:
    """Multiplies two tiles of w by one tile of x, or two if `is_pair`, over `num_steps` steps. `step`: numbers of w
    from one step to the next. `x_words`: words from the first tile of x to the second."""
    if is_pair:
        zero2()
        for k in range(num_steps):
            add_products2(w, at + k * step, row_numbers, tiles, x_at + k * STEP_WORDS, x_words)
    else:
        zero1()
        for k in range(num_steps):
            add_products1(w, at + k * step, row_numbers, tiles, x_at + k * STEP_WORDS, x_words)


@njit(fastmath=REORDERED)
def _write_block(sums: np.ndarray, at: int, num_rows: int, out_MN: np.ndarray, to: int, out_numbers: int) -> None:
    """Writes the sums of 32 rows of w and the first `num_rows` rows of two tiles of x, from sums[at] on, to `out_MN`
    from flat index `to` on."""
    for j in range(2 if num_rows > TILE_ROWS else 1):
        top = j * TILE_ROWS
        for i in range(2):
            address, own = to + top * out_numbers + i * TILE_ROWS, at + i * TILE_ROWS * SUM_NUMBERS + top
            write_products(sums, own, num_rows - top, out_MN, address, out_numbers)


# No named tuples: numba takes a microsecond per call to unpack them, and they slow down the loop of a chain.
@cached_kernel
def linear(
    w_NK: np.ndarray,
    first: int,
    last: int,
    tiles: np.ndarray,
    out_MN: np.ndarray,
    begin: int,
    out_numbers: int,
    num_rows: int,
    panel: np.ndarray,
    sums: np.ndarray,
    shape: np.ndarray,
) -> None:
    """Multiplies rows [first, last) of w (bits of bfloat16) by the `num_rows` rows of x in `tiles`. The rows of w are a
    multiple of 32, at most CHUNK_ROWS. Writes float32 to `out_MN`, which has `out_numbers` columns, with row 0 of w in
    column `begin`. `panel` and `sums`: scratch memory. `shape`: the tile configuration."""
    # If x does not fit the L2 cache, all rows of w are copied and read from the panel for each two tiles of x.
    # Otherwise 32 rows at a time are multiplied by all of x, and read from memory once.
    K = w_NK.shape[1]
    depth = K // TILE_DIMS
    num_tiles, row_words = -(-num_rows // TILE_ROWS), depth * STEP_WORDS
    copies_weights = num_tiles * depth > CACHED_STEPS
    height = last - first if copies_weights else PAIR_ROWS
    configure(shape, 0)
    for row in range(first, last, height):
        num_pairs = (min(row + height, last) - row) // PAIR_ROWS
        for k_first in range(0, depth, CHAIN_STEPS):
            num_steps = min(CHAIN_STEPS, depth - k_first)
            for n in range(num_pairs if copies_weights else 0):
                at = (row + n * PAIR_ROWS) * K + k_first * TILE_DIMS
                _copy_weights(w_NK, at, num_steps, panel, n * CHAIN_STEPS * PAIR_NUMBERS)
            for t in range(0, num_tiles, 2):
                is_pair = t + 1 < num_tiles
                for n in range(num_pairs):
                    x_at = (t * depth + k_first) * STEP_WORDS
                    if copies_weights:
                        address = n * CHAIN_STEPS * PAIR_NUMBERS
                        _add_chain(panel, address, PAIR_NUMBERS, TILE_DIMS, tiles, x_at, row_words, num_steps, is_pair)
                    else:
                        at = row * K + k_first * TILE_DIMS
                        _add_chain(w_NK, at, TILE_DIMS, K, tiles, x_at, row_words, num_steps, is_pair)
                    own_sums = (1 + t // 2 * num_pairs + n) * BLOCK_NUMBERS
                    at = 0 if k_first else own_sums
                    if is_pair:
                        store2(sums, at)
                    else:
                        store1(sums, at)
                    if k_first:
                        for i in range(BLOCK_NUMBERS):
                            sums[own_sums + i] += sums[i]
                    if k_first + num_steps == depth:
                        top = t * TILE_ROWS
                        to = begin + top * out_numbers + row + n * PAIR_ROWS
                        _write_block(sums, own_sums, num_rows - top, out_MN, to, out_numbers)
    release()
