"""A stage's bytes as the arguments its module wants."""

from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from ..linear.panels import Block, plain_rows
from ..linear.rows import ScaledRows
from ..linear.stored import StoredWeight
from ..plan.shape.shapes import Parameter, Stage, TensorSlice
from ..profiles import BackendTable
from .gguf_blocks import GgufRows

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


def stage_weights(
    stage: Stage,
    buffer: torch.Tensor,
    tensor_offsets: Mapping[str, int],
    dtypes: Mapping[str, torch.dtype],
    table: BackendTable | None = None,
) -> dict[str, torch.Tensor]:
    """Returns tensors by parameter name, as views into `buffer` (uint8, compute memory), valid as long as its bytes
    are.

    `dtypes` says in which precision the model wants each parameter. Matrices stored otherwise are handed over as
    stored and dequantised inside the product, whose backends `table` chooses; vectors are dequantised here.
    """
    return {p.name: _argument(p, buffer, tensor_offsets, dtypes[p.name], table) for p in stage.parameters}


def load_tensor(piece: TensorSlice) -> torch.Tensor:
    """Reads one tensor whole, to convert it: as it is, or in float32 where it is quantised."""
    if not is_plain(piece) and len(piece.shape) == 3:
        return torch.stack([load_tensor(piece.expert(index)) for index in range(piece.shape[0])])
    scales = () if piece.scales is None else (piece.scales.tensor,)
    offsets, parts = {}, [b""]
    for part in (*scales, piece):
        offsets[part.name] = sum(map(len, parts))
        parts.append(_read(part))
    rows = _rows(torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), offsets, piece)
    tensor = rows if isinstance(rows, torch.Tensor) else plain_rows(rows, torch.float32).view(piece.shape)
    return tensor.t() if piece.is_transposed else tensor


def _read(piece: TensorSlice) -> bytes:
    with Path(piece.file).open("rb") as file:
        file.seek(piece.offset)
        return file.read(piece.num_bytes)


def _argument(
    parameter: Parameter,
    buffer: torch.Tensor,
    offsets: Mapping[str, int],
    dtype: torch.dtype,
    table: BackendTable | None,
) -> torch.Tensor:
    entries = [[_rows(buffer, offsets, piece) for piece in blocks] for blocks in parameter.pieces]
    if not parameter.is_stacked and len(entries[0]) == 1:
        piece, first = parameter.pieces[0][0], entries[0][0]
        if isinstance(first, torch.Tensor):
            plain = _plain_argument(first.t() if piece.is_transposed else first, parameter, dtype, table)
            if plain is not None:
                return plain
        elif len(piece.shape) < 2 or (piece.shape != parameter.shape and not piece.is_transposed):
            return plain_rows(first, dtype).view(parameter.shape)
    return StoredWeight(
        entries,
        parameter.shape,
        dtype,
        is_stacked=parameter.is_stacked,
        is_flipped=parameter.is_transposed,
        table=table,
    )


def _plain_argument(
    tensor: torch.Tensor, parameter: Parameter, dtype: torch.dtype, table: BackendTable | None
) -> torch.Tensor | None:
    """Returns None for a matrix that is widened inside the product."""
    is_matrix = tensor.dim() == 2 and tensor.shape == parameter.shape
    if (tensor.dtype == dtype or not tensor.is_floating_point()) and (tensor.device.type != "cpu" or not is_matrix):
        return tensor.view(parameter.shape)
    if tensor.dim() == 3 and tensor.shape == parameter.shape:  # experts stored as one stack
        entries = [[expert] for expert in tensor]
        return StoredWeight(entries, parameter.shape, dtype, is_stacked=True, table=table)
    return None if is_matrix else tensor.to(dtype).view(parameter.shape)


def is_plain(piece: TensorSlice) -> bool:
    """Its bytes are a tensor of the parameter's rows."""
    return piece.dtype in TORCH_DTYPES and piece.scales is None and not piece.row_order


def _rows(buffer: torch.Tensor, offsets: Mapping[str, int], piece: TensorSlice) -> Block:
    if is_plain(piece):
        return _view(buffer, offsets[piece.name], piece)
    raw_NB = _raw(buffer, offsets[piece.name], piece, 2).view(piece.shape[0], -1)
    if piece.scales is None:
        runs = [torch.arange(run.start, run.stop, run.step, device=buffer.device) for run in piece.row_order]
        return GgufRows(raw_NB, piece.dtype, prod(piece.shape[1:]), torch.cat(runs) if runs else None)
    factors = piece.scales.tensor
    return ScaledRows(
        raw_NB,
        TORCH_DTYPES.get(piece.dtype),
        _view(buffer, offsets[factors.name], factors),
        piece.scales.block_rows,
        piece.scales.block_columns,
    )


def _view(buffer: torch.Tensor, offset: int, piece: TensorSlice) -> torch.Tensor:
    dtype = TORCH_DTYPES[piece.dtype]
    return _raw(buffer, offset, piece, dtype.itemsize).view(dtype).view(piece.shape)


def _raw(buffer: torch.Tensor, offset: int, piece: TensorSlice, alignment: int) -> torch.Tensor:
    raw = buffer[offset : offset + piece.num_bytes]
    # Legal in the formats, unknown in the wild: an odd header length shifts every tensor.
    return raw.clone() if offset % alignment else raw
