"""Opens checkpoints (directories of safetensors, or GGUF files): reads names, shapes and file offsets of tensors, but
no weights."""

import hashlib
import logging
import re
import shlex
from array import array
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import CheckpointError
from ..plan.shape.shapes import Stripes, TensorSlice
from .gguf import GgufHeader, read_gguf
from .header import read_header
from .json_object import read_json_object
from .read_errors import read_error
from .striped_store import find_stripes, stripe_directories
from .stripes import STRIPE_NAME, open_whole

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG, WEIGHTS_KEY = "config.json", "transformers_weights"  # the key names another weights file or index
INDEX_SUFFIX = ".index.json"
ADAPTER = "adapter_config.json"
MAX_NAME_BYTES = 255  # of a file name, on Linux
SHARD = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")
VENDOR_FILES = re.compile(r"(original/.*|consolidated[^/]*)\.(safetensors|pth|pt)$")  # of Mistral's and Meta's programs
# Python code for an error message: writes an index of the shards that match {pattern} to the file {index}.
WRITE_INDEX = (
    "import glob, json; from safetensors import safe_open; json.dump({{'metadata': {{}}, 'weight_map': {{t: f for f in "
    "sorted(glob.glob('{pattern}')) for t in safe_open(f, 'pt').keys()}}}}, open('{index}', 'w'))"
)
SAMPLE_BYTES, NUM_SAMPLES = 4096, 16  # of each file in a fingerprint


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The tensors of a checkpoint, by name."""

    path: Path
    tensors: Mapping[str, TensorSlice]
    gguf: GgufHeader | None = None  # of a GGUF file
    duplicates: Mapping[str, str] = field(default_factory=dict)  # tensor stored in several files -> file that is read

    @property
    def files(self) -> list[str]:
        """Sorted paths of the files that contain tensors."""
        return sorted({tensor.file for tensor in self.tensors.values()})

    @property
    def stripes(self) -> Mapping[str, Stripes]:
        """The stripes of each of `files` that is divided among directories."""
        return {tensor.file: tensor.stripes for tensor in self.tensors.values() if tensor.stripes is not None}

    @property
    def stored_files(self) -> list[str]:
        """Paths of the files on disk: `files`, or their stripes."""
        stripes = self.stripes
        return [part for file in self.files for part in (stripes[file].files if file in stripes else (file,))]

    def fingerprint(self) -> str:
        """SHA-256 over each shard's name, size, header and 16 samples of its data; independent of the directory.
        Different checkpoints have different fingerprints, but a few changed bits may go unnoticed."""
        digest = hashlib.sha256()
        stripes = self.stripes
        data_begins: dict[str, int] = {}  # offset of the first tensor in each file
        for tensor in self.tensors.values():
            data_begins[tensor.file] = min(tensor.offset, data_begins.get(tensor.file, tensor.offset))
        for file in map(Path, self.files):
            try:
                parts = stripes.get(str(file))
                size = file.stat().st_size if parts is None else parts.num_bytes
                digest.update(f"{file.name}:{size};".encode())
                with open_whole(file, parts) as handle:
                    start = handle.read(8)  # of safetensors: the header's length
                    # The minimum is the header's size also in two other cases: in a GGUF file, which begins with a
                    # magic number, and in a shard whose first tensors are read from another shard.
                    header_bytes = min(data_begins[str(file)], 8 + int.from_bytes(start, "little"))
                    digest.update(start + handle.read(header_bytes - len(start)))
                    for sample in range(NUM_SAMPLES):
                        handle.seek(max(0, size - SAMPLE_BYTES) * sample // (NUM_SAMPLES - 1))
                        digest.update(handle.read(SAMPLE_BYTES))
            except OSError as error:
                raise read_error(file, "reading samples", error) from error
        for name, file in sorted(self.duplicates.items()):
            digest.update(f"{name}:{Path(file).name};".encode())
        return digest.hexdigest()


def open_checkpoint(path: Path, others: Sequence[str] = ()) -> Checkpoint:
    """Reads the headers of all shards and checks them against the index. `others`: see `stripe_directories`; without
    effect for other checkpoints. Raises CheckpointError."""
    if is_gguf(path):
        header = read_gguf(path)
        return Checkpoint(path=path, tensors=header.tensors, gguf=header)
    entry = find_weights(path)  # a weights file or an index
    if entry is None:
        raise no_weights_error(str(path), list_names(path))
    if not entry.exists():
        raise CheckpointError(f"{entry}: missing, but {CONFIG} names it ({WEIGHTS_KEY})")
    if not is_index(entry):
        warn_of_unused_index(entry)
        return Checkpoint(path=path, tensors=read_header(entry))
    # As in transformers: the index decides from which shard a tensor is read. Unlisted tensors are read too.
    weight_map, directories = read_index(entry), stripe_directories(entry, others)
    tensors, files = dict[str, TensorSlice](), dict[str, list[str]]()  # files: shards that contain each tensor
    for file in shard_names(entry):
        stripes = find_stripes(directories, file) if directories else None
        if stripes is None and not (path / file).exists():
            raise CheckpointError(f"{path / file}: missing, but {entry.name} names it")
        header = read_header(path / file, stripes)
        for name in header:
            files.setdefault(name, []).append(file)
        tensors |= shard_tensors(path / file, header, weight_map)
    duplicates = {name: tensors[name].file for name, several in files.items() if len(several) > 1}
    for name, chosen in list(duplicates.items())[:1]:  # one warning, with the first tensor as example
        others = ", ".join(file for file in files[name] if file != Path(chosen).name)
        reason = (
            f"as {entry.name} says" if name in weight_map else f"the last shard, since {entry.name} does not list it"
        )
        count = f" ({len(duplicates)} tensors are in several shards)" if len(duplicates) > 1 else ""
        log.warning("%s: %r is also in %s; read from %s, %s%s", path, name, others, Path(chosen).name, reason, count)
    return Checkpoint(path=path, tensors=tensors, duplicates=duplicates)


def read_bytes(tensor: TensorSlice) -> bytes:
    """Reads a small tensor into memory. Raises CheckpointError or StorageError."""
    try:
        with open_whole(tensor.file, tensor.stripes) as file:
            file.seek(tensor.offset)
            return file.read(tensor.num_bytes)
    except OSError as error:
        raise read_error(tensor.file, f"reading {tensor.name!r}", error) from error


def read_integers(tensor: TensorSlice) -> "array[int]":
    """Reads a small I32 or I64 tensor. Raises CheckpointError (also for other dtypes) or StorageError."""
    code = {"I32": "i", "I64": "q"}.get(tensor.dtype)
    if code is None:
        raise CheckpointError(f"{tensor.file}: {tensor.name!r} has dtype {tensor.dtype}; expected I32 or I64")
    return array(code, read_bytes(tensor))


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def shard_tensors(
    shard: Path, header: Mapping[str, TensorSlice], weight_map: Mapping[str, str]
) -> dict[str, TensorSlice]:
    """Returns the shard's tensors except those that the index assigns to another shard. Raises CheckpointError if a
    tensor that the index assigns to this shard is missing."""
    missing = sorted(name for name, file in weight_map.items() if file == shard.name and name not in header)
    if missing:
        raise CheckpointError(f"{shard} lacks {missing[0]!r} ({len(missing)} tensors), which the index lists there")
    return {name: tensor for name, tensor in header.items() if weight_map.get(name, shard.name) == shard.name}


def find_weights(directory: Path, names: Collection[str] | None = None) -> Path | None:
    """Finds the weights file or index that transformers would read: the file named by `transformers_weights` in
    config.json, else model.safetensors, else model.safetensors.index.json. Returns None if there is none.

    `names`: the files of the repository, if its weights are not downloaded to `directory` yet. Raises CheckpointError
    if `transformers_weights` is not a plain file name."""
    config = directory / CONFIG
    named = read_json_object(config).get(WEIGHTS_KEY) if config.is_file() else None
    if named is not None:
        if not isinstance(named, str) or not named.endswith((".safetensors", ".safetensors.index.json")):
            raise CheckpointError(
                f"{config}: {WEIGHTS_KEY}={named!a:.80}; "
                "expected a name that ends in .safetensors or .safetensors.index.json"
            )
        return directory / _require_plain_name(named, f"{config}: {WEIGHTS_KEY}")
    for name in (SINGLE, INDEX):
        if name in names if names is not None else (directory / name).exists():
            return directory / name
    return None


def is_index(entry: Path) -> bool:
    return entry.suffix == ".json"


def shard_names(entry: Path) -> list[str]:
    """Sorted names of the shards; `entry`: the weights file or index returned by `find_weights`."""
    return sorted(set(read_index(entry).values())) if is_index(entry) else [entry.name]


def read_index(index: Path) -> dict[str, str]:
    """Returns the shard's file name for each tensor. Raises CheckpointError if the index is malformed or names a file
    outside its directory."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise CheckpointError(f"{index}: not a safetensors index: weight_map must map tensor names to file names")
    names = {tensor: file for tensor, file in weight_map.items() if isinstance(file, str)}
    if len(names) < len(weight_map):
        bad = next(tensor for tensor, file in weight_map.items() if not isinstance(file, str))
        raise CheckpointError(
            f"{index}: not a safetensors index: weight_map[{bad!a:.80}] is {weight_map[bad]!a:.40}, not a file name"
        )
    for file in sorted(set(names.values())):
        _require_plain_name(file, f"{index}:")
    return names


