"""What the compiled decode attention does with bfloat16 pages where the processor has a matrix unit.

Positions of a page are rows of a tile, so keys and values are loaded as they lie. Loads of tiles do not wait for each
other and run ahead, so nothing is asked for beforehand: from memory, two threads got 16.0 GB/s so, and between 15.8 and
16.8 with prefetches of several kinds. In a cache a position of 32/8 heads of 128 takes 0.16 us, in vectors 0.28.

H KV heads, G query heads of each, J tiles of its queries, T tiles of D of a head, S positions of a chunk, n pages of a
row.
"""

import numpy as np
from numba import njit

from .attention_blocks import CHUNK_TOKENS
from .kernel_arguments import Pages, Span
from .numerics import REORDERED
from .tile_layout import give_scores, split_weights
from .tile_scratch import PAIRED, TILE_DIMS, TILE_QUERIES, TILE_ROWS, TileScratch
from .tile_unit import NUM_TILES, add, configure, load_queries, load_sums, score, store_sums


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
def score_in_tiles(pages: Pages, table_n: np.ndarray, first: int, last: int, heads: Span, scratch: TileScratch) -> None:
    """Scores of positions [first, last), a chunk at most."""
    place = first
    while place < last:
        num, stop = _stretch(place, last, pages.page_tokens)
        configure(scratch.shapes, (num - 1) * 64)
        _score_stretch(pages, table_n, first, place, stop, num, heads, scratch)
        place = stop


@njit(fastmath=REORDERED)
def add_in_tiles(pages: Pages, table_n: np.ndarray, first: int, last: int, heads: Span, scratch: TileScratch) -> None:
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
