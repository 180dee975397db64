"""Weights that are on no disk: random numbers at memory's speed, for any bytes of an outlined checkpoint.

Matrices are windows, each from a place of its own, of one tile of normal numbers per deviation: real numbers on a link
and in products, which take a device more power than zeros do. The tile's length is prime, so no two rows are equal.
"""

import math
import os
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from runtime.plan.shape.shapes import Parameter, TensorSlice
from runtime.store.reader import Reader
from runtime.store.transfer import ChunkTiming
from runtime.synthesize.random_weights import RandomWeights
from runtime.units import MIB

TILE_ELEMENTS = 16_777_259  # 32 MiB of bf16
CHUNK_BYTES = 16 * MIB


class DrawnWeights:
    """`tensors` are those of the outline that `weights` draws. The same bytes whenever and wherever they are asked
    for, and the same for a tensor of the same name in a model of fewer layers."""

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
        found, end = self._files[file], offset + len(target)
        view = np.frombuffer(target, dtype=np.uint8)
        first = max(0, bisect_right(found, offset, key=lambda tensor: tensor.offset) - 1)
        for tensor in found[first:]:
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
        with ThreadPoolExecutor(num_threads) as pool:
            jobs = [
                pool.submit(self._write, file, tensor.offset + begin, min(CHUNK_BYTES, tensor.num_bytes - begin))
                for file, tensors in self._files.items()
                for tensor in tensors
                for begin in range(0, tensor.num_bytes, CHUNK_BYTES)
            ]
        for job in jobs:
            job.result()

    def _write(self, file: str, offset: int, num_bytes: int) -> None:
        buffer = bytearray(num_bytes)
        self.fill(file, offset, memoryview(buffer))
        with Path(file).open("r+b") as target:
            os.pwrite(target.fileno(), buffer, offset)

    def tensors(self, parameters: Sequence[Parameter], num_threads: int) -> dict[str, torch.Tensor]:
        """Each in memory of its own, as a model of transformers has it."""
        made = {p.name: torch.empty(p.shape, dtype=_dtype_of(p)) for p in parameters}
        with ThreadPoolExecutor(num_threads) as pool:
            jobs = [
                pool.submit(self.fill, piece.file, piece.offset + begin, view[begin : begin + CHUNK_BYTES])
                for parameter in parameters
                for piece, view in _runs(parameter, made[parameter.name])
                for begin in range(0, piece.num_bytes, CHUNK_BYTES)
            ]
        for job in jobs:
            job.result()
        return made


class DrawnReader(Reader):
    """Answers reads of an outlined checkpoint with its drawn weights."""

    def __init__(self, drawn: DrawnWeights, num_threads: int):
        super().__init__(num_threads=num_threads, chunk_bytes=CHUNK_BYTES)
        self._drawn = drawn

    def _read(self, path: str, offset: int, view: memoryview, needed: int) -> ChunkTiming:
        begin = time.monotonic()
        self._drawn.fill(path, offset, view)
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
