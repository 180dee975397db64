"""AWQ in its `gemm` version: `qweight` (K, N / 8), `qzeros` (G, N / 8) and `scales` (G, N).

Rows and columns are those of the weight: N rows (outputs) of K columns (inputs). `qweight` is stored transposed: a
32-bit word holds the 4-bit codes of eight neighboring rows in one column. From the lowest bits, these are rows 0, 2, 4,
6, 1, 3, 5, 7. Words of `qzeros` hold zero points in the same order. The number is (code - zero) * scale.

Shapes: N rows and K columns of a weight, R rows selected; G groups of columns; W words.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from ...kernels.arguments import ROW_WORDS
from ...linear.packed_rows import ColumnCodes, supports_column_codes
from ...linear.rows import Codes, Rows
from ...plan.shape.shapes import Companion, TensorSlice
from ..module_tensors import (
    FLOATS,
    SCALES,
    ZEROS,
    ModuleTensors,
    get_integer,
    group_width,
    modules_with,
    replace_tensors,
    require_matrix,
    require_shape,
    unsupported_error,
)
from ..scaled_rows import IntegerRows, RowSelection, row_numbers, select_columns
from ..storage_format import Loss, StorageFormat, StoredMatrix, join_by_columns

NAME, NUM_BITS, PER_WORD, USUAL_WIDTH = "awq-int4", 4, 8, 128
NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # row r of the eight has bits 4 * NIBBLES[r] and up of its word
LEAVES = ("qweight", "qzeros", "scales")
READABLE = "AWQ of 4 bits in version gemm"


def _rows(stored: StoredMatrix) -> Rows:
    source = stored.source
    num_rows, num_columns = source.shape
    words_KW = stored.raw.view(torch.int32).view(num_columns, -1)
    position = (num_rows, source.first_row)  # of these rows in the whole weight, see `row_numbers`

    def write(rows: RowSelection, out_RK: torch.Tensor) -> None:
        out_RK.copy_(_codes(words_KW, rows, *position))

    def zeros(rows: RowSelection) -> torch.Tensor:
        return _codes(stored.companions[ZEROS], rows, *position).float()

    def scales(rows: RowSelection) -> torch.Tensor:
        return select_columns(stored.companions[SCALES], rows, *position).t().float()

    width = next(companion.block_columns for companion in source.companions if companion.role == SCALES)
    shape, device = (num_rows, num_columns), stored.raw.device

    def codes() -> Codes:
        # The weight may be a slice of stored rows. Scales are cut to the slice. Codes are cut in front only, at the
        # word that contains the first row. Zero points are not cut: `first_row` selects them.
        begin, end = source.first_row, source.first_row + num_rows
        return Codes(
            encoding=ROW_WORDS,
            shape=shape,
            body=words_KW.t()[None, begin // PER_WORD :],
            scales=stored.companions[SCALES].t()[None, begin:end],
            width=width,
            zeros=stored.companions[ZEROS].t()[None],
            zero_bits=NUM_BITS,
            first_row=begin,
        )

    rows = IntegerRows(shape, device, write, zeros, scales, width, codes=codes)
    if not supports_column_codes(shape, device, ROW_WORDS, source.first_row):
        return rows
    num_groups = len(stored.companions[SCALES])
    return ColumnCodes(
        rows,
        words_KW,
        encoding=ROW_WORDS,  # words of neighboring rows
        first_row=source.first_row,
        num_groups=num_groups,
        get_scales=rows.zeros_and_scales,
        width=width,
    )


def _codes(words_KW: torch.Tensor, rows: RowSelection, num_rows: int, first_row: int) -> torch.Tensor:
    """Returns the codes of the selected rows: (R, K). For a slice, each word is read once."""
    numbers = row_numbers(rows, num_rows, first_row, words_KW.device)
    shifts = _shifts(words_KW.device)
    if isinstance(rows, torch.Tensor) or not len(numbers):
        return (words_KW[:, numbers // PER_WORD].t() >> shifts[numbers % PER_WORD, None]) & 15
    # Decode all eight rows of each word that overlaps the slice, then cut off rows before and after the slice.
    start, stop, _ = rows.indices(num_rows)
    first, last = (first_row + start) // PER_WORD, -(-(first_row + stop) // PER_WORD)
    words_WK = words_KW[:, first:last].t().contiguous()
    codes_RK = (words_WK[:, None] >> shifts[:, None]).bitwise_and_(15).flatten(0, 1)
    offset = first_row + start - first * PER_WORD
    return codes_RK[offset : offset + stop - start]


@lru_cache
def _shifts(device: torch.device) -> torch.Tensor:
    """Returns the shift to each row's code in a word, (8,). Cached, since a copy to the device waits for its queued
    work."""
    return (NUM_BITS * torch.tensor(NIBBLES, dtype=torch.int32)).to(device)


def _pair(tensors: Mapping[str, TensorSlice], quantization: Mapping[str, object]) -> Mapping[str, TensorSlice]:
    """See `storage_format.Method`."""
    if quantization.get("quant_method") != "awq":
        return tensors
    version = str(quantization.get("version") or quantization.get("checkpoint_format") or "gemm").lower()
    num_bits = get_integer(quantization, "bits", NUM_BITS)
    if version != "gemm" or num_bits != NUM_BITS:
        raise unsupported_error(f"its weights are AWQ of version {version!r} with {num_bits} bits", READABLE)
    weights = {module.path: _weight(module) for module in modules_with(tensors, "qweight")}
    return replace_tensors(tensors, weights, LEAVES)


def _weight(module: ModuleTensors) -> TensorSlice:
    words, scales = module.require("qweight", "I32"), module.require("scales", *FLOATS)
    (num_columns, num_words), (num_groups, _) = require_matrix(words), require_matrix(scales)
    num_rows = num_words * PER_WORD
    require_shape(scales, (num_groups, num_rows), f"{words.name!r}, {words.shape},")
    zeros = require_shape(module.require("qzeros", "I32"), (num_groups, num_words), f"{words.name!r}, {words.shape},")
    width = group_width(num_columns, scales, num_groups)
    return replace(
        words,
        shape=(num_rows, num_columns),
        format=NAME,
        companions=(Companion(role=SCALES, tensor=scales, block_columns=width), Companion(role=ZEROS, tensor=zeros)),
        is_interleaved=True,
    )


FORMATS = (
    StorageFormat(
        name=NAME,
        loss=Loss.exact,
        # A group has a float16 scale and a 4-bit zero point.
        row_bytes=lambda num_columns: num_columns / 2 + num_columns / USUAL_WIDTH * 2.5,
        rows=_rows,
        companions=(SCALES, ZEROS),
        is_output_major=True,  # rows of the weight are outputs, although words are stored transposed
        # Joins the rows of weights, which are columns of `qweight`. It has a row of words for each of K columns.
        join=lambda matrices: join_by_columns(matrices, matrices[0].source.shape[1]),
    ),
)
METHODS = {"awq": _pair}
