"""Where rows of w lie, stored as they are or packed, for both ways in which the vectors multiply with them."""

from typing import NamedTuple

import numpy as np
from numba import njit

from .arguments import GROUP_NUMBERS, WINDOW4
from .compiled import REORDERED
from .packed import Packed, packed_place


class Ahead(NamedTuple):
    """Rows of w that are multiplied next, from its number `at` on. They lie `apart` elements apart, their GROUP_NUMBERS
    words `group_apart`."""

    at: int
    num_rows: int
    apart: int
    group_apart: int


@njit(fastmath=REORDERED, forceinline=True)
def place_in_rows(K: int, packed: Packed | None, row: int, k: int) -> int:
    """Where input `k` of a row of w lies, in its stored numbers or, if it is packed, bytes."""
    return row * K + k if packed is None else packed_place(K, packed.group_bytes, row, k)


@njit(fastmath=REORDERED, forceinline=True)
def group_elements(packed: Packed | None) -> int:
    """How many of those GROUP_NUMBERS inputs of a row take."""
    return GROUP_NUMBERS if packed is None else packed.group_bytes


@njit(fastmath=REORDERED, forceinline=True)
def row_apart(w: np.ndarray, num_weights: int, packed: Packed | None) -> int:
    """How many elements of w there are from one row to the next; 0 where it lies in columns, of which none are asked
    for ahead: a line of them serves many rows."""
    if packed is None:
        return w.size // num_weights
    return 0 if packed.apart else w.size // num_weights


@njit(fastmath=REORDERED, forceinline=True)
def cursors_of(packed: Packed | None, num_rows: int) -> np.ndarray:
    """Room for those of as many rows."""
    return np.empty(0 if packed is None else num_rows, np.int64)


@njit(fastmath=REORDERED, forceinline=True)
def set_cursors(packed: Packed | None, cursors: np.ndarray, first: int, count: int) -> None:
    """Each block of x meets the rows from their first inputs on."""
    if packed is None:
        return
    if packed.way == WINDOW4:
        cursors[:count] = packed.escapes.starts[first : first + count]
