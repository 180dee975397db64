"""Quantised safetensors: which methods can be read, and which tensors hold the scales of which.

FP8 in blocks (DeepSeek-V3, MiniMax-M2): `X` in F8 beside `X_scale_inv`. MXFP4 (gpt-oss): `X_blocks` beside `X_scales`,
both U8, rows of the transposed parameter.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from transformers import PreTrainedConfig

from ..errors import CheckpointError
from ..plan.shape.shapes import Scales, TensorSlice

READABLE = ("fp8", "mxfp4")
FP8, FP8_SCALES = ("F8_E4M3", "F8_E5M2"), "_scale_inv"
MXFP4, MXFP4_SCALES, MXFP4_COLUMNS = "_blocks", "_scales", 32
DEFAULT_BLOCK = (128, 128)


def take_quantization(config: PreTrainedConfig) -> Mapping[str, object]:
    """What the config says of it, {} if nothing. Removes it from `config`: the model is built as if it had none.

    Raises CheckpointError for a method that cannot be read.
    """
    found: dict[str, object] = {}
    for part in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            found = found or dict(getattr(part, key, None) or {})
            if hasattr(part, key):
                delattr(part, key)
    method = str(found.get("quant_method") or "bitsandbytes") if found else READABLE[0]
    if method not in READABLE:
        raise CheckpointError(
            f"model.path: its weights are quantised by {method!r}, which cannot be read. Can be: "
            f"{', '.join(READABLE)}, GGUF (model.path=FILE.gguf) and the unquantised checkpoint; most models have one"
        )
    return found


def pair_scales(tensors: Mapping[str, TensorSlice], quantization: Mapping[str, object]) -> Mapping[str, TensorSlice]:
    """The checkpoint as if it were not quantised: weights under their own names, in their own shapes, with their
    scales. Raises CheckpointError for scales that do not fit their weight."""
    block = quantization.get("weight_block_size") or DEFAULT_BLOCK
    rows, columns = block if isinstance(block, list | tuple) and len(block) == 2 else DEFAULT_BLOCK
    result = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype in FP8 and name + FP8_SCALES in tensors:
            result[name] = _fp8(tensor, result.pop(name + FP8_SCALES), int(rows), int(columns))
        elif name.endswith(MXFP4) and (base := name.removesuffix(MXFP4)) + MXFP4_SCALES in tensors:
            result[base] = _mxfp4(result.pop(name), result.pop(base + MXFP4_SCALES))
        elif tensor.dtype in FP8 and quantization.get("quant_method") == "fp8":
            raise CheckpointError(f"{tensor.file}: {name!r} is {tensor.dtype}, but {name + FP8_SCALES!r} is missing")
    return result


def _fp8(tensor: TensorSlice, scales: TensorSlice, rows: int, columns: int) -> TensorSlice:
    """A single factor is one for the whole tensor."""
    height, width = tensor.shape[-2:]
    if prod(scales.shape) == 1:
        scales, rows, columns = replace(scales, shape=(1,) * len(tensor.shape)), height, width
    return _scaled(tensor, scales, rows, columns)


def _mxfp4(blocks: TensorSlice, scales: TensorSlice) -> TensorSlice:
    """Two numbers in each byte, 16 bytes side by side with one exponent."""
    shape = (*blocks.shape[:-2], prod(blocks.shape[-2:]) * 2)
    return _scaled(replace(blocks, dtype="F4", shape=shape, is_transposed=True), scales, 1, MXFP4_COLUMNS)


def _scaled(tensor: TensorSlice, scales: TensorSlice, rows: int, columns: int) -> TensorSlice:
    *stack, height, width = tensor.shape
    expected = (*stack, -(-height // rows), -(-width // columns))
    if scales.shape != expected:
        raise CheckpointError(
            f"{scales.file}: {scales.name!r} has shape {scales.shape}; blocks of {rows} x {columns} (weight_block_size "
            f"in config.json) of {tensor.name!r}, {tensor.shape}, need {expected}"
        )
    dtype = "F8_E8M0" if scales.dtype == "U8" else scales.dtype  # exponents, saved as bytes by some
    return replace(
        tensor,
        scales=Scales(tensor=replace(scales, dtype=dtype), block_rows=rows, block_columns=columns),
    )
