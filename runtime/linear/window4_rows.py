"""Rows of bfloat16 packed into 12 bits (`formats/packing.py`), decoded by operators of any device or, on a CPU, by
compiled code inside of the product.

N rows of K numbers, R of them wanted; n escapes.
"""

from functools import cached_property

import numpy as np
import torch

from ..kernels.arguments import GROUP_BYTES, GROUP_NUMBERS
from ..kernels.arguments import WINDOW4 as WAY
from .packed_rows import Arrays, Layout, PackedRows

WINDOW4 = "window4"  # its storage format
BIASED_SIGN, MANTISSA = 0x80, 0x7F


class Window4Rows(PackedRows):
    """See `Rows`. Its numbers are those that were packed, bit by bit."""

    dtype = torch.bfloat16  # of its numbers, as a tensor's

    def __init__(self, body_NB: torch.Tensor, escapes: torch.Tensor, num_starts: int, first_row: int = 0):
        """`escapes`: the companion, int32, of `num_starts` - 1 rows, of which these begin at `first_row`."""
        super().__init__(body_NB, body_NB.shape[1] // GROUP_BYTES * GROUP_NUMBERS)
        self._escapes, self._num_starts, self._first_row = escapes, num_starts, first_row

    @cached_property
    def _parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of the companion: the base (1), starts (N + 1), columns as int16 and exponents as uint8."""
        begin = 1 + self._num_starts
        num_escapes = (self._escapes.numel() - begin) // 3 * 4
        columns, exponents = self._escapes[begin:].split([num_escapes // 2, num_escapes // 4])
        return self._escapes[:1], self._escapes[1:begin], columns.view(torch.int16), exponents.view(torch.uint8)

    def _laid_out(self) -> tuple[Layout, Arrays]:
        base, starts, columns, exponents = (part.numpy() for part in self._parts)
        own = starts[self._first_row : self._first_row + self.shape[0] + 1].view(np.uint32)
        layout = Layout(WAY, *self.shape, GROUP_BYTES, base=int(base[0]))
        return layout, Arrays(own, columns.view(np.uint16), exponents)

    def decode(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        bits_RK = out_RK.view(torch.int32)
        self._decode_coded(self._body_NB[rows], bits_RK)
        own = torch.arange(self.shape[0], device=self.device)[rows] + self._first_row
        places = torch.full((self._num_starts,), -1, device=self.device)
        places[own] = torch.arange(len(own), device=self.device)
        self._add_escapes(places, bits_RK)
        if isinstance(rows, torch.Tensor):  # of rows that are wanted more than once, one has got its escapes
            bits_RK.copy_(bits_RK[places[own]])

    def _decode_coded(self, body_RB: torch.Tensor, bits_RK: torch.Tensor) -> None:
        """Writes float32 as bits, escapes with an exponent of 0."""
        groups = body_RB.unflatten(1, (-1, GROUP_BYTES)).int()
        kept, nibbles = groups[..., :GROUP_NUMBERS], groups[..., GROUP_NUMBERS:]
        codes = torch.cat([nibbles & 15, nibbles >> 4], dim=-1)
        exponents = torch.where(codes == 0, 0, codes + self._parts[0])
        bits = (kept & BIASED_SIGN) << 24 | exponents << 23 | (kept & MANTISSA) << 16
        places = bits.unflatten(-1, (4, 2, 4, 2)).permute(0, 1, 3, 5, 2, 4)  # see `formats/packing.py`
        bits_RK.view(places.shape).copy_(places)

    def _add_escapes(self, places: torch.Tensor, bits_RK: torch.Tensor) -> None:
        """`places`: where each row's numbers are wanted, -1 where they are not. Others, and those of columns that there
        are not, add 0 to the first number."""
        _, _, columns, exponents = self._parts
        place, column = places[self._rows_of_escapes], columns.long() & 0xFFFF
        is_elsewhere = (place < 0) | (column >= self.shape[1])
        at = torch.where(is_elsewhere, 0, place * self.shape[1] + column)
        added = torch.where(is_elsewhere, 0, exponents.int() << 23)
        bits_RK.view(-1).index_add_(0, at, added)

    @cached_property
    def _rows_of_escapes(self) -> torch.Tensor:
        """(n,): the row of each; of what only fills up, the one behind the last."""
        _, starts, _, exponents = self._parts
        numbers = torch.arange(len(exponents), device=self.device, dtype=torch.int32)
        return torch.searchsorted(starts[1:].contiguous(), numbers, right=True)
