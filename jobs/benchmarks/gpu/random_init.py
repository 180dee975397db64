"""Random-init models that are on no disk: a checkpoint's outline, and random numbers at memory's speed for any of its
bytes.

Matrices are windows, each from a place of its own, of one tile of normal numbers per deviation: real numbers on a link
and in products, which take a device more power than zeros do. The tile's length is prime, so no two rows are equal.
"""

import math
import os
import tempfile
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from runtime.api import Runtime
from runtime.config import RuntimeConfig
from runtime.plan.shape.shapes import Parameter, TensorSlice
from runtime.store.checkpoint import open_checkpoint
from runtime.store.reader import Reader
from runtime.store.transfer import ChunkTiming
from runtime.stream.device import ComputeDevice
from runtime.synthesize.checkpoints import outline_checkpoint
from runtime.synthesize.random_weights import RandomWeights
from runtime.units import MIB

from .config import MODEL_TYPE, GpuConfig

TILE_ELEMENTS = 16_777_259  # 32 MiB of bf16
CHUNK_BYTES = 16 * MIB


class RandomInitWeights:
    """Random numbers for `tensors` of the outline that `weights` draws: the same bytes whenever and wherever they are
    asked for, and the same for a tensor of the same name in a model of fewer layers."""

    def __init__(self, weights: RandomWeights, tensors: Mapping[str, TensorSlice]):
        self._files: dict[str, list[TensorSlice]] = {}
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            self._files.setdefault(tensor.file, []).append(tensor)
        specs = {spec.name: spec for spec in weights.specs}
        deviations = {name: weights.deviation(specs[name]) for name in tensors}
        normal = torch.empty(TILE_ELEMENTS).normal_(generator=torch.Generator().manual_seed(0))
        dtype = weights.specs[0].dtype
        tiles = {std: _as_bytes((normal * std).to(dtype)) for std in {*deviations.values()} if std is not None}
        self._sources = {
            name: _as_bytes(weights.draw(specs[name])) if std is None else tiles[std]
            for name, std in deviations.items()
        }
        self._begins = {
            name: 0 if std is None else crc32(name.encode()) % TILE_ELEMENTS * dtype.itemsize
            for name, std in deviations.items()
        }

    def fill(self, file: str, offset: int, target: memoryview) -> None:
        """Writes what `file` would hold from `offset` on; what is in no tensor stays as it is."""
        tensors, end = self._files[file], offset + len(target)
        view = np.frombuffer(target, dtype=np.uint8)
        first = max(0, bisect_right(tensors, offset, key=lambda tensor: tensor.offset) - 1)
        for tensor in tensors[first:]:
            if tensor.offset >= end:
                return
            begin, stop = max(tensor.offset, offset), min(tensor.offset + tensor.num_bytes, end)
            if begin < stop:
                self._copy(tensor.name, begin - tensor.offset, view[begin - offset : stop - offset])

    def _copy(self, name: str, at: int, view: np.ndarray) -> None:
        source, done = self._sources[name], 0
        while done < len(view):
            begin = (self._begins[name] + at + done) % len(source)
            count = min(len(view) - done, len(source) - begin)
            view[done : done + count] = source[begin : begin + count]
            done += count

    def write(self, num_threads: int) -> None:
        """Puts them into the outline's own files, for those who read a disk."""
        chunks = [
            (file, tensor.offset + begin, min(CHUNK_BYTES, tensor.num_bytes - begin))
            for file, tensors in self._files.items()
            for tensor in tensors
            for begin in range(0, tensor.num_bytes, CHUNK_BYTES)
        ]
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(self._write, *zip(*chunks, strict=True)))

    def _write(self, file: str, offset: int, num_bytes: int) -> None:
        buffer = bytearray(num_bytes)
        self.fill(file, offset, memoryview(buffer))
        with Path(file).open("r+b") as target:
            os.pwrite(target.fileno(), buffer, offset)

    def tensors(self, parameters: Sequence[Parameter], num_threads: int) -> dict[str, torch.Tensor]:
        """The parameters by name, each in memory of its own, as a model of transformers has it."""
        tensors = {p.name: torch.empty(p.shape, dtype=_dtype_of(p)) for p in parameters}
        chunks = [
            (piece.file, piece.offset + begin, view[begin : begin + CHUNK_BYTES])
            for parameter in parameters
            for piece, view in _runs(parameter, tensors[parameter.name])
            for begin in range(0, piece.num_bytes, CHUNK_BYTES)
        ]
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(self.fill, *zip(*chunks, strict=True)))
        return tensors


