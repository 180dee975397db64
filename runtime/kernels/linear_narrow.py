"""Products in vectors of eight lanes and sixteen registers (AVX2): the lanes are rows of w, and each number of x meets
two vectors of them.

So few rows of w are widened and laid out at a time, as a panel, and so few inputs of them, that they stay in the first
cache; a block of rows of x, which stays in the second, passes by them, while the next rows of w are on their way.
Nothing that is widened is ever in memory. An output adds up its inputs in the same order whatever rows stand beside its
own.

Blocks for each level of caches, panels, and sums in registers, after Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication" (2008), and Van Zee and van de Geijn, "BLIS" (2015).
"""

import numpy as np
from numba import njit

from .arguments import PAIR_ROWS, WINDOW4, Span
from .compiled import REORDERED
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
from .narrow_steps import (
    CHAIN_INPUTS,
    FEW_ROWS,
    MOST_ROWS,
    PANEL_NUMBERS,
    PANEL_ROWS,
    add_products,
    lay_out_row,
    turn,
)
from .outputs import Output, give_rows
from .packed import Packed, widen_packed
from .primitives import LANES, Place, RowsAt, begin_items
from .window4 import put_escapes

CHUNK_ROWS = 256  # of w, at most, for which a block of x is read once
INPUT_ROWS = 1  # of x that are laid out without regard to others
BLOCK_GROUPS = 240 // MOST_ROWS  # of rows of x in a block, about: 240 KiB at CHAIN_INPUTS
MOST_GROUPS = BLOCK_GROUPS + BLOCK_GROUPS // 2
CACHED_NUMBERS = 1 << 15  # of x, 128 KiB: they stay in the second cache as a whole
TILE_NUMBERS = LANES * CHAIN_INPUTS  # of rows of w that are decoded before they are laid out
SUM_NUMBERS = CHUNK_ROWS * MOST_GROUPS * MOST_ROWS
WORK_NUMBERS = 2 * PANEL_NUMBERS + TILE_NUMBERS


def split(work: np.ndarray, *, pairs: bool) -> tuple[np.ndarray, np.ndarray]:
    """A thread's panels and tile."""
    assert not pairs, "vectors of eight lanes multiply no pairs"
    return work[TILE_NUMBERS:], work[:TILE_NUMBERS]


@njit(fastmath=REORDERED)
def _most_rows(num_rows: int) -> int:
    """How many rows of x are in a group: few, with two panels, where a group of more would have too few sums to keep
    the units busy."""
    return FEW_ROWS if num_rows <= FEW_ROWS or MOST_ROWS < num_rows <= 3 * FEW_ROWS else MOST_ROWS


