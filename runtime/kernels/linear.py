"""Entry points of the vector kernels: products of float32, or of bfloat16 pairs, with weights as stored. With AVX-512
(`linear_wide.py`) lanes are rows of x; otherwise (`linear_narrow.py`) lanes are rows of w.
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
    """Writes groups [first, last) of INPUT_ROWS rows of x into `inputs`, in the layout of `multiply`. K words per row:
    a word is a float32 (converted from 16 bits if needed) or a pair of bfloat16."""
    lay_out(x_MK, first, last, inputs)


@cached_kernel
def linear(w_NK: np.ndarray, product: VectorProduct) -> None:
    """Multiplies rows of x by the rows of w, except the last ones that do not fill `PAIR_ROWS`."""
    multiply(w_NK, w_NK.shape[0], w_NK.shape[1], None, product)


@cached_kernel
def linear_packed(stored: StoredRows, product: VectorProduct) -> None:
    """Same as `linear`, bit by bit, for packed rows."""
    packed = unpack_arguments(stored)
    multiply(stored.body, packed.num_rows, stored.layout[2], packed, product)
