"""Weights rounded by `millrace pack format=int8|int4|fp8`: codes beside scales of rows or of groups of columns.

`X_int8-rows`, `X_int4-groups` and `X_fp8-rows`, uint8, beside `X_scales`, bfloat16 (N, G); `linear/packed_rows.py` says
how codes lie.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ...kernels.arguments import GROUP_NUMBERS, INT4
from ...linear.packed_rows import ROUNDED, CodedRows, bytes_of_codes
from ...linear.rows import Rows
from ...plan.shape.shapes import Companion, TensorSlice
from ..own_store import METHOD, paired, unfit
from ..scaled_rows import SCALES
from ..storage_format import Loss, StorageFormat, Stored

USUAL_GROUP = 64  # columns


def _rows(way: int, stored: Stored) -> Rows:
    return CodedRows(stored.raw_NB, stored.companions[SCALES], way)


def _row_bytes(way: int, num_columns: int) -> float:
    num_scales = num_columns / USUAL_GROUP if way == INT4 else 1
    return bytes_of_codes(way, num_columns) + 2 * num_scales


def _pair(tensors: Mapping[str, TensorSlice], quantization: Mapping[str, object]) -> Mapping[str, TensorSlice]:
    """See `Method`."""
    for name in ROUNDED:
        tensors = paired(tensors, quantization, name, SCALES, partial(_weight, name))
    return tensors


def _weight(name: str, codes: TensorSlice, scales: TensorSlice) -> TensorSlice:
    if len(codes.shape) < 2 or scales.dtype != "BF16" or scales.shape[:-1] != codes.shape[:-1]:
        raise unfit(codes, scales)
    *rows, num_bytes = codes.shape
    num_columns, num_groups = (
        num_bytes * GROUP_NUMBERS // bytes_of_codes(ROUNDED[name], GROUP_NUMBERS),
        scales.shape[-1],
    )
    if num_columns % GROUP_NUMBERS or not _are_groups(num_columns, num_groups):
        raise unfit(codes, scales)
    companion = Companion(role=SCALES, tensor=scales, block_rows=1, block_columns=num_columns // num_groups)
    shape = (*rows, num_columns)
    return replace(codes, dtype="BF16", format=name, shape=shape, companions=(companion,))


def _are_groups(num_columns: int, num_groups: int) -> bool:
    """Whether they are one, or equal ones whose width is a power of two from 32 to 256."""
    if num_groups <= 1:
        return num_groups == 1
    width, rest = divmod(num_columns, num_groups)
    return not rest and width in (32, 64, 128, 256)


FORMATS = tuple(
    StorageFormat(
        name=name, loss=Loss.lossy, row_bytes=partial(_row_bytes, way), rows=partial(_rows, way), companions=(SCALES,)
    )
    for name, way in ROUNDED.items()
)
METHODS = {METHOD: _pair}
