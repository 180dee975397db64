"""Builds the weight tensors of a stage as views into its buffer."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import torch

from ..config.profiles import BackendTable
from ..formats.registry import FORMATS
from ..formats.storage_format import Loss, StoredMatrix
from ..linear.blocks import Block, dequantize_rows
from ..linear.rows import Rows
from ..linear.stored import Join, StoredWeight
from ..plan.shape.shapes import Parameter, Stage, TensorSlice
from ..store.checkpoint import read_bytes
from ..store.reader import Fill

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
BLOCK_BYTES = 2  # minimum alignment of quantized blocks


def stage_weights(
    stage: Stage,
    buffer: torch.Tensor,
    tensor_offsets: Mapping[str, int],
    dtypes: Mapping[str, torch.dtype],
    table: BackendTable | None = None,
    *,
    on_device: bool = False,
) -> dict[str, torch.Tensor]:
    """Returns tensors by parameter name: views into `buffer` (uint8, compute memory), valid until its bytes are reused.

    `dtypes`: the compute dtype of each parameter. Matrices of other dtypes stay as stored and are dequantized inside
    the product, with backends chosen by `table`; vectors are dequantized here. `on_device`: `buffer` is on an
    accelerator.
    """
    return {p.name: _make_weight(p, buffer, tensor_offsets, dtypes[p.name], table, on_device) for p in stage.parameters}


def load_tensor(piece: TensorSlice, virtual_files: Mapping[str, Fill] = MappingProxyType({})) -> torch.Tensor:
    """Reads a whole tensor from disk, dequantized to its `decoded_dtype`. `virtual_files`: read functions by file name,
    for files that do not exist on disk."""
    if not is_plain(piece) and len(piece.shape) == 3:
        return torch.stack([load_tensor(piece.expert(index), virtual_files) for index in range(piece.shape[0])])
    offsets, parts = {}, [b""]
    for part in piece.with_companions():
        offsets[part.name] = sum(map(len, parts))
        if part.file in virtual_files:
            data = bytearray(part.num_bytes)
            virtual_files[part.file](part.offset, memoryview(data))
            parts.append(bytes(data))
        else:
            parts.append(read_bytes(part))
    rows = _rows(torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), offsets, piece)
    tensor = rows if isinstance(rows, torch.Tensor) else dequantize_rows(rows, decoded_dtype(piece)).view(piece.shape)
    return tensor.t() if piece.is_transposed else tensor


def _make_weight(
    parameter: Parameter,
    buffer: torch.Tensor,
    offsets: Mapping[str, int],
    dtype: torch.dtype,
    table: BackendTable | None,
    on_device: bool,
) -> torch.Tensor:
    join = partial(_join_experts, buffer, offsets, parameter) if on_device else None
    entries = [[_rows(buffer, offsets, piece) for piece in blocks] for blocks in parameter.pieces]
    if not parameter.is_stacked and len(entries[0]) == 1:
        piece, first = parameter.pieces[0][0], entries[0][0]
        if isinstance(first, torch.Tensor):
            plain = _make_plain_weight(first.t() if piece.is_transposed else first, parameter, dtype, table, join)
            if plain is not None:
                return plain
        # A quantized vector, or a matrix that the model declares with another shape.
        elif len(piece.shape) < 2 or (piece.shape != parameter.shape and not piece.is_transposed):
            return dequantize_rows(first, dtype).view(parameter.shape)
    return StoredWeight(
        entries,
        parameter.shape,
        dtype,
        is_stacked=parameter.is_stacked,
        is_transposed=parameter.is_transposed,
        table=table,
        join=join,
    )


def _make_plain_weight(
    tensor: torch.Tensor, parameter: Parameter, dtype: torch.dtype, table: BackendTable | None, join: Join | None
) -> torch.Tensor | None:
    """Returns an unquantized weight in `dtype`; None for a matrix that becomes a `StoredWeight`, for its products."""
    is_matrix = tensor.dim() == 2 and tensor.shape == parameter.shape
    # On a CPU, matrices of any dtype are multiplied by linear backends.
    if (tensor.dtype == dtype or not tensor.is_floating_point()) and (tensor.device.type != "cpu" or not is_matrix):
        return tensor.view(parameter.shape)
    if tensor.dim() == 3 and tensor.shape == parameter.shape:  # experts stored as one stack
        entries = [[expert] for expert in tensor]
        return StoredWeight(entries, parameter.shape, dtype, is_stacked=True, table=table, join=join)
    return None if is_matrix else tensor.to(dtype).view(parameter.shape)


def is_plain(piece: TensorSlice) -> bool:
    """True if the tensor is stored unquantized, in a torch dtype."""
    return not piece.format and piece.dtype in TORCH_DTYPES


def decoded_dtype(piece: TensorSlice) -> torch.dtype:
    """Returns a dtype that holds the tensor's numbers exactly: float32 if it is quantized, otherwise its own."""
    is_lossless = is_plain(piece) or FORMATS[piece.format].loss is Loss.lossless
    return TORCH_DTYPES[piece.dtype] if is_lossless else torch.float32


def _rows(buffer: torch.Tensor, offsets: Mapping[str, int], piece: TensorSlice) -> Block:
    if is_plain(piece):
        return _plain_view(buffer, offsets[piece.name], piece)
    return FORMATS[piece.format].rows(_stored_matrix(buffer, offsets, piece))


def _join_experts(
    buffer: torch.Tensor, offsets: Mapping[str, int], parameter: Parameter, block: int, experts: range
) -> Rows | None:
    """Concatenates block number `block` of these experts by rows; None if they cannot form one matrix."""
    if not parameter.is_stacked:
        return None
    pieces = [parameter.pieces[expert][block] for expert in experts]
    if any(is_plain(piece) for piece in pieces):
        return None
    return FORMATS[pieces[0].format].join_matrices([_stored_matrix(buffer, offsets, piece) for piece in pieces])


def _stored_matrix(buffer: torch.Tensor, offsets: Mapping[str, int], piece: TensorSlice) -> StoredMatrix:
    companions = {c.role: _plain_view(buffer, offsets[c.tensor.name], c.tensor) for c in piece.companions}
    dtype = TORCH_DTYPES.get(piece.dtype, torch.uint8)
    raw = _byte_view(buffer, offsets[piece.name], piece, max(BLOCK_BYTES, dtype.itemsize))
    return StoredMatrix(piece, raw, companions)


def _plain_view(buffer: torch.Tensor, offset: int, piece: TensorSlice) -> torch.Tensor:
    dtype = TORCH_DTYPES[piece.dtype]
    return _byte_view(buffer, offset, piece, dtype.itemsize).view(dtype).view(piece.shape)


def _byte_view(buffer: torch.Tensor, offset: int, piece: TensorSlice, alignment: int) -> torch.Tensor:
    raw = buffer[offset : offset + piece.num_bytes]
    # Legal, but not seen in published files: an odd header length misaligns every tensor. A view would fail: copy.
    return raw.clone() if offset % alignment else raw
