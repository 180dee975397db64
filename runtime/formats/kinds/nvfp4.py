"""NVFP4: two FP4 numbers per byte (even column in the low nibble), an FP8 factor per 16 columns, and one global factor.

compressed-tensors divides by the global factor (`weight_global_scale`), ModelOpt multiplies by it (`weight_scale_2`).

Shapes: N rows of K numbers in B = K / 2 bytes, R rows selected.
"""

from dataclasses import replace
from functools import partial
from math import prod

import torch

from ...errors import CheckpointError
from ...kernels.arguments import FLOAT4
from ...linear.packed_rows import RowCodes, supports_row_codes
from ...linear.rows import Codes, Rows
from ...plan.shape.shapes import Companion, TensorSlice
from ..module_tensors import SCALES, require_matrix, require_shape
from ..scaled_rows import RowSelection, apply_by_group, byte_values, write_pairs
from ..storage_format import Loss, StorageFormat, StoredMatrix

DIVIDED, MULTIPLIED = "nvfp4", "nvfp4-modelopt"  # format names, by the operation with the global factor
WIDTH = 16  # columns per FP8 factor
OVERALL = "overall"  # companion role: the global factor


class Nvfp4Rows:
    """Rows of FP4 numbers times a group factor and a global factor; see `linear.rows.Rows`. `scales`: (N, K / WIDTH)
    FP8. `overall`: the global factor as (1, 1), or (N, 1) for concatenated matrices."""

    def __init__(self, raw_NB: torch.Tensor, scales: torch.Tensor, overall: torch.Tensor, *, divides: bool):
        self._raw_NB, self._scales, self._overall, self._divides = raw_NB, scales, overall, divides
        self.shape, self.device = (raw_NB.shape[0], 2 * raw_NB.shape[1]), raw_NB.device

    def dequantize(self, rows: RowSelection, out_RK: torch.Tensor) -> None:
        pair_by_byte = byte_values(None, self.device)  # None: FP4
        write_pairs(pair_by_byte, self._raw_NB[rows], out_RK)
        apply_by_group(out_RK, self.zeros_and_scales(rows)[1], WIDTH, torch.Tensor.mul_)

    def codes(self) -> Codes:
        """See `Rows`."""
        return Codes(
            encoding=FLOAT4,
            shape=self.shape,
            body=self._raw_NB[None],
            scales=self._scales[None],
            width=WIDTH,
            overall=self._overall.view(1, -1).expand(1, self.shape[0]),
            divides=self._divides,
        )

    def zeros_and_scales(self, rows: RowSelection) -> tuple[None, torch.Tensor]:
        """Returns None (no zero points) and the combined factors of the selected rows, (R, K / WIDTH) float32."""
        scales, overall = self._scales[rows].float(), self._overall
        overall = overall if len(overall) == 1 else overall[rows]
        return None, scales / overall if self._divides else scales * overall


def nvfp4_weight(numbers: TensorSlice, scales: TensorSlice, overall: TensorSlice, *, divides: bool) -> TensorSlice:
    """Returns the weight with its group factors (`scales`) and global factor (`overall`). `divides`: numbers are
    divided by the global factor. Raises CheckpointError if shapes do not fit."""
    num_rows, row_bytes = require_matrix(numbers)
    num_columns = 2 * row_bytes
    if prod(overall.shape) != 1:
        raise CheckpointError(f"{overall.file}: {overall.name!r} has shape {overall.shape}; must be one number")
    require_shape(scales, (num_rows, num_columns // WIDTH), f"{numbers.name!r} in groups of {WIDTH} columns")
    companions = (
        Companion(role=SCALES, tensor=scales, block_rows=1, block_columns=WIDTH),
        Companion(role=OVERALL, tensor=replace(overall, shape=(1, 1))),
    )
    name = DIVIDED if divides else MULTIPLIED
    return replace(numbers, dtype="F4", shape=(num_rows, num_columns), format=name, companions=companions)


def _rows(stored: StoredMatrix, *, divides: bool) -> Rows:
    companions = stored.companions
    rows = Nvfp4Rows(stored.raw_NB, companions[SCALES], companions[OVERALL], divides=divides)
    num_groups = companions[SCALES].shape[1]
    if not supports_row_codes(rows.shape, rows.device, num_groups):
        return rows
    # On a CPU, vector kernels decode these codes during a product.
    return RowCodes(rows, stored.raw_NB, FLOAT4, num_groups, rows.zeros_and_scales)


FORMATS = tuple(
    StorageFormat(
        name=name,
        loss=Loss.exact,
        row_bytes=lambda num_columns: num_columns / 2 + num_columns / WIDTH,
        rows=partial(_rows, divides=name == DIVIDED),
        companions=(SCALES, OVERALL),
    )
    for name in (DIVIDED, MULTIPLIED)
)
