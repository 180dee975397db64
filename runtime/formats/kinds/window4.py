"""Lossless bfloat16 in 12 bits, as `weightstream pack` writes it: tensors `X_window4` and `X_escapes` for weight X.

The numbers of a matrix use few exponents. Exponent 0 gets the 4-bit code 0, and 15 consecutive exponents (the window)
the codes 1 to 15: exponent = code + base. A number takes a byte for sign and mantissa, and the code of its exponent.
Escapes are numbers whose exponent is outside the window: they have code 0 here, and their columns and exponents are
stored in the companion tensor. Published weights have an entropy of 2.6 bits per exponent (DFloat11, arXiv 2504.11651),
so variable-length codes would save a few percent more. A matrix is packed in chunks of rows, to bound memory.

Shapes: N rows of K numbers, of which n are escapes; R rows of a chunk. K is a multiple of GROUP_NUMBERS.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...kernels.arguments import GROUP_BYTES, GROUP_NUMBERS
from ...linear.blocks import concat_rows
from ...linear.rows import Rows
from ...linear.window4_rows import WINDOW4, Window4Rows
from ...plan.shape.shapes import Companion, TensorSlice
from ..module_tensors import METHOD, mismatch_error, pair_parts
from ..storage_format import Loss, StorageFormat, StoredMatrix

ESCAPES = "escapes"  # companion role
WINDOW = 15  # exponents in the window
MAX_COLUMNS = 1 << 16  # an escape's column is stored in 16 bits
MAX_ESCAPES = 0.003  # fraction of numbers; a product spends some 40 ns on each escape (EPYC Zen 5)
ROWS_AT_ONCE_NUMBERS = 1 << 20  # numbers of a chunk
SAMPLE_NUMBERS = 1 << 20
TYPICAL_ESCAPES = 0.0005  # fraction of numbers in published weights; measured elsewhere: 0.0003 to 0.0005
ESCAPES_AT_ONCE = 4  # pads exponents to whole 32-bit words


class Window4(NamedTuple):
    """Packed rows. Escapes of row i are elements [starts[i], starts[i + 1]) of `columns` and `exponents`."""

    body: np.ndarray  # (N, K * 1.5) uint8: signs and mantissas, codes
    base: int  # exponent - code
    starts: np.ndarray  # (N + 1,) uint32
    columns: np.ndarray  # (n,) uint16
    exponents: np.ndarray  # (n,) uint8

    @property
    def num_bytes(self) -> int:
        return self.body.nbytes + 4 * num_words(len(self.starts) - 1, len(self.columns))

    def without_body(self) -> "Window4":
        return self._replace(body=self.body[:, :0].copy())


def num_words(num_rows: int, num_escapes: int) -> int:
    """Returns the number of 32-bit words in the companion: the base, N + 1 starts, columns and exponents."""
    return 2 + num_rows + _padded_count(num_escapes) // 4 * 3


def _padded_count(num_escapes: int) -> int:
    return -(-num_escapes // ESCAPES_AT_ONCE) * ESCAPES_AT_ONCE


def pack_window4(bits_NK: np.ndarray) -> Window4:
    """Packs a matrix of bfloat16 numbers, given as their bits in uint16."""
    return concat_chunks(list(pack_chunks(bits_NK)))


def pack_chunks(bits_NK: np.ndarray) -> Iterator[Window4]:
    """Packs chunks of rows, all with the same base."""
    base, step = choose_base(bits_NK), max(1, ROWS_AT_ONCE_NUMBERS // bits_NK.shape[1])
    for first in range(0, len(bits_NK), step):
        bits_RK = bits_NK[first : first + step]
        exponents = (bits_RK >> 7).astype(np.uint8)
        codes = exponents - np.uint8(base)  # wraps around: exponents below the base become large
        codes[exponents == 0] = 0
        rows, columns = np.nonzero((codes == 0) & (exponents != 0) | (codes > WINDOW))  # of escapes
        codes[rows, columns] = 0
        starts = np.bincount(rows + 1, minlength=len(bits_RK) + 1).cumsum().astype(np.uint32)
        yield Window4(_pack_groups(bits_RK, codes), base, starts, columns.astype(np.uint16), exponents[rows, columns])


def concat_chunks(chunks: Sequence[Window4]) -> Window4:
    """Concatenates the chunks of a matrix."""
    num_escapes = np.concatenate([np.diff(chunk.starts) for chunk in chunks])  # per row
    starts = np.concatenate([[0], num_escapes.cumsum(dtype=np.int64)]).astype(np.uint32)
    body, columns, exponents = (
        np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ("body", "columns", "exponents")
    )
    return Window4(body, chunks[0].base, starts, columns, exponents)


def choose_base(bits_NK: np.ndarray) -> int:
    """Returns the base with the fewest escapes in a sample of about a million numbers."""
    step = max(1, bits_NK.size // SAMPLE_NUMBERS)
    counts = np.bincount((bits_NK.ravel()[::step] >> 7) & 255, minlength=256)
    # The sum over each window of nonzero exponents; window i begins at exponent i + 1, so its base is i.
    return int(np.argmax(np.convolve(counts[1:], np.ones(WINDOW, np.int64), "valid")))


def _pack_groups(bits_RK: np.ndarray, codes_RK: np.ndarray) -> np.ndarray:
    """Packs rows into bytes: for each group of 64 numbers, 64 bytes of signs and mantissas, then 32 bytes of codes.

    Numbers are reordered for the CPU's vector kernels, which shuffle within 16 bytes and convert pairs in 32-bit words.
    Number 32 h + 16 t + 4 q + j of a group (h, t < 2; q, j < 4) moves to 16 q + 8 h + 2 j + t. Codes of the first 32
    numbers in this order are low nibbles, those of the last 32 are high nibbles."""
    R, K = bits_RK.shape
    signs_and_mantissas, codes = (
        part.reshape(R, K // GROUP_NUMBERS, 2, 2, 4, 4)
        .transpose(0, 1, 4, 2, 5, 3)
        .reshape(R, K // GROUP_NUMBERS, GROUP_NUMBERS)
        for part in ((bits_RK >> 8 & 128 | bits_RK & 127).astype(np.uint8), codes_RK)
    )
    nibbles = codes[:, :, : GROUP_NUMBERS // 2] | codes[:, :, GROUP_NUMBERS // 2 :] << 4
    return np.concatenate([signs_and_mantissas, nibbles], axis=2).reshape(R, -1)


def escape_words(packed: Window4, max_escapes: int) -> np.ndarray:
    """Returns the companion as int32 words: base, starts, columns and exponents. Columns and exponents are zero-padded
    to `max_escapes`; `starts` does not include the padding."""
    padding = _padded_count(max_escapes) - len(packed.columns)
    parts = (
        np.array([packed.base], np.uint32),
        packed.starts,
        np.pad(packed.columns, (0, padding)).view(np.uint32),
        np.pad(packed.exponents, (0, padding)).view(np.uint32),
    )
    return np.concatenate(parts).view(np.int32)


def skip_reason(dtype: str, shape: tuple[int, ...]) -> str | None:
    """Returns the reason why a tensor cannot be packed; None if it can be."""
    if dtype != "BF16":
        return f"{dtype}, not BF16"
    if len(shape) not in (2, 3) or 0 in shape:
        return "not a matrix"
    if shape[-1] % GROUP_NUMBERS:
        return f"columns not a multiple of {GROUP_NUMBERS}"
    return f"more than {MAX_COLUMNS:,} columns" if shape[-1] > MAX_COLUMNS else None


def packed_columns(num_columns: int) -> int:
    """Bytes per packed row."""
    return num_columns // GROUP_NUMBERS * GROUP_BYTES


def stack_escapes(matrices: Sequence[Sequence[Window4]]) -> np.ndarray:
    """Returns the companions of all matrices (experts) as one array, padded to the largest. `matrices`: the chunks of
    each matrix."""
    packed = [concat_chunks(chunks) for chunks in matrices]
    max_escapes = max(len(matrix.columns) for matrix in packed)
    return np.stack([escape_words(matrix, max_escapes) for matrix in packed])


def _rows(stored: StoredMatrix) -> Rows:
    (num_rows,) = stored.source.constants  # of the whole matrix, also if `stored` is only some rows of it
    return Window4Rows(stored.raw_NB, [stored.companions[ESCAPES]], int(num_rows) + 1, stored.source.first_row)


def _join(matrices: Sequence[StoredMatrix]) -> Rows | None:
    """Concatenates whole matrices, which may differ in their number of escapes. Returns None for parts of matrices."""
    source = matrices[0].source
    is_whole = source.first_row == 0 and source.constants == (source.shape[0],)
    if not is_whole or any(stored.source.shape != source.shape for stored in matrices):
        return None
    body_NB = concat_rows([stored.raw for stored in matrices]).view(len(matrices) * source.shape[0], -1)
    return Window4Rows(body_NB, [stored.companions[ESCAPES] for stored in matrices], source.shape[0] + 1)


def _weight(body: TensorSlice, escapes: TensorSlice) -> TensorSlice:
    """Returns the weight of `X_window4` (`body`) with `X_escapes`. Its only constant is N."""
    *stack, num_rows, num_bytes = body.shape if len(body.shape) > 1 else (0, *body.shape)
    is_whole = num_bytes % GROUP_BYTES == 0 and escapes.dtype == "I32" and escapes.shape[:-1] == tuple(stack)
    # Words for columns and exponents: 3 for each 4 escapes.
    escape_size = escapes.shape[-1] - num_words(num_rows, 0) if is_whole and escapes.shape else -1
    if escape_size < 0 or escape_size % 3:
        raise mismatch_error(body, escapes)
    shape = (*stack, num_rows, num_bytes // GROUP_BYTES * GROUP_NUMBERS)
    companions = (Companion(role=ESCAPES, tensor=escapes),)
    return replace(body, dtype="BF16", format=WINDOW4, shape=shape, companions=companions, constants=(num_rows,))


FORMATS = (
    StorageFormat(
        name=WINDOW4,
        loss=Loss.lossless,
        # An escape takes 3 bytes, and each row 4 in `starts`.
        row_bytes=lambda num_columns: num_columns * (GROUP_BYTES / GROUP_NUMBERS + 3 * TYPICAL_ESCAPES) + 4,
        rows=_rows,
        companions=(ESCAPES,),
        join=_join,
    ),
)
METHODS = {METHOD: lambda tensors, quantization: pair_parts(tensors, quantization, WINDOW4, ESCAPES, _weight)}
