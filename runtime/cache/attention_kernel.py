"""The compiled decode attention: one new token per row over KV pages, each read once and in the order of its bytes.

Softmax goes along with it (Milakov and Gimelshein 2018): scores of CHUNK_TOKENS positions, their maximum, their values.
Nothing here promises that numbers are finite: NaN and infinities end as they do in torch.

The annotations are for the reader; the compiler takes the types of what it is given. What multiplies is written in
explicit vectors, in `attention_blocks.py` and `attention_vectors.py`. numba's cache on disk looks only at this file's
time of change, so the digest of the others is written here, and a test compares.

B rows, H KV heads, G query heads of each, D of a head, P positions of a page, n pages of a row.
"""

import logging
from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
from numba import njit

from .attention_blocks import ADD_BLOCK, CHUNK_TOKENS, SCORE_BLOCK, add_block, add_one, score_block, score_one
from .attention_vectors import highest_of
from .kernel_arguments import Pages, Rows, Scratch, Softmax, Span

log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., object])

# Of attention_blocks.py and attention_vectors.py: who edits them edits this line, and numba compiles anew.
PARTS_SHA256 = "5966b232790490628400646d9aa9f31da5efcc9260de85699716e6f72ac2b0f7"
REORDERED = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; never nnan or ninf
FUSED = {"contract"}  # said, or a caller's permission to reorder would undo the rounding of `_exp`
ONE, ZERO = np.float32(1), np.float32(0)
LOG2_E, LN_2_HIGH, LN_2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
LOWEST = np.float32(np.finfo(np.float32).min)  # where maxima begin: not -inf, as -inf less -inf is NaN
ROUND = np.float32(1.5 * 2**23)  # added to a small number it leaves the nearest integer in the low bits
T2, T3, T4, T5, T6, T7 = (np.float32(1 / factorial) for factorial in (2, 6, 24, 120, 720, 5040))
EXP_MIN, TANH_MAX = np.float32(-87), np.float32(10)  # exp stays a normal number; tanh is 1 from 9.1 on


def kept(function: Function) -> Function:
    """Compiled at its first call, for the types of its arguments, in 2 to 4 s, and kept on disk, beside the source
    or in the user's cache."""
    options = {"nogil": True, "fastmath": REORDERED, "error_model": "numpy"}
    try:
        return cast(Function, njit(cache=True, **options)(function))
    except RuntimeError as error:
        log.info("decode attention is compiled anew in each process, in 2 to 4 s: %s", error)
        return cast(Function, njit(**options)(function))


@njit(fastmath=FUSED)
def _exp(x: np.float32, shift: np.float32) -> np.float32:
    """e^x - 1 + shift for x in [-87, 88], shift 0 or 1, each exact to 2e-7: 2^n times a Taylor series around 0."""
    rounded = np.float32(x * LOG2_E + ROUND)
    n = np.float32(rounded - ROUND)
    r = np.float32(np.float32(x - n * LN_2_HIGH) - n * LN_2_LOW)
    series = np.float32(np.float32(T7 * r + T6) * r + T5)
    series = np.float32(np.float32(series * r + T4) * r + T3)
    series = np.float32(np.float32(np.float32(series * r + T2) * r) * r + r)
    power = np.uint32(np.uint32(rounded.view(np.uint32) + np.uint32(127)) << np.uint32(23)).view(np.float32)
    return np.float32(series * power + np.float32(power - np.float32(ONE - shift)))


@njit(fastmath=FUSED)
def _cap(scores: np.ndarray, num: int, softcap: np.float32) -> None:
    for i in range(num):
        x = np.float32(scores[i] / softcap)
        x = x if not x > TANH_MAX else TANH_MAX  # so that NaN stays
        x = x if not x < -TANH_MAX else -TANH_MAX
        e = _exp(np.float32(x + x), ZERO)
        scores[i] = softcap * np.float32(e / np.float32(e + np.float32(2)))


@njit(fastmath=REORDERED)
def _exponentiate(scores: np.ndarray, num: int, top: np.float32) -> np.float32:
    """Returns their sum. One loop, as a second one would wait for the stores of the first."""
    total = ZERO
    for i in range(num):
        x = np.float32(scores[i] - top)
        scores[i] = _exp(x if not x < EXP_MIN else EXP_MIN, ONE)
        total += scores[i]
    return total


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
def _raise(
    scores_S: np.ndarray,
    num: int,
    softcap: np.float32,
    tops_G: np.ndarray,
    totals_G: np.ndarray,
    g: int,
    sums_D: np.ndarray,
) -> None:
    """Raises one query's maximum to that of its scores; its total and sums are then seen from there."""
    if softcap > ZERO:
        _cap(scores_S, num, softcap)
    highest = highest_of(scores_S, num, tops_G[g])
    if highest > tops_G[g]:
        x = np.float32(tops_G[g] - highest)
        fade = _exp(x, ONE) if x > EXP_MIN else ZERO
        tops_G[g] = highest
        totals_G[g] *= fade
        for d in range(len(sums_D)):
            sums_D[d] *= fade


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
    H, G, Dk = q_HGD.shape
    Dv, place = sums_HGD.shape[2], first
    while place < last:
        page, offset, num = _run(pages, table_n, place, last)
        key = page * pages.key_stride + offset * H * Dk
        value = page * pages.value_stride + offset * H * Dv
        _score(q_HGD, pages.keys, key, num, heads, scratch.scores_HGS, place - first, pages.values, value)
        place += num
    for h in range(heads[0], heads[1]):
        for g in range(G):
            scores_S, tops_G, totals_G = scratch.scores_HGS[h, g], scratch.tops_HG[h], scratch.totals_HG[h]
            _raise(scores_S, last - first, softcap, tops_G, totals_G, g, sums_HGD[h, g])
    for h in range(heads[0], heads[1]):  # apart, or each query would wait for its maximum: 1.8 us instead of 0.9
        for g in range(G):
            weights = _exponentiate(scratch.scores_HGS[h, g], last - first, scratch.tops_HG[h, g])
            scratch.totals_HG[h, g] += weights
    place = first
    while place < last:
        page, offset, num = _run(pages, table_n, place, last)
        value = page * pages.value_stride + offset * H * Dv
        later = place + CHUNK_TOKENS if place + CHUNK_TOKENS < end else place
        next_key = table_n[later // pages.page_tokens] * pages.key_stride + offset * H * Dk
        _add(sums_HGD, pages.values, value, num, heads, scratch.scores_HGS, place - first, pages.keys, next_key)
        place += num


@kept
def attend(
    q_BHGD: np.ndarray,
    pages: Pages,
    rows: Rows,
    softmax: Softmax,
    out_BHGD: np.ndarray,
    piece: Span,
    heads: Span,
    scratch: Scratch,
) -> None:
    """Adds to `out`, which holds zeros, rows and KV heads from the first up to the second number. Scaled queries and
    `out` are float32. A row that sees nothing stays zero."""
    G, Dv = out_BHGD.shape[2:]
    for row in range(piece[0], piece[1]):
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
