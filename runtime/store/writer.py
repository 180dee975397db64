"""Writes a safetensors file or a sharded checkpoint, with one tensor in memory at a time.

Format: 8-byte little-endian header length, JSON header, tensor bytes; see the README of safetensors.
"""

import contextlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import torch

from ..errors import OutputError
from ..units import format_bytes, round_up

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PAGE_BYTES = 4096  # tensor data begins at a multiple: O_DIRECT reads whole pages
PUBLISHED_ALIGNMENT_BYTES = 8  # at which the safetensors library begins tensor data
_LENGTH_BYTES = 8
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, dtype and shape of a tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


Shards: TypeAlias = Mapping[str, Sequence[TensorSpec]]  # file name -> its tensors, in order


def plan_shards(specs: Sequence[TensorSpec], max_shard_bytes: int) -> Shards:
    """Assigns tensors to shards, in order, up to `max_shard_bytes` of tensor data each. A larger tensor gets a shard of
    its own."""
    groups: list[list[TensorSpec]] = [[]]
    used_bytes = 0
    for spec in specs:
        if groups[-1] and used_bytes + spec.num_bytes > max_shard_bytes:
            groups.append([])
            used_bytes = 0
        groups[-1].append(spec)
        used_bytes += spec.num_bytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups, start=1)
    }


def write_checkpoint(
    directory: Path, shards: Shards, tensors: Iterable[torch.Tensor], *, alignment_bytes: int = PAGE_BYTES
) -> int:
    """Writes all shards, then the index if there are several. Returns the total bytes written.

    `tensors` yields one tensor for each spec of each shard, in order. A tensor is freed before the next one is
    requested. Raises OutputError if the directory cannot be written; files that are complete stay.
    """
    iterator = iter(tensors)
    written_bytes = sum(
        write_safetensors(directory / name, specs, iterator, alignment_bytes=alignment_bytes)
        for name, specs in shards.items()
    )
    if len(shards) > 1:
        written_bytes += _write_index(directory / INDEX_FILE, shards)
    return written_bytes


def write_sparse_checkpoint(
    directory: Path, shards: Shards, metadata: Callable[[int], Mapping[str, str]] = lambda num_bytes: {}
) -> None:
    """Writes the files of `write_checkpoint` with holes instead of tensor data: these read as zeros and take no disk
    space. `metadata`: function from a shard's data bytes to additional header entries. Raises OutputError."""
    for name, specs in shards.items():
        data_bytes = sum(spec.num_bytes for spec in specs)
        header = _encode_header(specs, PUBLISHED_ALIGNMENT_BYTES, metadata(data_bytes))
        with atomic_write(directory / name, len(header)) as file:
            file.write(header)
            file.truncate(len(header) + data_bytes)
    if len(shards) > 1:
        _write_index(directory / INDEX_FILE, shards)


def write_safetensors(
    path: Path, specs: Sequence[TensorSpec], tensors: Iterable[torch.Tensor], *, alignment_bytes: int = PAGE_BYTES
) -> int:
    """Writes one file atomically. Returns its size in bytes.

    Takes exactly `len(specs)` tensors from `tensors`, in order. Tensor data is contiguous, and begins at a multiple of
    `alignment_bytes`. Raises OutputError.
    """
    header = _encode_header(specs, alignment_bytes)
    num_bytes = len(header) + sum(spec.num_bytes for spec in specs)
    iterator = iter(tensors)
    with atomic_write(path, num_bytes) as file:
        file.write(header)
        for spec in specs:
            _write_tensor(file, spec, iterator)
    return num_bytes


def _encode_header(
    specs: Sequence[TensorSpec], alignment_bytes: int, metadata: Mapping[str, str] | None = None
) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for spec in specs:
        assert spec.name not in entries, f"two tensors are named {spec.name}"
        end = offset + spec.num_bytes
        entries[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded_bytes = round_up(_LENGTH_BYTES + len(text), alignment_bytes) - _LENGTH_BYTES  # spaces end the JSON
    return padded_bytes.to_bytes(_LENGTH_BYTES, "little") + text.ljust(padded_bytes)


def _write_tensor(file: BinaryIO, spec: TensorSpec, tensors: Iterator[torch.Tensor]) -> None:
    tensor = next(tensors)  # the only reference: freed on return, before the next tensor is made
    assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, spec.shape), f"{spec}: {tensor.dtype} {tensor.shape}"
    if spec.num_bytes:
        file.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def _write_index(path: Path, shards: Shards) -> int:
    all_specs = [spec for specs in shards.values() for spec in specs]
    index = {
        "metadata": {
            "total_parameters": sum(spec.num_elements for spec in all_specs),
            "total_size": sum(spec.num_bytes for spec in all_specs),
        },
        "weight_map": {spec.name: name for name, specs in shards.items() for spec in specs},
    }
    text = json.dumps(index, indent=2).encode() + b"\n"
    with atomic_write(path, len(text)) as file:
        file.write(text)
    return len(text)


@contextlib.contextmanager
def atomic_write(path: Path, num_bytes: int) -> Iterator[BinaryIO]:
    """Opens a temporary file to write. On exit, syncs it and renames it to `path`; on an error, deletes it.
    `num_bytes`: its size, for the message of OutputError."""
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temp.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # before the rename: a crash must not leave an incomplete file named `path`
        temp.replace(path)
        sync_directory(path.parent)  # otherwise a power cut may undo the rename
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temp.unlink()
        if not isinstance(error, OSError):
            raise
        free = ""
        with contextlib.suppress(OSError):
            free = f", {format_bytes(shutil.disk_usage(path.parent).free)} are free"
        cause = f"{error.strerror or error}; it needs {format_bytes(num_bytes)}{free}"
        raise OutputError(f"{path} cannot be written: {cause}") from error


def sync_directory(directory: Path) -> None:
    """Makes renames in the directory durable: a power cut later does not undo them."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
