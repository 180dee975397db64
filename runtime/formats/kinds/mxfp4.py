"""MXFP4, as gpt-oss stores it: `X_blocks` with `X_scales`, both U8. Their rows are columns of parameter X of the model.

Each byte holds two FP4 numbers, and 16 bytes (32 numbers of a row) share an exponent. compressed-tensors stores the
same encoding under other names, see `compressed_tensors.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from ...errors import CheckpointError
from ...plan.shape.shapes import TensorSlice
from ..scaled_rows import SCALES, attach_factors, scaled_rows
from ..storage_format import Loss, StorageFormat

NAME, BLOCK_COLUMNS = "mxfp4", 32
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"


def _pair(tensors: Mapping[str, TensorSlice], quantization: Mapping[str, object]) -> Mapping[str, TensorSlice]:
    """See `storage_format.Method`."""
    result = dict(tensors)
    for name in tensors:
        base = name.removesuffix(BLOCKS_SUFFIX)
        if base != name and base + SCALES_SUFFIX in tensors:
            blocks, scales = result.pop(name), result.pop(base + SCALES_SUFFIX)
            if blocks.dtype != "U8":
                raise CheckpointError(
                    f"{blocks.file}: {blocks.name!r} is {blocks.dtype}; must be U8, two numbers per byte"
                )
            shape = (*blocks.shape[:-2], prod(blocks.shape[-2:]) * 2)
            numbers = replace(blocks, dtype="F4", format=NAME, shape=shape, is_transposed=True)
            result[base] = attach_factors(numbers, scales, 1, BLOCK_COLUMNS)
    return result


FORMATS = (
    StorageFormat(
        name=NAME,
        loss=Loss.exact,
        row_bytes=lambda num_columns: num_columns / 2 + num_columns / BLOCK_COLUMNS,
        rows=lambda stored: scaled_rows(stored.raw_NB, None, stored.companions[SCALES], 1, BLOCK_COLUMNS),
        companions=(SCALES,),
    ),
)
METHODS = {"mxfp4": _pair}
