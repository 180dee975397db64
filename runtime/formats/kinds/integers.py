"""Integer weights of compressed-tensors: `weight_packed` (N, words) of 4 or 8 bits, or `weight` in int8.

A 32-bit word of `weight_packed` holds codes of neighboring columns, lowest bits first. Codes are unsigned: half of
their range was added. `weight_zero_point` is stored like `weight_scale`, or packed in words of neighboring rows. The
number is (code - zero) * scale, with a scale per tensor, row, or group of columns. With activation ordering,
`weight_g_idx` holds the group number of each column.

Shapes: N rows of K numbers in W words, R rows selected.
"""

from dataclasses import replace
from functools import partial

import torch

from ...kernels.arguments import BYTES, NIBBLES, SIGNED_BYTES
from ...linear.packed_rows import RowCodes, supports_row_codes
from ...linear.rows import Codes, Rows
from ...plan.shape.shapes import Companion, TensorSlice
from ..module_tensors import GROUPS, SCALES, ZEROS, column_groups, group_width, require_shape, row_factors
from ..scaled_rows import WORD_BITS, Factors, IntegerRows, RowSelection, Write, extract_fields, row_numbers, write_words
from ..storage_format import Loss, StorageFormat, StoredMatrix

PLAIN, WORDS = "int8", {4: "packed-int4", 8: "packed-int8"}
USUAL_WIDTH = 128
ENCODINGS = {4: NIBBLES, 8: BYTES}


def plain_integers(weight: TensorSlice, scales: TensorSlice, zeros: TensorSlice | None) -> TensorSlice:
    """Returns an int8 weight with its scales and zero points, which may be per tensor, row or group of columns."""
    num_rows, num_columns = weight.shape
    companions = [_scales(scales, num_rows, num_columns)]
    if zeros is not None:
        companions.append(row_factors(zeros, num_rows, ZEROS))
    return replace(weight, format=PLAIN, companions=tuple(companions))


def integers_in_words(
    words: TensorSlice,
    shape: tuple[int, int],
    num_bits: int,
    scales: TensorSlice,
    zeros: TensorSlice | None,
    groups: TensorSlice | None,
) -> TensorSlice:
    """Returns the weight of `shape` (N, K) whose codes of `num_bits` are packed in `words`."""
    num_rows, num_columns = shape
    companions = [_scales(scales, num_rows, num_columns)]
    num_groups = companions[0].tensor.shape[1]
    if zeros is not None and zeros.dtype == "I32":
        num_words = -(-num_rows * num_bits // WORD_BITS)
        require_shape(zeros, (num_words, num_groups), f"{words.name!r} with {num_groups} groups")
        companions.append(Companion(role=ZEROS, tensor=zeros, block_rows=WORD_BITS // num_bits))
    elif zeros is not None:
        companions.append(row_factors(zeros, num_rows, ZEROS))
    if groups is not None:
        companions.append(column_groups(groups, num_columns, num_groups))
    return replace(words, shape=shape, format=WORDS[num_bits], companions=tuple(companions))


def _scales(scales: TensorSlice, num_rows: int, num_columns: int) -> Companion:
    """Returns the companion of scales, with `block_columns` set to the columns per group."""
    companion = row_factors(scales, num_rows)
    return replace(companion, block_columns=group_width(num_columns, companion.tensor, companion.tensor.shape[1]))


def _plain_rows(stored: StoredMatrix) -> Rows:
    codes_NK = stored.raw_NB.view(torch.int8)

    def write(rows: RowSelection, out_RK: torch.Tensor) -> None:
        out_RK.copy_(codes_NK[rows])

    return _integer_rows(stored, write, _plain_zeros(stored, 0), SIGNED_BYTES, 0)


def _word_rows(num_bits: int, stored: StoredMatrix) -> Rows:
    words_NW = stored.raw_NB.view(torch.int32)

    def write(rows: RowSelection, out_RK: torch.Tensor) -> None:
        write_words(words_NW[rows], num_bits, out_RK)

    def packed_zeros(rows: RowSelection) -> torch.Tensor:
        numbers = row_numbers(rows, len(words_NW), 0, words_NW.device)
        return extract_fields(stored.companions[ZEROS].t(), numbers, num_bits).t().float()

    if ZEROS not in stored.companions or stored.companions[ZEROS].dtype != torch.int32:
        offset = 1 << (num_bits - 1)
        return _integer_rows(stored, write, _plain_zeros(stored, offset), ENCODINGS[num_bits], offset)
    return _integer_rows(stored, write, packed_zeros, ENCODINGS[num_bits], 0, zero_bits=num_bits)


def _integer_rows(
    stored: StoredMatrix, write: Write, zeros: Factors, encoding: int, zero_offset: int, *, zero_bits: int = 0
) -> Rows:
    """Returns rows that the CPU's vector kernels can decode, if they support these; see `IntegerRows` for `write` and
    `zeros`. `zero_offset` is added to stored zero points. `zero_bits`: bits of a zero point packed in words, else 0."""
    scales, shape = stored.companions[SCALES], (stored.source.shape[0], stored.source.shape[1])
    width = stored.source.companions[0].block_columns
    groups, num_groups = stored.companions.get(GROUPS), scales.shape[1]

    def codes() -> Codes:
        stored_zeros, expanded = stored.companions.get(ZEROS), (1, shape[0], num_groups)
        if stored_zeros is not None:
            stored_zeros = stored_zeros[None] if zero_bits else stored_zeros.expand(expanded)
        return Codes(
            encoding=encoding,
            shape=shape,
            body=stored.raw_NB[None],
            scales=scales.expand(expanded),
            width=width,
            groups=None if groups is None else groups[None],
            zeros=stored_zeros,
            zero_bits=zero_bits,
            zero_offset=zero_offset,
        )

    row_scales = partial(_row_values, scales, 0)
    rows = IntegerRows(shape, stored.raw.device, write, zeros, row_scales, width, groups, codes=codes)
    if groups is not None or not supports_row_codes(shape, rows.device, num_groups):
        return rows
    return RowCodes(rows, stored.raw_NB, encoding, num_groups, rows.zeros_and_scales)


def _plain_zeros(stored: StoredMatrix, zero_offset: int) -> Factors:
    """Returns a function that gives the zero points of selected rows, plus `zero_offset`. Stored zero points have one
    entry per scale; without stored ones they are 0."""
    zeros = stored.companions.get(ZEROS)
    if zeros is None:
        zeros = torch.zeros(1, 1, device=stored.raw.device)
    return partial(_row_values, zeros, zero_offset)


def _row_values(factors: torch.Tensor, offset: int, rows: RowSelection) -> torch.Tensor:
    """Returns the factors of selected rows plus `offset`, (R, G) float32; (1, G) if all rows share them."""
    return (factors if len(factors) == 1 else factors[rows]).float() + offset


FORMATS = (
    StorageFormat(
        name=PLAIN,
        loss=Loss.exact,
        row_bytes=lambda num_columns: num_columns + 2,
        rows=_plain_rows,
        companions=(SCALES, ZEROS),
    ),
    *(
        StorageFormat(
            name=name,
            loss=Loss.exact,
            # Typical: one scale per row for 8 bits, one per group of columns for 4 bits.
            row_bytes=lambda num_columns, num_bits=num_bits: (
                num_columns * num_bits / 8 + 2 * (num_columns / USUAL_WIDTH if num_bits == 4 else 1)
            ),
            rows=partial(_word_rows, num_bits),
            companions=(SCALES, ZEROS, GROUPS),
        )
        for num_bits, name in WORDS.items()
    ),
)
