"""Rows of a quantised matrix as they are stored, how a run of them becomes numbers, and how they lie in memory, in
tensors and numbers that a kernel of an accelerator takes: codes, and the zero points and factors that make numbers of
them. Formats say it of their rows (`Rows.codes`), and know no kernel.

A number is (code - zero) * factor * `last`, each step rounded to float32, as `Rows.dequantize` has it.

Shapes: E matrices of N rows and K columns, of which R rows are wanted, at equal distances; G groups of columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class Codes:
    """E matrices of shape (N, K), or one. All tensors are views into a slot, of any strides: valid as long as its bytes
    are.

    `way`: of `kernels/arguments.py`. `body`: (E, N, B) uint8; of WORDS4 and WORDS8 (E, N, W) int32, words of neighbour
    columns; of ROW_WORDS (E, N / 8, K) int32 words of eight rows, the first of them that of row `first_row` rounded
    down. `scales` (E, N / scale_rows, G), of any float dtype, for groups of `width` columns or of those that `groups`
    (E, K) says. `zeros` (E, N, G) numbers; with `zero_bits` (E, words, G) int32 words whose fields are those of rows
    from `first_row` on. `added` is added to zero points, to fields modulo their range; without `zeros` it is the zero
    point itself. `table` (E, 16): the numbers of IN_TABLE's codes. `overall` (E, N): another factor, by which those of
    groups are multiplied or, if it `divides`, divided. `order` (E, N) int64: which row of `body` each row is.
    Escapes of WINDOW4: `bases` (E, 1) and `starts` (E, N + 1) int32, `columns` int16 and `exponents` uint8 (E, n), or
    (1, n) of all matrices, in which those of each begin at `begins` (E,) int32.
    """

    encoding: int
    shape: tuple[int, int]
    body: torch.Tensor
    scales: torch.Tensor | None = None
    scale_rows: int = 1
    width: int = 0
    groups: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    zero_bits: int = 0
    zero_offset: int = 0
    table: torch.Tensor | None = None
    overall: torch.Tensor | None = None
    divides: bool = False
    last_factor: float | None = None
    order: torch.Tensor | None = None
    bases: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    exponents: torch.Tensor | None = None
    escape_offsets: torch.Tensor | None = None
    first_row: int = 0

    @cached_property
    def launches(self) -> dict[object, Any]:
        """What kernels keep from one launch with these codes to the next."""
        return {}

    @property
    def num_matrices(self) -> int:
        return len(self.body)

    def first(self, num_rows: int) -> "Codes":
        """The first rows of the first matrix."""
        tensors = {field.name: getattr(self, field.name) for field in fields(Codes)}
        ones = {name: value[:1] for name, value in tensors.items() if isinstance(value, torch.Tensor)}
        return replace(self, **ones, shape=(min(num_rows, self.shape[0]), self.shape[1]))

    @property
    def is_view(self) -> bool:
        """Whether all of it lies in one item of memory, as a slot does: nothing was made."""
        tensors = (getattr(self, field.name) for field in fields(Codes))
        return len({t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor)}) == 1

    @property
    def device(self) -> torch.device:
        return self.body.device


def stack_codes(parts: Sequence[Codes]) -> Codes | None:
    """The codes of several single matrices as those of one stack, without a copy; None where they are not of one kind
    and shape, or one of their tensors does not lie at equal distances in one item of memory."""
    found = dict[str, torch.Tensor]()
    for field in fields(Codes):
        values = [getattr(part, field.name) for part in parts]
        if isinstance(values[0], torch.Tensor):
            ones = [value[0] for value in values if isinstance(value, torch.Tensor) and len(value) == 1]
            stack = as_strided_stack(ones) if len(ones) == len(values) else None
            if stack is None:
                return None
            found[field.name] = stack
        elif any(value != values[0] for value in values):
            return None
    return replace(parts[0], **found)


def as_strided_stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Tensors of one shape, dtype and strides as one with a dimension before theirs, without a copy; None where they
    are not alike, or do not follow each other at equal distances in one item of memory."""
    first = tensors[0]
    memory, begins = first.untyped_storage().data_ptr(), list[int]()
    for tensor in tensors:
        if tensor.dtype != first.dtype or tensor.shape != first.shape or tensor.stride() != first.stride():
            return None
        if tensor.untyped_storage().data_ptr() != memory:
            return None
        begins.append(int(tensor.storage_offset()))
    distance = begins[1] - begins[0] if len(begins) > 1 else first.numel()
    if distance < 0 or begins != [begins[0] + turn * distance for turn in range(len(begins))]:
        return None
    return first.as_strided((len(begins), *first.shape), (distance, *first.stride()), begins[0])


class Rows(Protocol):
    """A matrix of `shape` (N, K) on `device`. Views into a slot: valid as long as its bytes are."""

    shape: tuple[int, int]
    device: torch.device

    def dequantize(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        """Writes the numbers of some rows, or of the rows with these numbers, in that order. `out_RK`: float32,
        contiguous. Allocates a few bytes for each number of them, freed on return."""
        ...

    def codes(self) -> Codes | None:
        """How they lie, for kernels of an accelerator; None for what these do not take."""
        ...


class KernelWeights(NamedTuple):
    """Rows as the kernel for vectors of that name takes them."""

    kernel: str
    stored: Any  # (N, K), or StoredRows
    num_rows: int


@runtime_checkable
class KernelRows(Rows, Protocol):
    """Rows that a CPU kernel decodes inside the product. `row_scratch_bytes`: bytes per row that `kernel_weights`
    allocates besides views."""

    row_scratch_bytes: int

    def kernel_weights(self, rows: slice) -> KernelWeights:
        """Returns kernel arguments for a run of rows that begins at a multiple of 32; for all rows if
        `row_scratch_bytes` is 0. CPU only. Valid as long as these rows are."""
        ...