def warn_of_unused_index(single: Path) -> None:
    """Logs a warning if the directory of `single`, the file that is read, also has an index of other shards, whose
    weights may differ."""
    index, shards = single.with_name(INDEX), [single.name]
    with suppress(CheckpointError, OSError):
        shards = shard_names(index)
    if shards != [single.name]:
        log.warning(
            "%s is read, as in transformers; %s and its %d shards are ignored: to read them instead, move %s away",
            single,
            INDEX,
            len(shards),
            single.name,
        )


def no_weights_error(location: str, names: Collection[str], *, is_local: bool = True) -> CheckpointError:
    """Returns the error for a location without readable weights, which says what is there and what to do. `names`: the
    relative paths of its files. `is_local`: the location is a directory, not a hub id or URL."""
    fetch = "" if is_local else "download it, and "
    files = sorted(name for name in names if "/" not in name)
    vendor_files = sorted(name for name in names if VENDOR_FILES.match(name))
    weights = [name for name in files if name.endswith(".safetensors") and name not in vendor_files]
    problem = f"{location}: holds neither {SINGLE} nor {INDEX}"
    if stripe := next(filter(None, map(STRIPE_NAME.fullmatch, files)), None):
        advice = "set model.path to its first directory, or name all of them in order: model=[DIR1,DIR2]"
        if stripe["number"] == "1":
            advice = "it is not finished: start the same `weightstream pack` again"
        return CheckpointError(
            f"{location}: has stripe {stripe['number']} of {stripe['count']} of a striped store: {advice}"
        )
    if ADAPTER in files:
        return CheckpointError(
            f"{location}: an adapter ({ADAPTER}), not a whole model: merge it into its base model once, with "
            "`merge_and_unload` of peft, save that and set model.path to its directory"
        )
    if shards := [name for name in weights if SHARD.search(name)]:
        return CheckpointError(f"{location}: {_describe_missing_index(location if is_local else None, shards)}")
    if pickles := [name for name in files if name.endswith(".bin")]:
        return CheckpointError(
            f"{location}: only pickled weights ({pickles[0]} ...), and loading a pickle can run code of its author. "
            "Use the safetensors that most models also have; only if you trust the author, convert the weights once, "
            "in a container without network:\n"
            f'  python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{location}', dtype='auto').save_pretrained('{location}-safetensors')\""
        )
    if ggufs := [name for name in files if name.endswith(".gguf")]:
        advice = f"set model.path={location}" if is_local else "download one and set model.path=DIR"
        return CheckpointError(f"{location}: a directory of GGUF files; {advice}/{ggufs[0]}")
    if weights:
        more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        link = f"ln -s {shlex.quote(weights[0])} {shlex.quote(f'{location}/{SINGLE}')}"
        return CheckpointError(
            f"{problem}, but {weights[0]}{more}, which transformers does not read by default. If that is the whole "
            f"model, {fetch}give it the usual name{f': {link}' * is_local}"
        )
    if vendor_files:
        return CheckpointError(
            f"{problem}, but {vendor_files[0]}, in the format of Mistral's or Meta's own programs, with other tensor "
            f"names. Most such repositories also have the transformers format ({SINGLE}, or {INDEX} and its shards): "
            "download that; otherwise convert the weights once with transformers' script for this model"
        )
    if nested := sorted(name for name in names if name.rpartition("/")[2] in (SINGLE, INDEX)):
        folder = nested[0].rpartition("/")[0]
        return CheckpointError(f"{problem}, but its folder {folder} does: {fetch}set model.path to that folder")
    return CheckpointError(problem)


