"""Entry points of the vector kernels: products x @ w.T of inputs x (M, K) with weights w (N, K) as stored. Numbers are
multiplied as float32, or as pairs of bfloat16. With AVX-512, a vector holds the same input of several rows of x
(`linear_wide.py`), otherwise the same input of several rows of w (`linear_narrow.py`)."""

import numpy as np

from .arguments import StoredRows, VectorProduct
from .compiled import cached_kernel
from .packed import unpack_arguments
from .primitives import LANES

if LANES == 16:
    from . import linear_wide as _vectors
else:
    from . import linear_narrow as _vectors

# Sizes, see either module. Callers allocate SUM_NUMBERS and WORK_NUMBERS float32 of scratch memory per thread.
CHAIN_INPUTS, CHUNK_ROWS, INPUT_ROWS = _vectors.CHAIN_INPUTS, _vectors.CHUNK_ROWS, _vectors.INPUT_ROWS
SUM_NUMBERS, WORK_NUMBERS = _vectors.SUM_NUMBERS, _vectors.WORK_NUMBERS
_lay_out, _multiply, split_workspace = _vectors.lay_out, _vectors.multiply, _vectors.split_workspace


@cached_kernel
def lay_out_inputs(x_MK: np.ndarray, first: int, last: int, inputs: np.ndarray) -> None:
    """Writes part of x to `inputs`, in the layout that `linear` reads: the rows in groups [first, last) of INPUT_ROWS
    rows. A row has K words: float32 (converted from 16 bits if needed), or pairs of bfloat16."""
    _lay_out(x_MK, first, last, inputs)


@cached_kernel
def linear(w_NK: np.ndarray, product: VectorProduct) -> None:
    """Multiplies the rows of x in `product` by the rows of `w_NK`, except the last N % PAIR_ROWS rows of w."""
    _multiply(w_NK, w_NK.shape[0], w_NK.shape[1], None, product)


@cached_kernel
def linear_packed(stored: StoredRows, product: VectorProduct) -> None:
    """Same as `linear` for packed rows: the results equal those for the decoded weights bit by bit."""
    packed = unpack_arguments(stored)
    _multiply(stored.body, packed.num_rows, stored.layout[2], packed, product)
