"""Protocols for rows of a quantized matrix: dequantize some rows, or describe their memory layout to a kernel.

`Codes` is the layout for accelerator kernels: tensors of codes, zero points and factors, which each storage format
returns from `Rows.codes`. A number is (code - zero point) * factor * `last_factor`; each step is rounded to float32, as
in `Rows.dequantize`. A slot is a buffer into which the weights of a layer are read.

Shapes: E matrices (experts, or one) of N rows and K columns; R selected rows; G groups of columns, each with its own
zero point and factor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class Codes:
    """The memory layout of E matrices of shape (N, K). Tensors are views into a slot with any strides, valid until the
    slot is reused.

    `encoding`: a constant of `kernels/arguments.py`.
    `body`: codes. (E, N, B) uint8, B bytes per row. WORDS4 and WORDS8: (E, N, W) int32, W words of neighboring columns.
    ROW_WORDS: (E, N / 8, K) int32, words of eight neighboring rows, of which the first one contains row `first_row`.
    `scales`: factors (E, N / scale_rows, G), of any float dtype, one for `scale_rows` rows and a group of columns.
    `width`: columns per group. `groups` (E, K): the group of each column, if groups are not adjacent columns.
    `zeros`: zero points (E, N, G). If `zero_bits` is not 0: (E, W, G) int32, in W words of fields with `zero_bits` bits
    for neighboring rows, from row `first_row` on.
    `zero_offset`: added to zero points, modulo 2 ** zero_bits for fields. Without `zeros`, it is the zero point.
    `table` (E, 16): the numbers of TABLE_NIBBLES codes. `order` (E, N) int64: the row of `body` that holds each row.
    `overall` (E, N): a second factor per row, which multiplies the factors, or divides them if `divides`.
    Escapes of WINDOW4 (numbers whose exponent has no code): see `kernels.packed.Escapes`. `bases` (E, 1) and `starts`
    (E, N + 1) int32. `columns` int16 and `exponents` uint8 are (E, n); or (1, n) for the escapes of all matrices, which
    then begin at `escape_offsets` (E,) int32 for each matrix.
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
        """A cache for `device_codes.py`: compiled launches and kernel arguments for these codes, by its keys."""
        return {}

    @property
    def num_matrices(self) -> int:
        return len(self.body)

    def first(self, num_rows: int) -> "Codes":
        """The first `num_rows` rows of the first matrix."""
        tensors = {field.name: getattr(self, field.name) for field in fields(Codes)}
        first_matrices = {name: value[:1] for name, value in tensors.items() if isinstance(value, torch.Tensor)}
        return replace(self, **first_matrices, shape=(min(num_rows, self.shape[0]), self.shape[1]))

    @property
    def is_view(self) -> bool:
        """True if all tensors are views of one storage (a slot)."""
        tensors = (getattr(self, field.name) for field in fields(Codes))
        return len({t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor)}) == 1

    @property
    def device(self) -> torch.device:
        return self.body.device


def stack_codes(parts: Sequence[Codes]) -> Codes | None:
    """Returns the codes of several single matrices as one stack, without a copy. Returns None if encodings or shapes
    differ, or if tensors are not at equal distances in one storage."""
    stacks = dict[str, torch.Tensor]()
    for field in fields(Codes):
        values = [getattr(part, field.name) for part in parts]
        if isinstance(values[0], torch.Tensor):
            matrices = [value[0] for value in values if isinstance(value, torch.Tensor) and len(value) == 1]
            stack = as_strided_stack(matrices) if len(matrices) == len(values) else None
            if stack is None:
                return None
            stacks[field.name] = stack
        elif any(value != values[0] for value in values):
            return None
    return replace(parts[0], **stacks)


def as_strided_stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns a view that stacks tensors along a new first dimension. Returns None if shapes, dtypes or strides differ,
    or if tensors are not at equal distances in one storage."""
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
    """A quantized matrix of `shape` (N, K) on `device`: a view into a slot, valid until the slot is reused."""

    shape: tuple[int, int]
    device: torch.device

    def dequantize(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        """Writes the selected rows (a slice, or a tensor of row numbers) to `out_RK`, float32 and contiguous. Allocates
        a few bytes per number, freed on return."""
        ...

    def codes(self) -> Codes | None:
        """Returns the memory layout for accelerator kernels; None if they do not support these rows."""
        ...


class KernelWeights(NamedTuple):
    """Weights as arguments of a CPU kernel."""

    kernel: str  # name of a kernel in `kernels.linear`: "linear" or "linear_packed"
    stored: Any  # array (num_rows, K) for "linear", StoredRows for "linear_packed"
    num_rows: int


@runtime_checkable
class KernelRows(Rows, Protocol):
    """Rows that a CPU kernel decodes inside the product. `kernel_weights` makes views, and allocates
    `row_scratch_bytes` per row."""

    row_scratch_bytes: int

    def kernel_weights(self, rows: slice) -> KernelWeights:
        """Returns kernel arguments for rows from a multiple of 32 on. `rows` must be all rows if `row_scratch_bytes` is
        0. Only for rows in host memory. The result is valid as long as this object's tensors."""
        ...
