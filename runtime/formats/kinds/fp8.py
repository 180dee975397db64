"""FP8 in blocks that share a factor (DeepSeek-V3, MiniMax-M2): `X` in F8 beside `X_scale_inv`."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch

from ...errors import CheckpointError
from ...linear.rows import Rows
from ...plan.shape.shapes import TensorSlice
from ..scaled_rows import SCALES, ScaledRows, with_factors
from ..storage_format import Loss, StorageFormat, Stored

NAME, DTYPES = "fp8", {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
SUFFIX = "_scale_inv"
DEFAULT_BLOCK = (128, 128)


def _rows(stored: Stored) -> Rows:
    (scales,) = stored.piece.companions
    factors, dtype = stored.companions[SCALES], DTYPES[stored.piece.dtype]
    return ScaledRows(stored.raw_NB, dtype, factors, scales.block_rows, scales.block_columns)


def _pair(tensors: Mapping[str, TensorSlice], quantization: Mapping[str, object]) -> Mapping[str, TensorSlice]:
    """See `Method`."""
    block = quantization.get("weight_block_size") or DEFAULT_BLOCK
    rows, columns = block if isinstance(block, list | tuple) and len(block) == 2 else DEFAULT_BLOCK
    result = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype in DTYPES and name + SUFFIX in tensors:
            result[name] = _scaled(tensor, result.pop(name + SUFFIX), int(rows), int(columns))
        elif tensor.dtype in DTYPES and quantization.get("quant_method") == "fp8":
            raise CheckpointError(f"{tensor.file}: {name!r} is {tensor.dtype}, but {name + SUFFIX!r} is missing")
    return result


def _scaled(tensor: TensorSlice, scales: TensorSlice, rows: int, columns: int) -> TensorSlice:
    """A single factor is one for the whole tensor."""
    height, width = tensor.shape[-2:]
    if prod(scales.shape) == 1:
        scales, rows, columns = replace(scales, shape=(1,) * len(tensor.shape)), height, width
    return with_factors(replace(tensor, format=NAME), scales, rows, columns)


def _row_bytes(num_columns: int) -> float:
    return num_columns + 4 * -(-num_columns // DEFAULT_BLOCK[1]) / DEFAULT_BLOCK[0]


FORMATS = (StorageFormat(name=NAME, loss=Loss.exact, row_bytes=_row_bytes, rows=_rows, companions=(SCALES,)),)
METHODS = {"fp8": _pair}
