"""A checkpoint, which is a directory of safetensors or a GGUF file: which tensors it holds and where their bytes lie.

No weight is read here."""

import hashlib
import logging
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointError
from ..plan.shape.shapes import TensorSlice
from .faults import read_fault
from .gguf import GgufHeader, read_gguf
from .header import read_header
from .weight_files import (
    CONFIG,
    NAMED,
    find_weights,
    is_index,
    names_below,
    read_index,
    shards_of,
    unreadable,
    warn_of_index,
)

log = logging.getLogger(__name__)

SAMPLE_BYTES = 4096
NUM_SAMPLES = 16


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """`contested`: of each tensor that lies in several files, the one that it is read from."""

    path: Path
    tensors: Mapping[str, TensorSlice]
    gguf: GgufHeader | None = None
    contested: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        return sorted({tensor.file for tensor in self.tensors.values()})

    def fingerprint(self) -> str:
        """sha256 over each shard's name, size, header and some spread samples of its data: cheap, and independent of
        where the files lie. It tells checkpoints apart; it does not prove that no bit has flipped."""
        digest = hashlib.sha256()
        header_bytes: dict[str, int] = {}
        for tensor in self.tensors.values():
            header_bytes[tensor.file] = min(tensor.offset, header_bytes.get(tensor.file, tensor.offset))
        for file in map(Path, self.files):
            try:
                _add_samples(digest, file, header_bytes[str(file)])
            except OSError as error:
                raise read_fault(file, "reading samples of it", error) from error
        for name, file in sorted(self.contested.items()):
            digest.update(f"{name}:{Path(file).name};".encode())
        return digest.hexdigest()


def _add_samples(digest: "hashlib._Hash", file: Path, first_offset: int) -> None:
    """`first_offset`: of a tensor that is read. Others may lie between it and the header, which ends before."""
    size = file.stat().st_size
    digest.update(f"{file.name}:{size};".encode())
    with file.open("rb") as handle:
        begin = handle.read(8)
        header_bytes = min(first_offset, 8 + int.from_bytes(begin, "little"))  # GGUF's magic number is no length
        digest.update(begin + handle.read(header_bytes - len(begin)))
        for turn in range(NUM_SAMPLES):
            handle.seek(max(0, size - SAMPLE_BYTES) * turn // (NUM_SAMPLES - 1))
            digest.update(handle.read(SAMPLE_BYTES))


def open_checkpoint(path: Path) -> Checkpoint:
    """Headers of all shards, checked against the index. Raises CheckpointError naming the file and the disagreement."""
    if is_gguf(path):
        header = read_gguf(path)
        return Checkpoint(path=path, tensors=header.tensors, gguf=header)
    entry = find_weights(path)
    if entry is None:
        raise unreadable(str(path), names_below(path))
    if not entry.exists():
        raise CheckpointError(f"{entry}: missing, but {CONFIG} names it ({NAMED})")
    if is_index(entry):
        return _sharded(path, entry)
    warn_of_index(entry)
    return Checkpoint(path=path, tensors=read_header(entry))


def read_bytes(tensor: TensorSlice) -> bytes:
    """Reads a tensor whole: one of a few bytes, which says how others are stored. Raises CheckpointError or
    StorageError."""
    try:
        with Path(tensor.file).open("rb") as file:
            file.seek(tensor.offset)
            return file.read(tensor.num_bytes)
    except OSError as error:
        raise read_fault(tensor.file, f"reading {tensor.name!r}", error) from error


def read_integers(tensor: TensorSlice) -> "array[int]":
    """Reads one of I32 or I64, as `read_bytes` does. Raises CheckpointError for any other dtype."""
    code = {"I32": "i", "I64": "q"}.get(tensor.dtype)
    if code is None:
        raise CheckpointError(f"{tensor.file}: {tensor.name!r} is {tensor.dtype}; I32 or I64 is wanted")
    return array(code, read_bytes(tensor))


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def _sharded(directory: Path, index: Path) -> Checkpoint:
    """The index decides. A tensor that it does not list is one more that there is, as transformers has it."""
    weight_map = read_index(index)
    tensors, files = dict[str, TensorSlice](), dict[str, list[str]]()
    for file in shards_of(index):
        if not (directory / file).exists():
            raise CheckpointError(f"{directory / file}: missing, but {index.name} names it")
        header = read_header(directory / file)
        for name in header:
            files.setdefault(name, []).append(file)
        tensors |= listed_in(directory / file, header, weight_map)
    contested = {name: tensors[name].file for name, several in files.items() if len(several) > 1}
    for name, read in list(contested.items())[:1]:
        others = ", ".join(file for file in files[name] if file != Path(read).name)
        why = f"as {index.name} says" if name in weight_map else f"the last, since {index.name} does not list it"
        count = f" ({len(contested)} tensors lie in several files)" if len(contested) > 1 else ""
        log.warning(
            "%s: %r lies in %s too: that of %s is read, %s%s", directory, name, others, Path(read).name, why, count
        )
    return Checkpoint(path=directory, tensors=tensors, contested=contested)


def listed_in(shard: Path, header: Mapping[str, TensorSlice], weight_map: Mapping[str, str]) -> dict[str, TensorSlice]:
    """Those of a shard's tensors that are read of it: all that the index does not place in another. Raises
    CheckpointError where it places one here that is not."""
    missing = sorted(name for name, file in weight_map.items() if file == shard.name and name not in header)
    if missing:
        raise CheckpointError(f"{shard} lacks {missing[0]!r} ({len(missing)} tensors), which the index places there")
    return {name: tensor for name, tensor in header.items() if weight_map.get(name, shard.name) == shard.name}
