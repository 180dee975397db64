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
def _widen_grouped(packed: Packed, stored: RowsAt, num_rows: int, num_inputs: int, at: int, to: RowsAt) -> None:
    """`widen_packed` of codes that others have published, whose zero points and factors begin at number `at`."""
    way, num_groups, shift = packed.way, packed.scales.num_groups, packed.scales.shift
    zeros, factors = RowsAt(packed.groups.zeros, at, num_groups), RowsAt(packed.groups.factors, at, num_groups)
    table = Place(packed.groups.table, 0)
    if way == HALVES:
        widen_halves(stored, num_rows, num_inputs, zeros, factors, shift, table, to)
    elif way == FLOAT4:
        widen_float4(stored, num_rows, num_inputs, zeros, factors, shift, table, to)
    elif way == IN_TABLE:
        widen_in_table(stored, num_rows, num_inputs, zeros, factors, shift, table, to)
    elif way == SCALED_FLOAT8:
        widen_scaled_float8(stored, num_rows, num_inputs, zeros, factors, shift, table, to)
    elif way == BYTES:
        widen_bytes(stored, num_rows, num_inputs, zeros, factors, shift, table, to)
    elif way == SIGNED_BYTES:
        widen_signed_bytes(stored, num_rows, num_inputs, zeros, factors, shift, table, to)


@njit(fastmath=REORDERED, forceinline=True)
def _widen_columns(packed: Packed, body: np.ndarray, rows: Span, k: int, num_inputs: int, to: RowsAt) -> None:
    """`widen_packed` of codes in columns, of which `rows` are a multiple of UNIT_ROWS."""
    first, num_rows, way, apart = rows[0], rows[1] - rows[0], packed.way, packed.apart
    zeros = RowsAt(packed.groups.zeros, first, packed.num_rows)
    factors = RowsAt(packed.groups.factors, first, packed.num_rows)
    is_wide, columns = packed.groups.is_wide, Place(packed.groups.columns, k)
    if way == WORDS4:
        words = RowsAt(body, (k >> 3) * apart, apart)
        widen_words4(words, first, num_rows, num_inputs, zeros, factors, columns, is_wide, to)
    elif way == WORDS8:
        words = RowsAt(body, (k >> 2) * apart, apart)
        widen_words8(words, first, num_rows, num_inputs, zeros, factors, columns, is_wide, to)
    else:
        words = RowsAt(body, k * apart, apart)
        widen_row_words(words, first, num_rows, num_inputs, zeros, factors, columns, is_wide, to)


@njit(fastmath=REORDERED, forceinline=True)
def widen_packed(
    packed: Packed, body: np.ndarray, K: int, rows: Span, chain: Span, out: np.ndarray, apart: int
) -> None:
    """Rows' inputs of a chain as float32, `apart` numbers apart; escapes with an exponent of 0. Steps are given all
    rows: to count references to arrays takes as long as one."""
    (first, last), k, num_inputs = rows, chain[0], chain[1] - chain[0]
    num_rows, way, group_bytes, scales = last - first, packed.way, packed.group_bytes, packed.scales
    shift, at = scales.shift, first * scales.num_groups + (k >> scales.shift)
    own, to = RowsAt(scales.bits, at, scales.num_groups), RowsAt(out, 0, apart)
    stored = RowsAt(body, packed_place(K, group_bytes, first, k), K // GROUP_NUMBERS * group_bytes)
    if way == WINDOW4:
        widen_window4(stored, num_rows, num_inputs, packed.escapes.base, to)
    elif way == INT8:
        widen_int8(stored, num_rows, num_inputs, own, shift, to)
    elif way == INT4:
        widen_int4(stored, num_rows, num_inputs, own, shift, to)
    elif way == FLOAT8:
        widen_float8(stored, num_rows, num_inputs, own, shift, to)
    elif way >= WORDS4:
        _widen_columns(packed, body, rows, k, num_inputs, to)
    else:
        _widen_grouped(packed, stored, num_rows, num_inputs, at, to)


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
