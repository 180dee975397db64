"""Compiled decode attention: one new token per row over KV pages; each page is read once, in memory order.

A row is the new token of one sequence. Its positions are attended to in chunks of CHUNK_TOKENS, with an online softmax
(Milakov and Gimelshein 2018): it keeps a running maximum of scores, a running total of softmax weights, and weighted
sums of values, and rescales total and sums when the maximum grows. NaN and infinities give the same results as in
torch. Vector code for scores and sums is in `attention_blocks.py`. Numba ignores the annotations.

B rows, H KV heads, G query heads per KV head, D numbers per head (Dk of a key, Dv of a value), S positions of a chunk
(Gs query heads if padded), n pages of a row.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from .arguments import (
    CHUNK_TOKENS,
    AttentionItem,
    Pages,
    QuantizedPages,
    RowTables,
    ScoreScratch,
    Scratch,
    Softmax,
    SoftmaxState,
    Span,
    WorkItems,
)
from .attention_blocks import add_numbers, score_numbers
from .compiled import FUSED, REORDERED, cached_kernel
from .primitives import EXP_MIN, ONE, ZERO, ArrayAt, claim_items, exp, max_ignoring_nan

TANH_MAX = np.float32(10)  # tanh is 1 from 9.1 on


@njit(fastmath=FUSED)
def _apply_softcap(scores_HGS: np.ndarray, h: int, g: int, num: int, softcap: np.float32) -> None:
    """Replaces scores x by softcap * tanh(x / softcap), with tanh(y) = (e^2y - 1) / (e^2y + 1)."""
    for i in range(num):
        x = np.float32(scores_HGS[h, g, i] / softcap)
        x = x if not x > TANH_MAX else TANH_MAX  # `not >` instead of `<=`: keeps NaN
        x = x if not x < -TANH_MAX else -TANH_MAX
        e = exp(np.float32(x + x), ZERO)  # e^2x - 1
        scores_HGS[h, g, i] = softcap * np.float32(e / np.float32(e + np.float32(2)))


@njit(fastmath=REORDERED)
def _rescale_sums(
    h: int, g: int, highest: np.float32, maxima_HG: np.ndarray, totals_HG: np.ndarray, sums_HGD: np.ndarray
) -> None:
    """Makes `highest` the running maximum of a query, and rescales its total and sums to it."""
    x = np.float32(maxima_HG[h, g] - highest)
    factor = exp(x, ONE) if x > EXP_MIN else ZERO
    maxima_HG[h, g] = highest
    totals_HG[h, g] *= factor
    for d in range(sums_HGD.shape[2]):
        sums_HGD[h, g, d] *= factor


@njit(fastmath=REORDERED)
def _update_maxima(num: int, heads: Span, scratch: ScoreScratch, sums_HGD: np.ndarray) -> None:
    """Updates each query's running maximum with its scores, and rescales its total and sums."""
    _, Gs, S = scratch.scores_HGS.shape
    for h in range(heads[0], heads[1]):
        for g in range(scratch.maxima_HG.shape[1]):
            highest = max_ignoring_nan(scratch.scores_HGS, (h * Gs + g) * S, num, scratch.maxima_HG[h, g])
            if highest > scratch.maxima_HG[h, g]:
                _rescale_sums(h, g, highest, scratch.maxima_HG, scratch.totals_HG, sums_HGD)


@njit(fastmath=REORDERED)
def _exponentiate(scores_HGS: np.ndarray, h: int, g: int, num: int, maximum: np.float32) -> np.float32:
    """Replaces scores by weights exp(score - maximum). Returns the sum of weights: a separate loop that sums would wait
    for the stores of this one."""
    total = ZERO
    for i in range(num):
        x = np.float32(scores_HGS[h, g, i] - maximum)
        scores_HGS[h, g, i] = exp(x if not x < EXP_MIN else EXP_MIN, ONE)  # `not <`: keeps NaN
        total += scores_HGS[h, g, i]
    return total


