"""Rows of bfloat16 packed losslessly into 12 bits (`formats/kinds/window4.py`). Decoded with torch operators on any
device, or on a CPU by a compiled kernel inside the product.

Escapes are numbers whose exponent has no code. They are in a companion: a separate int32 tensor per matrix. It has the
exponent base, then `starts` (row r has escapes [starts[r], starts[r + 1])), then 16-bit columns and 8-bit exponents of
all escapes, padded to whole words. Rows here are one matrix (or some of its rows), or several matrices one below the
other.

E matrices; N rows of K numbers, R selected rows; n escapes.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
import torch

from ..kernels.arguments import BLOCK_NUMBERS, GROUP_BYTES, GROUP_NUMBERS
from ..kernels.arguments import WINDOW4 as ENCODING
from .blocks import device_constant
from .packed_rows import Arrays, Layout, PackedRows
from .rows import Codes

WINDOW4 = "window4"  # name of the storage format
BIASED_SIGN, MANTISSA = 0x80, 0x7F  # bits of a byte with sign and mantissa


class Window4Rows(PackedRows):
    """See `Rows`. Decoding restores all bits of the packed bfloat16 numbers."""

    dtype = torch.bfloat16  # of the decoded numbers, like a tensor's

    def __init__(self, body_NB: torch.Tensor, escapes: Sequence[torch.Tensor], num_starts: int, first_row: int = 0):
        """Makes rows of codes `body_NB`. `escapes`: the companion of each matrix; a matrix has `num_starts` - 1 rows.
        If there is one matrix, `body_NB` may have only some of its rows, from `first_row` on. If there are several, it
        has all their rows."""
        super().__init__(body_NB, body_NB.shape[1] // GROUP_BYTES * GROUP_NUMBERS)
        self._escapes, self._num_starts, self._first_row = escapes, num_starts, first_row

    @cached_property
    def _parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The content of the companions: bases (E, 1), starts (E, N + 1), and concatenated over matrices: columns (n,)
        int16 and exponents (n,) uint8. For a single matrix, these are views."""
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
        """Returns the number of escapes including padding; four of them take three words."""
        return (companion.numel() - 1 - self._num_starts) // 3 * 4

    def _escape_offsets(self) -> torch.Tensor:
        """Returns the index of each matrix's first escape in the concatenated escapes, (E,)."""
        counts = [self._num_escapes(companion) for companion in self._escapes]
        return device_constant((0, *accumulate(counts[:-1])), torch.int32, self.device)

    def _layout(self) -> tuple[Layout, Arrays]:
        bases, starts, columns, exponents = (part.numpy() for part in self._parts)
        assert len(bases) == 1, "kernels take one matrix at a time"
        starts_N = starts[0, self._first_row : self._first_row + self.shape[0] + 1].view(np.uint32)
        layout = Layout(ENCODING, *self.shape, BLOCK_NUMBERS // GROUP_NUMBERS * GROUP_BYTES, base=int(bases[0, 0]))
        return layout, Arrays(starts_N, columns.view(np.uint16), exponents)

    def codes(self) -> Codes:
        """See `Rows`. The codes of several matrices share one tensor of escapes, with an offset for each matrix."""
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
        # First decodes all numbers with escapes at exponent 0, then adds the missing exponents at the escapes' places.
        body_RB, num_rows = self._body_NB[rows], self._num_starts - 1
        is_all_rows = len(body_RB) == len(self._escapes) * num_rows and isinstance(rows, slice)
        row_numbers = None if is_all_rows else torch.arange(self.shape[0], device=self.device)[rows] + self._first_row
        self._decode_coded(body_RB, row_numbers, out_RK)
        bits = out_RK.view(torch.int32).view(-1)
        if row_numbers is None:
            bits.index_add_(0, *self._escape_updates(self._escape_rows(), len(body_RB)))
            return
        # Maps each row of all matrices to its row in the output; `num_all` means that it is not selected.
        num_all = len(self._escapes) * num_rows
        output_rows = torch.full((num_all + 1,), num_all, device=self.device)
        output_rows[row_numbers] = torch.arange(len(row_numbers), device=self.device)
        bits.index_add_(0, *self._escape_updates(output_rows[self._escape_rows()], len(row_numbers)))
        if isinstance(rows, torch.Tensor):  # if a row was selected several times, only one copy got its escapes
            out_RK.copy_(out_RK[output_rows[row_numbers]])

    def _decode_coded(self, body_RB: torch.Tensor, row_numbers: torch.Tensor | None, out_RK: torch.Tensor) -> None:
        """Writes the decoded rows `body_RB`, escapes with exponent 0. `row_numbers`: their row numbers; None for all
        rows."""
        groups = body_RB.unflatten(1, (-1, GROUP_BYTES))
        signed, pairs = groups[..., :GROUP_NUMBERS], groups[..., GROUP_NUMBERS:]
        bits = _signs_and_mantissas(self.device).index_select(0, signed.int().flatten()).view(signed.shape)
        # Looks up both exponents of each byte of codes in the table of the row's matrix.
        entries = pairs.int()
        if len(self._escapes) > 1:
            row_numbers = torch.arange(self.shape[0], device=self.device) if row_numbers is None else row_numbers
            entries += 256 * (row_numbers // (self._num_starts - 1)).int()[:, None, None]
        exponents = self._exponents.index_select(0, entries.flatten()).view(torch.int16)
        bits = bits.unflatten(-1, (2, -1)) | exponents.view(*entries.shape, 2).movedim(-1, -2)
        ordered = bits.flatten(-2).unflatten(-1, (4, 2, 4, 2)).permute(0, 1, 3, 5, 2, 4)  # see `kinds/window4.py`
        out_RK.view(ordered.shape).copy_(ordered.view(torch.bfloat16))

    @cached_property
    def _exponents(self) -> torch.Tensor:
        """Lookup table (E x 256,) from a byte of two codes to their exponents, as two bfloat16 in one int32; 256
        entries for each matrix."""
        codes, pairs = _byte_codes(self.device)
        exponents_E16 = ((codes + self._parts[0]) << 7).short()
        exponents_E16[:, 0] = 0  # code 0: an escape
        return exponents_E16.index_select(1, pairs).view(torch.int32).flatten()

    def _escape_updates(self, output_rows_n: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns for each escape the flat index into the output and the bits to add there. `output_rows_n`: the output
        row of each escape; `num_rows` or more means that its row is not selected. An escape that is not selected, or
        has an invalid column, adds 0 to element 0."""
        _, _, columns, exponents = self._parts
        column = columns.long() & 0xFFFF
        is_skipped = (column >= self.shape[1]) | (output_rows_n >= num_rows)
        bits_to_add = torch.where(is_skipped, 0, exponents.int() << 23)
        return torch.where(is_skipped, 0, output_rows_n * self.shape[1] + column), bits_to_add

    def _escape_rows(self) -> torch.Tensor:
        """Returns the row of each escape, counted over all matrices, (n,). For padding, returns one past the last
        row."""
        # Not cached: over all layers it would use device memory that the plan does not count.
        _, starts_EN, _, exponents = self._parts
        numbers = torch.arange(len(exponents), device=self.device, dtype=torch.int32)
        if len(self._escapes) == 1:
            return torch.searchsorted(starts_EN[0, 1:], numbers, right=True)
        # The search counts one more row per matrix: the padding behind its last escape.
        starts = starts_EN + self._escape_offsets()[:, None]
        padded_rows = torch.searchsorted(starts.flatten(), numbers, right=True) - 1
        matrices = padded_rows // self._num_starts
        is_padding = padded_rows % self._num_starts == self._num_starts - 1
        return torch.where(is_padding, self.shape[0], padded_rows - matrices)


@lru_cache
def _signs_and_mantissas(device: torch.device) -> torch.Tensor:
    """Returns a lookup table (256,) from a byte of sign and mantissa to these bits of a bfloat16, int16."""
    byte = torch.arange(256)
    return ((byte & BIASED_SIGN) << 8 | byte & MANTISSA).short().to(device)


@lru_cache
def _byte_codes(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns all codes (16,), and the codes of each byte 0 to 255, low nibble first (512,)."""
    pairs = torch.stack([torch.arange(256) & 15, torch.arange(256) >> 4], dim=1)
    return torch.arange(16, dtype=torch.int32).to(device), pairs.flatten().to(device)
