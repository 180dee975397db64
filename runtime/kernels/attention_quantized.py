"""Compiled decode attention over quantized pages. Codes are converted to float32 in registers, and multiplied without
scales. A number is (code + zero point) * scale: KV formats add the zero point, while weight formats subtract it.

    score = q . ((codes + zeros) * scales) = (q * scales) . codes + (q * scales) . zeros
    sum   = weights . ((codes + zeros) * scales), likewise with (weights * scales)

Key scales are per dim, so queries are scaled once per page; the term of zero points is one number per query. Value
scales are per position, so weights are scaled.

A row's last page (its tail) is not quantized and uses `attention.py`. Pages that rows share are read again for each
row: they are small and usually still in a cache.

B rows, H KV heads, G query heads per KV head, D numbers per head, S positions of a chunk, n pages of a row.
"""

import numpy as np
from numba import njit

from .arguments import (
    CHUNK_TOKENS,
    AttentionItem,
    QuantizedPages,
    QuantizedScratch,
    RowTables,
    Softmax,
    Span,
    TailPages,
    WorkItems,
)
from .attention import (
    AttentionRow,
    apply_softmax,
    attend_chunk,
    get_item,
    locate_in_page,
    normalize_sums,
    reset_softmax,
)
from .attention_blocks import SCORE_BLOCK, add_codes, prefetch_bytes, scale_numbers, score_codes
from .compiled import REORDERED, cached_kernel
from .primitives import ZERO, ArrayAt, claim_items


