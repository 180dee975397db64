"""The model to be packed: its shards, its config, and why it may not be packed."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import CheckpointError, ConfigError
from runtime.formats.own_store import METHOD
from runtime.store.checkpoint import INDEX, SINGLE, is_gguf
from runtime.store.json_object import read_json_object

CONFIG = "config.json"
SAMPLE_BYTES, NUM_SAMPLES = 4096, 16
QUANTISED = ("quantization_config", "compression_config")


@dataclass(frozen=True, kw_only=True)
class Source:
    """`shards`: names of its files of weights, also of those that are packed and deleted already."""

    directory: Path
    config: Mapping[str, object]
    shards: Sequence[str]

    @property
    def others(self) -> list[Path]:
        """All its other files, which are copied: tokenizer, settings, licence."""
        weights = {*self.shards, INDEX, CONFIG}
        return sorted(path for path in self.directory.iterdir() if path.is_file() and path.name not in weights)


def open_source(path: Path, out: Path, *, replace: bool) -> Source:
    """Reads what says which files there are. Raises ConfigError or CheckpointError for what cannot be packed."""
    if is_gguf(path):
        raise CheckpointError(f"model.path={path}: a GGUF file, whose numbers are quantised already; pack the original")
    if not path.is_dir():
        raise ConfigError(f"model.path={path}: no directory; name the one that holds config.json and safetensors")
    if out.resolve() == path.resolve():
        raise ConfigError(f"out={out} is model.path itself: name another directory")
    config = read_json_object(path / CONFIG)
    method = next((found for key in QUANTISED if (found := config.get(key))), None)
    if method is not None:
        name = method.get("quant_method", "bitsandbytes") if isinstance(method, Mapping) else method
        what = "is packed already" if name == METHOD else f"is quantised already, by {name!r}"
        raise CheckpointError(f"model.path={path}: {what} (quantization_config in {CONFIG}); pack the original")
    shards = _shards(path, out)
    links = [name for name in shards if (path / name).is_symlink()]
    if replace and links:
        raise ConfigError(
            f"replace=true: {path / links[0]} is a link, as in the Hugging Face cache, whose deletion frees nothing: "
            "replace=false, or name a directory of the files themselves"
        )
    return Source(directory=path, config=config, shards=shards)


def _shards(path: Path, out: Path) -> list[str]:
    index = path / INDEX
    if not index.exists():
        if (path / SINGLE).exists() or (out / SINGLE).exists():
            return [SINGLE]
        raise CheckpointError(f"{path}: holds neither {SINGLE} nor {INDEX}")
    weight_map = read_json_object(index).get("weight_map")
    names = sorted({str(file) for file in weight_map.values()}) if isinstance(weight_map, Mapping) else []
    if not names or any(Path(name).name != name for name in names):
        raise CheckpointError(f"{index}: not a safetensors index: weight_map must be an object of tensors and files")
    lost = [name for name in names if not (path / name).exists() and not (out / name).exists()]
    if lost:
        raise CheckpointError(f"{path / lost[0]}: missing, but {INDEX} names it")
    return names


def stamp_of(path: Path) -> str:
    """Tells files apart by size and spread samples, headers among them; SHA-256 in hexadecimal digits."""
    size, digest = path.stat().st_size, hashlib.sha256()
    digest.update(f"{size};".encode())
    with path.open("rb") as file:
        for turn in range(NUM_SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * turn // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def packed_config(source: Source, about: Mapping[str, object]) -> bytes:
    """The model's config.json, which says how its weights lie, and what else there is to say `about` it."""
    values = {**source.config, "quantization_config": {"quant_method": METHOD, **about}}
    return json.dumps(values, indent=2).encode() + b"\n"
