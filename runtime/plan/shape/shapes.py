"""What a model is made of, in bytes and FLOPs: plain values, no torch.

A **stage** is what the weights of one step of the forward pass are called: 0 is the embeddings, 1..L the decoder
layers, the last one the norm and head. An encoder's layers and a **bridge**, its norm and what the decoder begins with,
come between the embeddings and the decoder layers. A stage's **parameters** say which bytes of which file they are.
"""

from collections import Counter
from collections.abc import Iterable
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
    """The bytes of a file from an offset."""

    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class TensorSlice:
    """The bytes of one checkpoint tensor: `num_bytes` from `offset` of `file`, holding `shape` of `dtype`.

    `shape` counts numbers, of which a quantised tensor may hold several in a byte. Where a parameter's rows lie in
    another order, `row_order` names them as runs of the stored ones; where they lie as its columns, it `is_transposed`.
    `format` names the storage format by which its bytes and those of its `companions` become numbers; without one they
    are numbers of `dtype`. Of a run of rows, companions that are not cut count from `first_row` before it, and so do
    its own bytes where it `is_interleaved`: a row's do not lie apart. `constants` are what else the format must know.
    """

    name: str
    file: str
    offset: int
    num_bytes: int
    dtype: str  # safetensors' name: F32, BF16, F8_E4M3, F4, I64 ...; or that of a GGUF block: Q8_0, Q4_K ...
    shape: tuple[int, ...]
    format: str = ""
    companions: tuple["Companion", ...] = ()
    row_order: tuple[range, ...] = ()  # empty: as stored
    is_transposed: bool = False
    first_row: int = 0
    is_interleaved: bool = False
    constants: tuple[float, ...] = ()

    def expert(self, index: int) -> "TensorSlice":
        """One matrix of a stack."""
        part = self._split(index, self.shape[0])
        return replace(part, shape=self.shape[1:], companions=tuple(each.expert(index) for each in self.companions))

    def file_extent(self, part: tuple[int, int] | None) -> FileExtent:
        """Where it lies; or one of so many equal runs of it."""
        if part is None:
            return FileExtent(self.file, self.offset, self.num_bytes)
        num_bytes = self.num_bytes // part[1]
        return FileExtent(self.file, self.offset + part[0] * num_bytes, num_bytes)

    def row_part(self, index: int, num_parts: int) -> "TensorSlice | None":
        """The `turn`-th of equal runs of a matrix's rows; None where a run would end inside a block with one scale."""
        if self.is_interleaved:
            height = self.shape[0] // num_parts
            return replace(self, shape=(height, *self.shape[1:]), first_row=self.first_row + index * height)
        part = self._split(index, num_parts)
        # Each must have rows to itself, or all of it be every row's.
        if any(not each.is_shared and part.shape[0] % each.block_rows for each in self.companions):
            return None
        companions = tuple(each.row_part(index, num_parts) for each in self.companions)
        return replace(part, companions=companions, first_row=self.first_row + index * part.shape[0])

    def with_companions(self) -> tuple["TensorSlice", ...]:
        """All that must be read of it."""
        return (self, *(each.tensor for each in self.companions))

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
    """Another tensor that the numbers of a stored matrix are made of: its factors, its zero points, its escapes. `role`
    is what the storage format calls it.

    Each of its rows belongs to `block_rows` rows of the matrix, the last one to those that are left; 0: all of it
    belongs to every row. Of a stack, it is a stack. Columns are the format's matter: factors tell it the width of their
    blocks by `block_columns`.
    """

    role: str
    tensor: TensorSlice
    block_rows: int = 0
    block_columns: int = 0

    def expert(self, index: int) -> "Companion":
        """That of one matrix of a stack."""
        return replace(self, tensor=self.tensor.expert(index))

    def row_part(self, index: int, num_parts: int) -> "Companion":
        """That of the `turn`-th of equal runs of the matrix's rows."""
        return self if self.is_shared else replace(self, tensor=self.tensor._split(index, num_parts))

    @property
    def is_shared(self) -> bool:
        """Whether all of it belongs to every row."""
        return not self.block_rows or self.tensor.shape[0] == 1


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One argument of a stage's module, put together from tensor slices without copying.

    `pieces[e]` are the slices whose rows, one below the other, make entry `e` of a stacked parameter (an expert); a
    parameter that is not stacked has one entry, nearly always of one slice.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[TensorSlice, ...], ...]
    is_stacked: bool = False
    is_experts: bool = False  # a matrix for each expert of a layer whose experts run through our function
    num_experts: int = 0  # of a stack of which a rank has some, those that all ranks have

    @cached_property
    def is_pageable(self) -> bool:
        """Its experts can be read one by one: no two of them share a byte or a companion."""
        names = [piece.name for piece in self.slices]
        whole = self.pieces[0][0]
        is_cut = self.is_stacked and len(self.pieces) == self.shape[0] and len({*names}) == len(names)
        return self.is_experts and (is_cut or (len(names) == 1 and whole.shape == self.shape))

    def expert(self, index: int) -> "Parameter":
        """The stack of this one expert."""
        assert self.is_pageable, f"{self.name} cannot be read by expert"
        if self.is_stacked:
            return replace(self, shape=(1, *self.shape[1:]), pieces=(self.pieces[index],))
        part = self.pieces[0][0].expert(index)
        return replace(self, shape=(1, *self.shape[1:]), pieces=((replace(part, shape=(1, *part.shape)),),))

    def expert_extents(self, index: int) -> list[FileExtent]:
        """Where that expert's slices lie, companions included."""
        entry, parts = (self.pieces[index], None) if self.is_stacked else (self.pieces[0], (index, self.shape[0]))
        return [tensor.file_extent(parts) for piece in entry for tensor in piece.with_companions()]

    @property
    def slices(self) -> tuple[TensorSlice, ...]:
        """All that must be read, companions included."""
        pieces = [piece for entry in self.pieces for piece in entry]
        return (*pieces, *(each.tensor for piece in pieces for each in piece.companions))

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
    """What is in several of them counts once."""
    return sum({piece.name: piece.num_bytes for p in parameters for piece in p.slices}.values())


