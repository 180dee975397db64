"""Weights rounded while they are read (`model.quantize`): virtual files, which exist only in memory, with the bytes
that `weightstream pack` would write.

A matrix is rounded when its first byte is read, and its result is freed when all bytes have been read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from ..errors import CheckpointError
from ..formats.kinds.rounded import Rounding, Squares, relative_rms_error
from ..formats.module_tensors import METHOD, part_name
from ..formats.registry import pair_companions
from ..formats.scaled_rows import SCALES
from ..plan.shape.shapes import TensorSlice
from ..store.read_errors import read_error
from ..store.reader import Fill
from .stage_weights import TORCH_DTYPES

CHUNK_NUMBERS = 1 << 20  # numbers read from the source at a time


class RoundedTensor:
    """The virtual file of one matrix or stack of matrices: all codes, then all scales. Thread-safe."""

    def __init__(self, source: TensorSlice, rounding: Rounding):
        self._rounding, self._lock = rounding, Lock()
        self._matrices = [source.expert(e) for e in range(source.shape[0])] if len(source.shape) == 3 else [source]
        *rows, num_columns = source.shape
        file = f"{source.file}#{source.name}"
        codes = _part_slice(source, rounding.format, file, 0, "U8", (*rows, rounding.packed_columns(num_columns)))
        groups = (*rows, rounding.num_groups(num_columns))
        self.tensors = (codes, _part_slice(source, SCALES, file, codes.num_bytes, "BF16", groups))
        self._rounded: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # index of a matrix -> its codes and scales
        self._bytes_left: dict[int, int] = {}  # index of a matrix -> bytes not read yet
        self.squares: dict[int, Squares] = {}  # index of a matrix -> its sums, once it is rounded

    @property
    def file(self) -> str:
        return self.tensors[0].file

    @property
    def num_matrices(self) -> int:
        return len(self._matrices)

    def fill(self, offset: int, view: memoryview) -> None:
        """Fills `view` with the file's bytes from `offset` on, up to its end. Rounds matrices as needed. Raises
        CheckpointError for non-finite weights and StorageError for read errors."""
        target = np.frombuffer(view, np.uint8)
        with self._lock:  # reader threads fill parts of the same matrix
            for (part, tensor), matrix in product(enumerate(self.tensors), range(self.num_matrices)):
                num_bytes = tensor.num_bytes // self.num_matrices
                begin = tensor.offset + matrix * num_bytes
                # The bytes [first, last) of the file that are requested and belong to this part (codes or scales).
                first, last = max(begin, offset), min(begin + num_bytes, offset + len(target))
                if first >= last:
                    continue
                if matrix not in self._rounded:
                    self._rounded[matrix] = self._round(matrix)
                    self._bytes_left[matrix] = sum(map(len, self._rounded[matrix]))
                target[first - offset : last - offset] = self._rounded[matrix][part][first - begin : last - begin]
                self._bytes_left[matrix] -= last - first
                if self._bytes_left[matrix] <= 0:  # every byte was read once: free it
                    del self._rounded[matrix], self._bytes_left[matrix]

    def _round(self, matrix: int) -> tuple[np.ndarray, np.ndarray]:
        """Reads and rounds a matrix. Returns its codes and scales as bytes."""
        source, codes, scales, error, norm = self._matrices[matrix], list[np.ndarray](), list[np.ndarray](), 0.0, 0.0
        for chunk in (chunk for rows in _read_row_chunks(source) for chunk in self._rounding.round_rows(rows)):
            if chunk is None:
                raise CheckpointError(
                    f"{source.file}: {source.name!r} holds infinities or NaN, which model.quantize="
                    f"{self._rounding.name} cannot encode: unset it, or use weightstream pack, which keeps such tensors"
                )
            codes.append(chunk.codes_RB.numpy().reshape(-1))
            scales.append(chunk.scales_RG.view(torch.uint8).numpy().reshape(-1))
            error, norm = error + chunk.squared_error, norm + chunk.squared_norm
        self.squares[matrix] = error, norm
        return np.concatenate(codes), np.concatenate(scales)


def _part_slice(
    source: TensorSlice, part: str, file: str, offset: int, dtype: str, shape: tuple[int, ...]
) -> TensorSlice:
    """Returns the codes or scales (`part`) of a rounded `source` as a tensor at `offset` of the virtual `file`."""
    num_bytes = prod(shape) * TORCH_DTYPES[dtype].itemsize
    return replace(
        source,
        name=part_name(source.name, part),
        file=file,
        offset=offset,
        num_bytes=num_bytes,
        dtype=dtype,
        shape=shape,
    )


def _read_row_chunks(matrix: TensorSlice) -> Iterator[torch.Tensor]:
    """Yields the rows of a matrix in chunks of about CHUNK_NUMBERS numbers. Raises CheckpointError if the file is
    truncated and StorageError for read errors."""
    num_rows, num_columns = matrix.shape
    row_bytes, step = matrix.num_bytes // num_rows, max(1, CHUNK_NUMBERS // num_columns)
    try:
        with Path(matrix.file).open("rb") as file:
            file.seek(matrix.offset)
            for first in range(0, num_rows, step):
                count = min(step, num_rows - first)
                data = bytearray(file.read(count * row_bytes))
                if len(data) < count * row_bytes:
                    raise CheckpointError(f"{matrix.file}: ends inside {matrix.name!r}: restore the original file")
                yield torch.frombuffer(data, dtype=TORCH_DTYPES[matrix.dtype]).view(count, num_columns)
    except OSError as error:
        raise read_error(matrix.file, f"reading {matrix.name!r}", error) from error


@dataclass(frozen=True, kw_only=True)
class RoundedTensors:
    """A checkpoint's tensors, some of which are rounded while they are read."""

    tensors: Mapping[str, TensorSlice]  # all tensors by name; rounded weights have codes in a virtual file
    rounded: tuple[RoundedTensor, ...]

    @staticmethod
    def from_rounding(tensors: Mapping[str, TensorSlice], rounding: Rounding) -> "RoundedTensors":
        """Rounds all tensors that `rounding` applies to. Raises CheckpointError if there are none."""
        skipped = {name: rounding.skip_reason(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        rounded = tuple(RoundedTensor(tensors[name], rounding) for name, reason in skipped.items() if reason is None)
        if not rounded:
            reasons = {f"{reason}" for name, reason in skipped.items() if len(tensors[name].shape) > 1}
            listed = ", ".join(sorted(reasons))
            raise CheckpointError(f"model.quantize={rounding.name}: no matrix of the model can be rounded: {listed}")
        result = {name: tensor for name, tensor in tensors.items() if skipped[name] is not None}
        result |= {tensor.name: tensor for pair in rounded for tensor in pair.tensors}
        return RoundedTensors(tensors=pair_companions(result, {"quant_method": METHOD}), rounded=rounded)

    @property
    def fills(self) -> Mapping[str, Fill]:
        """Read functions of the virtual files, by file name."""
        return {tensor.file: tensor.fill for tensor in self.rounded}

    @property
    def relative_error(self) -> float | None:
        """RMS rounding error of the rounded weights relative to their RMS; None until all of them have been read."""
        squares = [pair for tensor in self.rounded for pair in tensor.squares.values()]
        if len(squares) < sum(tensor.num_matrices for tensor in self.rounded):
            return None
        return relative_rms_error(squares) or 0.0