@njit(fastmath=REORDERED)
def _groups(num_rows: int) -> tuple[int, int, int]:
    """How many groups of rows of x there are, how many rows each has at least, and how many groups have one more: the
    first ones."""
    num_groups = -(-num_rows // _most_rows(num_rows))
    return num_groups, num_rows // num_groups, num_rows % num_groups


@njit(fastmath=REORDERED)
def lay_out(x_MK: np.ndarray, first: int, last: int, inputs: np.ndarray) -> None:
    """Rows [first, last) of x: each beside the others of its group, number by number; groups lie one after the other,
    (K, rows) each."""
    M, K = x_MK.shape
    num_groups, least, num_larger = _groups(M)
    for g in range(num_groups):
        top, height = first_of_group(g, least, num_larger), least + (g < num_larger)
        for row in range(max(first, top), min(last, top + height)):
            lay_out_row(Place(x_MK, row * K), K, Place(inputs, top * K + row - top), height)


@njit(fastmath=REORDERED)
def _take_out(sums: np.ndarray, width: int, height: int, rows: Span, out: Output, begin: int) -> None:
    """Sums of `width` rows of w, `height` at a time, with a run of rows of x, as columns of out from `begin` on."""
    num_rows = rows[1] - rows[0]
    for row in range(num_rows):
        own = RowsAt(sums, row * height, num_rows * height)
        at = (rows[0] + row) * out.apart + begin * out.per_number
        give_rows(own, width // height, height, RowsAt(out.halves, at, height * out.per_number), out.kind)


@njit(fastmath=REORDERED)
def _multiply_panels(
    panels: np.ndarray,
    rows: Span,
    inputs: np.ndarray,
    chain: Span,
    block: Block,
    sums: np.ndarray,
    K: int,
    w: np.ndarray,
    ahead: Ahead,
) -> None:
    """The rows of a panel, or of two, a span of their chunk, times the inputs of a chain of a block. Rows ahead are
    asked for beside it."""
    k, height = chain[0], rows[1] - rows[0]
    top = first_of_group(block.first, block.least, block.num_larger)
    block_rows = first_of_group(block.last, block.least, block.num_larger) - top
    next_at, num_left, begin = ahead.at, ahead.num_rows, top
    share = -(-num_left // (block.last - block.first))  # with each of the groups
    for g in range(block.first, block.last):
        count, now = block.least + (g < block.num_larger), min(share, num_left)
        own = Place(sums, rows[0] * block_rows + (begin - top) * height)
        x, next_rows = Place(inputs, begin * K + k * count), RowsAt(w, next_at, ahead.apart)
        weights, num_vectors, num_inputs = Place(panels, 0), height // LANES, chain[1] - k
        add_products(weights, num_vectors, x, count, num_inputs, own, k == 0, next_rows, now, ahead.group_apart)
        next_at, num_left, begin = next_at + now * ahead.apart, num_left - now, begin + count


@njit(fastmath=REORDERED, forceinline=True)
def _lay_out_weights(
    w: np.ndarray,
    K: int,
    packed: Packed | None,
    cursors: np.ndarray,
    own: int,
    rows: Span,
    chain: Span,
    tile: np.ndarray,
    bits: np.ndarray,
    panels: np.ndarray,
) -> None:
    """Inputs of a chain of rows of w as panels. Packed ones become float32 in `tile` before, whose `bits` these are;
    their next escapes are in `cursors` from number `own` on."""
    (first, last), (k, end) = rows, chain
    for top in range(first, last, LANES):
        vector = (top - first) // LANES
        place = Place(panels, vector // 2 * PANEL_NUMBERS + vector % 2 * LANES)
        if packed is None:
            turn(RowsAt(w, top * K + k, K), end - k, place)
            continue
        widen_packed(packed, w, K, (top, top + LANES), chain, tile, CHAIN_INPUTS)
        if packed.way == WINDOW4:
            escapes = packed.escapes
            for row in range(LANES):
                at = own + top - first + row
                cursors[at] = put_escapes(escapes, cursors[at], top + row, k, end, bits, row * CHAIN_INPUTS)
        turn(RowsAt(tile, 0, CHAIN_INPUTS), end - k, place)


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
    panels: np.ndarray,
    tile: np.ndarray,
    sums: np.ndarray,
) -> None:
    """See `linear`. `num_weights` rows of w are numbers, or packed so."""
    num_groups, least, num_larger = _groups(num_rows)
    in_all, cursors = num_blocks(num_groups, BLOCK_GROUPS), cursors_of(packed, CHUNK_ROWS)
    bits = tile.view(np.uint32)  # once: a view counts references, which takes as long as a row
    apart, group_apart = row_apart(w, num_weights, packed), group_elements(packed)
    height = 2 * PANEL_ROWS if _most_rows(num_rows) == FEW_ROWS else PANEL_ROWS
    chunk = height if num_rows * K <= CACHED_NUMBERS else step  # rows of w that x is read once for, unless it stays
    whole = num_weights // PAIR_ROWS * PAIR_ROWS
    item = begin_items(begun, step)
    while item < whole:
        end = min(item + step, whole)
        for top in range(item, end, chunk):
            width = min(chunk, end - top)
            for b in range(in_all):
                block = Block(b * num_groups // in_all, (b + 1) * num_groups // in_all, least, num_larger)
                set_cursors(packed, cursors, top, width)
                for k in range(0, K, CHAIN_INPUTS):
                    chain = (k, min(K, k + CHAIN_INPUTS))
                    for n in range(0, width, height):
                        own, rows = (n, n + height), (top + n, top + n + height)
                        _lay_out_weights(w, K, packed, cursors, n, rows, chain, tile, bits, panels)
                        next_top, next_k = (top + n + height, k) if n + height < width else (top, chain[1])
                        if next_k >= K:
                            next_top, next_k = top + width, 0
                        num_next = height if apart and next_top < end else 0
                        ahead = Ahead(place_in_rows(K, packed, next_top, next_k), num_next, apart, group_apart)
                        _multiply_panels(panels, own, inputs, chain, block, sums, K, w, ahead)
                span = first_of_group(block.first, least, num_larger), first_of_group(block.last, least, num_larger)
                _take_out(sums, width, height, span, out, begin + top)
        item = begin_items(begun, step)
