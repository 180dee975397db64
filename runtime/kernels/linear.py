"""Products of float32, or of pairs of bfloat16 in words, with weights as they are stored, in the processor's vectors,
where they fit no matrix unit: the functions that Python calls. Where there are 32 registers of 16 lanes, lanes are rows
of x; elsewhere they are rows of w.
"""

import numpy as np

from .arguments import StoredRows, VectorProduct
from .compiled import cached_kernel
from .packed import unpack_arguments
from .primitives import LANES

if LANES == 16:
    from .linear_wide import (
        CHAIN_INPUTS,
        CHUNK_ROWS,
        INPUT_ROWS,
        SUM_NUMBERS,
        WORK_NUMBERS,
        lay_out,
        multiply,
        split_workspace,
    )
else:
    from .linear_narrow import (
        CHAIN_INPUTS,
        CHUNK_ROWS,
        INPUT_ROWS,
        SUM_NUMBERS,
        WORK_NUMBERS,
        lay_out,
        multiply,
        split_workspace,
    )

__all__ = [
    "CHAIN_INPUTS",
    "CHUNK_ROWS",
    "INPUT_ROWS",
    "SUM_NUMBERS",
    "WORK_NUMBERS",
    "lay_out_inputs",
    "linear",
    "linear_packed",
    "split_workspace",
]


@cached_kernel
def lay_out_inputs(x_MK: np.ndarray, first: int, last: int, inputs: np.ndarray) -> None:
    """Groups [first, last) of INPUT_ROWS rows of x, K words each, as `multiply` takes them. A word is float32, widened
    where x is of 16 bits, or a pair of bfloat16, given as such."""
    lay_out(x_MK, first, last, inputs)


@cached_kernel
def linear(w_NK: np.ndarray, product: VectorProduct) -> None:
    """All rows of w but those behind the last `PAIR_ROWS`, times the rows of x."""
    multiply(w_NK, w_NK.shape[0], w_NK.shape[1], None, product)


@cached_kernel
def linear_packed(stored: StoredRows, product: VectorProduct) -> None:
    """See `linear`, bit by bit the same, of packed rows."""
    packed = unpack_arguments(stored)
    multiply(stored.body, packed.num_rows, stored.layout[2], packed, product)
