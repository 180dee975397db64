"""Rows of bfloat16 packed losslessly into 12 bits (`kinds/window4.py`). Decoded by torch operators on any device, or on
a CPU by a compiled kernel inside the product.

N rows of K numbers, R of them selected; n escapes: numbers whose exponents are stored separately.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
import torch

from ..kernels.arguments import GROUP_BYTES, GROUP_NUMBERS
from ..kernels.arguments import WINDOW4 as ENCODING
from .blocks import device_constant
from .packed_rows import Arrays, Layout, PackedRows
from .rows import Codes

WINDOW4 = "window4"  # its storage format
BIASED_SIGN, MANTISSA = 0x80, 0x7F


class Window4Rows(PackedRows):
    """See `Rows`. Decoding restores the packed bfloat16 numbers bit by bit."""

    dtype = torch.bfloat16  # of the decoded numbers, like a tensor's

    def __init__(self, body_NB: torch.Tensor, escapes: Sequence[torch.Tensor], num_starts: int, first_row: int = 0):
        """`escapes`: the int32 companion of a matrix of `num_starts` - 1 rows, in which these rows begin at
        `first_row`; or one companion for each of several concatenated matrices, of which these are all rows."""
        super().__init__(body_NB, body_NB.shape[1] // GROUP_BYTES * GROUP_NUMBERS)
        self._escapes, self._num_starts, self._first_row = escapes, num_starts, first_row

    @cached_property
    def _parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The companions' bases (E, 1), starts (E, N + 1), and concatenated columns (int16) and exponents (uint8).
        Views if there is one matrix."""
        begin, parts = 1 + self._num_starts, list[tuple[torch.Tensor, ...]]()
        for companion in self._escapes:
            columns, exponents = companion[begin:].split([num := self._num_escapes(companion) // 2, num // 2])
            starts = companion[None, 1:begin]
            parts.append((companion[None, :1], starts, columns.view(torch.int16), exponents.view(torch.uint8)))
        bases, starts, columns, exponents = (
            tensors[0] if len(tensors) == 1 else torch.cat(tensors) for tensors in zip(*parts, strict=True)
        )
        return bases, starts, columns, exponents

    def _num_escapes(self, companion: torch.Tensor) -> int:
        return (companion.numel() - 1 - self._num_starts) // 3 * 4

    def _escape_offsets(self) -> torch.Tensor:
        """(E,): the index of each matrix's first escape."""
        counts = [self._num_escapes(companion) for companion in self._escapes]
        return device_constant((0, *accumulate(counts[:-1])), torch.int32, self.device)

    def _layout(self) -> tuple[Layout, Arrays]:
        bases, starts, columns, exponents = (part.numpy() for part in self._parts)
        assert len(bases) == 1, "kernels take one matrix at a time"
        own = starts[0, self._first_row : self._first_row + self.shape[0] + 1].view(np.uint32)
        layout = Layout(ENCODING, *self.shape, GROUP_BYTES, base=int(bases[0, 0]))
        return layout, Arrays(own, columns.view(np.uint16), exponents)

    def codes(self) -> Codes:
        """See `Rows`. Escapes of several matrices are concatenated; the host computes their offsets."""
        bases_E1, starts_EN, columns, exponents = self._parts
        num_matrices, begins = len(self._escapes), None
        if num_matrices > 1:
            begins = self._escape_offsets()
        else:
            starts_EN = starts_EN[:, self._first_row : self._first_row + self.shape[0] + 1]
        body = self._body_NB.unflatten(0, (num_matrices, -1))
        return Codes(
            encoding=ENCODING,
            shape=(body.shape[1], self.shape[1]),
            body=body,
            bases=bases_E1,
            starts=starts_EN,
            columns=columns[None],
            exponents=exponents[None],
            escape_offsets=begins,
        )

    def dequantize(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        """See `Rows`."""
        if len(self._escapes) == 1:
            super().dequantize(rows, out_RK)
        else:  # kernels take one matrix at a time
            self.decode(rows, out_RK)

    def decode(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        body_RB, num_rows = self._body_NB[rows], self._num_starts - 1
        is_whole = len(body_RB) == len(self._escapes) * num_rows and isinstance(rows, slice)
        own = None if is_whole else torch.arange(self.shape[0], device=self.device)[rows] + self._first_row
        self._decode_coded(body_RB, own, out_RK)
        bits = out_RK.view(torch.int32).view(-1)
        if own is None:
            bits.index_add_(0, *self._escape_updates(self._escape_rows(), len(body_RB)))
            return
        num_all = len(self._escapes) * num_rows
        places = torch.full((num_all + 1,), num_all, device=self.device)
        places[own] = torch.arange(len(own), device=self.device)
        bits.index_add_(0, *self._escape_updates(places[self._escape_rows()], len(own)))
        if isinstance(rows, torch.Tensor):  # of duplicate row numbers only one got its escapes: copy it to the others
            out_RK.copy_(out_RK[places[own]])

    def _decode_coded(self, body_RB: torch.Tensor, own: torch.Tensor | None, out_RK: torch.Tensor) -> None:
        """Writes all numbers, with exponent 0 for escapes. `own`: row numbers of these rows; None: all rows."""
        groups = body_RB.unflatten(1, (-1, GROUP_BYTES))
        kept, pairs = groups[..., :GROUP_NUMBERS], groups[..., GROUP_NUMBERS:]
        signs = _signs_and_mantissas(self.device).index_select(0, kept.int().flatten()).view(kept.shape)
        codes = pairs.int()
        if len(self._escapes) > 1:
            own = torch.arange(self.shape[0], device=self.device) if own is None else own
            codes += 256 * (own // (self._num_starts - 1)).int()[:, None, None]
        exponents = self._exponents.index_select(0, codes.flatten()).view(torch.int16)  # two per byte
        signs = signs.unflatten(-1, (2, -1)) | exponents.view(*codes.shape, 2).movedim(-1, -2)
        places = signs.flatten(-2).unflatten(-1, (4, 2, 4, 2)).permute(0, 1, 3, 5, 2, 4)  # see `kinds/window4.py`
        out_RK.view(places.shape).copy_(places.view(torch.bfloat16))

    @cached_property
    def _exponents(self) -> torch.Tensor:
        """(E x 256,): a table from a byte of two codes to both exponents, at bfloat16's bit positions, as one int32."""
        codes, pairs = _byte_codes(self.device)
        exponents_E16 = ((codes + self._parts[0]) << 7).short()
        exponents_E16[:, 0] = 0  # code 0: an escape
        return exponents_E16.index_select(1, pairs).view(torch.int32).flatten()

    def _escape_updates(self, place_n: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns flat indices into the output and the bits to add there, per escape. `place_n`: each escape's output
        row, `num_rows` or more if it is not selected. Those, padding, and invalid columns add 0 to element 0."""
        _, _, columns, exponents = self._parts
        column = columns.long() & 0xFFFF
        is_elsewhere = (column >= self.shape[1]) | (place_n >= num_rows)
        added = torch.where(is_elsewhere, 0, exponents.int() << 23)
        return torch.where(is_elsewhere, 0, place_n * self.shape[1] + column), added

    def _escape_rows(self) -> torch.Tensor:
        """(n,): each escape's row, counted over all matrices; for padding, one past the last row. Not cached: over all
        layers it would use device memory that the plan does not count."""
        _, starts_EN, _, exponents = self._parts
        numbers = torch.arange(len(exponents), device=self.device, dtype=torch.int32)
        if len(self._escapes) == 1:
            return torch.searchsorted(starts_EN[0, 1:], numbers, right=True)
        starts = starts_EN + self._escape_offsets()[:, None]  # each matrix has one more row, for padding
        places = torch.searchsorted(starts.flatten(), numbers, right=True) - 1
        matrices = places // self._num_starts
        is_padding = places % self._num_starts == self._num_starts - 1
        return torch.where(is_padding, self.shape[0], places - matrices)


@lru_cache
def _signs_and_mantissas(device: torch.device) -> torch.Tensor:
    """(256,): a table from a byte to its sign and mantissa at bfloat16's bit positions."""
    byte = torch.arange(256)
    return ((byte & BIASED_SIGN) << 8 | byte & MANTISSA).short().to(device)


@lru_cache
def _byte_codes(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """All codes (16,), and the two codes of each byte (512,), low nibble first."""
    pairs = torch.stack([torch.arange(256) & 15, torch.arange(256) >> 4], dim=1)
    return torch.arange(16, dtype=torch.int32).to(device), pairs.flatten().to(device)
