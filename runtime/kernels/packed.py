"""Rows of packed weights, whichever way they are packed, as float32: what the product and the decoding of whole rows
have in common.

N rows of K numbers; R of them.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from .arguments import FLOAT8, GROUP_NUMBERS, INT4, INT8, WINDOW4, Span
from .codes import widen_float8, widen_int4, widen_int8
from .compiled import REORDERED, kept
from .primitives import Place
from .window4 import Escapes, put_escapes, widen_window4


class Scales(NamedTuple):
    """Bits of bfloat16, `num_groups` of each row; that of number k is number k >> shift of its row's."""

    bits: np.ndarray
    num_groups: int
    shift: int


class Packed(NamedTuple):
    """How numbers lie in bytes: `way` is one of those in `arguments.py`, whose GROUP_NUMBERS take `group_bytes`.
    `escapes` are of WINDOW4, `scales` of the others."""

    way: int
    group_bytes: int
    escapes: Escapes
    scales: Scales


@njit(fastmath=REORDERED)
def as_packed(
    layout: np.ndarray, starts: np.ndarray, columns: np.ndarray, exponents: np.ndarray, scales: np.ndarray
) -> Packed:
    """How rows are packed, of what Python hands over flat, as a named tuple takes it a microsecond. `layout`: the way,
    the bytes of a group, the base of exponents, the groups of a row with a scale, and the shift."""
    way, group_bytes, base, num_groups, shift = layout[0], layout[1], layout[2], layout[3], layout[4]
    return Packed(way, group_bytes, Escapes(base, starts, columns, exponents), Scales(scales, num_groups, shift))


@njit(fastmath=REORDERED, forceinline=True)
def packed_place(K: int, group_bytes: int, row: int, k: int) -> int:
    """The byte at which input `k` of a row lies."""
    return (row * K + k) // GROUP_NUMBERS * group_bytes


@njit(fastmath=REORDERED, forceinline=True)
def widen_packed(
    packed: Packed, body: np.ndarray, K: int, rows: Span, chain: Span, out: np.ndarray, apart: int
) -> None:
    """Rows' inputs of a chain as float32, `apart` numbers apart; escapes with an exponent of 0. One loop for each way,
    and what it needs taken out before: to count references to arrays takes as long as a row."""
    (first, last), k, num_inputs = rows, chain[0], chain[1] - chain[0]
    way, group_bytes, base, scales = packed.way, packed.group_bytes, packed.escapes.base, packed.scales
    bits, num_groups, shift = scales.bits, scales.num_groups, scales.shift
    group = k >> shift
    if way == WINDOW4:
        for row in range(first, last):
            place = Place(body, packed_place(K, group_bytes, row, k))
            widen_window4(place, num_inputs, base, Place(out, (row - first) * apart))
    elif way == INT8:
        for row in range(first, last):
            place, scale = Place(body, packed_place(K, group_bytes, row, k)), Place(bits, row * num_groups + group)
            widen_int8(place, num_inputs, scale, shift, Place(out, (row - first) * apart))
    elif way == INT4:
        for row in range(first, last):
            place, scale = Place(body, packed_place(K, group_bytes, row, k)), Place(bits, row * num_groups + group)
            widen_int4(place, num_inputs, scale, shift, Place(out, (row - first) * apart))
    elif way == FLOAT8:
        for row in range(first, last):
            place, scale = Place(body, packed_place(K, group_bytes, row, k)), Place(bits, row * num_groups + group)
            widen_float8(place, num_inputs, scale, shift, Place(out, (row - first) * apart))


@kept
def unpack_rows(
    body: np.ndarray,
    layout: np.ndarray,
    starts: np.ndarray,
    columns: np.ndarray,
    exponents: np.ndarray,
    scales: np.ndarray,
    first: int,
    out_RK: np.ndarray,
) -> None:
    """Rows from `first` on as float32, as many as `out_RK` (contiguous) holds."""
    packed, (R, K) = as_packed(layout, starts, columns, exponents, scales), out_RK.shape
    numbers = out_RK.reshape(R * K)
    widen_packed(packed, body, K, (first, first + R), (0, K), numbers, K)
    if packed.way == WINDOW4:
        escapes, bits = packed.escapes, numbers.view(np.uint32)
        for r in range(R):
            put_escapes(escapes, int(starts[first + r]), first + r, 0, K, bits, r * K)
