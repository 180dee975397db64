"""The compiled decode attention: one new token per row over KV pages, each read once and in the order of its bytes.

Softmax goes along with it (Milakov and Gimelshein 2018): scores of CHUNK_TOKENS positions, their maximum, their values.
Nothing here promises that numbers are finite: NaN and infinities end as they do in torch, but for what
`attend_in_tiles` says.

The annotations are for the reader; the compiler takes the types of what it is given. What multiplies is written in
explicit vectors (`attention_blocks.py`) or in tiles (`attention_tiles.py`).

B rows, H KV heads, G query heads of each, D of a head, P positions of a page, n pages of a row.
"""

import numpy as np
from numba import njit

from .attention_blocks import ADD_BLOCK, CHUNK_TOKENS, SCORE_BLOCK, add_block, add_one, score_block, score_one
from .attention_softmax import weigh
from .attention_tiles import add_in_tiles, score_in_tiles
from .compiled import kept
from .kernel_arguments import Pages, Pieces, Rows, Scratch, Softmax, Span
from .numerics import ONE, REORDERED, ZERO
from .taking import take
from .tile_layout import give_sums, split_queries
from .tile_scratch import TileScratch
from .tile_unit import release

# See `compiled.py`.
PARTS_SHA256 = "eb5dd9fe7d21fc2a4f695a02051f7d0dc5f709edabbb4d166160ea718b2ccf50"
LOWEST = np.float32(np.finfo(np.float32).min)  # where maxima begin: not -inf, as -inf less -inf is NaN


@njit(fastmath=REORDERED)
def _score(
    q_HGD: np.ndarray,
    keys: np.ndarray,
    base: int,
    num: int,
    heads: Span,
    scores_HGS: np.ndarray,
    at: int,
    ahead: np.ndarray,
    ahead_base: int,
) -> None:
    """Scores of `num` positions of a page."""
    step = q_HGD.shape[0] * q_HGD.shape[2]
    whole = num // SCORE_BLOCK * SCORE_BLOCK
    for p in range(0, whole, SCORE_BLOCK):
        score_block(q_HGD, keys, base + p * step, heads, scores_HGS, at + p, ahead, ahead_base + p * step)
    for p in range(whole, num):
        score_one(q_HGD, keys, base + p * step, heads, scores_HGS, at + p, ahead, ahead_base + p * step)


@njit(fastmath=REORDERED)
def _add(
    sums_HGD: np.ndarray,
    values: np.ndarray,
    base: int,
    num: int,
    heads: Span,
    scores_HGS: np.ndarray,
    at: int,
    ahead: np.ndarray,
    ahead_base: int,
) -> None:
    """Adds the weighted values of `num` positions of a page."""
    step = sums_HGD.shape[0] * sums_HGD.shape[2]
    whole = num // ADD_BLOCK * ADD_BLOCK
    for p in range(0, whole, ADD_BLOCK):
        add_block(sums_HGD, values, base + p * step, heads, scores_HGS, at + p, ahead, ahead_base + p * step)
    for p in range(whole, num):
        add_one(sums_HGD, values, base + p * step, heads, scores_HGS, at + p, ahead, ahead_base + p * step)


