"""The storage format: a way that numbers of a matrix lie in bytes.

Shapes: N rows of K numbers, of B bytes each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..linear.rows import Rows
from ..plan.shape.loss import Loss as Loss
from ..plan.shape.shapes import TensorSlice


class Stored(NamedTuple):
    """A matrix as it lies in memory: its bytes, and its companions by role. Views into a slot: valid as long as its
    bytes are."""

    piece: TensorSlice
    raw: torch.Tensor  # uint8, one behind the other
    companions: Mapping[str, torch.Tensor]  # in their own dtypes and shapes

    @property
    def raw_NB(self) -> torch.Tensor:
        return self.raw.view(self.piece.shape[0], -1)


@dataclass(frozen=True, kw_only=True)
class StorageFormat:
    """`name` is what a tensor slice calls it. `rows` makes rows of a stored matrix that dequantize themselves on
    whichever device they lie; `row_bytes` says what a row of so many numbers takes, with its share of the companions,
    whose roles are `companions`. A format `of_linear` layers has a row for each output, also where a class keeps its
    weight as columns, as GPT-2's does."""

    name: str
    loss: Loss
    row_bytes: Callable[[int], float]
    rows: Callable[[Stored], Rows]
    companions: tuple[str, ...] = ()
    of_linear: bool = False


# A method that a config names, with what the config says of it: the checkpoint's tensors as if they were not stored so,
# weights under their own names and in their own shapes, with format and companions. Raises CheckpointError for tensors
# that do not fit each other, and for a variant that cannot be read.
Method = Callable[[Mapping[str, TensorSlice], Mapping[str, object]], Mapping[str, TensorSlice]]
