"""Builds the weight tensors of a stage as views into a buffer that holds the stage's bytes.

A block is a group of consecutive rows of a weight, stored as one tensor of the checkpoint. Here, it is a torch tensor,
or a `Rows` object if it is quantized. A parameter, or each expert of a stack, consists of one or more blocks.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
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
MIN_ALIGNMENT_BYTES = 2  # of quantized data


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

    `tensor_offsets`: offset of each checkpoint tensor in `buffer`, by tensor name. `dtypes`: the compute dtype of each
    parameter. Matrices of other dtypes stay as stored and are dequantized inside the product, by the linear backend
    that `table` chooses; vectors are dequantized here. `on_device`: `buffer` is on an accelerator.
    """
    return {p.name: _make_weight(p, buffer, tensor_offsets, dtypes[p.name], table, on_device) for p in stage.parameters}


def load_tensor(source: TensorSlice, virtual_files: Mapping[str, Fill] = MappingProxyType({})) -> torch.Tensor:
    """Reads a whole tensor, dequantized to its `decoded_dtype`. `virtual_files`: for files that do not exist on disk,
    functions that fill memory with their bytes, by file name."""
    if not is_plain(source) and len(source.shape) == 3:
        return torch.stack([load_tensor(source.expert(index), virtual_files) for index in range(source.shape[0])])
    offsets, data = dict[str, int](), bytearray()
    for part in source.with_companions():
        offsets[part.name] = len(data)
        if part.file in virtual_files:
            content = bytearray(part.num_bytes)
            virtual_files[part.file](part.offset, memoryview(content))
            data += content
        else:
            data += read_bytes(part)
    rows = _rows(torch.frombuffer(data, dtype=torch.uint8), offsets, source)
    tensor = rows if isinstance(rows, torch.Tensor) else dequantize_rows(rows, decoded_dtype(source)).view(source.shape)
    return tensor.t() if source.is_transposed else tensor


def _make_weight(
    parameter: Parameter,
    buffer: torch.Tensor,
    offsets: Mapping[str, int],
    dtype: torch.dtype,
    table: BackendTable | None,
    on_device: bool,
) -> torch.Tensor:
    """Returns one parameter of a stage: a plain tensor, or a `StoredWeight`, which keeps its blocks as stored.

    A parameter of one block is a plain tensor if it is a vector, if the model declares it with another shape than the
    checkpoint, or if it is stored in `dtype` or as integers, and is not a matrix on a CPU. All others are a
    `StoredWeight`."""
    join = partial(_join_experts, buffer, offsets, parameter) if on_device else None
    # For each expert, or for the only matrix: its blocks.
    blocks = [[_rows(buffer, offsets, source) for source in sources] for sources in parameter.pieces]
    if not parameter.is_stacked and len(blocks[0]) == 1:
        source, first = parameter.pieces[0][0], blocks[0][0]
        if isinstance(first, torch.Tensor):
            plain = _make_plain_weight(first.t() if source.is_transposed else first, parameter, dtype, table, join)
            if plain is not None:
                return plain
        # Dequantize a quantized vector, and a matrix that the model declares with another shape.
        elif len(source.shape) < 2 or (source.shape != parameter.shape and not source.is_transposed):
            return dequantize_rows(first, dtype).view(parameter.shape)
    return StoredWeight(
        blocks,
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
    """Returns a weight that is stored unquantized, as a tensor of `dtype`; None if it must become a `StoredWeight`,
    which chooses the linear backend of its products."""
    is_matrix = tensor.dim() == 2 and tensor.shape == parameter.shape
    is_converted = tensor.dtype == dtype or not tensor.is_floating_point()
    # On a CPU, all matrices use linear backends, also those already in the compute dtype.
    needs_backend = is_matrix and tensor.device.type == "cpu"
    if is_converted and not needs_backend:
        return tensor.view(parameter.shape)
    if tensor.dim() == 3 and tensor.shape == parameter.shape:  # experts stored as one stack
        blocks = [[expert] for expert in tensor]
        return StoredWeight(blocks, parameter.shape, dtype, is_stacked=True, table=table, join=join)
    return None if is_matrix else tensor.to(dtype).view(parameter.shape)


def is_plain(source: TensorSlice) -> bool:
    """True if the tensor is stored unquantized, in a torch dtype."""
    return not source.format and source.dtype in TORCH_DTYPES


def decoded_dtype(source: TensorSlice) -> torch.dtype:
    """Returns a dtype that holds the tensor's numbers exactly: float32 if it is quantized, otherwise its own dtype."""
    is_lossless = is_plain(source) or FORMATS[source.format].loss is Loss.lossless
    return TORCH_DTYPES[source.dtype] if is_lossless else torch.float32


def stored_rows(source: TensorSlice, raw: torch.Tensor, num_rows: int) -> Block:
    """Returns rows of a table whose bytes are `raw` (uint8), one behind the other."""
    part = replace(source, shape=(num_rows, *source.shape[1:]), num_bytes=len(raw))
    return _rows(raw, {source.name: 0}, part)


def can_gather(parameter: Parameter, virtual_files: Collection[str] = ()) -> bool:
    """True if each row of the parameter has bytes of its own, as in plain tensors and GGUF files."""
    if parameter.is_stacked or len(parameter.pieces[0]) != 1 or len(parameter.shape) != 2:
        return False
    source = parameter.pieces[0][0]
    is_by_row = is_plain(source) or not (FORMATS[source.format].companions or source.constants)
    is_moved = source.row_order or source.is_transposed or source.is_interleaved or source.companions
    is_read = source.file not in virtual_files
    return is_by_row and not is_moved and is_read and source.shape == parameter.shape


def _rows(buffer: torch.Tensor, offsets: Mapping[str, int], source: TensorSlice) -> Block:
    """Returns a tensor in the buffer: as a view, or as `Rows` if it is quantized."""
    if is_plain(source):
        return _plain_view(buffer, offsets[source.name], source)
    return FORMATS[source.format].rows(_stored_matrix(buffer, offsets, source))


def _join_experts(
    buffer: torch.Tensor, offsets: Mapping[str, int], parameter: Parameter, block: int, experts: range
) -> Rows | None:
    """Concatenates block number `block` of these experts by rows. Returns None if it is not quantized, or the format
    cannot concatenate."""
    if not parameter.is_stacked:
        return None
    sources = [parameter.pieces[expert][block] for expert in experts]
    if any(map(is_plain, sources)):
        return None
    return FORMATS[sources[0].format].join_matrices([_stored_matrix(buffer, offsets, source) for source in sources])


def _stored_matrix(buffer: torch.Tensor, offsets: Mapping[str, int], source: TensorSlice) -> StoredMatrix:
    companions = {c.role: _plain_view(buffer, offsets[c.tensor.name], c.tensor) for c in source.companions}
    dtype = TORCH_DTYPES.get(source.dtype, torch.uint8)
    raw = _byte_view(buffer, offsets[source.name], source, max(MIN_ALIGNMENT_BYTES, dtype.itemsize))
    return StoredMatrix(source, raw, companions)


def _plain_view(buffer: torch.Tensor, offset: int, source: TensorSlice) -> torch.Tensor:
    dtype = TORCH_DTYPES[source.dtype]
    return _byte_view(buffer, offset, source, dtype.itemsize).view(dtype).view(source.shape)


def _byte_view(buffer: torch.Tensor, offset: int, source: TensorSlice, alignment: int) -> torch.Tensor:
    raw = buffer[offset : offset + source.num_bytes]
    # A misaligned view would fail, so copy. Cause: a header of odd length, which is legal but not seen in published
    # files.
    return raw.clone() if offset % alignment else raw
