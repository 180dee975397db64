"""How compiled code may round, and e to the power of x in code that becomes vectors; calls into libraries do not."""

import numpy as np
from numba import njit

REORDERED = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; never nnan or ninf
FUSED = {"contract"}  # said, or a caller's permission to reorder would undo the rounding of `exp`
ONE, ZERO = np.float32(1), np.float32(0)
LOG2_E, LN_2_HIGH, LN_2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
ROUND = np.float32(1.5 * 2**23)  # added to a small number it leaves the nearest integer in the low bits
T2, T3, T4, T5, T6, T7 = (np.float32(1 / factorial) for factorial in (2, 6, 24, 120, 720, 5040))
EXP_MIN = np.float32(-87)  # exp stays a normal number


@njit(fastmath=FUSED)
def exp(x: np.float32, shift: np.float32) -> np.float32:
    """e^x - 1 + shift for x in [-87, 88], shift 0 or 1, each exact to 2e-7: 2^n times a Taylor series around 0."""
    rounded = np.float32(x * LOG2_E + ROUND)
    n = np.float32(rounded - ROUND)
    r = np.float32(np.float32(x - n * LN_2_HIGH) - n * LN_2_LOW)
    series = np.float32(np.float32(T7 * r + T6) * r + T5)
    series = np.float32(np.float32(series * r + T4) * r + T3)
    series = np.float32(np.float32(np.float32(series * r + T2) * r) * r + r)
    power = np.uint32(np.uint32(rounded.view(np.uint32) + np.uint32(127)) << np.uint32(23)).view(np.float32)
    return np.float32(series * power + np.float32(power - np.float32(ONE - shift)))
