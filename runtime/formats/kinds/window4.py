"""bfloat16 in 12 bits without loss, as `millrace pack` writes it: `X_window4` beside `X_escapes`.

Weights of a layer have few exponents: most lie in a window of 15, which with that of zero are codes of 4 bits. A number
is a byte of sign and mantissa and half a byte of its exponent's code; exponents without a code, escapes, lie beside it.
The entropy of published weights is 2.6 bits an exponent (DFloat11, arXiv 2504.11651): codes of variable length would
save a few per cent more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...kernels.arguments import GROUP_BYTES, GROUP_NUMBERS
from ...linear.blocks import below
from ...linear.rows import Rows
from ...linear.window4_rows import WINDOW4, Window4Rows
from ...plan.shape.shapes import Companion, TensorSlice
from ..own_store import METHOD, paired, unfit
from ..packing import ESCAPES, num_words
from ..storage_format import Loss, StorageFormat, Stored

TYPICAL_ESCAPES = 0.0005  # of published weights, as others measured them: 0.0003 to 0.0005


def _rows(stored: Stored) -> Rows:
    (num_rows,) = stored.piece.constants  # of the whole that escapes are those of
    return Window4Rows(stored.raw_NB, [stored.companions[ESCAPES]], int(num_rows) + 1, stored.piece.first_row)


def _join(matrices: Sequence[Stored]) -> Rows | None:
    """Each with as many escapes as it has."""
    piece = matrices[0].piece
    is_whole = piece.first_row == 0 and piece.constants == (piece.shape[0],)
    if not is_whole or any(stored.piece.shape != piece.shape for stored in matrices):
        return None
    body_NB = below([stored.raw for stored in matrices]).view(len(matrices) * piece.shape[0], -1)
    return Window4Rows(body_NB, [stored.companions[ESCAPES] for stored in matrices], piece.shape[0] + 1)


def _row_bytes(num_columns: int) -> float:
    return num_columns * (GROUP_BYTES / GROUP_NUMBERS + 3 * TYPICAL_ESCAPES) + 4


def _pair(tensors: Mapping[str, TensorSlice], quantization: Mapping[str, object]) -> Mapping[str, TensorSlice]:
    """See `Method`."""
    return paired(tensors, quantization, WINDOW4, ESCAPES, _weight)


def _weight(body: TensorSlice, escapes: TensorSlice) -> TensorSlice:
    *stack, num_rows, num_bytes = body.shape if len(body.shape) > 1 else (0, *body.shape)
    is_whole = num_bytes % GROUP_BYTES == 0 and escapes.dtype == "I32" and escapes.shape[:-1] == tuple(stack)
    spare = escapes.shape[-1] - num_words(num_rows, 0) if is_whole and escapes.shape else -1
    if spare < 0 or spare % 3:
        raise unfit(body, escapes)
    shape = (*stack, num_rows, num_bytes // GROUP_BYTES * GROUP_NUMBERS)
    companions = (Companion(role=ESCAPES, tensor=escapes),)
    return replace(body, dtype="BF16", format=WINDOW4, shape=shape, companions=companions, constants=(num_rows,))


FORMATS = (
    StorageFormat(
        name=WINDOW4, loss=Loss.lossless, row_bytes=_row_bytes, rows=_rows, companions=(ESCAPES,), join=_join
    ),
)
METHODS = {METHOD: _pair}
