"""Fused row-wise kernels between products: SiLU gates, RMS norms, rotary embeddings. Each reads and writes memory once;
torch's operators make two to nine passes over memory.

Numbers are float32 or bits of bfloat16. With bfloat16, kernels compute in float32 and round to bfloat16 wherever one of
torch's operators would end. Arguments `first` and `last`: the rows [first, last) to compute.

T rows (tokens), H numbers of an output row, N >= H columns of an input matrix, h heads of D numbers.
"""

import math

import numpy as np
from numba import njit

from .compiled import FUSED, cached_kernel
from .primitives import EXP_MIN, ONE, exp, round_like, to_float32

RUN = 1024  # numbers that `gate_rows` computes at a time; they fit the L1 cache


@njit(fastmath=FUSED)
def _silu(x: np.float32) -> np.float32:
    """SiLU with a relative error of at most 4e-7, until it underflows. Propagates NaN."""
    y = np.float32(-x)
    # Limit y to [EXP_MIN, -EXP_MIN]. The negated comparisons keep NaN.
    y = y if not y < EXP_MIN else EXP_MIN
    y = y if not y > -EXP_MIN else np.float32(-EXP_MIN)
    return np.float32(x / np.float32(ONE + exp(y, ONE)))


@cached_kernel
def gate_rows(
    gate_TN: np.ndarray,
    up_TN: np.ndarray,
    up_begin: int,
    out_TH: np.ndarray,
    first: int,
    last: int,
    scratch: np.ndarray,
) -> None:
    """Computes silu(gate) * up, with the gate in the first H columns of `gate_TN`, and up in H columns of `up_TN` from
    `up_begin` on. `out_TH` may be `gate_TN`. `scratch`: (RUN,) float32 for results, because the compiler would not
    vectorize a loop that writes to its own input."""
    H = out_TH.shape[1]
    for t in range(first, last):
        for begin in range(0, H, RUN):
            width = min(RUN, H - begin)
            gate, out = gate_TN[t, begin : begin + width], out_TH[t, begin : begin + width]
            up = up_TN[t, up_begin + begin : up_begin + begin + width]
            for i in range(width):
                scratch[i] = to_float32(round_like(_silu(to_float32(gate[i])), gate[i])) * to_float32(up[i])
            for i in range(width):
                out[i] = round_like(scratch[i], up[i])


@cached_kernel
def norm_rows(
    x_TH: np.ndarray, weight_H: np.ndarray, eps: np.float32, out_TH: np.ndarray, first: int, last: int
) -> None:
    """Computes the RMS norm of rows of x, times the weight."""
    H = x_TH.shape[1]
    for t in range(first, last):
        total = np.float32(0)
        for i in range(H):
            total += to_float32(x_TH[t, i]) * to_float32(x_TH[t, i])
        factor = np.float32(ONE / np.float32(math.sqrt(np.float32(total / np.float32(H) + eps))))
        for i in range(H):
            number = round_like(np.float32(to_float32(x_TH[t, i]) * factor), x_TH[t, i])
            out_TH[t, i] = round_like(to_float32(weight_H[i]) * to_float32(number), weight_H[i])


@cached_kernel
def rotate_rows(
    x_ThD: np.ndarray, cos_TD: np.ndarray, sin_TD: np.ndarray, out_ThD: np.ndarray, first: int, last: int
) -> None:
    """Applies rotary embeddings to rows: rotates number i of a head together with number i + D / 2."""
    _, h, D = x_ThD.shape
    half = D // 2
    for t in range(first, last):
        for n in range(h):
            for i in range(half):
                a, b, like = to_float32(x_ThD[t, n, i]), to_float32(x_ThD[t, n, i + half]), x_ThD[t, n, i]
                cosine = to_float32(round_like(a * to_float32(cos_TD[t, i]), like))
                sine = to_float32(round_like(b * to_float32(sin_TD[t, i]), like))
                out_ThD[t, n, i] = round_like(cosine - sine, like)
                cosine = to_float32(round_like(b * to_float32(cos_TD[t, i + half]), like))
                sine = to_float32(round_like(a * to_float32(sin_TD[t, i + half]), like))
                out_ThD[t, n, i + half] = round_like(cosine + sine, like)
