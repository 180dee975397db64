"""Models with random weights that are generated when they are read, as fast as memory.

On disk, a model is a sparse checkpoint: files with headers, and holes instead of numbers. The numbers of a matrix come
from a tile, a buffer of normal numbers with the matrix's standard deviation. A matrix begins at its own offset in the
tile and repeats it cyclically. The length of a tile is prime, so that no two rows are equal. Int4 weights come from a
tile of codes and a tile of scales. Zeros instead of random numbers would be measured as too fast, because they take
less power in products and over the link.
"""

import json
import math
import os
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from runtime.config.settings import RuntimeConfig
from runtime.formats.kinds.rounded import Rounding
from runtime.formats.module_tensors import METHOD, part_name
from runtime.formats.scaled_rows import SCALES
from runtime.library.api import Runtime
from runtime.plan.shape.shapes import Parameter, TensorSlice
from runtime.store.checkpoint import CONFIG, open_checkpoint
from runtime.store.file_digests import METADATA, PIECE_BYTES
from runtime.store.reader import Reader
from runtime.store.transfer import ChunkTiming
from runtime.store.writer import DTYPE_NAMES, TensorSpec, plan_shards, write_sparse_checkpoint
from runtime.stream.device import ComputeDevice
from runtime.synthesize.checkpoints import create_sparse_checkpoint
from runtime.synthesize.random_weights import RandomWeights
from runtime.units import GIB, MIB

from .config import MODELS, GpuConfig

TILE_ELEMENTS = 16_777_259  # prime; 32 MiB of bf16
TILE_GROUPS = 262_139  # prime; groups that share a scale, of an int4 tile
CHUNK_BYTES = 16 * MIB
SHARD_BYTES = 5 * GIB
INT4 = Rounding("int4")

TileWindow = tuple[np.ndarray, int]  # the bytes of a tile, and a tensor's offset in them


class RandomInitWeights:
    """Random numbers for the `tensors` of a checkpoint. A tensor name always gives the same bytes, also in a model with
    fewer layers. `weights`: the distributions. `rounding`: the format of `weightstream pack` in which matrices are
    stored."""

    def __init__(self, weights: RandomWeights, tensors: Mapping[str, TensorSlice], rounding: Rounding | None = None):
        self._files: dict[str, list[TensorSlice]] = {}
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            self._files.setdefault(tensor.file, []).append(tensor)
        self._windows = dict(_tile_windows(weights, rounding))
        assert self._windows.keys() == tensors.keys(), "the checkpoint has the same tensors"

    def fill(self, file: str, offset: int, target: memoryview) -> None:
        """Fills `target` with the bytes of `file` from `offset`. Bytes outside of tensors are not changed."""
        tensors, end = self._files[file], offset + len(target)
        view = np.frombuffer(target, dtype=np.uint8)
        # Tensors are sorted by offset: begins with the last one that begins at or before `offset`.
        first = max(0, bisect_right(tensors, offset, key=lambda tensor: tensor.offset) - 1)
        for tensor in tensors[first:]:
            if tensor.offset >= end:
                return
            begin, stop = max(tensor.offset, offset), min(tensor.offset + tensor.num_bytes, end)
            if begin < stop:
                self._copy(tensor.name, begin - tensor.offset, view[begin - offset : stop - offset])

    def _copy(self, name: str, offset: int, view: np.ndarray) -> None:
        """Copies the bytes of tensor `name` from `offset` into `view`."""
        (source, first), done = self._windows[name], 0  # the tile, read cyclically from `first` on
        while done < len(view):
            begin = (first + offset + done) % len(source)
            count = min(len(view) - done, len(source) - begin)
            view[done : done + count] = source[begin : begin + count]
            done += count

    def write(self, num_threads: int) -> None:
        """Writes all numbers into the sparse files, for variants that read weights from disk."""
        chunks = [
            (file, tensor.offset + begin, min(CHUNK_BYTES, tensor.num_bytes - begin))
            for file, tensors in self._files.items()
            for tensor in tensors
            for begin in range(0, tensor.num_bytes, CHUNK_BYTES)
        ]
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(self._write, *zip(*chunks, strict=True)))  # list() raises a thread's error

    def _write(self, file: str, offset: int, num_bytes: int) -> None:
        buffer = bytearray(num_bytes)
        self.fill(file, offset, memoryview(buffer))
        with Path(file).open("r+b") as target:
            os.pwrite(target.fileno(), buffer, offset)

    def tensors(self, parameters: Sequence[Parameter], num_threads: int) -> dict[str, torch.Tensor]:
        """The parameters by name, each in memory of its own, as transformers needs them."""
        tensors = {p.name: torch.empty(p.shape, dtype=_dtype_of(p)) for p in parameters}
        chunks = [
            (piece.file, piece.offset + begin, view[begin : begin + CHUNK_BYTES])
            for parameter in parameters
            for piece, view in _slice_views(parameter, tensors[parameter.name])
            for begin in range(0, piece.num_bytes, CHUNK_BYTES)
        ]
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(self.fill, *zip(*chunks, strict=True)))  # disjoint views; list() raises a thread's error
        return tensors


