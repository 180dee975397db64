"""What stands between products, row by row: a gate's SiLU times what it lets through, RMS norms, rotary embeddings.
Each number is read once and written once; as torch operators they take two to nine passes over memory.

T rows (tokens), H numbers of each, h heads of D.
"""

import math

import numpy as np
from numba import njit

from .compiled import FUSED, kept
from .primitives import EXP_MIN, ONE, exp

RUN = 1024  # numbers at a time, which stay in the first cache


@njit(fastmath=FUSED)
def _silu(x: np.float32) -> np.float32:
    """Exact to 4e-7 of itself, down to where it vanishes; NaN stays."""
    y = np.float32(-x)
    y = y if not y < EXP_MIN else EXP_MIN
    y = y if not y > -EXP_MIN else np.float32(-EXP_MIN)
    return np.float32(x / np.float32(ONE + exp(y, ONE)))


@kept
def gate_rows(
    gate_TN: np.ndarray,
    up_TN: np.ndarray,
    up_begin: int,
    out_TH: np.ndarray,
    first: int,
    last: int,
    own: np.ndarray,
) -> None:
    """Rows [first, last) of silu(gate) * up: the first H numbers of one, and those from `up_begin` on of the other.
    `own`: RUN numbers, in which results wait to be written, as the output may lie over the gates."""
    H = out_TH.shape[1]
    for t in range(first, last):
        for begin in range(0, H, RUN):
            width = min(RUN, H - begin)
            gate, out = gate_TN[t, begin : begin + width], out_TH[t, begin : begin + width]
            up = up_TN[t, up_begin + begin : up_begin + begin + width]
            for i in range(width):
                own[i] = _silu(gate[i]) * up[i]
            for i in range(width):
                out[i] = own[i]


@kept
def norm_rows(
    x_TH: np.ndarray, weight_H: np.ndarray, eps: np.float32, out_TH: np.ndarray, first: int, last: int
) -> None:
    """Rows [first, last) of x over the root of their mean square, times the weight."""
    H = x_TH.shape[1]
    for t in range(first, last):
        total = np.float32(0)
        for i in range(H):
            total += x_TH[t, i] * x_TH[t, i]
        factor = np.float32(ONE / np.float32(math.sqrt(np.float32(total / np.float32(H) + eps))))
        for i in range(H):
            out_TH[t, i] = weight_H[i] * np.float32(x_TH[t, i] * factor)


@kept
def rotate_rows(
    x_ThD: np.ndarray, cos_TD: np.ndarray, sin_TD: np.ndarray, out_ThD: np.ndarray, first: int, last: int
) -> None:
    """Rows [first, last): the halves of each head as pairs, turned by the angles of their token."""
    _, h, D = x_ThD.shape
    half = D // 2
    for t in range(first, last):
        for n in range(h):
            for i in range(half):
                a, b = x_ThD[t, n, i], x_ThD[t, n, i + half]
                out_ThD[t, n, i] = a * cos_TD[t, i] - b * sin_TD[t, i]
                out_ThD[t, n, i + half] = b * cos_TD[t, i + half] + a * sin_TD[t, i + half]
