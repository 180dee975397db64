"""Protocols for rows of a quantized matrix: dequantize a run of them, or describe their memory layout to a kernel.

`Codes` is the layout for accelerator kernels: tensors of codes, zero points and factors. Each storage format returns it
from `Rows.codes` and knows nothing of the kernels. A number is (code - zero) * factor * `last_factor`, each step
rounded to float32, as in `Rows.dequantize`.

Shapes: E matrices of N rows and K columns, at equal distances; R selected rows; G groups of columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class Codes:
    """The memory layout of E matrices of shape (N, K). Tensors are views into a slot, of any strides: valid until the
    slot is reused.

    `encoding`: a constant of `kernels/arguments.py`.
    `body`: (E, N, B) uint8; for WORDS4 and WORDS8 (E, N, W) int32, words of neighboring columns; for ROW_WORDS (E, N /
    8, K) int32, words of eight rows, the first of which contains row `first_row`.
    `scales` (E, N / scale_rows, G): any float dtype, for groups of `width` columns, or as `groups` (E, K) assigns them.
    `zeros` (E, N, G): plain numbers; with `zero_bits` (E, words, G) int32, whose fields are rows from `first_row` on.
    `zero_offset`: added to zero points (to fields modulo their range); without `zeros`, the zero point itself.
    `table` (E, 16): the numbers of TABLE_NIBBLES codes. `order` (E, N) int64: the row of `body` that each row is.
    `overall` (E, N): a second factor, which multiplies the group factors, or divides them if `divides`.
    Escapes of WINDOW4: `bases` (E, 1) and `starts` (E, N + 1) int32; `columns` int16 and `exponents` uint8 (E, n), or
    (1, n) for all matrices, of which each matrix's begin at `escape_offsets` (E,) int32.
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
        """A cache of compiled launches and kernel arguments for these codes."""
        return {}

    @property
    def num_matrices(self) -> int:
        return len(self.body)

    def first(self, num_rows: int) -> "Codes":
        """The first `num_rows` rows of the first matrix."""
        tensors = {field.name: getattr(self, field.name) for field in fields(Codes)}
        ones = {name: value[:1] for name, value in tensors.items() if isinstance(value, torch.Tensor)}
        return replace(self, **ones, shape=(min(num_rows, self.shape[0]), self.shape[1]))

    @property
    def is_view(self) -> bool:
        """True if all tensors are views of one storage (a slot), with no copies."""
        tensors = (getattr(self, field.name) for field in fields(Codes))
        return len({t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor)}) == 1

    @property
    def device(self) -> torch.device:
        return self.body.device


def stack_codes(parts: Sequence[Codes]) -> Codes | None:
    """Returns the codes of several single matrices as one stack, without a copy. Returns None if their kinds or shapes
    differ, or their tensors do not lie at equal distances in one storage."""
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
    """Returns a view that stacks tensors of one shape, dtype and strides along a new first dimension. Returns None if
    they differ, or do not lie at equal distances in one storage."""
    first = tensors[0]
    memory, begins = first.untyped_storage().data_ptr(), list[int]()
    for tensor in tensors:
        if tensor.dtype != first.dtype or tensor.shape != first.shape or tensor.stride() != first.stride():
            return None
        if tensor.untyped_storage().data_ptr() != memory:
            return None
        begins.append(int(tensor.storage_offset()))
    distance = begins[1] - begins[0] if len(begins) > 1 else first.numel()
    if distance < 0 or begins != [begins[0] + index * distance for index in range(len(begins))]:
        return None
    return first.as_strided((len(begins), *first.shape), (distance, *first.stride()), begins[0])


class Rows(Protocol):
    """A quantized matrix of `shape` (N, K) on `device`. A view into a slot: valid until the slot is reused."""

    shape: tuple[int, int]
    device: torch.device

    def dequantize(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        """Writes the selected rows (a slice, or row numbers in order) into `out_RK`, float32 and contiguous. Allocates
        a few bytes per number, freed on return."""
        ...

    def codes(self) -> Codes | None:
        """Returns the memory layout for accelerator kernels; None if they do not support these rows."""
        ...


class KernelWeights(NamedTuple):
    """Weights as arguments of the vector kernel of that name."""

    kernel: str
    stored: Any  # array (N, K), or StoredRows
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
