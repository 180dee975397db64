"""Small integers whose groups of columns share a zero point and a scale, and how they lie in words of 32 bits.

Shapes: N rows of K numbers, of which R are wanted; G groups of columns; W words.
"""

from collections.abc import Callable
from functools import lru_cache

import torch

from ..linear.rows import Codes

WORD_BITS = 32
Chosen = slice | torch.Tensor  # some rows, or the rows with these numbers in that order
Write = Callable[[Chosen, torch.Tensor], None]  # the codes of the wanted rows into (R, K) float32
Factors = Callable[[Chosen], torch.Tensor]  # of the wanted rows: (R, G) float32, or (1, 1) for all alike
Apply = Callable[[torch.Tensor, torch.Tensor], object]


class IntegerRows:
    """Rows of `(code - zero) * scale` (see `rows.Rows`). Codes and zero points have at most nine bits: float32 holds
    their difference exactly, and its product with a scale of 16 bits too."""

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        write: Write,
        zeros: Factors,
        scales: Factors,
        width: int,
        groups: torch.Tensor | None = None,
        *,
        codes: Callable[[], Codes],
    ):
        """`width`: the columns of a group; `groups` (K,): the group of each column, where they do not lie in turn; or
        (E, K), of each of E equal runs of rows. `codes`: see `Rows`."""
        self.shape, self.device = shape, device
        self._write, self._zeros, self._scales, self._width, self._groups = write, zeros, scales, width, groups
        self.codes = codes

    def shared(self, rows: Chosen) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns zero points and scales of the wanted rows: (R, G) float32 each, or (1, 1) for all alike."""
        return self._zeros(rows), self._scales(rows)

    def dequantize(self, rows: Chosen, out_RK: torch.Tensor) -> None:
        self._write(rows, out_RK)
        for factors, apply in ((self._zeros, torch.Tensor.sub_), (self._scales, torch.Tensor.mul_)):
            if self._groups is None or self._groups.dim() == 1:
                apply_by_group(out_RK, factors(rows), self._width, apply, self._groups)
            else:
                self._apply_by_matrix(rows, factors(rows), apply, out_RK)

    def _apply_by_matrix(self, rows: Chosen, factors_RG: torch.Tensor, apply: Apply, out_RK: torch.Tensor) -> None:
        """Applies the factors of runs of rows whose columns are in groups of their own. Rows are a run."""
        assert self._groups is not None, "columns are in groups"
        assert isinstance(rows, slice), "rows of several matrices are looked at in runs"
        height = self.shape[0] // len(self._groups)
        first, stop, _ = rows.indices(self.shape[0])
        for matrix in range(first // height, -(-stop // height)):
            begin, end = (min(max(row, first), stop) - first for row in (matrix * height, (matrix + 1) * height))
            apply(out_RK[begin:end], factors_RG[begin:end].index_select(1, self._groups[matrix]))


def apply_by_group(
    out_RK: torch.Tensor, factors_RG: torch.Tensor, width: int, apply: Apply, groups: torch.Tensor | None = None
) -> None:
    """Applies to each run of `width` columns, or to each column of `groups`, its factor; the last run may be
    shorter."""
    num_whole = out_RK.shape[1] // width
    if factors_RG.shape[1] == 1:
        apply(out_RK, factors_RG)
    elif groups is not None:
        apply(out_RK, factors_RG.index_select(1, groups))  # six times as fast as an index of its own
    else:
        apply(out_RK[:, : num_whole * width].unflatten(1, (num_whole, width)), factors_RG[:, :num_whole, None])
        if num_whole < factors_RG.shape[1]:
            apply(out_RK[:, num_whole * width :], factors_RG[:, num_whole:])


def write_words(words_RW: torch.Tensor, num_bits: int, out_RK: torch.Tensor) -> None:
    """Writes codes of 4 or 8 bits that lie in words (contiguous), the first in the lowest bits; those behind the last
    column are padding."""
    bytes_RB = words_RW.view(torch.uint8)
    if num_bits == 4:
        write_pairs(nibble_pairs(bytes_RB.device), bytes_RB, out_RK)
    else:
        out_RK.copy_(bytes_RB[:, : out_RK.shape[1]])


def write_pairs(pairs: torch.Tensor, bytes_RB: torch.Tensor, out_RK: torch.Tensor) -> None:
    """Writes the two numbers of each byte, of which `pairs` (256,) has each as one element of 64 bits."""
    numbers = bytes_RB.flatten().int()
    if out_RK.shape[1] == 2 * bytes_RB.shape[1]:
        torch.index_select(pairs, 0, numbers, out=out_RK.view(pairs.dtype).flatten())
    else:
        out_RK.copy_(pairs[numbers].view(out_RK.dtype).view(len(out_RK), 2 * bytes_RB.shape[1])[:, : out_RK.shape[1]])


@lru_cache
def nibble_pairs(device: torch.device) -> torch.Tensor:
    """(256,): the halves of each byte, the low one first."""
    byte = torch.arange(256)
    return as_pairs(byte & 15, byte >> 4).to(device)


def as_pairs(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Two numbers for each byte as one element of 64 bits."""
    return torch.stack([first, second], dim=1).float().view(torch.int64).flatten()


def fields(words_RW: torch.Tensor, positions: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The codes at these positions of each row of words, of which the first lies in the lowest bits: (R, positions)."""
    per_word = WORD_BITS // num_bits
    shifts = (positions % per_word * num_bits).to(words_RW.dtype)
    return words_RW[:, positions // per_word] >> shifts & ((1 << num_bits) - 1)


def row_numbers(rows: Chosen, num_rows: int, first_row: int, device: torch.device) -> torch.Tensor:
    """The numbers of the wanted rows of `num_rows`, which begin at `first_row` of what companions count."""
    if isinstance(rows, slice):
        start, stop, _ = rows.indices(num_rows)
        return torch.arange(first_row + start, first_row + stop, device=device)
    return rows + first_row


def columns_of(matrix: torch.Tensor, rows: Chosen, num_rows: int, first_row: int) -> torch.Tensor:
    """The columns of a matrix that lie as the wanted rows; a view of a run of them."""
    if isinstance(rows, slice):
        start, stop, _ = rows.indices(num_rows)
        return matrix[:, first_row + start : first_row + stop]
    return matrix[:, rows + first_row]
