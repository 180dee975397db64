"""A checkpoint, which is a directory of safetensors or a GGUF file: which tensors it holds and where their bytes lie.

No weight is read here."""

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
from ..plan.shape.shapes import TensorSlice
from .gguf import GgufHeader, read_gguf
from .header import read_header
from .json_object import read_json_object
from .read_errors import read_error

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG, NAMED = "config.json", "transformers_weights"  # its key that names another file or index
INDEX_SUFFIX = ".index.json"
ADAPTER = "adapter_config.json"
MAX_NAME_BYTES = 255  # of a file, on Linux
SHARD = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")
OWN_FORM = re.compile(r"(original/.*|consolidated[^/]*)\.(safetensors|pth|pt)$")  # of Mistral's and Meta's programs
WRITE_INDEX = (
    "import glob, json; from safetensors import safe_open; json.dump({{'metadata': {{}}, 'weight_map': {{t: f for f in "
    "sorted(glob.glob('{pattern}')) for t in safe_open(f, 'pt').keys()}}}}, open('{index}', 'w'))"
)
SAMPLE_BYTES = 4096
NUM_SAMPLES = 16


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """`duplicates`: of each tensor that lies in several files, the one that it is read from."""

    path: Path
    tensors: Mapping[str, TensorSlice]
    gguf: GgufHeader | None = None
    duplicates: Mapping[str, str] = field(default_factory=dict)

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
                size = file.stat().st_size
                digest.update(f"{file.name}:{size};".encode())
                with file.open("rb") as handle:
                    begin = handle.read(8)
                    # GGUF's magic number is no length. Tensors that are not read may lie behind the header.
                    num_bytes = min(header_bytes[str(file)], 8 + int.from_bytes(begin, "little"))
                    digest.update(begin + handle.read(num_bytes - len(begin)))
                    for turn in range(NUM_SAMPLES):
                        handle.seek(max(0, size - SAMPLE_BYTES) * turn // (NUM_SAMPLES - 1))
                        digest.update(handle.read(SAMPLE_BYTES))
            except OSError as error:
                raise read_error(file, "reading samples of it", error) from error
        for name, file in sorted(self.duplicates.items()):
            digest.update(f"{name}:{Path(file).name};".encode())
        return digest.hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Headers of all shards, checked against the index. Raises CheckpointError naming the file and the disagreement."""
    if is_gguf(path):
        header = read_gguf(path)
        return Checkpoint(path=path, tensors=header.tensors, gguf=header)
    entry = find_weights(path)
    if entry is None:
        raise no_weights_error(str(path), list_names(path))
    if not entry.exists():
        raise CheckpointError(f"{entry}: missing, but {CONFIG} names it ({NAMED})")
    if not is_index(entry):
        warn_of_unused_index(entry)
        return Checkpoint(path=path, tensors=read_header(entry))
    # The index decides. A tensor that it does not list is one more that there is, as transformers has it.
    weight_map = read_index(entry)
    tensors, files = dict[str, TensorSlice](), dict[str, list[str]]()
    for file in shard_names(entry):
        if not (path / file).exists():
            raise CheckpointError(f"{path / file}: missing, but {entry.name} names it")
        header = read_header(path / file)
        for name in header:
            files.setdefault(name, []).append(file)
        tensors |= shard_tensors(path / file, header, weight_map)
    duplicates = {name: tensors[name].file for name, several in files.items() if len(several) > 1}
    for name, read in list(duplicates.items())[:1]:
        others = ", ".join(file for file in files[name] if file != Path(read).name)
        why = f"as {entry.name} says" if name in weight_map else f"the last, since {entry.name} does not list it"
        count = f" ({len(duplicates)} tensors lie in several files)" if len(duplicates) > 1 else ""
        log.warning("%s: %r lies in %s too: that of %s is read, %s%s", path, name, others, Path(read).name, why, count)
    return Checkpoint(path=path, tensors=tensors, duplicates=duplicates)


def read_bytes(tensor: TensorSlice) -> bytes:
    """Reads a tensor whole: one of a few bytes, which says how others are stored. Raises CheckpointError or
    StorageError."""
    try:
        with Path(tensor.file).open("rb") as file:
            file.seek(tensor.offset)
            return file.read(tensor.num_bytes)
    except OSError as error:
        raise read_error(tensor.file, f"reading {tensor.name!r}", error) from error


def read_integers(tensor: TensorSlice) -> "array[int]":
    """Reads one of I32 or I64, as `read_bytes` does. Raises CheckpointError for any other dtype."""
    code = {"I32": "i", "I64": "q"}.get(tensor.dtype)
    if code is None:
        raise CheckpointError(f"{tensor.file}: {tensor.name!r} is {tensor.dtype}; I32 or I64 is wanted")
    return array(code, read_bytes(tensor))


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def shard_tensors(
    shard: Path, header: Mapping[str, TensorSlice], weight_map: Mapping[str, str]
) -> dict[str, TensorSlice]:
    """Those of a shard's tensors that are read of it: all that the index does not place in another. Raises
    CheckpointError where it places one here that is not."""
    missing = sorted(name for name, file in weight_map.items() if file == shard.name and name not in header)
    if missing:
        raise CheckpointError(f"{shard} lacks {missing[0]!r} ({len(missing)} tensors), which the index places there")
    return {name: tensor for name, tensor in header.items() if weight_map.get(name, shard.name) == shard.name}


def find_weights(directory: Path, names: Collection[str] | None = None) -> Path | None:
    """The file of weights, or the index, that transformers reads of a directory: the one that `transformers_weights` in
    config.json names, else model.safetensors, else model.safetensors.index.json. None where there is none of them.

    `names`: of all files in the place that `directory` is a copy of, where it holds no weights yet. Raises
    CheckpointError for a name that is no plain file's."""
    config = directory / CONFIG
    named = read_json_object(config).get(NAMED) if config.is_file() else None
    if named is not None:
        if not isinstance(named, str) or not named.endswith((".safetensors", ".safetensors.index.json")):
            raise CheckpointError(f"{config}: {NAMED} names {named!a:.80}, neither *.safetensors nor their index")
        return directory / _require_plain_name(named, f"{config}: {NAMED}")
    for name in (SINGLE, INDEX):
        if name in names if names is not None else (directory / name).exists():
            return directory / name
    return None


def is_index(entry: Path) -> bool:
    return entry.suffix == ".json"


def shard_names(entry: Path) -> list[str]:
    """The names of the files that are read, in order; `entry`: the file or the index that `find_weights` found."""
    return sorted(set(read_index(entry).values())) if is_index(entry) else [entry.name]


def read_index(index: Path) -> dict[str, str]:
    """The shard of each tensor. Raises CheckpointError for what is no index or names a file elsewhere."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise CheckpointError(f"{index}: not a safetensors index: weight_map must be an object of tensors and files")
    names = {tensor: file for tensor, file in weight_map.items() if isinstance(file, str)}
    if len(names) < len(weight_map):
        odd = next(tensor for tensor, file in weight_map.items() if not isinstance(file, str))
        raise CheckpointError(f"{index}: not a safetensors index: {odd!a:.80} lies in {weight_map[odd]!a:.40}")
    for file in sorted(set(names.values())):
        _require_plain_name(file, f"{index}:")
    return names


def warn_of_unused_index(single: Path) -> None:
    """Names both where an index of other files lies beside the file that is read: their numbers may differ."""
    index, shards = single.with_name(INDEX), [single.name]
    with suppress(CheckpointError, OSError):
        shards = shard_names(index)
    if shards != [single.name]:
        log.warning(
            "%s is read, as transformers does, and not %s with its %d shards beside it: to take those, move %s away",
            single,
            INDEX,
            len(shards),
            single.name,
        )


def no_weights_error(place: str, names: Collection[str], *, is_local: bool = True) -> CheckpointError:
    """The error for a place that holds no weights that can be read: says what is there and what to do. `names`: of its
    files, those of folders with the folder's name in front; `is_local`: a directory, and no hub id or URL."""
    fetched = "" if is_local else "fetch it, and "
    files = sorted(name for name in names if "/" not in name)
    own_form = sorted(name for name in names if OWN_FORM.match(name))
    weights = [name for name in files if name.endswith(".safetensors") and name not in own_form]
    lacks = f"{place}: holds neither {SINGLE} nor {INDEX}"
    if ADAPTER in files:
        return CheckpointError(
            f"{place}: an adapter ({ADAPTER}), which is no model by itself: merge it into its base model once, as "
            "`merge_and_unload` of peft does, and give model.path the directory that this saves"
        )
    if shards := [name for name in weights if SHARD.search(name)]:
        return CheckpointError(f"{place}: {_describe_missing_index(place if is_local else None, shards)}")
    if pickles := [name for name in files if name.endswith(".bin")]:
        return CheckpointError(
            f"{place}: only pickled weights ({pickles[0]} ...), which run code of whoever wrote them when they are "
            "read. Take the safetensors that most models also have; only if you trust the writer as you trust a "
            "program, convert them once, in a container without network:\n"
            f'  python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{place}', dtype='auto').save_pretrained('{place}-safetensors')\""
        )
    if ggufs := [name for name in files if name.endswith(".gguf")]:
        way = f"name one: model.path={place}" if is_local else "fetch one and name it: model.path=DIR"
        return CheckpointError(f"{place}: holds GGUF files; {way}/{ggufs[0]}")
    if weights:
        more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        link = f"ln -s {shlex.quote(weights[0])} {shlex.quote(f'{place}/{SINGLE}')}"
        return CheckpointError(
            f"{lacks}, but {weights[0]}{more}, which transformers reads only when told to. If that is the whole model, "
            f"{fetched}give it the usual name{f': {link}' * is_local}"
        )
    if own_form:
        return CheckpointError(
            f"{lacks}, but {own_form[0]}, in the own form of Mistral's or Meta's programs, whose tensors have other "
            f"names. Most such repositories hold transformers' form as well ({SINGLE}, or {INDEX} and its shards): "
            "fetch that; where there is none, convert it once by the script that transformers has for this model"
        )
    if inside := sorted(name for name in names if name.rpartition("/")[2] in (SINGLE, INDEX)):
        folder = inside[0].rpartition("/")[0]
        return CheckpointError(f"{lacks}, but its folder {folder} does: {fetched}give that to model.path")
    return CheckpointError(lacks)


