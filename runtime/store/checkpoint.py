"""A checkpoint, which is a directory of safetensors or a GGUF file: which tensors it holds and where their bytes lie.

No weight is read here."""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..plan.shape.shapes import TensorSlice
from .faults import read_fault
from .gguf import GgufHeader, read_gguf
from .header import read_header
from .json_object import read_json_object

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"
SAMPLE_BYTES = 4096
NUM_SAMPLES = 16
MAX_NAME_BYTES = 255  # of a file, on Linux


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    path: Path
    tensors: Mapping[str, TensorSlice]
    gguf: GgufHeader | None = None

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
        return digest.hexdigest()


def _add_samples(digest: "hashlib._Hash", file: Path, header_bytes: int) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}:{size};".encode())
    with file.open("rb") as handle:
        digest.update(handle.read(header_bytes))
        for turn in range(NUM_SAMPLES):
            handle.seek(max(0, size - SAMPLE_BYTES) * turn // (NUM_SAMPLES - 1))
            digest.update(handle.read(SAMPLE_BYTES))


def open_checkpoint(path: Path) -> Checkpoint:
    """Headers of all shards, checked against the index. Raises CheckpointError naming the file and the disagreement."""
    if is_gguf(path):
        header = read_gguf(path)
        return Checkpoint(path=path, tensors=header.tensors, gguf=header)
    index, single = path / INDEX, path / SINGLE
    if index.exists():
        return Checkpoint(path=path, tensors=_sharded(path, index))
    if single.exists():
        return Checkpoint(path=path, tensors=read_header(single))
    raise _unreadable(path)


def read_bytes(tensor: TensorSlice) -> bytes:
    """Reads a tensor whole: one of a few bytes, which says how others are stored. Raises CheckpointError or
    StorageError."""
    try:
        with Path(tensor.file).open("rb") as file:
            file.seek(tensor.offset)
            return file.read(tensor.num_bytes)
    except OSError as error:
        raise read_fault(tensor.file, f"reading {tensor.name!r}", error) from error


def read_integers(tensor: TensorSlice) -> Sequence[int]:
    """Reads one of I32 or I64, as `read_bytes` does. Raises CheckpointError for any other dtype."""
    code = {"I32": "i", "I64": "q"}.get(tensor.dtype)
    if code is None:
        raise CheckpointError(f"{tensor.file}: {tensor.name!r} is {tensor.dtype}; I32 or I64 is wanted")
    return array(code, read_bytes(tensor))


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def _unreadable(directory: Path) -> CheckpointError:
    if (directory / ADAPTER).exists():
        return CheckpointError(
            f"{directory}: an adapter ({ADAPTER}), which is no model by itself: merge it into its base model once, as "
            "`merge_and_unload` of peft does, and give model.path the directory that this saves"
        )
    pickles = sorted(p.name for p in directory.glob("*.bin"))
    if pickles:
        return CheckpointError(
            f"{directory}: only pickled weights ({pickles[0]} ...), which run code of whoever wrote them when they are "
            "read. Take the safetensors that most models also have; only if you trust the writer as you trust a "
            "program, convert them once, in a container without network:\n"
            f'  python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{directory}', dtype='auto').save_pretrained('{directory}-safetensors')\""
        )
    ggufs = sorted(p.name for p in directory.glob("*.gguf"))
    if ggufs:
        return CheckpointError(f"{directory}: holds GGUF files; name one: model.path={directory / ggufs[0]}")
    return CheckpointError(f"{directory}: holds neither {SINGLE} nor {INDEX}")


def _sharded(directory: Path, index: Path) -> dict[str, TensorSlice]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise CheckpointError(f"{index}: not a safetensors index: weight_map must be an object of tensors and files")
    names = {tensor: file for tensor, file in weight_map.items() if isinstance(file, str)}
    if len(names) < len(weight_map):
        odd = next(tensor for tensor, file in weight_map.items() if not isinstance(file, str))
        raise CheckpointError(f"{index}: not a safetensors index: {odd!a:.80} lies in {weight_map[odd]!a:.40}")
    tensors: dict[str, TensorSlice] = {}
    for file in sorted(set(names.values())):
        if Path(file).name != file or "\0" in file or len(file.encode("utf-8", "replace")) > MAX_NAME_BYTES:
            raise CheckpointError(f"{index}: names {file!a:.80}; only plain file names are allowed")
        if not (directory / file).exists():
            raise CheckpointError(f"{directory / file}: missing, but {INDEX} names it")
        tensors.update(_agreeing(read_header(directory / file), names, file, index))
    return tensors


def _agreeing(found: dict[str, TensorSlice], names: dict[str, str], file: str, index: Path) -> dict[str, TensorSlice]:
    listed = {tensor for tensor, where in names.items() if where == file}
    missing, extra = sorted(listed - found.keys()), sorted(found.keys() - listed)
    if missing:
        raise CheckpointError(f"{file} lacks {missing[0]!r} ({len(missing)} tensors), which {index} places there")
    if extra:
        raise CheckpointError(
            f"{file} holds {extra[0]!r} ({len(extra)} tensors), which {index} places elsewhere or nowhere"
        )
    return found
