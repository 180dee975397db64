"""The interface of a storage format: an encoding of a matrix in bytes.

Shapes: N rows of K numbers, of B bytes each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..kernels.arguments import WORD_ROWS
from ..linear.blocks import CONCAT_DTYPES, concat_rows
from ..linear.rows import Rows
from ..plan.shape.dtypes import Loss as Loss
from ..plan.shape.shapes import Companion, TensorSlice


class StoredMatrix(NamedTuple):
    """A matrix in memory: its bytes, and its companions by role. Views into a slot: valid until the slot is reused."""

    piece: TensorSlice
    raw: torch.Tensor  # uint8, flat
    companions: Mapping[str, torch.Tensor]  # in their own dtypes and shapes

    @property
    def raw_NB(self) -> torch.Tensor:
        return self.raw.view(self.piece.shape[0], -1)


def join_by_rows(matrices: Sequence[StoredMatrix]) -> StoredMatrix | None:
    """Concatenates matrices of one shape, such as experts, into one of E x N rows: a view if contiguous, otherwise a
    copy. Returns None if their layouts differ, or a companion belongs neither to rows nor to whole matrices."""
    first, num_rows = matrices[0].piece, matrices[0].piece.shape[0]
    if not have_same_layout(matrices) or first.row_order:
        return None
    companions, tensors = list[Companion](), dict[str, torch.Tensor]()
    for companion in first.companions:
        parts, block = [stored.companions[companion.role] for stored in matrices], companion.block_rows
        if parts[0].dim() != 2 or (parts[0].dtype == torch.int32 and len(parts[0]) * block != num_rows):
            return None  # fields of the last word would belong to no row
        if len(parts[0]) == 1:  # one for all rows of its matrix
            parts, block = [part.expand(num_rows, -1) for part in parts], 1
        elif len(parts[0]) * block != num_rows:
            if -(-num_rows // block) != len(parts[0]):
                return None
            rows = torch.arange(num_rows, device=parts[0].device) // block
            parts = [part.view(CONCAT_DTYPES.get(part.dtype, part.dtype))[rows].view(part.dtype) for part in parts]
            block = 1
        tensors[companion.role] = concat_rows(parts)
        companions.append(replace(companion, block_rows=block))
    shape = (len(matrices) * num_rows, *first.shape[1:])
    joined = replace(first, shape=shape, companions=tuple(companions))
    return StoredMatrix(joined, concat_rows([stored.raw for stored in matrices]), tensors)


def join_by_columns(matrices: Sequence[StoredMatrix], num_words: int) -> StoredMatrix | None:
    """Same as `join_by_rows` for transposed matrices: `num_words` rows of 32-bit words, one column per row of the
    matrix, as in their companions. One-dimensional companions are stacked, one row per matrix."""
    first, num_rows = matrices[0].piece, matrices[0].piece.shape[0]
    if not have_same_layout(matrices) or first.first_row or num_rows % WORD_ROWS:
        return None
    words = torch.cat([stored.raw.view(torch.int32).view(num_words, -1) for stored in matrices], dim=1)
    tensors = dict[str, torch.Tensor]()
    for role in matrices[0].companions:
        parts = [stored.companions[role] for stored in matrices]
        tensors[role] = torch.stack(parts) if parts[0].dim() == 1 else torch.cat(parts, dim=1)
    joined = replace(first, shape=(len(matrices) * num_rows, *first.shape[1:]))
    return StoredMatrix(joined, words.view(torch.uint8).view(-1), tensors)


def have_same_layout(matrices: Sequence[StoredMatrix]) -> bool:
    """True if shapes, formats, dtypes and companions' shapes are equal."""

    def layout_key(stored: StoredMatrix) -> tuple[object, ...]:
        piece, sizes = stored.piece, {role: tensor.shape for role, tensor in stored.companions.items()}
        return piece.shape, piece.format, piece.dtype, piece.first_row, piece.constants[:2], stored.raw.shape, sizes

    return all(layout_key(matrix) == layout_key(matrices[0]) for matrix in matrices)


@dataclass(frozen=True, kw_only=True)
class StorageFormat:
    """A storage format, by the `name` in a tensor slice.

    `row_bytes(num_columns)`: bytes per row, with its share of the companions. `rows`: makes dequantizable rows of a
    stored matrix, on any device. `companions`: their roles. `is_output_major`: rows are outputs even if the model class
    stores its weight transposed, as GPT-2 does. `join`: concatenates matrices, so that a device decodes all experts of
    a layer at once.
    """

    name: str
    loss: Loss
    row_bytes: Callable[[int], float]
    rows: Callable[[StoredMatrix], Rows]
    companions: tuple[str, ...] = ()
    is_output_major: bool = False
    join: Callable[[Sequence[StoredMatrix]], StoredMatrix | Rows | None] = join_by_rows

    def join_matrices(self, matrices: Sequence[StoredMatrix]) -> Rows | None:
        """Concatenates matrices of one shape by rows; None if they cannot form one matrix."""
        joined = self.join(matrices)
        return self.rows(joined) if isinstance(joined, StoredMatrix) else joined


# A quantization method: (tensors, quantization config) -> tensors, its weights combined, with format and companions.
# Raises CheckpointError for tensors that do not fit each other and for unsupported variants.
Method = Callable[[Mapping[str, TensorSlice], Mapping[str, object]], Mapping[str, TensorSlice]]
