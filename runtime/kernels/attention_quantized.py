"""The compiled decode attention over quantised pages: codes are read as they lie and become numbers in registers. A
row's own page, the last one, is its tail, which `attention.py` takes up as computed.

What rows share is read by each of them: a page of codes is small, and mostly in a cache for the next row.

B rows, H KV heads, G query heads of each, D of a head, P positions of a page, n pages of a row.
"""

import numpy as np
from numba import njit

from .arguments import CHUNK_TOKENS, Pages, QuantizedPages, QuantizedScratch, RowTables, Softmax, Span, WorkItems
from .attention import attend_chunk, begin, finish, page_run, weigh
from .attention_blocks import ADD_BLOCK, SCORE_BLOCK
from .attention_codes import add_code, add_codes, ask_for, scale_by, score_code, score_codes
from .compiled import REORDERED, kept
from .primitives import ZERO, begin_items


@njit(fastmath=REORDERED)
def _scale_queries(q_HGD: np.ndarray, pages: QuantizedPages, page: int, heads: Span, scratch: QuantizedScratch) -> None:
    """Multiplies queries by the scales of a page's channels; what zeros add is the same for all its scores."""
    _, G, D = q_HGD.shape
    begin_bytes = page * pages.stride_bytes
    for h in range(heads[0], heads[1]):
        scale, zero = begin_bytes // 2 + h * D, begin_bytes + h * D
        for g in range(G):
            at = (h * G + g) * D
            scratch.added_HG[h, g] = scale_by(
                q_HGD, at, D, pages.key_scales, scale, pages.key_zeros, zero, scratch.scaled_HGD, at
            )


@njit(fastmath=REORDERED)
def _score_page(
    pages: QuantizedPages, page: int, offset: int, num: int, heads: Span, scratch: QuantizedScratch, at: int, width: int
) -> None:
    """Makes scores of `num` positions of a page, of heads of `width` bytes, and asks for their values meanwhile."""
    H, G = scratch.scaled_HGD.shape[:2]
    step, base = H * width, page * pages.stride_bytes + offset * H * width
    whole = num // SCORE_BLOCK * SCORE_BLOCK
    for p in range(num):
        ask_for(pages.value_codes, base + p * step + heads[0] * width, (heads[1] - heads[0]) * width)
        if p < whole and p % SCORE_BLOCK == 0:
            score_codes(scratch.scaled_HGD, pages.key_codes, base + p * step, width, heads, scratch.scores_HGS, at + p)
        elif p >= whole:
            score_code(scratch.scaled_HGD, pages.key_codes, base + p * step, width, heads, scratch.scores_HGS, at + p)
    for h in range(heads[0], heads[1]):
        for g in range(G):
            for p in range(num):
                scratch.scores_HGS[h, g, at + p] += scratch.added_HG[h, g]


@njit(fastmath=REORDERED)
def _scale_weights(
    pages: QuantizedPages, page: int, offset: int, num: int, heads: Span, scratch: QuantizedScratch, at: int
) -> None:
    """Multiplies weights by the scales of values, in place, and adds up what their zeros add to each sum."""
    _, G, S = scratch.scores_HGS.shape
    begin_bytes = page * pages.stride_bytes
    for h in range(heads[0], heads[1]):
        place = h * pages.page_tokens + offset
        scale, zero = begin_bytes // 2 + place, begin_bytes + place
        for g in range(G):
            weight = (h * G + g) * S + at
            scratch.added_HG[h, g] += scale_by(
                scratch.scores_HGS,
                weight,
                num,
                pages.value_scales,
                scale,
                pages.value_zeros,
                zero,
                scratch.scores_HGS,
                weight,
            )


