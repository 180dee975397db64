"""FP8 with a factor per block (DeepSeek-V3, MiniMax-M2), per tensor or per row (FBGEMM, vLLM).

A checkpoint has FP8 numbers under the weight's name X, and the factors under `X_scale_inv` or `X_scale`, in DeepSeek-V4
under `scale` instead of `weight`. Experts of DeepSeek-V4 are MXFP4, two numbers in a byte of I8.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch

from ...errors import CheckpointError
from ...linear.rows import Rows
from ...plan.shape.shapes import TensorSlice
from ..scaled_rows import SCALES, attach_factors, scaled_rows
from ..storage_format import Loss, StorageFormat, StoredMatrix
from .mxfp4 import BLOCK_COLUMNS
from .mxfp4 import NAME as MXFP4

NAME, DTYPES = "fp8", {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
SUFFIXES = ("_scale_inv", "_scale")
ACTIVATION_SCALES = ("activation_scale", "input_scale", "input_scale_ub")  # tensors that are ignored
DEFAULT_BLOCK = (128, 128)  # rows, columns


def _rows(stored: StoredMatrix) -> Rows:
    (scales,) = stored.source.companions
    factors, dtype = stored.companions[SCALES], DTYPES[stored.source.dtype]
    return scaled_rows(stored.raw_NB, dtype, factors, scales.block_rows, scales.block_columns)


def fp8_weight(tensor: TensorSlice, factors: TensorSlice, block: tuple[int, int]) -> TensorSlice:
    """Returns the weight with its factors: one for the whole tensor, or one per row, column, block, or group of columns
    in a row. `block`: rows and columns of a block. Raises CheckpointError for other shapes."""
    if len(tensor.shape) < 2:
        raise CheckpointError(f"{tensor.file}: {tensor.name!r} has shape {tensor.shape}; FP8 weights must be matrices")
    *stack, height, width = tensor.shape
    (rows, columns), shape = block, factors.shape  # rows x columns that share a factor
    if prod(shape) == 1:
        shape, rows, columns = (1,) * len(tensor.shape), height, width
    elif shape == (*stack, height):
        shape, rows, columns = (*shape, 1), 1, width
    elif shape != (*stack, -(-height // rows), -(-width // columns)):  # not one factor per block
        if shape[:-1] == (*stack, height) and shape[-1] and width % shape[-1] == 0:
            rows, columns = 1, width // shape[-1]
        elif shape == (*stack, 1, width):
            rows, columns = height, 1
    return attach_factors(replace(tensor, format=NAME), replace(factors, shape=shape), rows, columns)


def block_shape(value: object) -> tuple[int, int]:
    """Returns (rows, columns) of a block from the config value; DEFAULT_BLOCK if it is missing or invalid."""
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
        return value[0], value[1]
    return DEFAULT_BLOCK


def _pair(tensors: Mapping[str, TensorSlice], quantization: Mapping[str, object]) -> Mapping[str, TensorSlice]:
    """See `storage_format.Method`."""
    block, result = block_shape(quantization.get("weight_block_size")), dict(tensors)
    for name, tensor in tensors.items():
        sibling = name.removesuffix("weight") + "scale"
        candidates = (*(name + suffix for suffix in SUFFIXES), *(sibling,) * name.endswith("weight"))
        factors = next((candidate for candidate in candidates if candidate in tensors), None)
        if tensor.dtype == "I8" and factors is not None and tensors[factors].dtype == "F8_E8M0":
            numbers = replace(tensor, dtype="F4", format=MXFP4, shape=(*tensor.shape[:-1], 2 * tensor.shape[-1]))
            result[name] = attach_factors(numbers, result.pop(factors), 1, BLOCK_COLUMNS)
        elif tensor.dtype in DTYPES and factors is not None:
            result[name] = fp8_weight(tensor, result.pop(factors), block)
            for leaf in ACTIVATION_SCALES:
                result.pop(name.removesuffix("weight") + leaf, None)
        elif tensor.dtype in DTYPES and str(quantization.get("quant_method")) in METHODS:
            raise CheckpointError(f"{tensor.file}: {name!r} is {tensor.dtype}, but {name + SUFFIXES[0]!r} is missing")
    return result


FORMATS = (
    StorageFormat(
        name=NAME,
        loss=Loss.exact,
        row_bytes=lambda num_columns: num_columns + 4 * -(-num_columns // DEFAULT_BLOCK[1]) / DEFAULT_BLOCK[0],
        rows=_rows,
        companions=(SCALES,),
    ),
)
METHODS = {"fp8": _pair, "fbgemm_fp8": _pair}
