"""The compiled decode attention: one new token per row over KV pages, each read once and in the order of its bytes.

Softmax goes along with it (Milakov and Gimelshein 2018): scores of CHUNK_TOKENS positions, their maximum, their values.
numba knows no 16-bit floats, so uint16 stands for the bits of bfloat16 and int16 for those of float16. Nothing here
promises that numbers are finite: NaN and infinities end as they do in torch.

The annotations are for the reader; the compiler takes the types of what it is given. All of it is in one file, as the
file's time of change is all that numba's cache on disk looks at.

B rows, H KV heads, G query heads of each, D of a head, P positions of a page, n pages of a row.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit, types
from numba.extending import overload

from .kernel_arguments import Pages, Rows, Scratch, Softmax, Span

log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., object])

CHUNK_TOKENS = 64  # with its queries and sums a chunk's scores stay in 48 KiB of L1, at 32 heads of 128
REORDERED = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; never nnan or ninf
FUSED = {"contract"}  # said, or a caller's permission to reorder would undo the rounding of `_exp`
ONE, ZERO = np.float32(1), np.float32(0)
LOWEST = np.float32(np.finfo(np.float32).min)  # where maxima begin: not -inf, as -inf less -inf is NaN
LOG2_E, LN_2_HIGH, LN_2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
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


def widen(number: Any) -> np.float32:
    """float32 of a stored number, in registers."""
    raise NotImplementedError("exists in compiled code only")


@overload(widen)
def _widen(number: Any) -> Callable[[Any], np.float32]:
    return {types.float32: _same, types.uint16: _from_bfloat16, types.int16: _from_float16}[number]


def _same(number: Any) -> np.float32:
    return number


def _from_bfloat16(number: Any) -> np.float32:
    return np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)


def _from_float16(number: Any) -> np.float32:
    """The product moves the exponent: exact, and right for subnormal numbers."""
    shifted = np.uint32(np.uint32(number & 0x7FFF) << np.uint32(13))
    bits = np.float32(np.uint32(shifted).view(np.float32) * np.float32(2.0**112)).view(np.uint32)
    special = np.uint32(0x7F800000) if shifted >= np.uint32(0x0F800000) else np.uint32(0)
    sign = np.uint32(np.uint32(number & 0x8000) << np.uint32(16))
    return np.uint32(bits | special | sign).view(np.float32)


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


@njit(fastmath=FUSED)
def _exponentiate(scores: np.ndarray, num: int, top: np.float32) -> None:
    for i in range(num):
        x = np.float32(scores[i] - top)
        scores[i] = _exp(x if not x < EXP_MIN else EXP_MIN, ONE)


@njit(fastmath=REORDERED)
def _score(
    q_HGD: np.ndarray, keys: np.ndarray, base: int, num: int, heads: Span, scores_HGS: np.ndarray, at: int
) -> None:
    """Scores of `num` positions of a page, which begin at keys[base], from place `at` on. Two keys at a time, so that
    each is loaded once for four queries and each query once for two keys."""
    H, G, D = q_HGD.shape
    step = H * D
    for p in range(0, num, 2):
        other = step if p + 1 < num else 0  # the last of an odd number is taken twice
        for h in range(heads[0], heads[1]):
            begin = base + p * step + h * D
            k0, k1 = keys[begin : begin + D], keys[begin + other : begin + other + D]
            s_GS, i, j = scores_HGS[h], at + p, at + p + min(other, 1)
            for g in range(0, G - 3, 4):
                q0, q1, q2, q3 = q_HGD[h, g], q_HGD[h, g + 1], q_HGD[h, g + 2], q_HGD[h, g + 3]
                a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = ZERO
                for d in range(D):
                    x, y = widen(k0[d]), widen(k1[d])
                    a0, a1, a2, a3 = a0 + q0[d] * x, a1 + q1[d] * x, a2 + q2[d] * x, a3 + q3[d] * x
                    b0, b1, b2, b3 = b0 + q0[d] * y, b1 + q1[d] * y, b2 + q2[d] * y, b3 + q3[d] * y
                s_GS[g, i], s_GS[g + 1, i], s_GS[g + 2, i], s_GS[g + 3, i] = a0, a1, a2, a3
                s_GS[g, j], s_GS[g + 1, j], s_GS[g + 2, j], s_GS[g + 3, j] = b0, b1, b2, b3
            for g in range(G // 4 * 4, G):
                q0, a0, b0 = q_HGD[h, g], ZERO, ZERO
                for d in range(D):
                    a0, b0 = a0 + q0[d] * widen(k0[d]), b0 + q0[d] * widen(k1[d])
                s_GS[g, i], s_GS[g, j] = a0, b0


@njit(fastmath=REORDERED)
def _weigh(
    scores_S: np.ndarray,
    num: int,
    softcap: np.float32,
    tops_G: np.ndarray,
    totals_G: np.ndarray,
    g: int,
    sums_D: np.ndarray,
) -> None:
    """Scores of one query become weights as seen from the maximum so far, and so do its total and sums."""
    if softcap > ZERO:
        _cap(scores_S, num, softcap)
    highest = max(tops_G[g], _highest(scores_S, num))
    if highest > tops_G[g]:
        x = np.float32(tops_G[g] - highest)
        fade = _exp(x, ONE) if x > EXP_MIN else ZERO
        tops_G[g] = highest
        totals_G[g] *= fade
        for d in range(len(sums_D)):
            sums_D[d] *= fade
    _exponentiate(scores_S, num, highest)
    total = ZERO
    for i in range(num):
        total += scores_S[i]
    totals_G[g] += total


@njit(fastmath=REORDERED)
def _highest(scores_S: np.ndarray, num: int) -> np.float32:
    """Four maxima side by side, as each waits for the one before it. NaN is passed over."""
    a = b = c = d = LOWEST
    for i in range(0, num - 3, 4):
        a, b = max(a, scores_S[i]), max(b, scores_S[i + 1])
        c, d = max(c, scores_S[i + 2]), max(d, scores_S[i + 3])
    for i in range(num // 4 * 4, num):
        a = max(a, scores_S[i])
    return max(max(a, b), max(c, d))


@njit(fastmath=REORDERED)
def _add(
    sums_HGD: np.ndarray, values: np.ndarray, base: int, num: int, heads: Span, weights_HGS: np.ndarray, at: int
) -> None:
    """Adds the weighted values of `num` positions of a page. Four at a time, so that sums are loaded and stored once
    for four; and for four queries at a time, so that values are widened once for four."""
    H, G, D = sums_HGD.shape
    step = H * D
    whole = num // 4 * 4
    for p in range(0, whole, 4):
        for h in range(heads[0], heads[1]):
            begin = base + p * step + h * D
            v0, v1 = values[begin : begin + D], values[begin + step : begin + step + D]
            begin += 2 * step
            v2, v3 = values[begin : begin + D], values[begin + step : begin + step + D]
            w_GS, i = weights_HGS[h], at + p
            for g in range(0, G - 3, 4):
                s0, s1, s2, s3 = sums_HGD[h, g], sums_HGD[h, g + 1], sums_HGD[h, g + 2], sums_HGD[h, g + 3]
                a0, a1, a2, a3 = w_GS[g, i], w_GS[g, i + 1], w_GS[g, i + 2], w_GS[g, i + 3]
                b0, b1, b2, b3 = w_GS[g + 1, i], w_GS[g + 1, i + 1], w_GS[g + 1, i + 2], w_GS[g + 1, i + 3]
                c0, c1, c2, c3 = w_GS[g + 2, i], w_GS[g + 2, i + 1], w_GS[g + 2, i + 2], w_GS[g + 2, i + 3]
                d0, d1, d2, d3 = w_GS[g + 3, i], w_GS[g + 3, i + 1], w_GS[g + 3, i + 2], w_GS[g + 3, i + 3]
                for d in range(D):
                    x0, x1, x2, x3 = widen(v0[d]), widen(v1[d]), widen(v2[d]), widen(v3[d])
                    s0[d] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
                    s1[d] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
                    s2[d] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
                    s3[d] += d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3
            for g in range(G // 4 * 4, G):
                s0, a0, a1, a2, a3 = sums_HGD[h, g], w_GS[g, i], w_GS[g, i + 1], w_GS[g, i + 2], w_GS[g, i + 3]
                for d in range(D):
                    s0[d] += a0 * widen(v0[d]) + a1 * widen(v1[d]) + a2 * widen(v2[d]) + a3 * widen(v3[d])
    for p in range(whole, num):
        for h in range(heads[0], heads[1]):
            begin = base + p * step + h * D
            v0 = values[begin : begin + D]
            for g in range(G):
                s0, a0 = sums_HGD[h, g], weights_HGS[h, g, at + p]
                for d in range(D):
                    s0[d] += a0 * widen(v0[d])


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
    heads: Span,
    softcap: np.float32,
    scratch: Scratch,
    sums_HGD: np.ndarray,
) -> None:
    """Takes up positions [first, last), a chunk at most, of one row."""
    H, G, Dk = q_HGD.shape
    Dv, place = sums_HGD.shape[2], first
    while place < last:
        page, offset, num = _run(pages, table_n, place, last)
        base = page * pages.key_stride + offset * H * Dk
        _score(q_HGD, pages.keys, base, num, heads, scratch.scores_HGS, place - first)
        place += num
    for h in range(heads[0], heads[1]):
        for g in range(G):
            scores_S, tops_G, totals_G = scratch.scores_HGS[h, g], scratch.tops_HG[h], scratch.totals_HG[h]
            _weigh(scores_S, last - first, softcap, tops_G, totals_G, g, sums_HGD[h, g])
    place = first
    while place < last:
        page, offset, num = _run(pages, table_n, place, last)
        base = page * pages.value_stride + offset * H * Dv
        _add(sums_HGD, pages.values, base, num, heads, scratch.scores_HGS, place - first)
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
            _attend_chunk(
                q_BHGD[row], pages, rows.tables_Bn[row], first, last, heads, softmax.softcap, scratch, out_BHGD[row]
            )
            first = last
        for h in range(heads[0], heads[1]):
            for g in range(G):
                share = ONE / scratch.totals_HG[h, g]
                for d in range(Dv):
                    out_BHGD[row, h, g, d] *= share
