"""The block formats of GGUF, by the names of their types; scales lie inside of their blocks. A type of plain numbers is
one where its rows lie in another order."""

from functools import partial
from math import prod

import torch

from ...linear.rows import Rows
from ...plan.shape.shapes import TensorSlice
from ...store.gguf import BLOCKS, Block
from ..gguf_blocks import GgufRows
from ..storage_format import Loss, StorageFormat, Stored


def _rows(stored: Stored) -> Rows:
    num_columns = prod(stored.piece.shape[1:])
    return GgufRows(stored.raw_NB, stored.piece.dtype, num_columns, _order(stored.piece, stored.raw.device))


def _order(piece: TensorSlice, device: torch.device) -> torch.Tensor | None:
    runs = [torch.arange(run.start, run.stop, run.step, device=device) for run in piece.row_order]
    return torch.cat(runs) if runs else None


def _row_bytes(block: Block, num_columns: int) -> float:
    return num_columns / block.num_numbers * block.num_bytes


FORMATS = tuple(
    StorageFormat(name=name, loss=Loss.exact, row_bytes=partial(_row_bytes, block), rows=_rows)
    for name, block in BLOCKS.items()
)
