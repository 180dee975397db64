"""The interface of a storage format: an encoding of a matrix in bytes.

A companion is a tensor needed to decode the matrix, such as its scales; its role is its name within the format.

Shapes: N rows, each of K numbers in B bytes; E matrices.
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
    """An encoded matrix in memory. Tensors are views into a slot: valid until the slot is reused."""

    source: TensorSlice  # the same matrix in the checkpoint: shape, format and constants
    raw: torch.Tensor  # the encoded bytes: uint8, flat
    companions: Mapping[str, torch.Tensor]  # by role, in the dtypes and shapes of the checkpoint

    @property
    def raw_NB(self) -> torch.Tensor:
        return self.raw.view(self.source.shape[0], -1)


def join_by_rows(matrices: Sequence[StoredMatrix]) -> StoredMatrix | None:
    """Concatenates E matrices of one shape, such as experts, into one matrix of E * N rows. Does not copy tensors that
    are adjacent in memory. Returns None if layouts differ, or companion rows cannot be assigned to matrix rows."""
    first, num_rows = matrices[0].source, matrices[0].source.shape[0]
    if not have_same_layout(matrices) or first.row_order:
        return None
    companions, tensors = list[Companion](), dict[str, torch.Tensor]()
    for companion in first.companions:
        parts, block = [stored.companions[companion.role] for stored in matrices], companion.block_rows
        if parts[0].dim() != 2:  # has no rows to join
            return None
        if parts[0].dtype == torch.int32 and len(parts[0]) * block != num_rows:
            return None  # a word has fields for several matrix rows, and the last word is only partly used
        if len(parts[0]) == 1:  # one companion row for the whole matrix: repeat it for every matrix row
            parts, block = [part.expand(num_rows, -1) for part in parts], 1
        elif len(parts[0]) * block != num_rows:
            if -(-num_rows // block) != len(parts[0]):
                return None
            # The last block is shorter, so blocks would shift in the next matrix: repeat for every matrix row.
            rows = torch.arange(num_rows, device=parts[0].device) // block
            # FP8 is viewed as uint8, since torch cannot index it.
            parts = [part.view(CONCAT_DTYPES.get(part.dtype, part.dtype))[rows].view(part.dtype) for part in parts]
            block = 1
        tensors[companion.role] = concat_rows(parts)
        companions.append(replace(companion, block_rows=block))
    shape = (len(matrices) * num_rows, *first.shape[1:])
    joined = replace(first, shape=shape, companions=tuple(companions))
    return StoredMatrix(joined, concat_rows([stored.raw for stored in matrices]), tensors)


def join_by_columns(matrices: Sequence[StoredMatrix], num_words: int) -> StoredMatrix | None:
    """Same as `join_by_rows` for matrices stored transposed: 32-bit words (num_words, columns), with the K numbers of a
    matrix row in one column. If words pack neighboring rows, a column holds WORD_ROWS matrix rows, otherwise one.
    Two-dimensional companions are transposed in the same way. One-dimensional companions are stacked: (E, K)."""
    first, num_rows = matrices[0].source, matrices[0].source.shape[0]
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
    """True if shapes, formats, dtypes, companions' shapes and the first two `TensorSlice.constants` are equal. Later
    constants, such as the offset of bitsandbytes' nested scales, may differ by matrix."""

    def layout_key(stored: StoredMatrix) -> tuple[object, ...]:
        info, sizes = stored.source, {role: tensor.shape for role, tensor in stored.companions.items()}
        return info.shape, info.format, info.dtype, info.first_row, info.constants[:2], stored.raw.shape, sizes

    return all(layout_key(matrix) == layout_key(matrices[0]) for matrix in matrices)


@dataclass(frozen=True, kw_only=True)
class StorageFormat:
    """A storage format. `is_output_major`: stored rows are outputs, even if the model class stores this weight
    transposed, as GPT-2 does."""

    name: str  # as in `TensorSlice.format`
    loss: Loss
    row_bytes: Callable[[int], float]  # number of columns -> bytes per row, with its share of the companions
    rows: Callable[[StoredMatrix], Rows]  # makes the object that dequantizes rows, on any device
    companions: tuple[str, ...] = ()  # roles
    is_output_major: bool = False
    # Concatenates the experts of a layer, so that a device decodes them at once; None: cannot be concatenated.
    join: Callable[[Sequence[StoredMatrix]], StoredMatrix | Rows | None] = join_by_rows

    def join_matrices(self, matrices: Sequence[StoredMatrix]) -> Rows | None:
        """Concatenates matrices of one shape by rows; None if `join` cannot."""
        joined = self.join(matrices)
        return self.rows(joined) if isinstance(joined, StoredMatrix) else joined


# The reader of a quantization method: (tensors of a checkpoint, quantization_config) -> tensors, in which each
# quantized weight has its format and companions, and the name that the model uses. Raises CheckpointError for tensors
# that do not fit each other and for unsupported variants.
Method = Callable[[Mapping[str, TensorSlice], Mapping[str, object]], Mapping[str, TensorSlice]]
