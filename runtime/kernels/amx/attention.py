"""The compiled decode attention over bfloat16 pages where the processor has a matrix unit; elsewhere and over other
pages: `attention.py` one folder up.

Positions of a page are rows of a tile, so keys and values are loaded as they lie. Loads of tiles do not wait for each
other and run ahead, so nothing is asked for beforehand: from memory, two threads got 16.0 GB/s so, and between 15.8 and
16.8 with prefetches of several kinds. In a cache a position of 32/8 heads of 128 takes 0.16 us, in vectors 0.28.

H KV heads, G query heads of each, J tiles of its queries, T tiles of D of a head, S positions of a chunk, n pages of a
row.
"""

import numpy as np
from numba import njit

from ..arguments import CHUNK_TOKENS, Pages, Rows, Softmax, Span, WorkItems
from ..attention import page_run
from ..attention_softmax import weigh
from ..compiled import REORDERED, kept
from ..primitives import ZERO, begin_items
from .layout import give_scores, give_sums, split_queries, split_weights
from .scratch import PAIRED, TILE_DIMS, TILE_QUERIES, TILE_ROWS, TileScratch
from .unit import NUM_TILES, add, configure, load_queries, load_sums, release, score, store_sums


@njit(fastmath=REORDERED)
def _stretch(place: int, last: int, page_tokens: int) -> Span:
    """How many positions of each page are taken from `place` on, and up to where: of whole pages, or of a part."""
    num = min(page_tokens - place % page_tokens, last - place)
    return num, place + (last - place) // num * num if num == page_tokens else place + num


@njit(fastmath=REORDERED)
def _score_stretch(
    pages: Pages, table_n: np.ndarray, first: int, place: int, stop: int, num: int, heads: Span, scratch: TileScratch
) -> None:
    H, J, T = scratch.queries_HJTRC.shape[:3]
    row = H * T * TILE_DIMS
    for h in range(heads[0], heads[1]):
        for j in range(J):
            for t in range(0, T, NUM_TILES):
                tiles = min(NUM_TILES, T - t)
                load_queries(scratch.queries_HJTRC, ((h * J + j) * T + t) * TILE_ROWS * PAIRED, tiles)
                for p in range(place, stop, num):
                    page, offset = table_n[p // pages.page_tokens], p % pages.page_tokens
                    key = page * pages.key_stride + offset * row + (h * T + t) * TILE_DIMS
                    score(pages.keys, key, 2 * row, tiles, scratch.products_SC, (p - place) * PAIRED, t > 0)
            for p in range(place, stop, num):
                at = (h * J + j) * TILE_QUERIES * CHUNK_TOKENS + p - first
                give_scores(scratch.products_SC, (p - place) * PAIRED, num, scratch.scores_HGS, at)


@njit(fastmath=REORDERED)
def _add_stretch(
    pages: Pages, table_n: np.ndarray, first: int, place: int, stop: int, num: int, heads: Span, scratch: TileScratch
) -> None:
    H, J, D = len(scratch.sums_HGD), scratch.weights_HJPCS.shape[1], scratch.sums_HGD.shape[2]
    T = D // TILE_DIMS
    for h in range(heads[0], heads[1]):
        for j in range(J):
            for t in range(0, T, NUM_TILES):
                tiles, sums = min(NUM_TILES, T - t), (h * J + j) * TILE_QUERIES * D + t * TILE_DIMS // 2
                load_sums(scratch.sums_HGD, sums, 2 * D, tiles)
                for p in range(place, stop, num):
                    page, offset = table_n[p // pages.page_tokens], p % pages.page_tokens
                    value = page * pages.value_stride + (offset * H + h) * D + t * TILE_DIMS
                    weight = (h * J + j) * 2 * PAIRED * CHUNK_TOKENS + p - first
                    add(pages.values, value, 2 * H * D, tiles, scratch.weights_HJPCS, weight)
                store_sums(scratch.sums_HGD, sums, 2 * D, tiles)


@njit(fastmath=REORDERED)
def _score_chunk(pages: Pages, table_n: np.ndarray, first: int, last: int, heads: Span, scratch: TileScratch) -> None:
    """Scores of positions [first, last), a chunk at most."""
    place = first
    while place < last:
        num, stop = _stretch(place, last, pages.page_tokens)
        configure(scratch.shapes, (num - 1) * 64)
        _score_stretch(pages, table_n, first, place, stop, num, heads, scratch)
        place = stop


@njit(fastmath=REORDERED)
def _add_chunk(pages: Pages, table_n: np.ndarray, first: int, last: int, heads: Span, scratch: TileScratch) -> None:
    """Adds their values by the weights that the scores have become."""
    J = scratch.weights_HJPCS.shape[1]
    for h in range(heads[0], heads[1]):
        for g in range(scratch.tops_HG.shape[1]):
            at = (((h * J + g // TILE_QUERIES) * 2) * PAIRED + 2 * (g % TILE_QUERIES)) * CHUNK_TOKENS
            score_at = (h * J * TILE_QUERIES + g) * CHUNK_TOKENS
            split_weights(scratch.scores_HGS, score_at, last - first, scratch.weights_HJPCS, at)
    place = first
    while place < last:
        num, stop = _stretch(place, last, pages.page_tokens)
        configure(scratch.shapes, (TILE_ROWS + num - 1) * 64)
        _add_stretch(pages, table_n, first, place, stop, num, heads, scratch)
        place = stop


@njit(fastmath=REORDERED)
def _check_pages(pages: Pages, table_n: np.ndarray, first: int, end: int) -> None:
    if first < end:
        for place in range(first - first % pages.page_tokens, end, pages.page_tokens):
            page_run(pages, table_n, place, end)


@njit(fastmath=REORDERED)
def _attend_item(
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
            _score_chunk(pages, table_n, first, last, heads, scratch)
            weigh(last - first, heads, softmax.softcap, scratch, scratch.sums_HGD)
            _add_chunk(pages, table_n, first, last, heads, scratch)
            first = last
        release()
        give_sums(scratch.sums_HGD, scratch.totals_HG, heads, out_BHGD, row)


@kept
def attend(
    q_BHGD: np.ndarray,
    scale: np.float32,
    pages: Pages,
    rows: Rows,
    softmax: Softmax,
    out_BHGD: np.ndarray,
    items: WorkItems,
    scratch: TileScratch,
) -> None:
    """What attention in vectors does, of pages of bfloat16 of up to TILE_ROWS positions and heads of multiples of
    TILE_DIMS, where `may_use_tiles`. Queries and `out` are both float32 or the bits of bfloat16; what `out` held does
    not matter. Infinite keys and values may end as NaN, and what is smaller than float32's normal numbers is zero."""
    i = begin_items(items.begun, 1)
    while i < items.spans_W4.shape[0]:
        row, last_row, head, last_head = items.spans_W4[i]
        own_rows, heads = (row, last_row), (head, last_head)
        _attend_item(q_BHGD, scale, pages, rows, softmax, out_BHGD, own_rows, heads, scratch)
        i = begin_items(items.begun, 1)