@njit(fastmath=REORDERED)
def _scale_queries(q_HGD: np.ndarray, pages: QuantizedPages, page: int, heads: Span, scratch: QuantizedScratch) -> None:
    """Multiplies a row's queries by a page's key scales. Writes the term of the key zero points, which is equal for all
    positions of the page, to `added_HG`."""
    _, G, D = q_HGD.shape
    begin_bytes = page * pages.stride_bytes
    for h in range(heads[0], heads[1]):
        scales = ArrayAt(pages.key_scales, begin_bytes // 2 + h * D)  # an index of elements, which have two bytes
        zeros = ArrayAt(pages.key_zeros, begin_bytes + h * D)
        for g in range(G):
            at = (h * G + g) * D
            scaled = ArrayAt(scratch.scaled_HGD, at)
            scratch.added_HG[h, g] = scale_numbers(ArrayAt(q_HGD, at), D, scales, zeros, scaled)


@njit(fastmath=REORDERED)
def _score_page(
    pages: QuantizedPages, page: int, offset: int, num: int, heads: Span, scratch: QuantizedScratch, at: int
) -> None:
    """Computes the scores of positions [offset, offset + num) of a page, and writes them to indices [at, at + num) of
    the chunk's scores. Prefetches the values of these positions."""
    H, G, D = scratch.scaled_HGD.shape
    width = D // pages.codes_in_byte
    step, base = H * width, page * pages.stride_bytes + offset * H * width
    for p in range(0, num, SCORE_BLOCK):
        count, codes = min(SCORE_BLOCK, num - p), ArrayAt(pages.key_codes, base + p * step)
        for position in range(p, p + count):
            prefetch_bytes(pages.value_codes, base + position * step + heads[0] * width, (heads[1] - heads[0]) * width)
        score_codes(scratch.scaled_HGD, codes, width, count, heads, ArrayAt(scratch.scores_HGS, at + p), None)
    for h in range(heads[0], heads[1]):
        for g in range(G):
            for p in range(num):
                scratch.scores_HGS[h, g, at + p] += scratch.added_HG[h, g]


@njit(fastmath=REORDERED)
def _scale_weights(
    pages: QuantizedPages, page: int, offset: int, num: int, heads: Span, scratch: QuantizedScratch, at: int
) -> None:
    """Multiplies the weights of `num` positions by their value scales, in place. Adds the term of the value zero points
    to `added_HG`: one number per query, as it is equal for all dims."""
    _, G, S = scratch.scores_HGS.shape
    begin_bytes = page * pages.stride_bytes
    for h in range(heads[0], heads[1]):
        position = h * pages.page_tokens + offset
        scales = ArrayAt(pages.value_scales, begin_bytes // 2 + position)  # an index of elements, which have two bytes
        zeros = ArrayAt(pages.value_zeros, begin_bytes + position)
        for g in range(G):
            weights = ArrayAt(scratch.scores_HGS, (h * G + g) * S + at)
            scratch.added_HG[h, g] += scale_numbers(weights, num, scales, zeros, weights)


@njit(fastmath=REORDERED)
def _attend_chunk(
    row: AttentionRow, pages: QuantizedPages, span: Span, heads: Span, softcap: np.float32, scratch: QuantizedScratch
) -> None:
    """Attends to the positions of `span`, at most a chunk."""
    (q_HGD, table_n, sums_HGD), (first, last) = row, span
    H, G, Dv = sums_HGD.shape
    width, position = Dv // pages.codes_in_byte, first
    while position < last:
        page, offset, num = locate_in_page(pages, table_n, position, last)
        _scale_queries(q_HGD, pages, page, heads, scratch)
        _score_page(pages, page, offset, num, heads, scratch, position - first)
        position += num
    apply_softmax(last - first, heads, softcap, scratch, sums_HGD)
    for h in range(heads[0], heads[1]):
        for g in range(G):
            scratch.added_HG[h, g] = ZERO  # from here on the term of value zero points
    position = first
    while position < last:
        page, offset, num = locate_in_page(pages, table_n, position, last)
        _scale_weights(pages, page, offset, num, heads, scratch, position - first)
        codes = ArrayAt(pages.value_codes, page * pages.stride_bytes + offset * H * width)
        add_codes(sums_HGD, codes, width, num, heads, ArrayAt(scratch.scores_HGS, position - first), None)
        position += num
    for h in range(heads[0], heads[1]):
        for g in range(G):
            for d in range(Dv):
                sums_HGD[h, g, d] += scratch.added_HG[h, g]


@njit(fastmath=REORDERED)
def _attend_item(
    q_BHGD: np.ndarray,
    pages: QuantizedPages,
    tails: TailPages,
    rows: RowTables,
    softmax: Softmax,
    out_BHGD: np.ndarray,
    item: AttentionItem,
    scratch: QuantizedScratch,
) -> None:
    """Computes the rows of one item: quantized pages in chunks, then the tail."""
    own_rows, heads = item
    for row in range(own_rows[0], own_rows[1]):
        first, end = rows.begins_B[row], rows.ends_B[row]
        if first >= end:
            continue
        q_HGD, sums_HGD = q_BHGD[row], out_BHGD[row]
        tail_first = (end - 1) // pages.page_tokens * pages.page_tokens
        reset_softmax(softmax, heads, scratch)
        while first < tail_first:
            last = min(tail_first, (first // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
            coded_row = AttentionRow(q_HGD, rows.tables_Bn[row], sums_HGD)
            _attend_chunk(coded_row, pages, (first, last), heads, softmax.softcap, scratch)
            first = last
        # The tail has a page table of one page, and positions that count from its start.
        tail_row, num_tail = AttentionRow(q_HGD, tails.slots_B1[row], sums_HGD), end - tail_first
        attend_chunk(tail_row, tails.pages, (first - tail_first, num_tail), num_tail, heads, softmax.softcap, scratch)
        normalize_sums(out_BHGD, row, heads, scratch)


@cached_kernel
def attend(
    q_BHGD: np.ndarray,
    pages: QuantizedPages,
    tails: TailPages,
    rows: RowTables,
    softmax: Softmax,
    out_BHGD: np.ndarray,
    items: WorkItems,
    scratch: QuantizedScratch,
) -> None:
    """Same as `attention.attend`, over quantized pages and unquantized tails. Does not share chunks between rows."""
    i = claim_items(items.counter, 1)
    while i < items.spans_W4.shape[0]:
        _attend_item(q_BHGD, pages, tails, rows, softmax, out_BHGD, get_item(items, i), scratch)
        i = claim_items(items.counter, 1)
