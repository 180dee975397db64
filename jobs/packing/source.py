"""The model to pack: finds its shards and its config, and refuses models that cannot be packed.

Also makes the config and the index of the packed store.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoint_source.config_rules import TEMPLATES
from runtime.errors import CheckpointError, ConfigError
from runtime.formats.module_tensors import METHOD
from runtime.plan.shape.shapes import Stripes, TensorSlice
from runtime.store.checkpoint import (
    INDEX,
    INDEX_SUFFIX,
    SINGLE,
    WEIGHTS_KEY,
    find_weights,
    is_gguf,
    is_index,
    list_names,
    no_weights_error,
    read_index,
    shard_names,
    shard_tensors,
    warn_of_unused_index,
)
from runtime.store.header import read_header
from runtime.store.json_object import read_json_object
from runtime.store.stripes import STRIPES_KEY, stripe_paths

CONFIG = "config.json"
SAMPLE_BYTES, NUM_SAMPLES = 4096, 16
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
WEIGHT_SUFFIXES = frozenset(
    {
        *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".gguf", ".h5", ".msgpack", ".npz"),
        *(".onnx", ".onnx_data", ".tflite", ".mlmodel", ".ot", ".nemo"),
    }
)


@dataclass(frozen=True, kw_only=True)
class PackSource:
    """The files of a model. `shards`: the weight files that a run reads, also those that are already packed and
    deleted. `weight_map`: the shard of each tensor, from the index."""

    directory: Path
    config: Mapping[str, object]
    shards: Sequence[str]
    weight_map: Mapping[str, str]

    def tensors(self, shard: str) -> Mapping[str, TensorSlice]:
        """The tensors that a run reads from a shard. Raises CheckpointError."""
        path = self.directory / shard
        return shard_tensors(path, read_header(path), self.weight_map)

    @property
    def files_to_copy(self) -> list[Path]:
        """Files that are no weights and that a run may read, such as tokenizer and chat templates; and the license."""
        folders = [folder for folder in (self.directory, self.directory / TEMPLATES) if folder.is_dir()]
        return sorted(
            path
            for folder in folders
            for path in folder.iterdir()
            if path.is_file()
            and path.suffix not in WEIGHT_SUFFIXES
            and not path.name.endswith(INDEX_SUFFIX)
            and path.name != CONFIG
        )

    @property
    def unused_files(self) -> list[str]:
        """The names of files and folders that no run reads, such as pickles. Names of folders end in a slash."""
        known = {*self.shards, CONFIG, TEMPLATES, *(path.name for path in self.files_to_copy)}
        names = sorted(
            f"{path.name}{'/' * path.is_dir()}" for path in self.directory.iterdir() if path.name not in known
        )
        return [name for name in names if not name.endswith(INDEX_SUFFIX) and not name.startswith(".")]


def open_source(path: Path, directories: Sequence[Path], *, replace: bool) -> PackSource:
    """Finds the files of the model to pack into `directories`. Raises ConfigError or CheckpointError if it cannot be
    packed."""
    if is_gguf(path):
        raise CheckpointError(f"model.path={path} is a GGUF file, which is already quantized: pack the original")
    if not path.is_dir():
        raise ConfigError(f"model.path={path} is not a directory: set the one with config.json and safetensors files")
    for out in directories:
        if out.resolve() == path.resolve():
            raise ConfigError(f"out={out} is the same directory as model.path: set another one")
    try:
        config = read_json_object(path / CONFIG)
    except FileNotFoundError:
        raise CheckpointError(f"model.path={path} has no {CONFIG}") from None
    method = next((value for key in QUANTIZATION_KEYS if (value := config.get(key))), None)
    if method is not None:
        name = method.get("quant_method", "bitsandbytes") if isinstance(method, Mapping) else method
        state = "already packed" if name == METHOD else f"already quantized by {name!r}"
        raise CheckpointError(f"model.path={path} is {state} (quantization_config in {CONFIG}): pack the original")
    shards, weight_map = _shards(path, directories, replace=replace)
    links = [name for name in shards if (path / name).is_symlink()]
    if replace and links:
        raise ConfigError(
            f"replace=true: {path / links[0]} is a link, as in the Hugging Face cache; deleting it frees nothing: set "
            "replace=false, or set model.path to a directory with the files themselves"
        )
    return PackSource(directory=path, config=config, shards=shards, weight_map=weight_map)


def _shards(path: Path, directories: Sequence[Path], *, replace: bool) -> tuple[list[str], Mapping[str, str]]:
    """Returns the names of the shards, and the shard of each tensor in the index."""
    entry, out = find_weights(path), directories[0]
    if entry is None and stripe_paths(directories, SINGLE)[0].exists():
        return [SINGLE], {}
    if entry is None:
        raise no_weights_error(str(path), list_names(path))
    weight_map = read_index(entry) if is_index(entry) else {}
    names = shard_names(entry)
    if not names:
        raise CheckpointError(f"{entry} is not a safetensors index: weight_map must be an object of tensors and files")
    if not is_index(entry):
        warn_of_unused_index(entry)
    if replace and names == [SINGLE] and (path / INDEX).exists() and shard_names(path / INDEX) != names:
        raise ConfigError(
            f"replace=true: {path} has both {SINGLE} and {INDEX}; once {SINGLE} is deleted, the other shards would be "
            f"read: move {INDEX} away first"
        )
    other = out / INDEX if names == [SINGLE] else stripe_paths(directories, SINGLE)[0]
    is_own_index = len(directories) > 1 and other.name == INDEX and other.exists() and shard_names(other) == names
    if other.exists() and not is_own_index:
        raise CheckpointError(
            f"{other}: packed from other files than {', '.join(names[:2])}{' ...' * (len(names) > 2)}: remove it, or "
            "set out to another directory"
        )
    packed = {name: stripe_paths(directories, name)[0] for name in names}
    missing = [name for name in names if not (path / name).exists() and not packed[name].exists()]
    if missing:
        raise CheckpointError(f"{path / missing[0]} is missing, but {entry.name} names it")
    return names, weight_map


def fingerprint_file(path: Path) -> str:
    """SHA-256 of the size of a file and of evenly spaced samples, the first of which has the header."""
    size, digest = path.stat().st_size, hashlib.sha256()
    digest.update(f"{size};".encode())
    with path.open("rb") as file:
        for sample in range(NUM_SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * sample // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def packed_config(source: PackSource, extra: Mapping[str, object]) -> bytes:
    """The text of config.json: that of the model, with the storage format and the fields of `extra`."""
    values = {**source.config, "quantization_config": {"quant_method": METHOD, **extra}}
    values.pop(WEIGHTS_KEY, None)  # packed weights have the default file names
    return json.dumps(values, indent=2).encode() + b"\n"


def format_index(directories: Sequence[Path], shards: Mapping[str, Stripes | None]) -> bytes:
    """The text of model.safetensors.index.json. `shards`: the stripes of each shard, None in a single directory."""
    headers = {name: read_header(directories[0] / name, stripes) for name, stripes in shards.items()}
    weight_map = {tensor: name for name, header in headers.items() for tensor in header}
    total = sum(tensor.num_bytes for header in headers.values() for tensor in header.values())
    metadata: dict[str, object] = {"total_size": total}
    if len(directories) > 1:
        metadata[STRIPES_KEY] = [str(directory.resolve()) for directory in directories]
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2).encode() + b"\n"
