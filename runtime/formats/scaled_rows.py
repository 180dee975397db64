"""Dequantizes rows of published formats: integers with a zero point and scale per group of columns (`IntegerRows`), FP8
and FP4 with a factor per block (`ScaledRows`).

A word is 32 bits with several codes. A pair is two float32 numbers in one 64-bit element: torch copies or looks up both
at once.

Shapes: N rows of K numbers; R selected rows; G groups of columns, each with one factor; B bytes or W words per row.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from ..errors import CheckpointError
from ..kernels.arguments import FLOAT4, FLOAT8_E5M2, SCALED_FLOAT8
from ..linear.packed_rows import RowCodes, supports_row_codes
from ..linear.rows import Codes, Rows
from ..plan.shape.shapes import Companion, TensorSlice

WORD_BITS = 32
SCALES = "scales"  # companion role
FACTORS = ("F32", "F16", "BF16", "F64", "F8_E8M0", "F8_E4M3", "U8")  # dtypes of factors
ENCODINGS = {
    None: FLOAT4,
    torch.float8_e4m3fn: SCALED_FLOAT8,
}  # those that the CPU's vector kernels decode, by dtype; None: FP4
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of FP4 codes 0 to 7; the highest bit is the sign
RowSelection = slice | torch.Tensor  # consecutive rows, or increasing row numbers
Write = Callable[[RowSelection, torch.Tensor], None]  # writes the codes of selected rows into (R, K) float32
Factors = Callable[[RowSelection], torch.Tensor]  # returns (R, G) float32, or (1, 1) if all numbers share one factor
Apply = Callable[[torch.Tensor, torch.Tensor], object]  # in-place operator on (numbers, factors), such as mul_


class IntegerRows:
    """Rows of `(code - zero) * scale`; see `linear.rows.Rows`. float32 is exact: codes and zero points have at most
    nine bits, scales 16."""

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        write: Write,
        zeros: Factors,
        scales: Factors,
        width: int,
        groups: torch.Tensor | None = None,
        *,
        codes: Callable[[], Codes],
    ):
        """`write` writes the codes of selected rows; `zeros` and `scales` return their zero points and scales. `width`:
        columns per group. `groups`: group number of each column, (K,), or (E, K) for E concatenated matrices; None if
        group g has columns [g * width, (g + 1) * width). `codes`: see `Rows`."""
        self.shape, self.device = shape, device
        self._write, self._zeros, self._scales, self._width, self._groups = write, zeros, scales, width, groups
        self.codes = codes

    def zeros_and_scales(self, rows: RowSelection) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns zero points and scales of the selected rows: float32, (R, G), or (1, 1) if all numbers share one."""
        return self._zeros(rows), self._scales(rows)

    def dequantize(self, rows: RowSelection, out_RK: torch.Tensor) -> None:
        self._write(rows, out_RK)
        for factors, apply in ((self._zeros, torch.Tensor.sub_), (self._scales, torch.Tensor.mul_)):
            if self._groups is None or self._groups.dim() == 1:
                apply_by_group(out_RK, factors(rows), self._width, apply, self._groups)
            else:
                # Concatenated matrices of `height` rows, each with its own groups: apply factors matrix by matrix.
                assert isinstance(rows, slice), "rows of several matrices are selected by slices"
                factors_RG, height = factors(rows), self.shape[0] // len(self._groups)
                first, stop, _ = rows.indices(self.shape[0])
                for matrix in range(first // height, -(-stop // height)):
                    # Rows of `out_RK` that belong to this matrix.
                    begin, end = max(matrix * height, first) - first, min((matrix + 1) * height, stop) - first
                    apply(out_RK[begin:end], factors_RG[begin:end].index_select(1, self._groups[matrix]))


def apply_by_group(
    out_RK: torch.Tensor, factors_RG: torch.Tensor, width: int, apply: Apply, groups: torch.Tensor | None = None
) -> None:
    """Applies one factor per row and group to `out_RK`, in place. Groups have `width` consecutive columns (the last one
    may have fewer). If `groups` (K,) is given, it has the group number of each column instead."""
    num_whole = out_RK.shape[1] // width
    if factors_RG.shape[1] == 1:
        apply(out_RK, factors_RG)
    elif groups is not None:
        apply(out_RK, factors_RG.index_select(1, groups))  # six times as fast as plain indexing
    else:
        apply(out_RK[:, : num_whole * width].unflatten(1, (num_whole, width)), factors_RG[:, :num_whole, None])
        if num_whole < factors_RG.shape[1]:
            apply(out_RK[:, num_whole * width :], factors_RG[:, num_whole:])


def write_words(words_RW: torch.Tensor, num_bits: int, out_RK: torch.Tensor) -> None:
    """Writes the 4- or 8-bit codes in contiguous int32 words as numbers, lowest bits first. Ignores padding after the
    last column."""
    bytes_RB = words_RW.view(torch.uint8)
    if num_bits == 4:
        write_pairs(nibble_pairs(bytes_RB.device), bytes_RB, out_RK)
    else:
        out_RK.copy_(bytes_RB[:, : out_RK.shape[1]])


def write_pairs(pairs: torch.Tensor, bytes_RB: torch.Tensor, out_RK: torch.Tensor) -> None:
    """Writes the two numbers that each byte encodes. `pairs`: table from byte to pair, (256,), or E such tables one
    after another, (256 * E,). Then `bytes_RB` are integers, the byte plus 256 times the number of its table."""
    indices = bytes_RB.flatten().int()
    if out_RK.shape[1] == 2 * bytes_RB.shape[1]:
        torch.index_select(pairs, 0, indices, out=out_RK.view(pairs.dtype).flatten())
    else:
        out_RK.copy_(pairs[indices].view(out_RK.dtype).view(len(out_RK), 2 * bytes_RB.shape[1])[:, : out_RK.shape[1]])


@lru_cache
def byte_halves(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tables (256,): from byte to low nibble, and to high nibble. Cached, since a copy to the device waits
    for its queued work."""
    byte = torch.arange(256)
    return (byte & 15).to(device), (byte >> 4).to(device)


@lru_cache
def nibble_pairs(device: torch.device) -> torch.Tensor:
    """Returns a table (256,) from byte to the pair of its nibbles, low nibble first."""
    return pack_pairs(*byte_halves(device))


def pack_pairs(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Returns pairs (n,) int64 of two tensors (n,) of numbers."""
    return torch.stack([first, second], dim=1).float().view(torch.int64).flatten()


def extract_fields(words_RW: torch.Tensor, positions: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Returns the codes numbered `positions` in each row of words: (R, positions). Code 0 has the lowest bits."""
    per_word = WORD_BITS // num_bits
    shifts = (positions % per_word * num_bits).to(words_RW.dtype)
    return words_RW[:, positions // per_word] >> shifts & ((1 << num_bits) - 1)


def row_numbers(rows: RowSelection, num_rows: int, first_row: int, device: torch.device) -> torch.Tensor:
    """Converts a selection among `num_rows` rows to row numbers in the whole weight, in which these rows begin at
    `first_row`."""
    if isinstance(rows, slice):
        start, stop, _ = rows.indices(num_rows)
        return torch.arange(first_row + start, first_row + stop, device=device)
    return rows + first_row


def select_columns(matrix: torch.Tensor, rows: RowSelection, num_rows: int, first_row: int) -> torch.Tensor:
    """Returns the selected rows of a matrix stored transposed, as columns; a view if `rows` is a slice. For `num_rows`
    and `first_row` see `row_numbers`."""
    if isinstance(rows, slice):
        start, stop, _ = rows.indices(num_rows)
        return matrix[:, first_row + start : first_row + stop]
    return matrix[:, rows + first_row]


class ScaledRows:
    """Rows of FP8 numbers, or FP4 numbers (two per byte, the even column in the low nibble), times a factor per block.

    Source of FP4 and its exponents: OCP Microscaling Formats 1.0.
    """

    def __init__(
        self, raw_NB: torch.Tensor, dtype: torch.dtype | None, scales: torch.Tensor, block_rows: int, block_columns: int
    ):
        """`raw_NB`: bytes of `dtype` numbers, None for FP4. `scales`: (N / block_rows, K / block_columns)."""
        self._raw_NB, self._dtype, self._scales = raw_NB, dtype, scales
        self._block_rows, self._block_columns = block_rows, block_columns
        self.shape = (raw_NB.shape[0], raw_NB.shape[1] * (2 if dtype is None else 1))
        self.device = raw_NB.device

    def dequantize(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        table = byte_values(self._dtype, self.device)
        out = out_RK.view(table.dtype).flatten()  # for FP4 64-bit elements: a byte writes two numbers
        torch.index_select(table, 0, self._raw_NB[rows].flatten().int(), out=out)
        apply_by_group(out_RK, self._factors(rows), self._block_columns, torch.Tensor.mul_)

    def codes(self) -> Codes:
        """See `Rows`."""
        return Codes(
            encoding=FLOAT8_E5M2 if self._dtype == torch.float8_e5m2 else ENCODINGS[self._dtype],
            shape=self.shape,
            body=self._raw_NB[None],
            scales=self._scales[None],
            scale_rows=self._block_rows,
            width=self._block_columns,
        )

    def zeros_and_scales(self, rows: RowSelection) -> tuple[None, torch.Tensor]:
        """Returns None (no zero points) and the factors of the selected rows, (R, K / block_columns) float32."""
        return None, self._factors(rows)

    def _factors(self, rows: RowSelection) -> torch.Tensor:
        numbers = torch.arange(self.shape[0], device=self.device)[rows]
        return self._scales[numbers // self._block_rows].float()


def scaled_rows(
    raw_NB: torch.Tensor, dtype: torch.dtype | None, scales: torch.Tensor, block_rows: int, block_columns: int
) -> Rows:
    """Returns ScaledRows, wrapped in RowCodes if the CPU's vector kernels can decode them during a product."""
    rows = ScaledRows(raw_NB, dtype, scales, block_rows, block_columns)
    num_groups = scales.shape[1]
    has_equal_groups = num_groups == 1 or num_groups * block_columns == rows.shape[1]
    if dtype not in ENCODINGS or not has_equal_groups or not supports_row_codes(rows.shape, rows.device, num_groups):
        return rows
    return RowCodes(rows, raw_NB, ENCODINGS[dtype], num_groups, rows.zeros_and_scales)


@lru_cache
def byte_values(dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    """Returns a table (256,) from byte to the float32 that it encodes, or for FP4 (None) to a pair. Looking up FP8 is
    five times as fast as torch's conversion on a CPU."""
    if dtype is not None:
        return torch.arange(256, dtype=torch.uint8).view(dtype).float().to(device)
    numbers = torch.tensor([*E2M1, *(-magnitude for magnitude in E2M1)], device=device)
    low, high = byte_halves(device)
    return pack_pairs(numbers[low], numbers[high])


def attach_factors(tensor: TensorSlice, factors: TensorSlice, rows: int, columns: int) -> TensorSlice:
    """Returns the weight with a factor per block of `rows` x `columns`. Raises CheckpointError if dtype or shape of the
    factors does not fit."""
    if len(tensor.shape) < 2 or factors.dtype not in FACTORS:
        raise CheckpointError(
            f"{factors.file}: {factors.name!r} is {factors.dtype}, {tensor.name!r} has shape {tensor.shape}; expected "
            f"a matrix and factors in {', '.join(FACTORS)}"
        )
    *stack, height, width = tensor.shape
    expected = (*stack, -(-height // rows), -(-width // columns))
    if factors.shape != expected:
        raise CheckpointError(
            f"{factors.file}: {factors.name!r} has shape {factors.shape}; blocks of {rows} x {columns} "
            f"(weight_block_size in config.json) of {tensor.name!r}, {tensor.shape}, need {expected}"
        )
    dtype = "F8_E8M0" if factors.dtype == "U8" else factors.dtype  # some checkpoints store exponents as bytes
    companion = Companion(role=SCALES, tensor=replace(factors, dtype=dtype), block_rows=rows, block_columns=columns)
    return replace(tensor, companions=(companion,))
