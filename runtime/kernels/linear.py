"""Entry points of the vector kernels: products of float32, or of bfloat16 pairs, with weights as stored. Lanes are rows
of x with AVX-512 (`linear_wide.py`), otherwise rows of w (`linear_narrow.py`)."""

import numpy as np

from .arguments import StoredRows, VectorProduct
from .compiled import cached_kernel
from .packed import unpack_arguments
from .primitives import LANES

if LANES == 16:
    from . import linear_wide as _vectors
else:
    from . import linear_narrow as _vectors

CHAIN_INPUTS, CHUNK_ROWS, INPUT_ROWS = _vectors.CHAIN_INPUTS, _vectors.CHUNK_ROWS, _vectors.INPUT_ROWS
SUM_NUMBERS, WORK_NUMBERS = _vectors.SUM_NUMBERS, _vectors.WORK_NUMBERS
_lay_out, _multiply, split_workspace = _vectors.lay_out, _vectors.multiply, _vectors.split_workspace


@cached_kernel
def lay_out_inputs(x_MK: np.ndarray, first: int, last: int, inputs: np.ndarray) -> None:
    """Writes groups [first, last) of INPUT_ROWS rows of x to `inputs`, in the layout that `linear` reads. A row has K
    words: float32 (converted from 16 bits if needed), or pairs of bfloat16."""
    _lay_out(x_MK, first, last, inputs)


@cached_kernel
def linear(w_NK: np.ndarray, product: VectorProduct) -> None:
    """Multiplies rows of x by rows of w, without the last rows of w that do not fill `PAIR_ROWS`."""
    _multiply(w_NK, w_NK.shape[0], w_NK.shape[1], None, product)


@cached_kernel
def linear_packed(stored: StoredRows, product: VectorProduct) -> None:
    """Same as `linear`, bit by bit, for packed rows."""
    packed = unpack_arguments(stored)
    _multiply(stored.body, packed.num_rows, stored.layout[2], packed, product)
