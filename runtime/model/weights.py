"""A stage's bytes as the arguments its module wants."""

from collections.abc import Mapping

import torch

from ..plan.shapes import Parameter, Stage, TensorSlice
from .stored import StoredWeight

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


def stage_weights(
    stage: Stage,
    buffer: torch.Tensor,
    tensor_offsets: Mapping[str, int],
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, torch.Tensor]:
    """Parameter name -> tensor, as views into `buffer` (uint8, compute memory): valid as long as its bytes are.

    `dtypes` says in which precision the model wants each parameter. Matrices stored otherwise are handed over as
    stored and widened inside the product; vectors are widened here.
    """
    return {p.name: _argument(p, buffer, tensor_offsets, dtypes[p.name]) for p in stage.parameters}


def _argument(
    parameter: Parameter, buffer: torch.Tensor, offsets: Mapping[str, int], dtype: torch.dtype
) -> torch.Tensor:
    entries = [[_view(buffer, offsets[piece.name], piece) for piece in blocks] for blocks in parameter.pieces]
    first = entries[0][0]
    is_plain = not parameter.is_stacked and len(entries[0]) == 1
    if is_plain and (first.dtype == dtype or not first.is_floating_point()) and (first.is_cuda or first.dim() != 2):
        return first.view(parameter.shape)
    if is_plain and (first.dim() < 2 or tuple(first.shape) != parameter.shape):
        return first.to(dtype).view(parameter.shape)
    if is_plain and first.dim() == 3:  # experts stored as one stack
        return StoredWeight([[expert] for expert in first], parameter.shape, dtype, is_stacked=True)
    return StoredWeight(entries, parameter.shape, dtype, is_stacked=parameter.is_stacked)


def _view(buffer: torch.Tensor, offset: int, piece: TensorSlice) -> torch.Tensor:
    raw = buffer[offset : offset + piece.num_bytes]
    dtype = TORCH_DTYPES[piece.dtype]
    if offset % dtype.itemsize:  # legal in the format, unknown in the wild: an odd header length shifts every tensor
        raw = raw.clone()
    return raw.view(dtype).view(piece.shape)