@njit(fastmath=REORDERED)
def apply_softmax(num: int, heads: Span, softcap: np.float32, scratch: ScoreScratch, sums_HGD: np.ndarray) -> None:
    """Replaces `num` scores of each query by weights exp(score - running maximum), and updates its softmax state."""
    G = scratch.maxima_HG.shape[1]
    if softcap > ZERO:
        for h in range(heads[0], heads[1]):
            for g in range(G):
                _apply_softcap(scratch.scores_HGS, h, g, num, softcap)
    _update_maxima(num, heads, scratch, sums_HGD)
    for h in range(heads[0], heads[1]):  # a separate loop: no query waits for its new maximum (0.9 us, not 1.8)
        for g in range(G):
            scratch.totals_HG[h, g] += _exponentiate(scratch.scores_HGS, h, g, num, scratch.maxima_HG[h, g])


LOWEST = np.float32(np.finfo(np.float32).min)  # initial maximum; not -inf, as -inf - -inf is NaN


@njit(fastmath=REORDERED)
def locate_in_page(
    pages: Pages | QuantizedPages, table_n: np.ndarray, position: int, last: int
) -> tuple[int, int, int]:
    """Returns the page of `position`, the offset of `position` in that page, and how many positions before `last` the
    page holds from there on. Raises IndexError if the page does not exist."""
    page, offset = table_n[position // pages.page_tokens], position % pages.page_tokens
    if page < 0 or page >= pages.num_pages:
        raise IndexError("page number in a KV page table is out of range")
    return page, offset, min(pages.page_tokens - offset, last - position)


class AttentionRow(NamedTuple):
    """A row's queries, page table, and weighted sums of values (the row of the output)."""

    q_HGD: np.ndarray
    table_n: np.ndarray
    sums_HGD: np.ndarray


@njit(fastmath=REORDERED)
def attend_chunk(
    row: AttentionRow, pages: Pages, span: Span, end: int, heads: Span, softcap: np.float32, scratch: ScoreScratch
) -> None:
    """Attends to the positions of `span`, at most a chunk. Prefetches the keys of the next chunk, up to position
    `end`."""
    (q_HGD, table_n, sums_HGD), (first, last) = row, span
    H, Dk = q_HGD.shape[0], q_HGD.shape[2]
    Dv, position = sums_HGD.shape[2], first
    while position < last:
        page, offset, num = locate_in_page(pages, table_n, position, last)
        keys = ArrayAt(pages.keys, page * pages.key_stride + offset * H * Dk)
        values = ArrayAt(pages.values, page * pages.value_stride + offset * H * Dv)
        score_numbers(q_HGD, keys, Dk, num, heads, ArrayAt(scratch.scores_HGS, position - first), values)
        position += num
    apply_softmax(last - first, heads, softcap, scratch, sums_HGD)
    position = first
    while position < last:
        page, offset, num = locate_in_page(pages, table_n, position, last)
        values = ArrayAt(pages.values, page * pages.value_stride + offset * H * Dv)
        next_position = position + CHUNK_TOKENS if position + CHUNK_TOKENS < end else position
        next_key = table_n[next_position // pages.page_tokens] * pages.key_stride + offset * H * Dk
        weights = ArrayAt(scratch.scores_HGS, position - first)
        add_numbers(sums_HGD, values, Dv, num, heads, weights, ArrayAt(pages.keys, next_key))
        position += num


@njit(fastmath=REORDERED)
def reset_softmax(softmax: Softmax, heads: Span, scratch: ScoreScratch) -> None:
    """Sets running maxima and totals to the initial values in `softmax`, before a row's first chunk."""
    for h in range(heads[0], heads[1]):
        for g in range(scratch.maxima_HG.shape[1]):
            scratch.maxima_HG[h, g], scratch.totals_HG[h, g] = softmax.maxima_HG[h, g], softmax.total


@njit(fastmath=REORDERED)
def _save_softmax(paused: SoftmaxState, row: int, heads: Span, scratch: Scratch) -> None:
    """Saves a row's running maxima and totals while another row uses the scratch memory."""
    for h in range(heads[0], heads[1]):
        for g in range(scratch.maxima_HG.shape[1]):
            paused.maxima_BHG[row, h, g] = scratch.maxima_HG[h, g]
            paused.totals_BHG[row, h, g] = scratch.totals_HG[h, g]


@njit(fastmath=REORDERED)
def _restore_softmax(paused: SoftmaxState, row: int, heads: Span, scratch: Scratch) -> None:
    for h in range(heads[0], heads[1]):
        for g in range(scratch.maxima_HG.shape[1]):
            scratch.maxima_HG[h, g] = paused.maxima_BHG[row, h, g]
            scratch.totals_HG[h, g] = paused.totals_BHG[row, h, g]


@njit(fastmath=REORDERED)
def _attend_shared(
    q_BHGD: np.ndarray,
    pages: Pages,
    rows: RowTables,
    softmax: Softmax,
    out_BHGD: np.ndarray,
    item: AttentionItem,
    scratch: Scratch,
    paused: SoftmaxState,
) -> None:
    """Attends to chunks that several rows of the item share. Computes all rows for one chunk before the next chunk, so
    that the later rows find its pages in a CPU cache. Each row adds chunks in the same order as without sharing, so
    results are equal bit by bit. Leaves the rows' softmax state in `paused`."""
    (own_rows, heads), num_shared = item, 0
    for row in range(own_rows[0], own_rows[1]):
        if rows.shared_B[row]:
            num_shared = max(num_shared, rows.shared_B[row])
            reset_softmax(softmax, heads, scratch)
            _save_softmax(paused, row, heads, scratch)
    for chunk in range(0, num_shared, CHUNK_TOKENS):
        last = chunk + CHUNK_TOKENS
        for row in range(own_rows[0], own_rows[1]):
            first = max(chunk, rows.begins_B[row])
            if last > rows.shared_B[row] or first >= last:
                continue
            _restore_softmax(paused, row, heads, scratch)
            attention_row = AttentionRow(q_BHGD[row], rows.tables_Bn[row], out_BHGD[row])
            attend_chunk(attention_row, pages, (first, last), rows.ends_B[row], heads, softmax.softcap, scratch)
            _save_softmax(paused, row, heads, scratch)


@njit(fastmath=REORDERED)
def normalize_sums(out_BHGD: np.ndarray, row: int, heads: Span, scratch: ScoreScratch) -> None:
    """Divides a row's sums by its totals of softmax weights."""
    G, Dv = out_BHGD.shape[2:]
    for h in range(heads[0], heads[1]):
        for g in range(G):
            inverse = ONE / scratch.totals_HG[h, g]
            for d in range(Dv):
                out_BHGD[row, h, g, d] *= inverse


@njit(fastmath=REORDERED)
def _attend_item(
    q_BHGD: np.ndarray,
    pages: Pages,
    rows: RowTables,
    softmax: Softmax,
    out_BHGD: np.ndarray,
    item: AttentionItem,
    scratch: Scratch,
    paused: SoftmaxState,
) -> None:
    """Computes the rows of one item: first the shared chunks of all rows, then the other chunks, row by row."""
    own_rows, heads = item
    _attend_shared(q_BHGD, pages, rows, softmax, out_BHGD, item, scratch, paused)
    for row in range(own_rows[0], own_rows[1]):
        first, end = rows.begins_B[row], rows.ends_B[row]
        if first >= end:
            continue
        if rows.shared_B[row]:
            _restore_softmax(paused, row, heads, scratch)
            first = max(first, rows.shared_B[row])
        else:
            reset_softmax(softmax, heads, scratch)
        while first < end:
            last = min(end, (first // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
            attention_row = AttentionRow(q_BHGD[row], rows.tables_Bn[row], out_BHGD[row])
            attend_chunk(attention_row, pages, (first, last), end, heads, softmax.softcap, scratch)
            first = last
        normalize_sums(out_BHGD, row, heads, scratch)


@njit(fastmath=REORDERED)
def get_item(items: WorkItems, i: int) -> AttentionItem:
    row, last_row, head, last_head = items.spans_W4[i]
    return AttentionItem((row, last_row), (head, last_head))


@cached_kernel
def attend(
    q_BHGD: np.ndarray,
    pages: Pages,
    rows: RowTables,
    softmax: Softmax,
    out_BHGD: np.ndarray,
    items: WorkItems,
    scratch: Scratch,
    paused: SoftmaxState,
) -> None:
    """Computes attention for the work items that this thread takes from `items`. Queries (already scaled) and `out` are
    float32. `out` must hold zeros at the start, and rows without positions stay zero. `paused`: scratch memory shared
    by all threads, one entry per row and head."""
    i = claim_items(items.counter, 1)
    while i < items.spans_W4.shape[0]:
        _attend_item(q_BHGD, pages, rows, softmax, out_BHGD, get_item(items, i), scratch, paused)
        i = claim_items(items.counter, 1)
