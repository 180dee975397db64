"""Lossless bfloat16 in 12 bits, as `weightstream pack` writes it: `X_window4` with `X_escapes`.

The weights of a layer use few exponents. A window of 15 consecutive exponents plus zero gets 4-bit codes. A number is a
byte of sign and mantissa plus the code of its exponent; exponents outside the window (escapes) are stored separately.
Published weights have an entropy of 2.6 bits per exponent (DFloat11, arXiv 2504.11651), so variable-length codes would
save a few percent more. A matrix is packed a few rows at a time.

N rows of K numbers, of which n escape; K is a multiple of GROUP_NUMBERS.
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

ESCAPES = "escapes"  # the companion
WINDOW = 15  # codes 1 to 15: consecutive exponents
MAX_COLUMNS = 1 << 16  # an escape's column is stored in 16 bits
MAX_ESCAPES = 0.003  # fraction of numbers; a product spends some 40 ns on each escape (EPYC Zen 5)
ROWS_AT_ONCE_NUMBERS = 1 << 20
SAMPLE_NUMBERS = 1 << 20
TYPICAL_ESCAPES = 0.0005  # fraction of numbers in published weights; measured elsewhere: 0.0003 to 0.0005
ESCAPES_AT_ONCE = 4  # pads exponents to whole 32-bit words


class Window4(NamedTuple):
    """Packed rows: `body` (N, K * 1.5) uint8. Escapes of row i are [starts[i], starts[i + 1]) of `columns` (n) uint16
    and `exponents` (n) uint8; `starts` (N + 1) uint32."""

    body: np.ndarray
    base: int
    starts: np.ndarray
    columns: np.ndarray
    exponents: np.ndarray

    @property
    def num_bytes(self) -> int:
        return self.body.nbytes + 4 * num_words(len(self.starts) - 1, len(self.columns))

    def without_body(self) -> "Window4":
        return self._replace(body=self.body[:, :0].copy())


def num_words(num_rows: int, num_escapes: int) -> int:
    """Number of 32-bit words of the escapes companion."""
    return 2 + num_rows + _padded_count(num_escapes) // 4 * 3


def _padded_count(num_escapes: int) -> int:
    return -(-num_escapes // ESCAPES_AT_ONCE) * ESCAPES_AT_ONCE


def pack_window4(words_NK: np.ndarray) -> Window4:
    """Packs a matrix of bfloat16 bits (uint16)."""
    return concat_pieces(list(pack_pieces(words_NK)))


def pack_pieces(words_NK: np.ndarray) -> Iterator[Window4]:
    """Packs a run of rows at a time, all with the same base."""
    base, step = choose_base(words_NK), max(1, ROWS_AT_ONCE_NUMBERS // words_NK.shape[1])
    for first in range(0, len(words_NK), step):
        words_RK = words_NK[first : first + step]
        exponents = (words_RK >> 7).astype(np.uint8)
        codes = exponents - np.uint8(base)
        codes[exponents == 0] = 0
        rows, columns = np.nonzero((codes == 0) & (exponents != 0) | (codes > WINDOW))
        codes[rows, columns] = 0
        starts = np.bincount(rows + 1, minlength=len(words_RK) + 1).cumsum().astype(np.uint32)
        yield Window4(_pack_groups(words_RK, codes), base, starts, columns.astype(np.uint16), exponents[rows, columns])


def concat_pieces(pieces: Sequence[Window4]) -> Window4:
    """Concatenates runs of rows."""
    counts = np.concatenate([np.diff(piece.starts) for piece in pieces])
    starts = np.concatenate([[0], counts.cumsum(dtype=np.int64)]).astype(np.uint32)
    body, columns, exponents = (
        np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("body", "columns", "exponents")
    )
    return Window4(body, pieces[0].base, starts, columns, exponents)


def choose_base(words_NK: np.ndarray) -> int:
    """Returns the base (exponent = code + base) with the fewest escapes in a sample of about a million numbers."""
    step = max(1, words_NK.size // SAMPLE_NUMBERS)
    counts = np.bincount((words_NK.ravel()[::step] >> 7) & 255, minlength=256)
    return int(np.argmax(np.convolve(counts[1:], np.ones(WINDOW, np.int64), "valid")))


def _pack_groups(words_RK: np.ndarray, codes_RK: np.ndarray) -> np.ndarray:
    """Packs rows into bytes. Number 32 h + 16 t + 4 q + j of a group is stored at 16 q + 8 h + 2 j + t: vector shuffles
    work within 16 bytes, and 32-bit words hold pairs. Codes of the second half are the high nibbles."""
    R, K = words_RK.shape
    rest, codes = (
        part.reshape(R, K // GROUP_NUMBERS, 2, 2, 4, 4)
        .transpose(0, 1, 4, 2, 5, 3)
        .reshape(R, K // GROUP_NUMBERS, GROUP_NUMBERS)
        for part in ((words_RK >> 8 & 128 | words_RK & 127).astype(np.uint8), codes_RK)
    )
    nibbles = codes[:, :, : GROUP_NUMBERS // 2] | codes[:, :, GROUP_NUMBERS // 2 :] << 4
    return np.concatenate([rest, nibbles], axis=2).reshape(R, -1)


def escape_words(packed: Window4, max_escapes: int) -> np.ndarray:
    """Returns the int32 companion: base, starts, columns and exponents of the escapes, zero-padded to `max_escapes`.
    Padding belongs to no row."""
    padding = _padded_count(max_escapes) - len(packed.columns)
    parts = (
        np.array([packed.base], np.uint32),
        packed.starts,
        np.pad(packed.columns, (0, padding)).view(np.uint32),
        np.pad(packed.exponents, (0, padding)).view(np.uint32),
    )
    return np.concatenate(parts).view(np.int32)


def skip_reason(dtype: str, shape: tuple[int, ...]) -> str | None:
    """Returns the reason why a tensor cannot be packed; None if it can."""
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
    """Returns the companions of all experts as one array, padded to the expert with the most escapes."""
    packed = [concat_pieces(pieces) for pieces in matrices]
    max_escapes = max(len(matrix.columns) for matrix in packed)
    return np.stack([escape_words(matrix, max_escapes) for matrix in packed])


def _rows(stored: StoredMatrix) -> Rows:
    (num_rows,) = stored.piece.constants  # rows of the whole matrix, which the escapes cover
    return Window4Rows(stored.raw_NB, [stored.companions[ESCAPES]], int(num_rows) + 1, stored.piece.first_row)


def _join(matrices: Sequence[StoredMatrix]) -> Rows | None:
    """Concatenates whole matrices, each with its own number of escapes; None for parts of matrices."""
    piece = matrices[0].piece
    is_whole = piece.first_row == 0 and piece.constants == (piece.shape[0],)
    if not is_whole or any(stored.piece.shape != piece.shape for stored in matrices):
        return None
    body_NB = concat_rows([stored.raw for stored in matrices]).view(len(matrices) * piece.shape[0], -1)
    return Window4Rows(body_NB, [stored.companions[ESCAPES] for stored in matrices], piece.shape[0] + 1)


def _weight(body: TensorSlice, escapes: TensorSlice) -> TensorSlice:
    *stack, num_rows, num_bytes = body.shape if len(body.shape) > 1 else (0, *body.shape)
    is_whole = num_bytes % GROUP_BYTES == 0 and escapes.dtype == "I32" and escapes.shape[:-1] == tuple(stack)
    spare = escapes.shape[-1] - num_words(num_rows, 0) if is_whole and escapes.shape else -1
    if spare < 0 or spare % 3:
        raise mismatch_error(body, escapes)
    shape = (*stack, num_rows, num_bytes // GROUP_BYTES * GROUP_NUMBERS)
    companions = (Companion(role=ESCAPES, tensor=escapes),)
    return replace(body, dtype="BF16", format=WINDOW4, shape=shape, companions=companions, constants=(num_rows,))


FORMATS = (
    StorageFormat(
        name=WINDOW4,
        loss=Loss.lossless,
        row_bytes=lambda num_columns: num_columns * (GROUP_BYTES / GROUP_NUMBERS + 3 * TYPICAL_ESCAPES) + 4,
        rows=_rows,
        companions=(ESCAPES,),
        join=_join,
    ),
)
METHODS = {METHOD: lambda tensors, quantization: pair_parts(tensors, quantization, WINDOW4, ESCAPES, _weight)}
