"""Reads the header of an untrusted safetensors file and validates sizes, names and offsets.

Format: https://github.com/huggingface/safetensors (8-byte little-endian header length, JSON, data).
"""

import json
from math import prod
from pathlib import Path

from ..errors import CheckpointError
from ..plan.shape.shapes import Stripes, TensorSlice
from ..units import MIB, format_bytes
from .json_object import require_regular
from .read_errors import read_error
from .stripes import open_whole

MAX_HEADER_BYTES = 32 * MIB  # the 92,000 tensors of DeepSeek-V3 need 11 MiB; parsed, up to 20 times as much memory
MAX_TENSORS, MAX_DIMENSIONS = 1 << 20, 64
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip


def read_header(path: Path, stripes: Stripes | None = None) -> dict[str, TensorSlice]:
    """Returns the tensors of a file by name. `stripes`: of a file that is divided. Raises CheckpointError or
    StorageError.

    As strict as the safetensors library: tensors must be contiguous and must not overlap. A damaged header in which a
    dtype became another dtype of the same width is not detected.
    """

    def make_unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("the same key twice")
        return result

    try:
        size = require_regular(path) if stripes is None else stripes.num_bytes
        with open_whole(path, stripes) as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path}: header claims {format_bytes(length)} but the file has {format_bytes(size)}: "
                    "truncated, or not a safetensors file"
                )
            text = file.read(length)
    except OSError as error:
        raise read_error(path, "reading its header", error) from error
    try:
        entries = json.loads(text, object_pairs_hook=make_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: header is not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise CheckpointError(f"{path}: __metadata__ must be an object of strings")
    if len(entries) > MAX_TENSORS:
        raise CheckpointError(f"{path}: header lists {len(entries):,} tensors; limit: {MAX_TENSORS:,}")
    tensors = {name: _parse_entry(path, name, entry, 8 + length, stripes) for name, entry in entries.items()}
    expected = max((t.offset + t.num_bytes for t in tensors.values()), default=8 + length)
    if size != expected:
        raise CheckpointError(
            f"{path}: {size:,} bytes on disk but its header describes {expected:,}: "
            f"{'truncated' if size < expected else 'trailing bytes'}; download the file again"
        )
    end, previous = 8 + length, "the header"
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != end:
            problem = "shares bytes with" if tensor.offset < end else "leaves a gap after"
            raise CheckpointError(f"{path}: tensor {tensor.name!r} {problem} {previous}; download the file again")
        end, previous = tensor.offset + tensor.num_bytes, f"tensor {tensor.name!r}"
    return tensors


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _parse_entry(path: Path, name: str, entry: object, data_start: int, stripes: Stripes | None) -> TensorSlice:
    """Returns the tensor of a header entry. `data_start`: file offset to which the entry's offsets are relative."""
    try:
        if not isinstance(entry, dict):
            raise TypeError("not a JSON object")
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if any(type(number) is not int for number in (*shape, start, end)):
            raise TypeError("sizes and offsets must be integers")
        if len(shape) > MAX_DIMENSIONS:
            raise CheckpointError(f"{path}: tensor {name!r} claims {len(shape):,} dimensions; limit: {MAX_DIMENSIONS}")
        num_bytes = prod(shape) * DTYPE_BITS[dtype] // 8
        is_consistent = 0 <= start <= end and end - start == num_bytes and all(n >= 0 for n in shape)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name!r} has a malformed header entry: {_shorten(entry)}") from error
    if not is_consistent:
        raise CheckpointError(
            f"{path}: tensor {name!r}: {dtype} {_shorten(shape)} does not match its bytes {start}..{end}"
        )
    return TensorSlice(
        name=name,
        file=str(path),
        offset=data_start + start,
        num_bytes=num_bytes,
        dtype=dtype,
        shape=shape,
        stripes=stripes,
    )
