"""Rows of packed weights, whichever way they are packed, as float32: what the product and the decoding of whole rows
have in common.

N rows of K numbers; R of them.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from .arguments import (
    BYTES,
    FLOAT4,
    FLOAT8,
    GROUP_NUMBERS,
    HALVES,
    IN_TABLE,
    INT4,
    INT8,
    SCALED_FLOAT8,
    SIGNED_BYTES,
    WINDOW4,
    WORDS4,
    WORDS8,
    Span,
)
from .codes import widen_float8, widen_int4, widen_int8
from .compiled import REORDERED, kept
from .grouped import (
    UNIT_ROWS,
    Groups,
    widen_bytes,
    widen_float4,
    widen_halves,
    widen_in_table,
    widen_row_words,
    widen_scaled_float8,
    widen_signed_bytes,
    widen_words4,
    widen_words8,
)
from .primitives import Place, RowsAt
from .window4 import Escapes, put_escapes, widen_window4


class Scales(NamedTuple):
    """Bits of bfloat16, `num_groups` of each row; that of number k is number k >> shift of its row's."""

    bits: np.ndarray
    num_groups: int
    shift: int


class Packed(NamedTuple):
    """How `num_rows` of numbers lie in bytes: `way` is one of those in `arguments.py`. In rows: GROUP_NUMBERS take
    `group_bytes`. In columns: `apart` bytes lie between a word and that of the next columns. `escapes` are of WINDOW4,
    `scales` of codes that we have rounded, `groups` of the others."""

    way: int
    num_rows: int
    group_bytes: int
    apart: int
    escapes: Escapes
    scales: Scales
    groups: Groups


@njit(fastmath=REORDERED)
def as_packed(
    layout: np.ndarray,
    starts: np.ndarray,
    columns: np.ndarray,
    exponents: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray,
    factors: np.ndarray,
    table: np.ndarray,
    groups: np.ndarray,
) -> Packed:
    """How rows are packed, of what Python hands over flat, as a named tuple takes it a microsecond. `layout`: see
    `linear/packed_rows.py`."""
    way, num_rows, group_bytes, apart = layout[0], layout[1], layout[3], layout[4]
    escapes, own = Escapes(layout[5], starts, columns, exponents), Scales(scales, layout[6], layout[7])
    others = Groups(zeros, factors, table, groups, layout[8] > 0)
    return Packed(way, num_rows, group_bytes, apart, escapes, own, others)


@njit(fastmath=REORDERED, forceinline=True)
def packed_place(K: int, group_bytes: int, row: int, k: int) -> int:
    """The byte at which input `k` of a row lies."""
    return (row * K + k) // GROUP_NUMBERS * group_bytes


@njit(fastmath=REORDERED, forceinline=True)
def _widen_grouped(
    packed: Packed, body: np.ndarray, K: int, rows: Span, chain: Span, out: np.ndarray, apart: int
) -> None:
    """`widen_packed` of codes that others have published."""
    (first, last), k, num_inputs = rows, chain[0], chain[1] - chain[0]
    way, group_bytes, num_groups, shift = packed.way, packed.group_bytes, packed.scales.num_groups, packed.scales.shift
    zeros, factors, table, group = packed.groups.zeros, packed.groups.factors, packed.groups.table, k >> shift
    for row in range(first, last):
        place, at = Place(body, packed_place(K, group_bytes, row, k)), row * num_groups + group
        zero, factor, to = Place(zeros, at), Place(factors, at), Place(out, (row - first) * apart)
        if way == HALVES:
            widen_halves(place, num_inputs, zero, factor, shift, Place(table, 0), to)
        elif way == FLOAT4:
            widen_float4(place, num_inputs, zero, factor, shift, Place(table, 0), to)
        elif way == IN_TABLE:
            widen_in_table(place, num_inputs, zero, factor, shift, Place(table, 0), to)
        elif way == SCALED_FLOAT8:
            widen_scaled_float8(place, num_inputs, zero, factor, shift, Place(table, 0), to)
        elif way == BYTES:
            widen_bytes(place, num_inputs, zero, factor, shift, Place(table, 0), to)
        elif way == SIGNED_BYTES:
            widen_signed_bytes(place, num_inputs, zero, factor, shift, Place(table, 0), to)


@njit(fastmath=REORDERED, forceinline=True)
def _widen_columns(packed: Packed, body: np.ndarray, rows: Span, chain: Span, out: np.ndarray, apart: int) -> None:
    """`widen_packed` of codes in columns, UNIT_ROWS rows at a time, which `rows` are a multiple of."""
    (first, last), k, num_inputs = rows, chain[0], chain[1] - chain[0]
    way, num_rows, is_wide, columns = packed.way, packed.num_rows, packed.groups.is_wide, packed.groups.columns
    zeros, factors = packed.groups.zeros, packed.groups.factors
    for row in range(first, last, UNIT_ROWS):
        zero, factor = RowsAt(zeros, row, num_rows), RowsAt(factors, row, num_rows)
        own, to = Place(columns, k), RowsAt(out, (row - first) * apart, apart)
        if way == WORDS4:
            words = RowsAt(body, (k >> 3) * packed.apart + 4 * row, packed.apart)
            widen_words4(words, 0, num_inputs, zero, factor, own, is_wide, to)
        elif way == WORDS8:
            words = RowsAt(body, (k >> 2) * packed.apart + 4 * row, packed.apart)
            widen_words8(words, 0, num_inputs, zero, factor, own, is_wide, to)
        else:
            words = RowsAt(body, k * packed.apart + (row >> 3) * 4, packed.apart)
            widen_row_words(words, (row & 7) * 2, num_inputs, zero, factor, own, is_wide, to)


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
    elif way >= WORDS4:
        _widen_columns(packed, body, rows, chain, out, apart)
    else:
        _widen_grouped(packed, body, K, rows, chain, out, apart)


@kept
def unpack_rows(
    body: np.ndarray,
    layout: np.ndarray,
    starts: np.ndarray,
    columns: np.ndarray,
    exponents: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray,
    factors: np.ndarray,
    table: np.ndarray,
    groups: np.ndarray,
    first: int,
    out_RK: np.ndarray,
) -> None:
    """Rows from `first` on as float32, as many as `out_RK` (contiguous) holds; of codes in rows alone."""
    packed, (R, K) = as_packed(layout, starts, columns, exponents, scales, zeros, factors, table, groups), out_RK.shape
    numbers = out_RK.reshape(R * K)
    widen_packed(packed, body, K, (first, first + R), (0, K), numbers, K)
    if packed.way == WINDOW4:
        escapes, bits = packed.escapes, numbers.view(np.uint32)
        for r in range(R):
            put_escapes(escapes, int(starts[first + r]), first + r, 0, K, bits, r * K)
