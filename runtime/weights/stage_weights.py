"""A stage's bytes as the arguments its module wants."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import torch

from ..config.profiles import BackendTable
from ..formats.registry import FORMATS
from ..formats.storage_format import Loss, Stored
from ..linear.blocks import Block, plain_rows
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
BLOCK_BYTES = 2  # what stored blocks of any kind are read as, at least


def stage_weights(
    stage: Stage,
    buffer: torch.Tensor,
    tensor_offsets: Mapping[str, int],
    dtypes: Mapping[str, torch.dtype],
    table: BackendTable | None = None,
    *,
    on_device: bool = False,
) -> dict[str, torch.Tensor]:
    """Returns tensors by parameter name, as views into `buffer` (uint8, compute memory), valid as long as its bytes
    are.

    `dtypes` says in which precision the model wants each parameter. Matrices stored otherwise are handed over as
    stored and dequantised inside the product, whose backends `table` chooses; vectors are dequantised here.
    `on_device`: the buffer is an accelerator's.
    """
    return {p.name: _argument(p, buffer, tensor_offsets, dtypes[p.name], table, on_device) for p in stage.parameters}


def load_tensor(piece: TensorSlice, made: Mapping[str, Fill] = MappingProxyType({})) -> torch.Tensor:
    """Reads one tensor whole, to convert it, in its `dtype_of`. `made`: files that lie nowhere, as for a reader."""
    if not is_plain(piece) and len(piece.shape) == 3:
        return torch.stack([load_tensor(piece.expert(index), made) for index in range(piece.shape[0])])
    offsets, parts = {}, [b""]
    for part in piece.with_companions():
        offsets[part.name] = sum(map(len, parts))
        if part.file in made:
            data = bytearray(part.num_bytes)
            made[part.file](part.offset, memoryview(data))
            parts.append(bytes(data))
        else:
            parts.append(read_bytes(part))
    rows = _rows(torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), offsets, piece)
    tensor = rows if isinstance(rows, torch.Tensor) else plain_rows(rows, dtype_of(piece)).view(piece.shape)
    return tensor.t() if piece.is_transposed else tensor


def _argument(
    parameter: Parameter,
    buffer: torch.Tensor,
    offsets: Mapping[str, int],
    dtype: torch.dtype,
    table: BackendTable | None,
    on_device: bool,
) -> torch.Tensor:
    join = partial(_joined, buffer, offsets, parameter) if on_device else None
    entries = [[_rows(buffer, offsets, piece) for piece in blocks] for blocks in parameter.pieces]
    if not parameter.is_stacked and len(entries[0]) == 1:
        piece, first = parameter.pieces[0][0], entries[0][0]
        if isinstance(first, torch.Tensor):
            plain = _plain_argument(first.t() if piece.is_transposed else first, parameter, dtype, table, join)
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
        join=join,
    )


def _plain_argument(
    tensor: torch.Tensor, parameter: Parameter, dtype: torch.dtype, table: BackendTable | None, join: Join | None
) -> torch.Tensor | None:
    """Returns None for a matrix that is widened inside the product."""
    is_matrix = tensor.dim() == 2 and tensor.shape == parameter.shape
    if (tensor.dtype == dtype or not tensor.is_floating_point()) and (tensor.device.type != "cpu" or not is_matrix):
        return tensor.view(parameter.shape)
    if tensor.dim() == 3 and tensor.shape == parameter.shape:  # experts stored as one stack
        entries = [[expert] for expert in tensor]
        return StoredWeight(entries, parameter.shape, dtype, is_stacked=True, table=table, join=join)
    return None if is_matrix else tensor.to(dtype).view(parameter.shape)


def is_plain(piece: TensorSlice) -> bool:
    """Its bytes are a tensor of the parameter's rows."""
    return not piece.format and piece.dtype in TORCH_DTYPES


def dtype_of(piece: TensorSlice) -> torch.dtype:
    """That of its numbers, in which nothing of them is lost: float32 where it is quantised."""
    is_itself = is_plain(piece) or FORMATS[piece.format].loss is Loss.lossless
    return TORCH_DTYPES[piece.dtype] if is_itself else torch.float32


def _rows(buffer: torch.Tensor, offsets: Mapping[str, int], piece: TensorSlice) -> Block:
    if is_plain(piece):
        return _view(buffer, offsets[piece.name], piece)
    return FORMATS[piece.format].rows(_stored(buffer, offsets, piece))


def _joined(
    buffer: torch.Tensor, offsets: Mapping[str, int], parameter: Parameter, turn: int, experts: range
) -> Rows | None:
    """The rows of those blocks of a stack that come `turn`-th in these experts, below each other; None where they
    cannot be one matrix."""
    if not parameter.is_stacked:
        return None
    pieces = [parameter.pieces[expert][turn] for expert in experts]
    if any(is_plain(piece) for piece in pieces):
        return None
    return FORMATS[pieces[0].format].joined([_stored(buffer, offsets, piece) for piece in pieces])


def _stored(buffer: torch.Tensor, offsets: Mapping[str, int], piece: TensorSlice) -> Stored:
    companions = {each.role: _view(buffer, offsets[each.tensor.name], each.tensor) for each in piece.companions}
    dtype = TORCH_DTYPES.get(piece.dtype, torch.uint8)
    raw = _raw(buffer, offsets[piece.name], piece, max(BLOCK_BYTES, dtype.itemsize))
    return Stored(piece, raw, companions)


def _view(buffer: torch.Tensor, offset: int, piece: TensorSlice) -> torch.Tensor:
    dtype = TORCH_DTYPES[piece.dtype]
    return _raw(buffer, offset, piece, dtype.itemsize).view(dtype).view(piece.shape)


def _raw(buffer: torch.Tensor, offset: int, piece: TensorSlice, alignment: int) -> torch.Tensor:
    raw = buffer[offset : offset + piece.num_bytes]
    # Legal in the formats, unknown in the wild: an odd header length shifts every tensor.
    return raw.clone() if offset % alignment else raw