@njit(fastmath=REORDERED)
def _add_page(
    sums_HGD: np.ndarray,
    pages: QuantizedPages,
    page: int,
    offset: int,
    num: int,
    heads: Span,
    scratch: QuantizedScratch,
    at: int,
    width: int,
) -> None:
    """Adds the weighted codes of `num` positions of a page."""
    step = sums_HGD.shape[0] * width
    base = page * pages.stride_bytes + offset * step
    whole = num // ADD_BLOCK * ADD_BLOCK
    for p in range(0, whole, ADD_BLOCK):
        add_codes(sums_HGD, pages.value_codes, base + p * step, width, heads, scratch.scores_HGS, at + p)
    for p in range(whole, num):
        add_code(sums_HGD, pages.value_codes, base + p * step, width, heads, scratch.scores_HGS, at + p)


@njit(fastmath=REORDERED)
def _attend_chunk(
    q_HGD: np.ndarray,
    pages: QuantizedPages,
    table_n: np.ndarray,
    first: int,
    last: int,
    heads: Span,
    num_codes: int,
    softcap: np.float32,
    scratch: QuantizedScratch,
    sums_HGD: np.ndarray,
) -> None:
    """Takes up positions [first, last), a chunk at most, of pages with `num_codes` codes in a byte."""
    _, G, Dk = q_HGD.shape
    Dv, place = sums_HGD.shape[2], first
    while place < last:
        page, offset, num = page_run(pages, table_n, place, last)
        _scale_queries(q_HGD, pages, page, heads, scratch)
        _score_page(pages, page, offset, num, heads, scratch, place - first, Dk // num_codes)
        place += num
    weigh(last - first, heads, softcap, scratch, sums_HGD)
    for h in range(heads[0], heads[1]):
        for g in range(G):
            scratch.added_HG[h, g] = ZERO
    place = first
    while place < last:
        page, offset, num = page_run(pages, table_n, place, last)
        _scale_weights(pages, page, offset, num, heads, scratch, place - first)
        _add_page(sums_HGD, pages, page, offset, num, heads, scratch, place - first, Dv // num_codes)
        place += num
    for h in range(heads[0], heads[1]):
        for g in range(G):
            for d in range(Dv):
                sums_HGD[h, g, d] += scratch.added_HG[h, g]


@njit(fastmath=REORDERED)
def _attend_item(
    q_BHGD: np.ndarray,
    pages: QuantizedPages,
    tails: Pages,
    slots_B1: np.ndarray,
    rows: RowTables,
    softmax: Softmax,
    num_codes: int,
    out_BHGD: np.ndarray,
    own_rows: Span,
    heads: Span,
    scratch: QuantizedScratch,
) -> None:
    for row in range(own_rows[0], own_rows[1]):
        first, end = rows.begins_B[row], rows.ends_B[row]
        if first >= end:
            continue
        q_HGD, sums_HGD = q_BHGD[row], out_BHGD[row]
        own = (end - 1) // pages.page_tokens * pages.page_tokens
        begin(softmax, heads, scratch)
        while first < own:
            last = min(own, (first // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
            table_n = rows.tables_Bn[row]
            _attend_chunk(q_HGD, pages, table_n, first, last, heads, num_codes, softmax.softcap, scratch, sums_HGD)
            first = last
        slots, new = slots_B1[row], end - own
        attend_chunk(q_HGD, tails, slots, first - own, new, new, heads, softmax.softcap, scratch, sums_HGD)
        finish(out_BHGD, row, heads, scratch)


@kept
def attend(
    q_BHGD: np.ndarray,
    pages: QuantizedPages,
    tails: Pages,
    slots_B1: np.ndarray,
    rows: RowTables,
    softmax: Softmax,
    num_codes: int,
    out_BHGD: np.ndarray,
    items: WorkItems,
    scratch: QuantizedScratch,
) -> None:
    """What attention in vectors does, over pages with `num_codes` codes in a byte; the last page of row b is
    `slots_B1[b]` of `tails`."""
    i = begin_items(items.begun, 1)
    while i < items.spans_W4.shape[0]:
        row, last_row, head, last_head = items.spans_W4[i]
        own_rows, heads = (row, last_row), (head, last_head)
        _attend_item(q_BHGD, pages, tails, slots_B1, rows, softmax, num_codes, out_BHGD, own_rows, heads, scratch)
        i = begin_items(items.begun, 1)