@njit(fastmath=REORDERED)
def _run(pages: Pages, table_n: np.ndarray, place: int, last: int) -> tuple[int, int, int]:
    """The page where `place` lies, the offset in it and how many positions up to `last` it holds."""
    page, offset = table_n[place // pages.page_tokens], place % pages.page_tokens
    if page < 0 or page >= pages.num_pages:
        raise IndexError("a page table names a KV page that does not exist")
    return page, offset, min(pages.page_tokens - offset, last - place)


@njit(fastmath=REORDERED)
def _attend_chunk(
    q_HGD: np.ndarray,
    pages: Pages,
    table_n: np.ndarray,
    first: int,
    last: int,
    end: int,
    heads: Span,
    softcap: np.float32,
    scratch: Scratch,
    sums_HGD: np.ndarray,
) -> None:
    """Takes up positions [first, last), a chunk at most, of one row that ends at `end`."""
    H, Dk = q_HGD.shape[0], q_HGD.shape[2]
    Dv, place = sums_HGD.shape[2], first
    while place < last:
        page, offset, num = _run(pages, table_n, place, last)
        key = page * pages.key_stride + offset * H * Dk
        value = page * pages.value_stride + offset * H * Dv
        _score(q_HGD, pages.keys, key, num, heads, scratch.scores_HGS, place - first, pages.values, value)
        place += num
    weigh(last - first, heads, softcap, scratch, sums_HGD)
    place = first
    while place < last:
        page, offset, num = _run(pages, table_n, place, last)
        value = page * pages.value_stride + offset * H * Dv
        later = place + CHUNK_TOKENS if place + CHUNK_TOKENS < end else place
        next_key = table_n[later // pages.page_tokens] * pages.key_stride + offset * H * Dk
        _add(sums_HGD, pages.values, value, num, heads, scratch.scores_HGS, place - first, pages.keys, next_key)
        place += num


@njit(fastmath=REORDERED)
def _attend_piece(
    q_BHGD: np.ndarray,
    pages: Pages,
    rows: Rows,
    softmax: Softmax,
    out_BHGD: np.ndarray,
    own_rows: Span,
    heads: Span,
    scratch: Scratch,
) -> None:
    G, Dv = out_BHGD.shape[2:]
    for row in range(own_rows[0], own_rows[1]):
        first, end = rows.begins_B[row], rows.ends_B[row]
        if first >= end:
            continue
        for h in range(heads[0], heads[1]):
            for g in range(G):
                scratch.tops_HG[h, g], scratch.totals_HG[h, g] = softmax.tops_HG[h, g], softmax.total
        while first < end:
            last = min(end, (first // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
            q_HGD, table_n, sums_HGD = q_BHGD[row], rows.tables_Bn[row], out_BHGD[row]
            _attend_chunk(q_HGD, pages, table_n, first, last, end, heads, softmax.softcap, scratch, sums_HGD)
            first = last
        for h in range(heads[0], heads[1]):
            for g in range(G):
                share = ONE / scratch.totals_HG[h, g]
                for d in range(Dv):
                    out_BHGD[row, h, g, d] *= share


@kept
def attend(
    q_BHGD: np.ndarray,
    pages: Pages,
    rows: Rows,
    softmax: Softmax,
    out_BHGD: np.ndarray,
    pieces: Pieces,
    scratch: Scratch,
) -> None:
    """Adds to `out`, which holds zeros, the pieces that no other thread takes. Scaled queries and `out` are float32. A
    row that sees nothing stays zero."""
    p = take(pieces.taken, 1)
    while p < pieces.spans_P4.shape[0]:
        row, last_row, head, last_head = pieces.spans_P4[p]
        own_rows, heads = (row, last_row), (head, last_head)
        _attend_piece(q_BHGD, pages, rows, softmax, out_BHGD, own_rows, heads, scratch)
        p = take(pieces.taken, 1)


@njit(fastmath=REORDERED)
def _check_pages(pages: Pages, table_n: np.ndarray, first: int, end: int) -> None:
    if first < end:
        for place in range(first - first % pages.page_tokens, end, pages.page_tokens):
            _run(pages, table_n, place, end)


@njit(fastmath=REORDERED)
def _attend_piece_in_tiles(
    q_BHGD: np.ndarray,
    scale: np.float32,
    pages: Pages,
    rows: Rows,
    softmax: Softmax,
    out_BHGD: np.ndarray,
    own_rows: Span,
    heads: Span,
    scratch: TileScratch,
) -> None:
    for row in range(own_rows[0], own_rows[1]):
        first, end, table_n = rows.begins_B[row], rows.ends_B[row], rows.tables_Bn[row]
        _check_pages(pages, table_n, first, end)
        split_queries(q_BHGD, row, scale, heads, scratch.queries_HJTRC)
        for h in range(heads[0], heads[1]):
            for g in range(q_BHGD.shape[2]):
                scratch.tops_HG[h, g], scratch.totals_HG[h, g] = softmax.tops_HG[h, g], softmax.total
                for d in range(scratch.sums_HGD.shape[2]):
                    scratch.sums_HGD[h, g, d] = ZERO
        while first < end:
            last = min(end, (first // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
            score_in_tiles(pages, table_n, first, last, heads, scratch)
            weigh(last - first, heads, softmax.softcap, scratch, scratch.sums_HGD)
            add_in_tiles(pages, table_n, first, last, heads, scratch)
            first = last
        release()
        give_sums(scratch.sums_HGD, scratch.totals_HG, heads, out_BHGD, row)


@kept
def attend_in_tiles(
    q_BHGD: np.ndarray,
    scale: np.float32,
    pages: Pages,
    rows: Rows,
    softmax: Softmax,
    out_BHGD: np.ndarray,
    pieces: Pieces,
    scratch: TileScratch,
) -> None:
    """As `attend`, of pages of bfloat16 of up to TILE_ROWS positions and heads of multiples of TILE_DIMS, where
    `may_use_tiles`. Queries and `out` are both float32 or the bits of bfloat16; what `out` held does not matter.
    Infinite keys and values may end as NaN, and what is smaller than float32's normal numbers is zero."""
    p = take(pieces.taken, 1)
    while p < pieces.spans_P4.shape[0]:
        row, last_row, head, last_head = pieces.spans_P4[p]
        own_rows, heads = (row, last_row), (head, last_head)
        _attend_piece_in_tiles(q_BHGD, scale, pages, rows, softmax, out_BHGD, own_rows, heads, scratch)
        p = take(pieces.taken, 1)
