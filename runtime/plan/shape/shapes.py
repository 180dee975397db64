"""Checkpoint tensors and stages as byte ranges of files: plain values, no torch.

A **stage** holds the weights of one step of the forward pass. Stage 0 has the embeddings, stages 1 to L the decoder
layers, and the last stage the norm and head. An encoder-decoder has encoder layers and a **bridge** (the encoder's norm
and the decoder's input) before its decoder layers. A **stack** is a parameter with a matrix per expert.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import prod
from typing import NamedTuple


class StageKind(Enum):
    embedding = "embedding"
    encoder = "encoder"
    bridge = "bridge"
    layer = "layer"
    head = "head"

    @property
    def is_layer(self) -> bool:
        return self in (StageKind.layer, StageKind.encoder)


class FileExtent(NamedTuple):
    """A byte range of a file."""

    file: str
    offset: int
    num_bytes: int


class StripeRange(NamedTuple):
    """A byte range of a stripe. `begin`: its first byte in the range of the whole file that was asked for."""

    stripe: int
    offset: int  # in the stripe's file
    begin: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Stripes:
    """The files (stripes) among which a file is divided: its pieces are dealt to them in turn, as in RAID 0."""

    files: tuple[str, ...]
    data_offset: int  # of the first piece in each stripe
    piece_bytes: int  # a multiple of disk blocks
    num_bytes: int  # of the whole file

    def ranges(self, offset: int, num_bytes: int) -> Iterator[StripeRange]:
        """Yields where the bytes of a range of the whole file are, in order. Ranges of one stripe are adjacent in its
        file."""
        begin = 0
        while begin < num_bytes:
            piece, first = divmod(offset + begin, self.piece_bytes)
            row, stripe = divmod(piece, len(self.files))
            length = min(self.piece_bytes - first, num_bytes - begin)
            yield StripeRange(stripe, self.data_offset + row * self.piece_bytes + first, begin, length)
            begin += length

    def stripe_bytes(self, stripe: int, num_bytes: int) -> int:
        """Returns how many of the first `num_bytes` of the whole file are in a stripe."""
        rows, rest = divmod(num_bytes, len(self.files) * self.piece_bytes)
        return rows * self.piece_bytes + max(0, min(self.piece_bytes, rest - stripe * self.piece_bytes))


@dataclass(frozen=True, kw_only=True)
class TensorSlice:
    """A checkpoint tensor or a part of it: `num_bytes` at `offset` of `file`.

    `shape` counts elements, of which a quantized tensor may pack several per byte. The bytes of an `is_interleaved`
    tensor mix all rows, so that a range of its rows keeps all bytes.
    """

    name: str
    file: str
    offset: int
    num_bytes: int
    dtype: str  # safetensors name (F32, BF16, F8_E4M3, F4, I64 ...) or GGUF block type (Q8_0, Q4_K ...)
    shape: tuple[int, ...]
    format: str = ""  # storage format of the bytes and of `companions`; empty: plain elements of `dtype`
    companions: tuple["Companion", ...] = ()
    row_order: tuple[range, ...] = ()  # stored rows in the order of the parameter; empty: as stored
    is_transposed: bool = False  # rows are stored as columns
    first_row: int = 0  # of a row range: its first row in shared companions, and in bytes that are interleaved
    is_interleaved: bool = False
    constants: tuple[float, ...] = ()  # numbers of the storage format
    stripes: Stripes | None = None  # of `file`, if it is divided among several files

    def expert(self, index: int) -> "TensorSlice":
        """Returns matrix number `index` of a stack."""
        part = self._split(index, self.shape[0])
        return replace(part, shape=self.shape[1:], companions=tuple(c.expert(index) for c in self.companions))

    def file_extent(self, part: tuple[int, int] | None) -> FileExtent:
        """Returns the tensor's byte range; with `part` = (i, n), that of part i of n equal parts."""
        if part is None:
            return FileExtent(self.file, self.offset, self.num_bytes)
        num_bytes = self.num_bytes // part[1]
        return FileExtent(self.file, self.offset + part[0] * num_bytes, num_bytes)

    def row_part(self, index: int, num_parts: int) -> "TensorSlice | None":
        """Divides the rows equally and returns part `index`; None if it would split a block that shares one scale."""
        if self.is_interleaved:
            height = self.shape[0] // num_parts
            return replace(self, shape=(height, *self.shape[1:]), first_row=self.first_row + index * height)
        part = self._split(index, num_parts)
        # Each row of a companion must belong to rows of one part only, or to all rows.
        if any(not c.is_shared and part.shape[0] % c.block_rows for c in self.companions):
            return None
        companions = tuple(c.row_part(index, num_parts) for c in self.companions)
        return replace(part, companions=companions, first_row=self.first_row + index * part.shape[0])

    def with_companions(self) -> tuple["TensorSlice", ...]:
        """Returns this tensor and its companions: everything to read."""
        return (self, *(c.tensor for c in self.companions))

    def _split(self, index: int, num_parts: int) -> "TensorSlice":
        num_bytes = self.num_bytes // num_parts
        return replace(
            self,
            name=f"{self.name}[{index}/{num_parts}]",
            offset=self.offset + index * num_bytes,
            num_bytes=num_bytes,
            shape=(self.shape[0] // num_parts, *self.shape[1:]),
        )


@dataclass(frozen=True, kw_only=True)
class Companion:
    """A tensor needed to decode a stored matrix, or stack of matrices: scales, zero points or escape values."""

    role: str  # name in the storage format
    tensor: TensorSlice
    block_rows: int = 0  # rows of the matrix per row of this tensor, the last may have fewer; 0: all rows use all of it
    block_columns: int = 0  # columns of the matrix per scale

    def expert(self, index: int) -> "Companion":
        """Returns the companion of one matrix of a stack."""
        return replace(self, tensor=self.tensor.expert(index))

    def row_part(self, index: int, num_parts: int) -> "Companion":
        """Returns the companion of part `index`, if the rows of the matrix are divided equally into `num_parts`."""
        return self if self.is_shared else replace(self, tensor=self.tensor._split(index, num_parts))

    @property
    def is_shared(self) -> bool:
        """True if the whole companion applies to every row of the matrix."""
        return not self.block_rows or self.tensor.shape[0] == 1


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of a stage's module, and the tensor slices to assemble it from.

    `pieces` has an entry per expert if `is_stacked`, otherwise one entry. An entry is a tuple of slices (pieces),
    usually one, that are concatenated by rows.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[TensorSlice, ...], ...]
    is_stacked: bool = False  # experts are stored as separate tensors
    is_experts: bool = False  # a stack that model/expert_groups.py runs
    num_experts: int = 0  # of all ranks, if this rank holds only some of them
    rows_per_token: float = 0.0  # of an embedding table: rows that a token looks up; 0: rows cannot be read alone

    @cached_property
    def is_pageable(self) -> bool:
        """True if experts can be read one by one: no two of them share a byte or a companion."""
        names = [piece.name for piece in self.slices]
        has_own_tensors = self.is_stacked and len(self.pieces) == self.shape[0] and len({*names}) == len(names)
        is_one_tensor = len(names) == 1 and self.pieces[0][0].shape == self.shape
        return self.is_experts and (has_own_tensors or is_one_tensor)

    def expert(self, index: int) -> "Parameter":
        """Returns a stack with expert `index` only."""
        assert self.is_pageable, f"{self.name} cannot be read by expert"
        if self.is_stacked:
            return replace(self, shape=(1, *self.shape[1:]), pieces=(self.pieces[index],))
        part = self.pieces[0][0].expert(index)
        return replace(self, shape=(1, *self.shape[1:]), pieces=((replace(part, shape=(1, *part.shape)),),))

    def expert_extents(self, index: int) -> list[FileExtent]:
        """Returns the byte ranges of expert `index` and its companions."""
        entry, parts = (self.pieces[index], None) if self.is_stacked else (self.pieces[0], (index, self.shape[0]))
        return [tensor.file_extent(parts) for piece in entry for tensor in piece.with_companions()]

    @property
    def slices(self) -> tuple[TensorSlice, ...]:
        """All tensors to read, companions included."""
        pieces = [piece for entry in self.pieces for piece in entry]
        return (*pieces, *(c.tensor for piece in pieces for c in piece.companions))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a table in the checkpoint."""
        return self.num_bytes // self.shape[0]

    @property
    def is_transposed(self) -> bool:
        return any(piece.is_transposed for entry in self.pieces for piece in entry)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @cached_property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.slices)


def distinct_bytes(parameters: Iterable[Parameter]) -> int:
    """Returns the bytes of these parameters. A tensor that several of them share counts once."""
    return sum({piece.name: piece.num_bytes for p in parameters for piece in p.slices}.values())


@dataclass(frozen=True, kw_only=True)
class Stage:
    index: int
    name: str
    kind: StageKind
    parameters: tuple[Parameter, ...]
    tables: tuple[Parameter, ...] = ()  # of which passes read single rows; not in `parameters`
    num_experts: int = 0  # 0: dense
    num_experts_per_token: int = 0

    @cached_property
    def num_bytes(self) -> int:
        return distinct_bytes(self.parameters)

    @cached_property
    def stacks(self) -> tuple[Parameter, ...]:
        """Parameters with a matrix per expert. Convolution kernels, which have three dimensions too, are excluded."""
        count = self.num_experts
        return tuple(
            p
            for p in self.parameters
            if count and (p.is_experts or p.is_stacked or (len(p.shape) == 3 and p.shape[0] == count))
        )

    @cached_property
    def local_expert_share(self) -> float:
        """The share of the layer's experts that this rank holds."""
        return min((p.shape[0] / p.num_experts for p in self.stacks if p.num_experts), default=1.0)

    @cached_property
    def num_dense_weights(self) -> int:
        """Elements of the matrices that every token uses."""
        stacks = {p.name for p in self.stacks}
        return sum(
            p.num_elements
            for p in self.parameters
            if len(p.shape) == 2 and p.name not in stacks and not (p.rows_per_token and self.kind.is_layer)
        )

    @cached_property
    def experts(self) -> tuple[Parameter, ...]:
        """Stacks that can be read expert by expert and share no bytes with other parameters of the stage."""
        uses = Counter(piece.name for p in self.parameters for piece in p.slices)
        pageable = [p for p in self.parameters if p.is_pageable and p.shape[0] == self.num_experts]
        return tuple(p for p in pageable if all(uses[piece.name] == 1 for piece in p.slices))

    @cached_property
    def dense(self) -> "Stage":
        """The stage without `experts`."""
        paged = {p.name for p in self.experts}
        return replace(self, parameters=tuple(p for p in self.parameters if p.name not in paged))

    def expert(self, index: int) -> "Stage":
        """Returns the weights of one expert as a stage. Its parameters are stacks with one matrix."""
        parameters = tuple(p.expert(index) for p in self.experts)
        return replace(self, name=f"{self.name} expert {index}", parameters=parameters)

    @cached_property
    def flops_per_token(self) -> float:
        """Two FLOPs per weight that a token is multiplied with; only the visited experts count."""
        if self.kind in (StageKind.embedding, StageKind.bridge):
            return 0.0
        experts = sum(p.num_elements for p in self.stacks)
        share = self.num_experts_per_token / self.num_experts if self.num_experts else 1.0
        return 2.0 * (self.num_dense_weights + share * experts)


def inner_size(stage: Stage, hidden_size: int) -> int:
    """Returns the intermediate size of one expert; 0 if no experts of the stage run in model/expert_groups.py."""
    sizes = [stack.num_elements // (stack.shape[0] * hidden_size) for stack in stage.stacks if stack.is_experts]
    return min(sizes, default=0)
