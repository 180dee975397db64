"""Products of float32, or of pairs of bfloat16 in words, with weights as they are stored, in the processor's vectors,
where they fit no matrix unit: the functions that Python calls. Where there are 32 registers of 16 lanes, lanes are rows
of x; elsewhere they are rows of w.
"""

import numpy as np

from .compiled import kept
from .outputs import as_output
from .packed import as_packed
from .primitives import LANES

if LANES == 16:
    from .linear_wide import CHAIN_INPUTS, CHUNK_ROWS, INPUT_ROWS, SUM_NUMBERS, WORK_NUMBERS, lay_out, multiply, split
else:
    from .linear_narrow import CHAIN_INPUTS, CHUNK_ROWS, INPUT_ROWS, SUM_NUMBERS, WORK_NUMBERS, lay_out, multiply, split

__all__ = [
    "CHAIN_INPUTS",
    "CHUNK_ROWS",
    "INPUT_ROWS",
    "SUM_NUMBERS",
    "WORK_NUMBERS",
    "lay_out_inputs",
    "linear",
    "linear_packed",
    "split",
]


@kept
def lay_out_inputs(x_MK: np.ndarray, first: int, last: int, inputs: np.ndarray) -> None:
    """Groups [first, last) of INPUT_ROWS rows of x, K words each, as `multiply` takes them. A word is float32, widened
    where x is of 16 bits, or a pair of bfloat16, given as such."""
    lay_out(x_MK, first, last, inputs)


# Not in named tuples, which from Python take a microsecond to unpack at each call.
@kept
def linear(
    w_NK: np.ndarray,
    step: int,
    begun: np.ndarray,
    inputs: np.ndarray,
    halves: np.ndarray,
    kind: int,
    begin: int,
    num_rows: int,
    words: np.ndarray,
    tile: np.ndarray,
    sums: np.ndarray,
) -> None:
    """All rows of w but those behind the last `PAIR_ROWS`, times the `num_rows` rows of x in `inputs`, into columns
    from `begin` on of an output of that kind, all of whose rows the `halves` are, see `outputs`. Threads that call it
    with one `begun`, of which the first number was 0, share the rows, `step` at a time, a multiple of
    PAIR_ROWS up to CHUNK_ROWS; each has `words`, a `tile` and `sums` of its own, used anew again and again, see
    `split`."""
    out = as_output(halves, kind)
    multiply(w_NK, w_NK.shape[0], w_NK.shape[1], None, step, begun, inputs, out, begin, num_rows, words, tile, sums)


@kept
def linear_packed(
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
    step: int,
    begun: np.ndarray,
    inputs: np.ndarray,
    halves: np.ndarray,
    kind: int,
    begin: int,
    num_rows: int,
    words: np.ndarray,
    tile: np.ndarray,
    sums: np.ndarray,
) -> None:
    """See `linear`, bit by bit the same, of packed rows: bytes, one behind the other. See `packed.as_packed` for how
    they lie."""
    packed = as_packed(layout, starts, columns, exponents, scales, zeros, factors, table, groups)
    out = as_output(halves, kind)
    multiply(body, packed.num_rows, layout[2], packed, step, begun, inputs, out, begin, num_rows, words, tile, sums)