def _tile_windows(weights: RandomWeights, rounding: Rounding | None) -> Iterator[tuple[str, TileWindow]]:
    """Yields the name of each stored tensor, with its tile and its offset in it. Tensors that are not normal have all
    their bytes instead of a tile."""
    normal = torch.empty(TILE_ELEMENTS).normal_(generator=torch.Generator().manual_seed(0))
    # By standard deviation: tiles of numbers, and pairs of tiles with codes and scales.
    tiles, rounded_tiles = dict[float, np.ndarray](), dict[float, tuple[np.ndarray, np.ndarray]]()
    for spec in weights.specs:
        std, name_hash = weights.standard_deviation(spec), crc32(spec.name.encode())
        if std is None:
            yield spec.name, (_as_bytes(weights.draw(spec)), 0)
        elif rounding is None or not _is_rounded(spec, rounding):
            if std not in tiles:
                tiles[std] = _as_bytes((normal * std).to(spec.dtype))
            yield spec.name, (tiles[std], name_hash % TILE_ELEMENTS * spec.dtype.itemsize)
        else:
            if std not in rounded_tiles:
                groups = normal[: TILE_GROUPS * rounding.group_size].view(TILE_GROUPS, -1) * std
                scales = rounding.choose_scales(groups)
                rounded_tiles[std] = (_as_bytes(rounding.encode(groups, scales)), _as_bytes(scales))
            for stored, tile in zip(_stored(spec, rounding), rounded_tiles[std], strict=True):
                yield stored.name, (tile, name_hash % TILE_GROUPS * (len(tile) // TILE_GROUPS))


def _is_rounded(spec: TensorSpec, rounding: Rounding) -> bool:
    return rounding.skip_reason(spec.name, DTYPE_NAMES[spec.dtype], spec.shape) is None


def _stored(spec: TensorSpec, rounding: Rounding) -> tuple[TensorSpec, TensorSpec]:
    """The tensors of codes and of scales that a packed store has for a rounded tensor."""
    *rows, num_columns = spec.shape
    codes = (*rows, rounding.packed_columns(num_columns))
    scales = (*rows, rounding.num_groups(num_columns))
    return (
        TensorSpec(name=part_name(spec.name, rounding.format), dtype=torch.uint8, shape=codes),
        TensorSpec(name=part_name(spec.name, SCALES), dtype=torch.bfloat16, shape=scales),
    )


class RandomInitReader(Reader):
    """A reader that fills buffers with random weights instead of reading files. Calls `count` with the bytes of each
    read."""

    def __init__(self, weights: RandomInitWeights, num_threads: int, count: Callable[[int], object]):
        super().__init__(num_threads=num_threads, chunk_bytes=CHUNK_BYTES)
        self._weights, self._count = weights, count

    def _read(self, path: str, offset: int, view: memoryview, needed: int) -> ChunkTiming:
        begin = time.monotonic()
        self._weights.fill(path, offset, view)
        self._count(len(view))
        return ChunkTiming(begin, time.monotonic(), len(view))


def _slice_views(parameter: Parameter, tensor: torch.Tensor) -> list[tuple[TensorSlice, memoryview]]:
    """The stored slices of a parameter, each with the bytes of `tensor` that it fills. Slices, such as experts, are
    consecutive in `tensor`, which is contiguous."""
    pieces = [piece for entry in parameter.pieces for piece in entry]
    assert sum(piece.num_bytes for piece in pieces) == tensor.nbytes, f"{parameter.name} is not made of plain rows"
    assert not parameter.is_transposed, f"{parameter.name} is stored transposed"
    whole, views, offset = tensor.view(-1).view(torch.uint8).numpy().data, [], 0
    for piece in pieces:
        views.append((piece, whole[offset : offset + piece.num_bytes]))
        offset += piece.num_bytes
    return views


def _dtype_of(parameter: Parameter) -> torch.dtype:
    size = parameter.num_bytes // math.prod(parameter.shape)
    return {2: torch.bfloat16, 4: torch.float32}[size]


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


@dataclass(frozen=True, kw_only=True)
class RandomInitModel:
    """A model in the directory `path`, and its weights."""

    path: Path
    num_layers: int
    weights: RandomInitWeights


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Bytes of one layer, and of the weights outside of layers: embeddings, final norm and head."""

    layer_bytes: int
    outer_bytes: int

    def total_bytes(self, num_layers: int) -> int:
        return self.outer_bytes + num_layers * self.layer_bytes

    def layers_within(self, num_bytes: float, max_layers: int) -> int:
        return max(1, min(max_layers, int((num_bytes - self.outer_bytes) // self.layer_bytes)))


def write_model(gpu: GpuConfig, folder: Path, num_layers: int, rounding: Rounding | None = None) -> RandomInitModel:
    """Writes the model into a new directory in `folder`: a sparse checkpoint or, with `rounding`, a sparse packed
    store."""
    path = Path(tempfile.mkdtemp(dir=folder))
    weights = _write_sparse_model(gpu, path, num_layers)
    if rounding is not None:
        for file in path.glob("*.safetensors*"):
            file.unlink()
        stored = [_stored(spec, rounding) if _is_rounded(spec, rounding) else (spec,) for spec in weights.specs]
        shards = plan_shards([spec for specs in stored for spec in specs], SHARD_BYTES)
        write_sparse_checkpoint(path, shards, _zero_digests)
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        config["quantization_config"] = {"quant_method": METHOD, "format": str(rounding)}
        (path / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    random_weights = RandomInitWeights(weights, open_checkpoint(path).tensors, rounding)
    return RandomInitModel(path=path, num_layers=num_layers, weights=random_weights)


def _zero_digests(num_bytes: int) -> dict[str, str]:
    """Safetensors metadata of a packed shard of zeros: its checksums. They are required when a store is opened."""
    num_whole, last_bytes = divmod(num_bytes, PIECE_BYTES)
    sums = f"{crc32(bytes(PIECE_BYTES)):08x}" * num_whole + (f"{crc32(bytes(last_bytes)):08x}" if last_bytes else "")
    return {METADATA: json.dumps({"source": "random numbers", "crc32": sums, "tensors": {}})}


def model_size(gpu: GpuConfig, folder: Path) -> ModelSize:
    """The sizes of a model. Writes a sparse checkpoint of one layer into `folder`."""
    specs = _write_sparse_model(gpu, folder / "one", 1).specs
    layer = sum(spec.num_bytes for spec in specs if ".layers." in spec.name)
    return ModelSize(layer_bytes=layer, outer_bytes=sum(spec.num_bytes for spec in specs) - layer)


def _write_sparse_model(gpu: GpuConfig, path: Path, num_layers: int) -> RandomWeights:
    model = MODELS[gpu.model]
    keys = {**model.shape, **gpu.shape, "num_hidden_layers": num_layers, "tie_word_embeddings": False}
    return create_sparse_checkpoint(model_type=model.model_type, directory=path, overrides=keys, dtype=torch.bfloat16)


class RandomInitRuntime(Runtime):
    """A runtime with random `weights`; None: reads the files. Calls `count` with the bytes of each generated read."""

    def __init__(
        self,
        config: RuntimeConfig,
        device: ComputeDevice,
        weights: RandomInitWeights | None,
        count: Callable[[int], object] = lambda num_bytes: None,
    ):
        self._weights, self._count = weights, count
        super().__init__(config, device=device)

    def reader(self) -> Reader:
        if self._weights is None:
            return super().reader()
        return RandomInitReader(self._weights, self.config.offload.reader_threads, self._count)


def unique_parameters(runtime: Runtime) -> list[Parameter]:
    """All parameters of a runtime's model; tied parameters are listed once."""
    return list({p.name: p for stage in runtime.model.shape.stages for p in stage.parameters}.values())
