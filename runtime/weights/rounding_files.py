"""Weights rounded while they are read: files that lie nowhere, which hold what `weightstream pack` would write of a
tensor.

A matrix is rounded when the first of its bytes is asked for, and forgotten when the last of them was handed out: beside
what stays, memory holds one rounded matrix for each that is being read.
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
from ..formats.kinds.rounded import Rounding, Squares, error_of_squares
from ..formats.module_tensors import METHOD, name_of
from ..formats.registry import pair_companions
from ..formats.scaled_rows import SCALES
from ..plan.shape.shapes import TensorSlice
from ..store.faults import read_fault
from ..store.reader import Fill
from .stage_weights import TORCH_DTYPES

RUN_NUMBERS = 1 << 20  # read at a time


class RoundedTensor:
    """A matrix, or a stack of them, in a file of its own: the codes of all, then the scales of all."""

    def __init__(self, source: TensorSlice, rounding: Rounding):
        self._rounding, self._lock = rounding, Lock()
        self._matrices = [source.expert(e) for e in range(source.shape[0])] if len(source.shape) == 3 else [source]
        *rows, num_columns = source.shape
        file = f"{source.file}#{source.name}"
        codes = _tensor(source, rounding.format, file, 0, "U8", (*rows, rounding.packed_columns(num_columns)))
        groups = (*rows, rounding.num_groups(num_columns))
        self.tensors = (codes, _tensor(source, SCALES, file, codes.num_bytes, "BF16", groups))
        self._made: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by matrix: codes and scales
        self._num_left: dict[int, int] = {}  # their bytes that nobody has asked for
        self.squares: dict[int, Squares] = {}  # by matrix, of those that were rounded

    @property
    def file(self) -> str:
        return self.tensors[0].file

    @property
    def num_matrices(self) -> int:
        return len(self._matrices)

    def fill(self, offset: int, view: memoryview) -> None:
        """Writes the bytes from `offset` on, as far as there are any. Raises CheckpointError, StorageError."""
        target = np.frombuffer(view, np.uint8)
        with self._lock:
            for (part, tensor), matrix in product(enumerate(self.tensors), range(self.num_matrices)):
                num_bytes = tensor.num_bytes // self.num_matrices
                begin = tensor.offset + matrix * num_bytes
                first, last = max(begin, offset), min(begin + num_bytes, offset + len(target))
                if first >= last:
                    continue
                if matrix not in self._made:
                    self._made[matrix] = self._round(matrix)
                    self._num_left[matrix] = sum(map(len, self._made[matrix]))
                target[first - offset : last - offset] = self._made[matrix][part][first - begin : last - begin]
                self._num_left[matrix] -= last - first
                if self._num_left[matrix] <= 0:
                    del self._made[matrix], self._num_left[matrix]

    def _round(self, matrix: int) -> tuple[np.ndarray, np.ndarray]:
        source, codes, scales, error, size = self._matrices[matrix], list[np.ndarray](), list[np.ndarray](), 0.0, 0.0
        for piece in (piece for run in _runs(source) for piece in self._rounding.pieces(run)):
            if piece is None:
                raise CheckpointError(
                    f"{source.file}: {source.name!r} holds an infinity or no number, for which model.quantize="
                    f"{self._rounding.name} has no code: leave it out; weightstream pack leaves such a tensor as it is"
                )
            codes.append(piece.codes_RB.numpy().reshape(-1))
            scales.append(piece.scales_RG.view(torch.uint8).numpy().reshape(-1))
            error, size = error + piece.error, size + piece.size
        self.squares[matrix] = error, size
        return np.concatenate(codes), np.concatenate(scales)


def _tensor(source: TensorSlice, part: str, file: str, offset: int, dtype: str, shape: tuple[int, ...]) -> TensorSlice:
    num_bytes = prod(shape) * TORCH_DTYPES[dtype].itemsize
    return replace(
        source,
        name=name_of(source.name, part),
        file=file,
        offset=offset,
        num_bytes=num_bytes,
        dtype=dtype,
        shape=shape,
    )


def _runs(matrix: TensorSlice) -> Iterator[torch.Tensor]:
    """Reads some rows of a matrix at a time."""
    num_rows, num_columns = matrix.shape
    row_bytes, step = matrix.num_bytes // num_rows, max(1, RUN_NUMBERS // num_columns)
    try:
        with Path(matrix.file).open("rb") as file:
            file.seek(matrix.offset)
            for first in range(0, num_rows, step):
                count = min(step, num_rows - first)
                data = bytearray(file.read(count * row_bytes))
                if len(data) < count * row_bytes:
                    raise CheckpointError(f"{matrix.file}: ends inside {matrix.name!r}: put the original file back")
                yield torch.frombuffer(data, dtype=TORCH_DTYPES[matrix.dtype]).view(count, num_columns)
    except OSError as error:
        raise read_fault(matrix.file, f"reading {matrix.name!r}", error) from error


@dataclass(frozen=True, kw_only=True)
class RoundedTensors:
    """A checkpoint's tensors as they are read: those that are rounded in the files that `fills` makes."""

    tensors: Mapping[str, TensorSlice]
    rounded: tuple[RoundedTensor, ...]

    @staticmethod
    def from_rounding(tensors: Mapping[str, TensorSlice], rounding: Rounding) -> "RoundedTensors":
        """Raises CheckpointError where nothing is to be rounded."""
        why = {name: rounding.why_exact(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        rounded = tuple(RoundedTensor(tensors[name], rounding) for name, reason in why.items() if reason is None)
        if not rounded:
            reasons = ", ".join(sorted({f"{reason}" for name, reason in why.items() if len(tensors[name].shape) > 1}))
            raise CheckpointError(f"model.quantize={rounding.name}: none of its matrices can be rounded: {reasons}")
        found = {name: tensor for name, tensor in tensors.items() if why[name] is not None}
        found |= {tensor.name: tensor for each in rounded for tensor in each.tensors}
        return RoundedTensors(tensors=pair_companions(found, {"quant_method": METHOD}), rounded=rounded)

    @property
    def fills(self) -> Mapping[str, Fill]:
        return {each.file: each.fill for each in self.rounded}

    @property
    def relative_error(self) -> float | None:
        """What the weights are off by, as `StoredNumbers` has it; None until all of them were read."""
        squares = [pair for each in self.rounded for pair in each.squares.values()]
        if len(squares) < sum(each.num_matrices for each in self.rounded):
            return None
        return error_of_squares(squares) or 0.0