@dataclass(frozen=True, kw_only=True)
class Stage:
    index: int
    name: str
    kind: StageKind
    parameters: tuple[Parameter, ...]
    num_experts: int = 0  # 0: dense
    num_experts_per_token: int = 0

    @cached_property
    def num_bytes(self) -> int:
        return distinct_bytes(self.parameters)

    @cached_property
    def stacks(self) -> tuple[Parameter, ...]:
        """Parameters that hold a matrix for each expert, of which a token meets those of the experts that it visits. A
        kernel of a convolution has as many dimensions and is none."""
        count = self.num_experts
        return tuple(
            p
            for p in self.parameters
            if count and (p.is_experts or p.is_stacked or (len(p.shape) == 3 and p.shape[0] == count))
        )

    @cached_property
    def local_expert_share(self) -> float:
        """The share of its experts that it has, where others have others."""
        return min((p.shape[0] / p.num_experts for p in self.stacks if p.num_experts), default=1.0)

    @cached_property
    def num_dense_weights(self) -> int:
        """Numbers of the matrices that every token is multiplied with, or is looked up in."""
        stacks = {p.name for p in self.stacks}
        return sum(p.num_elements for p in self.parameters if len(p.shape) == 2 and p.name not in stacks)

    @cached_property
    def experts(self) -> tuple[Parameter, ...]:
        """Stacks that can be read by expert and whose bytes nothing else in the stage uses."""
        uses = Counter(piece.name for p in self.parameters for piece in p.slices)
        pageable = [p for p in self.parameters if p.is_pageable and p.shape[0] == self.num_experts]
        return tuple(p for p in pageable if all(uses[piece.name] == 1 for piece in p.slices))

    @cached_property
    def dense(self) -> "Stage":
        """What every token needs: all but `experts`."""
        paged = {p.name for p in self.experts}
        return replace(self, parameters=tuple(p for p in self.parameters if p.name not in paged))

    def expert(self, index: int) -> "Stage":
        """What one expert needs beside `dense`, as stacks of one."""
        return replace(
            self, name=f"{self.name} expert {index}", parameters=tuple(p.expert(index) for p in self.experts)
        )

    @cached_property
    def flops_per_token(self) -> float:
        """Two per weight that a token is multiplied with; of stacked experts only the share that a token visits."""
        if self.kind in (StageKind.embedding, StageKind.bridge):
            return 0.0
        experts = sum(p.num_elements for p in self.stacks)
        share = self.num_experts_per_token / self.num_experts if self.num_experts else 1.0
        return 2.0 * (self.num_dense_weights + share * experts)


def inner_size(stage: Stage, hidden_size: int) -> int:
    """The numbers between the matrices of one expert; 0 where none runs through our function."""
    sizes = [stack.num_elements // (stack.shape[0] * hidden_size) for stack in stage.stacks if stack.is_experts]
    return min(sizes, default=0)
