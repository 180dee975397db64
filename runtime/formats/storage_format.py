"""The storage format: a way that numbers of a matrix lie in bytes.

Shapes: N rows of K numbers, of B bytes each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..linear.blocks import CONCAT_DTYPES, concat_rows
from ..linear.rows import Rows
from ..plan.shape.dtypes import Loss as Loss
from ..plan.shape.shapes import Companion, TensorSlice

ROWS_OF_WORD = 8  # rows whose zero points are in one word, at most


class StoredMatrix(NamedTuple):
    """A matrix as it lies in memory: its bytes, and its companions by role. Views into a slot: valid as long as its
    bytes are."""

    piece: TensorSlice
    raw: torch.Tensor  # uint8, one behind the other
    companions: Mapping[str, torch.Tensor]  # in their own dtypes and shapes

    @property
    def raw_NB(self) -> torch.Tensor:
        return self.raw.view(self.piece.shape[0], -1)


def join_by_rows(matrices: Sequence[StoredMatrix]) -> StoredMatrix | None:
    """Returns matrices of one shape, such as those of experts, below each other as one of E x N rows; views where they
    lie so, copies otherwise. None where they differ in more than their numbers, or where a companion is neither of rows
    nor of whole matrices."""
    first, num_rows = matrices[0].piece, matrices[0].piece.shape[0]
    if not have_same_layout(matrices) or first.row_order:
        return None
    companions, tensors = list[Companion](), dict[str, torch.Tensor]()
    for each in first.companions:
        parts, block = [stored.companions[each.role] for stored in matrices], each.block_rows
        if parts[0].dim() != 2 or (parts[0].dtype == torch.int32 and len(parts[0]) * block != num_rows):
            return None  # words whose fields are those of rows are full
        if len(parts[0]) == 1:  # for all rows of its matrix
            parts, block = [part.expand(num_rows, -1) for part in parts], 1
        elif len(parts[0]) * block != num_rows:
            if -(-num_rows // block) != len(parts[0]):
                return None
            rows = torch.arange(num_rows, device=parts[0].device) // block
            parts, block = (
                [part.view(CONCAT_DTYPES.get(part.dtype, part.dtype))[rows].view(part.dtype) for part in parts],
                1,
            )
        tensors[each.role] = concat_rows(parts)
        companions.append(replace(each, block_rows=block))
    shape = (len(matrices) * num_rows, *first.shape[1:])
    joined = replace(first, shape=shape, companions=tuple(companions))
    return StoredMatrix(joined, concat_rows([stored.raw for stored in matrices]), tensors)


def join_by_columns(matrices: Sequence[StoredMatrix], num_words: int) -> StoredMatrix | None:
    """The same of matrices in `num_words` rows of words of 32 bits, whose own rows lie as columns, as those of their
    companions do. What has one dimension, as the group of each column, becomes a row for each matrix."""
    first, num_rows = matrices[0].piece, matrices[0].piece.shape[0]
    if not have_same_layout(matrices) or first.first_row or num_rows % ROWS_OF_WORD:
        return None
    words = torch.cat([stored.raw.view(torch.int32).view(num_words, -1) for stored in matrices], dim=1)
    tensors = dict[str, torch.Tensor]()
    for role in matrices[0].companions:
        parts = [stored.companions[role] for stored in matrices]
        tensors[role] = torch.stack(parts) if parts[0].dim() == 1 else torch.cat(parts, dim=1)
    joined = replace(first, shape=(len(matrices) * num_rows, *first.shape[1:]))
    return StoredMatrix(joined, words.view(torch.uint8).view(-1), tensors)


def have_same_layout(matrices: Sequence[StoredMatrix]) -> bool:
    """Whether they lie in the same way, and have companions of the same shapes."""

    def looks(stored: StoredMatrix) -> tuple[object, ...]:
        piece, sizes = stored.piece, {role: tensor.shape for role, tensor in stored.companions.items()}
        return piece.shape, piece.format, piece.dtype, piece.first_row, piece.constants[:2], stored.raw.shape, sizes

    return all(looks(each) == looks(matrices[0]) for each in matrices)


@dataclass(frozen=True, kw_only=True)
class StorageFormat:
    """`name` is what a tensor slice calls it. `rows` makes rows of a stored matrix that dequantize themselves on
    whichever device they lie; `row_bytes` says what a row of so many numbers takes, with its share of the companions,
    whose roles are `companions`. A format `of_linear` layers has a row for each output, also where a class keeps its
    weight as columns, as GPT-2's does. `join` makes one matrix of several, or its rows, so that a device decodes all
    experts of a layer at once."""

    name: str
    loss: Loss
    row_bytes: Callable[[int], float]
    rows: Callable[[StoredMatrix], Rows]
    companions: tuple[str, ...] = ()
    is_output_major: bool = False
    join: Callable[[Sequence[StoredMatrix]], StoredMatrix | Rows | None] = join_by_rows

    def join_matrices(self, matrices: Sequence[StoredMatrix]) -> Rows | None:
        """Returns rows of matrices of one shape below each other; None where they cannot be one matrix."""
        found = self.join(matrices)
        return self.rows(found) if isinstance(found, StoredMatrix) else found


# A method that a config names, with what the config says of it: the checkpoint's tensors as if they were not stored so,
# weights under their own names and in their own shapes, with format and companions. Raises CheckpointError for tensors
# that do not fit each other, and for a variant that cannot be read.
Method = Callable[[Mapping[str, TensorSlice], Mapping[str, object]], Mapping[str, TensorSlice]]
