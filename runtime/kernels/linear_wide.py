"""Products in vectors of 16 lanes and 32 registers (AVX-512): the lanes are rows of x, of float32 or of pairs of
bfloat16 in words, and each number of w meets up to three vectors of them.

So few rows of w are widened at a time, and so few inputs of them, that they stay in the first cache; a block of rows of
x, which stays in the second, passes by them, while the next rows of w are on their way. Nothing that is widened is ever
in memory. An output adds up its inputs in the same order whatever rows stand beside its own.

Blocks for each level of caches, and sums in registers, after Goto and van de Geijn, "Anatomy of High-Performance Matrix
Multiplication" (2008). Here the inputs are what is laid out anew, as they are fewer than the weights.
"""

import numpy as np
from numba import njit

from .arguments import PAIR_ROWS, WINDOW4, Span
from .compiled import REORDERED
from .grouped import UNIT_ROWS
from .linear_parts import (
    Ahead,
    Block,
    cursors_of,
    first_of_group,
    group_elements,
    num_blocks,
    place_in_rows,
    row_apart,
    set_cursors,
)
from .linear_steps import (
    CHAIN_INPUTS,
    MOST_VECTORS,
    WEIGHT_ROWS,
    add_products,
    numbers_per_word,
    round_to_pairs,
    take,
    take_side_by_side,
)
from .outputs import Output, give_rows, place_in
from .packed import Packed, widen_packed
from .primitives import LANES, Place, RowsAt, begin_items
from .squares import SIDES, take_apart, transpose
from .window4 import put_escapes

CHUNK_ROWS = 256  # of w, at most, for which a block of x is read once
INPUT_ROWS = MOST_VECTORS * LANES  # of x, at most, in a group whose vectors lie side by side
BLOCK_GROUPS = 240 // INPUT_ROWS  # of rows of x in a block, about: 240 KiB at CHAIN_INPUTS
MOST_GROUPS = BLOCK_GROUPS + BLOCK_GROUPS // 2
TILE_NUMBERS = WEIGHT_ROWS * CHAIN_INPUTS
SUM_NUMBERS = CHUNK_ROWS * MOST_GROUPS * INPUT_ROWS
WORK_NUMBERS = 3 * TILE_NUMBERS


def split(work: np.ndarray, *, pairs: bool) -> tuple[np.ndarray, np.ndarray]:
    """A thread's words and tile. Words are twice as many as the tile's: where x is float32 the tile and those behind
    it, otherwise uint32, pairs of bfloat16."""
    words = work[TILE_NUMBERS:].view(np.uint32) if pairs else work[: 2 * TILE_NUMBERS]
    return words, work[:TILE_NUMBERS]


