"""Rows of packed weights, whichever way they are packed, as float32: what the product and the decoding of whole rows
have in common.

N rows of K numbers; R of them.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from .arguments import FLOAT8, GROUP_NUMBERS, INT4, INT8, WINDOW4
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
    """Of what Python hands over flat: from there a named tuple takes a microsecond. `layout`: the way, the bytes of a
    group, the base of exponents, the groups of a row with a scale, and the shift."""
    way, group_bytes, base, num_groups, shift = layout[0], layout[1], layout[2], layout[3], layout[4]
    return Packed(way, group_bytes, Escapes(base, starts, columns, exponents), Scales(scales, num_groups, shift))


@njit(fastmath=REORDERED)
def widen_packed(packed: Packed, place: Place, row: int, k: int, num_inputs: int, out: Place) -> None:
    """The row's inputs from number k on, which lie at `place`; escapes with an exponent of 0."""
    way, scales = packed.way, packed.scales
    if way == WINDOW4:
        widen_window4(place, num_inputs, packed.escapes.base, out)
        return
    own = Place(scales.bits, row * scales.num_groups + (k >> scales.shift))
    if way == INT8:
        widen_int8(place, num_inputs, own, scales.shift, out)
    elif way == INT4:
        widen_int4(place, num_inputs, own, scales.shift, out)
    elif way == FLOAT8:
        widen_float8(place, num_inputs, own, scales.shift, out)


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
    packed, (R, K), apart = as_packed(layout, starts, columns, exponents, scales), out_RK.shape, body.shape[1]
    numbers = out_RK.reshape(R * K)
    bits = numbers.view(np.uint32)
    for r in range(R):
        widen_packed(packed, Place(body, (first + r) * apart), first + r, 0, K, Place(numbers, r * K))
        if packed.way == WINDOW4:
            put_escapes(packed.escapes, int(starts[first + r]), first + r, 0, K, bits, r * K)


@njit(fastmath=REORDERED)
def packed_place(K: int, packed: Packed, row: int, k: int) -> int:
    """The byte at which input `k` of a row lies."""
    return (row * K + k) // GROUP_NUMBERS * packed.group_bytes
