"""Reads the header of one safetensors file, trusting nothing in it: sizes, names and offsets are checked against the
file.

Format: https://github.com/huggingface/safetensors (8-byte little-endian header length, JSON, data).
"""

import json
from math import prod
from pathlib import Path

from ..errors import CheckpointError
from ..plan.shapes import TensorSlice
from ..units import MIB, format_bytes
from .json_object import require_regular

MAX_HEADER_BYTES = 100 * MIB
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip


def read_header(path: Path) -> dict[str, TensorSlice]:
    """The tensors of `path` by name. Raises CheckpointError naming the file and what is wrong with it."""
    try:
        size = require_regular(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path}: header claims {format_bytes(length)} but the file has {format_bytes(size)}: "
                    "truncated, or not a safetensors file"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        entries = json.loads(text, object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: header is not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: header is not a JSON object")
    entries.pop("__metadata__", None)
    tensors = {name: _slice(path, name, entry, 8 + length) for name, entry in entries.items()}
    expected = max((t.offset + t.num_bytes for t in tensors.values()), default=8 + length)
    if size != expected:
        raise CheckpointError(
            f"{path}: {size:,} bytes on disk but its header describes {expected:,}: "
            f"{'truncated' if size < expected else 'trailing bytes'}; fetch the file again"
        )
    return tensors


def _refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("the same key twice")
    return result


def _slice(path: Path, name: str, entry: object, data_start: int) -> TensorSlice:
    try:
        if not isinstance(entry, dict):
            raise TypeError("not a JSON object")
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if any(type(number) is not int for number in (*shape, start, end)):
            raise TypeError("sizes and offsets are whole numbers")
        num_bytes = prod(shape) * DTYPE_BITS[dtype] // 8
        is_sound = 0 <= start <= end and end - start == num_bytes and all(n >= 0 for n in shape)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name!r} has a malformed header entry: {entry!r}") from error
    if not is_sound:
        raise CheckpointError(f"{path}: tensor {name!r}: {dtype} {shape} does not fill its bytes {start}..{end}")
    return TensorSlice(
        name=name, file=str(path), offset=data_start + start, num_bytes=num_bytes, dtype=dtype, shape=shape
    )