def list_names(directory: Path) -> list[str]:
    """The files of a directory and of its folders, as `unreadable` takes them."""
    paths = [path for pattern in ("*", "*/*") for path in directory.glob(pattern)]
    return [path.relative_to(directory).as_posix() for path in paths if path.is_file()]


def _describe_missing_index(directory: str | None, shards: Sequence[str]) -> str:
    expected = max(int(match[2]) for name in shards if (match := SHARD.search(name)))
    if len(shards) < expected:
        return (
            f"{len(shards)} of {expected} shards ({shards[0]} ...) and no index ({INDEX}): fetch the others and the "
            "index from where these come"
        )
    found = f"{len(shards)} shards ({shards[0]} ...) and no index ({INDEX}), which says what lies where"
    if directory is None:
        return f"{found}: fetch them, and write it once, in the directory: model.path=DIR says how"
    command = WRITE_INDEX.format(pattern=SHARD.sub("-*-of-*.safetensors", shards[0]), index=INDEX)
    return (
        f"{found}: fetch it from where they come, or write it once:\n"
        f'  cd {shlex.quote(directory)} && python -c "{command}"'
    )


def _require_plain_name(file: str, where: str) -> str:
    if Path(file).name != file or "\0" in file or len(file.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        raise CheckpointError(f"{where} names {file!a:.80}; only plain file names are allowed")
    return file