def list_names(directory: Path) -> list[str]:
    """Returns the relative paths of files in a directory and its direct subdirectories."""
    paths = [path for pattern in ("*", "*/*") for path in directory.glob(pattern)]
    return [path.relative_to(directory).as_posix() for path in paths if path.is_file()]


def _describe_missing_index(directory: str | None, shards: Sequence[str]) -> str:
    """Returns the problem of shards without index, and what to do. `directory`: None if it is not local."""
    expected = max(int(match[2]) for name in shards if (match := SHARD.search(name)))
    if len(shards) < expected:
        return (
            f"{len(shards)} of {expected} shards ({shards[0]} ...) and no index ({INDEX}): download the missing shards "
            "and the index from the same source"
        )
    problem = f"{len(shards)} shards ({shards[0]} ...) and no index ({INDEX})"
    if directory is None:
        return f"{problem}: download them, set model.path=DIR, and the next error shows how to write an index"
    command = WRITE_INDEX.format(pattern=SHARD.sub("-*-of-*.safetensors", shards[0]), index=INDEX)
    return (
        f"{problem}: download it from the same source, or write it once:\n"
        f'  cd {shlex.quote(directory)} && python -c "{command}"'
    )


def _require_plain_name(file: str, source: str) -> str:
    """Returns the name. Raises CheckpointError if it contains a directory. `source`: where the name is from."""
    if Path(file).name != file or "\0" in file or len(file.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        raise CheckpointError(f"{source} names {file!a:.80}; only plain file names are allowed")
    return file