@njit(fastmath=REORDERED)
def _groups(num_rows: int) -> tuple[int, int, int]:
    """How many groups of vectors of rows of x there are, how many vectors each has at least, and how many groups have
    one more: the first ones."""
    num_vectors = -(-num_rows // LANES)
    num_groups = -(-num_vectors // MOST_VECTORS)
    return num_groups, num_vectors // num_groups, num_vectors % num_groups


@njit(fastmath=REORDERED)
def _sides(num_rows: int) -> int:
    """How many rows of w meet so few rows of x side by side."""
    for sides in SIDES:
        if num_rows * sides <= LANES:
            return sides
    return 1


@njit(fastmath=REORDERED)
def lay_out(x_MK: np.ndarray, first: int, last: int, inputs: np.ndarray) -> None:
    """Groups [first, last) of rows of x, K words each, one after the other, each (K, vectors, LANES); zeros behind the
    last row. A word is float32, widened where x is of 16 bits, or a pair of bfloat16, given as such."""
    M, K = x_MK.shape
    (_, least, num_larger), shift = _groups(M), _sides(M) // 2
    for g in range(first, last):
        begin, width = first_of_group(g, least, num_larger) * LANES, (least + (g < num_larger)) * LANES
        for m in range(0, width, LANES):
            num_rows = max(0, min(LANES, M - begin - m))
            for k in range(0, K, LANES):
                to = begin * K + k * width + m
                transpose(RowsAt(x_MK, (begin + m) * K + k, K), num_rows, shift, RowsAt(inputs, to, width))


@njit(fastmath=REORDERED)
def _take_out(sums: np.ndarray, width: int, num_rows: int, block: Block, out: Output, begin: int, own: RowsAt) -> None:
    """Sums of `width` rows of w with a block, as columns of out from `begin` on. `own`: room for a square."""
    row, at = first_of_group(block.first, block.least, block.num_larger) * LANES, 0
    for g in range(block.first, block.last):
        apart = (block.least + (g < block.num_larger)) * LANES
        for m in range(0, min(apart, num_rows - row), LANES):
            for n in range(0, width, LANES):
                transpose(RowsAt(sums, at + n * apart + m, apart), LANES, 0, own)
                give_rows(own, min(LANES, num_rows - row - m), LANES, place_in(out, row + m, begin + n), out.kind)
        row, at = row + apart, at + CHUNK_ROWS * apart


@njit(fastmath=REORDERED)
def _take_sides_out(
    sums: np.ndarray, width: int, num_rows: int, sides: int, out: Output, begin: int, own: RowsAt
) -> None:
    """`_take_out` of sums of rows of w side by side."""
    for n in range(0, width, LANES * sides):
        num_sums = min(LANES, (width - n) // sides)
        take_apart(Place(sums, n // sides * LANES), num_sums, sides, Place(own.numbers, own.at))
        rows = RowsAt(own.numbers, own.at, LANES * sides)
        give_rows(rows, num_rows, num_sums * sides, place_in(out, 0, begin + n), out.kind)


@njit(fastmath=REORDERED)
def _multiply_tile(
    words: np.ndarray,
    span: Span,
    inputs: np.ndarray,
    chain: Span,
    block: Block,
    sums: np.ndarray,
    num_words: int,
    w: np.ndarray,
    ahead: Ahead,
    sides: int,
) -> None:
    """Rows of words of w, those of a span of their chunk, times the inputs of a chain of a block. Those side by side
    lie behind the tile. Rows ahead are asked for beside it."""
    k, vector, n, count = chain[0], 0, span[0], span[1] - span[0]
    num_products = (block.last - block.first) * -(-count * block.least // WEIGHT_ROWS)
    next_at, num_left, apart, group_apart = ahead.at, ahead.num_rows, ahead.apart, ahead.group_apart
    share = -(-num_left // num_products)  # with each of the products
    begin = first_of_group(block.first, block.least, block.num_larger)
    tile_at = TILE_NUMBERS if sides > 1 else 0
    for g in range(block.first, block.last):
        num_vectors = block.least + (g < block.num_larger)
        x_at, height = ((begin + vector) * num_words + k * num_vectors) * LANES, WEIGHT_ROWS // num_vectors
        for r in range(0, count, height):
            rows, now = min(height, count - r), min(share, num_left)
            own = Place(sums, (vector * CHUNK_ROWS + (n + r) // sides * num_vectors) * LANES)
            weights, next_rows = Place(words, tile_at + r * CHAIN_INPUTS), RowsAt(w, next_at, apart)
            x, num_inputs = Place(inputs, x_at), chain[1] - k
            add_products(weights, rows, x, num_vectors, num_inputs, own, k == 0, next_rows, now, group_apart, sides)
            next_at, num_left = next_at + now * apart, num_left - now
        vector += num_vectors


@njit(fastmath=REORDERED, forceinline=True)
def _widen_rows(
    w: np.ndarray,
    K: int,
    packed: Packed | None,
    cursors: np.ndarray,
    own: int,
    rows: Span,
    chain: Span,
    words: np.ndarray,
    tile: np.ndarray,
    bits: np.ndarray,
    sides: int,
) -> None:
    """Rows of w as words, of a chain of them, or side by side behind these; packed ones become float32 in `tile`
    before, whose `bits` these are. Their next escapes are in `cursors` from number `own` on."""
    first, per_word, num_words = rows[0], numbers_per_word(words), chain[1] - chain[0]
    k, last = chain[0] * per_word, chain[1] * per_word
    if packed is None:
        if sides > 1:
            place = Place(words, TILE_NUMBERS)
            take_side_by_side(RowsAt(w, first * K + k, K), rows[1] - first, num_words, sides, place)
            return
        for row in range(first, rows[1]):
            take(Place(w, row * K + k), num_words, Place(words, (row - first) * CHAIN_INPUTS))
        return
    step = UNIT_ROWS if sides > 1 else rows[1] - first  # so few that they stay in the first cache until they lie there
    for top in range(first, rows[1], step):
        for begin in range(k, last, CHAIN_INPUTS):
            end = min(last, begin + CHAIN_INPUTS)
            widen_packed(packed, w, K, (top, top + step), (begin, end), tile, CHAIN_INPUTS)
            if packed.way == WINDOW4:
                escapes = packed.escapes
                for row in range(top, top + step):
                    at, place = own + row - first, (row - top) * CHAIN_INPUTS
                    cursors[at] = put_escapes(escapes, cursors[at], row, begin, end, bits, place)
            for row in range(step):
                place = Place(words, row * CHAIN_INPUTS + (begin - k) // per_word)
                round_to_pairs(Place(tile, row * CHAIN_INPUTS), (end - begin) // per_word, place)
        if sides > 1:
            place = Place(words, TILE_NUMBERS + (top - first) * CHAIN_INPUTS)
            take_side_by_side(RowsAt(words, 0, CHAIN_INPUTS), step, num_words, sides, place)


@njit(fastmath=REORDERED)
def multiply(
    w: np.ndarray,
    num_weights: int,
    K: int,
    packed: Packed | None,
    step: int,
    begun: np.ndarray,
    inputs: np.ndarray,
    out: Output,
    begin: int,
    num_rows: int,
    words: np.ndarray,
    tile: np.ndarray,
    sums: np.ndarray,
) -> None:
    """See `linear`. `num_weights` rows of w are numbers, or packed so."""
    num_groups, least, num_larger = _groups(num_rows)
    in_all, cursors = num_blocks(num_groups, BLOCK_GROUPS), cursors_of(packed, CHUNK_ROWS)
    bits = tile.view(np.uint32)  # once: a view counts references, which takes as long as a row
    apart, per_word = row_apart(w, num_weights, packed), numbers_per_word(words)
    num_words, group_apart, sides = K // per_word, group_elements(packed) * per_word, _sides(num_rows)
    whole, square = num_weights // PAIR_ROWS * PAIR_ROWS, RowsAt(tile, 0, LANES)
    top = begin_items(begun, step)
    while top < whole:
        width = min(step, whole - top)
        for b in range(in_all):
            block = Block(b * num_groups // in_all, (b + 1) * num_groups // in_all, least, num_larger)
            set_cursors(packed, cursors, top, width)
            for k in range(0, num_words, CHAIN_INPUTS):
                chain = (k, min(num_words, k + CHAIN_INPUTS))
                for n in range(0, width, WEIGHT_ROWS):
                    count = min(WEIGHT_ROWS, width - n)
                    _widen_rows(w, K, packed, cursors, n, (top + n, top + n + count), chain, words, tile, bits, sides)
                    next_n, next_k = (n + count, k) if n + count < width else (0, chain[1])
                    num_next = min(WEIGHT_ROWS, width - next_n) if next_k < num_words and apart else 0
                    next_at = place_in_rows(K, packed, top + next_n, next_k * per_word)
                    ahead, span = Ahead(next_at, num_next, apart, group_apart), (n, n + count)
                    _multiply_tile(words, span, inputs, chain, block, sums, num_words, w, ahead, sides)
            if sides > 1:
                _take_sides_out(sums, width, num_rows, sides, out, begin + top, square)
            else:
                _take_out(sums, width, num_rows, block, out, begin + top, square)
        top = begin_items(begun, step)
