"""What both ways in which the vectors multiply have in common: blocks of rows of x, and where rows of w lie, stored as
they are or packed."""

from typing import NamedTuple

import numpy as np
from numba import njit

from .arguments import GROUP_NUMBERS, WINDOW4
from .compiled import REORDERED
from .packed import Packed, packed_place


class Block(NamedTuple):
    """Groups [first, last) of rows of x, of a `least` height each; those before `num_larger` have one more."""

    first: int
    last: int
    least: int
    num_larger: int


class Ahead(NamedTuple):
    """Rows of w that are multiplied next, from its number `at` on. They lie `apart` elements apart, their GROUP_NUMBERS
    words `group_apart`."""

    at: int
    num_rows: int
    apart: int
    group_apart: int


@njit(fastmath=REORDERED, forceinline=True)
def first_of_group(group: int, least: int, num_larger: int) -> int:
    """The height of the groups before it."""
    return group * least + min(group, num_larger)


@njit(fastmath=REORDERED)
def num_blocks(num_groups: int, usual: int) -> int:
    """Weights are widened once for each: a few larger ones, up to one and a half times the usual number of groups,
    rather than one more of what is left."""
    return max(1, (num_groups + usual // 2) // usual)


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