class RandomInitReader(Reader):
    """Answers reads of an outlined checkpoint with its random weights."""

    def __init__(self, weights: RandomInitWeights, num_threads: int):
        super().__init__(num_threads=num_threads, chunk_bytes=CHUNK_BYTES)
        self._weights = weights

    def _read(self, path: str, offset: int, view: memoryview, needed: int) -> ChunkTiming:
        begin = time.monotonic()
        self._weights.fill(path, offset, view)
        return ChunkTiming(begin, time.monotonic(), len(view))


def _runs(parameter: Parameter, tensor: torch.Tensor) -> list[tuple[TensorSlice, memoryview]]:
    """Row blocks and experts lie one behind the other in a contiguous tensor."""
    pieces = [piece for entry in parameter.pieces for piece in entry]
    assert sum(piece.num_bytes for piece in pieces) == tensor.nbytes, f"{parameter.name} is not made of plain rows"
    assert not parameter.is_transposed, f"{parameter.name} is stored transposed"
    whole, runs, at = tensor.view(-1).view(torch.uint8).numpy().data, [], 0
    for piece in pieces:
        runs.append((piece, whole[at : at + piece.num_bytes]))
        at += piece.num_bytes
    return runs


def _dtype_of(parameter: Parameter) -> torch.dtype:
    size = parameter.num_bytes // math.prod(parameter.shape)
    return {2: torch.bfloat16, 4: torch.float32}[size]


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


@dataclass(frozen=True, kw_only=True)
class RandomInitModel:
    path: Path
    num_layers: int
    weights: RandomInitWeights


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    layer_bytes: int
    outer_bytes: int

    def of_layers(self, num_layers: int) -> int:
        return self.outer_bytes + num_layers * self.layer_bytes

    def layers_within(self, num_bytes: float, most: int) -> int:
        return max(1, min(most, int((num_bytes - self.outer_bytes) // self.layer_bytes)))


def outline_model(gpu: GpuConfig, folder: Path, num_layers: int) -> RandomInitModel:
    """Writes the outline of the model into `folder`, which takes no disk to speak of."""
    path = Path(tempfile.mkdtemp(dir=folder))
    keys = {**gpu.shape, "num_hidden_layers": num_layers, "tie_word_embeddings": False}
    weights = outline_checkpoint(model_type=MODEL_TYPE, directory=path, overrides=keys, dtype=torch.bfloat16)
    random_weights = RandomInitWeights(weights, open_checkpoint(path).tensors)
    return RandomInitModel(path=path, num_layers=num_layers, weights=random_weights)


def size_of(gpu: GpuConfig, folder: Path) -> ModelSize:
    """The bytes of one layer and of what is around all of them. Writes the outline of a model of one."""
    keys = {**gpu.shape, "num_hidden_layers": 1, "tie_word_embeddings": False}
    weights = outline_checkpoint(model_type=MODEL_TYPE, directory=folder / "one", overrides=keys, dtype=torch.bfloat16)
    layer = sum(spec.num_bytes for spec in weights.specs if ".layers." in spec.name)
    return ModelSize(layer_bytes=layer, outer_bytes=sum(spec.num_bytes for spec in weights.specs) - layer)


class RandomInitRuntime(Runtime):
    """Reads no disk: its weights are random; without any, the files are read."""

    def __init__(self, config: RuntimeConfig, device: ComputeDevice, weights: RandomInitWeights | None):
        self._weights = weights
        super().__init__(config, device=device)

    def reader(self) -> Reader:
        if self._weights is None:
            return super().reader()
        return RandomInitReader(self._weights, self.config.offload.reader_threads)


def parameters_of(runtime: Runtime) -> list[Parameter]:
    """All parameters of its model, tied ones once."""
    return list({p.name: p for stage in runtime.model.shape.stages for p in stage.parameters}.values())
