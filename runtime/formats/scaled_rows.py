"""Small floats whose blocks share a factor, and how a weight is paired with its factors."""

from dataclasses import replace
from functools import lru_cache

import torch

from ..errors import CheckpointError
from ..kernels.arguments import FLOAT4, FLOAT8_E5M2, SCALED_FLOAT8
from ..linear.packed_rows import RowCodes, fits_in_rows
from ..linear.rows import Codes, Rows
from ..plan.shape.shapes import Companion, TensorSlice
from .integer_rows import Chosen, apply_by_group

SCALES = "scales"
FACTORS = ("F32", "F16", "BF16", "F64", "F8_E8M0", "F8_E4M3", "U8")
WAYS = {None: FLOAT4, torch.float8_e4m3fn: SCALED_FLOAT8}  # of dtypes, None for FP4
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # FP4's magnitudes; the highest of its four bits is the sign


class ScaledRows:
    """FP8 numbers, or FP4 ones two in a byte with the even column in its low half, times the factor of their block.

    Source of FP4 and its exponents: OCP Microscaling Formats 1.0.
    """

    def __init__(
        self, raw_NB: torch.Tensor, dtype: torch.dtype | None, scales: torch.Tensor, block_rows: int, block_columns: int
    ):
        """`raw_NB`: bytes; `dtype`: what they hold, None for FP4; `scales` (N / block_rows, K / block_columns)."""
        self._raw_NB, self._dtype, self._scales = raw_NB, dtype, scales
        self._block_rows, self._block_columns = block_rows, block_columns
        self.shape = (raw_NB.shape[0], raw_NB.shape[1] * (2 if dtype is None else 1))
        self.device = raw_NB.device

    def dequantize(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        numbers_of = numbers_of_bytes(self._dtype, self.device)
        out = out_RK.view(numbers_of.dtype).flatten()
        torch.index_select(numbers_of, 0, self._raw_NB[rows].flatten().int(), out=out)
        apply_by_group(out_RK, self._factors(rows), self._block_columns, torch.Tensor.mul_)

    def codes(self) -> Codes:
        """See `Rows`."""
        return Codes(
            way=FLOAT8_E5M2 if self._dtype == torch.float8_e5m2 else WAYS[self._dtype],
            shape=self.shape,
            body=self._raw_NB[None],
            scales=self._scales[None],
            scale_rows=self._block_rows,
            width=self._block_columns,
        )

    def shared(self, rows: Chosen) -> tuple[None, torch.Tensor]:
        """Returns no zero points, and the factors of the wanted rows, (R, K / block_columns) float32."""
        return None, self._factors(rows)

    def _factors(self, rows: Chosen) -> torch.Tensor:
        numbers = torch.arange(self.shape[0], device=self.device)[rows]
        return self._scales[numbers // self._block_rows].float()


def scaled_rows(
    raw_NB: torch.Tensor, dtype: torch.dtype | None, scales: torch.Tensor, block_rows: int, block_columns: int
) -> Rows:
    """Returns ScaledRows of these, which vectors decode inside of a product where they can."""
    rows = ScaledRows(raw_NB, dtype, scales, block_rows, block_columns)
    num_groups = scales.shape[1]
    is_even = num_groups == 1 or num_groups * block_columns == rows.shape[1]
    if dtype not in WAYS or not is_even or not fits_in_rows(rows.shape, rows.device, num_groups):
        return rows
    return RowCodes(rows, raw_NB, WAYS[dtype], num_groups, rows.shared)


@lru_cache
def numbers_of_bytes(dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    """(256,): what each byte holds, a float32 or, of FP4, two of them as one element of 64 bits. Five times as fast as
    torch's own conversion of FP8 on a CPU."""
    if dtype is not None:
        return torch.arange(256, dtype=torch.uint8).view(dtype).float().to(device)
    numbers = torch.tensor([*E2M1, *(-magnitude for magnitude in E2M1)])
    pairs = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], dim=1)
    return pairs.view(torch.int64).flatten().to(device)


def with_factors(tensor: TensorSlice, factors: TensorSlice, rows: int, columns: int) -> TensorSlice:
    """Returns the weight with its factors, of blocks of so many rows and columns. Raises CheckpointError for factors
    that do not fit it."""
    if len(tensor.shape) < 2 or factors.dtype not in FACTORS:
        raise CheckpointError(
            f"{factors.file}: {factors.name!r} is {factors.dtype}, {tensor.name!r} has shape {tensor.shape}: no matrix "
            f"with factors, which are {', '.join(FACTORS)}"
        )
    *stack, height, width = tensor.shape
    expected = (*stack, -(-height // rows), -(-width // columns))
    if factors.shape != expected:
        raise CheckpointError(
            f"{factors.file}: {factors.name!r} has shape {factors.shape}; blocks of {rows} x {columns} "
            f"(weight_block_size in config.json) of {tensor.name!r}, {tensor.shape}, need {expected}"
        )
    dtype = "F8_E8M0" if factors.dtype == "U8" else factors.dtype  # exponents, saved as bytes by some
    companion = Companion(role=SCALES, tensor=replace(factors, dtype=dtype), block_rows=rows, block_columns=columns)
    return replace(tensor, companions=(companion,))
