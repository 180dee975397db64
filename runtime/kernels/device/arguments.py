"""What kernels on an accelerator are given of a stored matrix. Importing this module does not import Triton."""

from typing import Any, NamedTuple

FLOATS, EXPONENTS, SMALL_FLOATS = range(3)  # dtypes of factors: any plain float, E8M0, E4M3
# Kinds of zero points: none, one for all, plain numbers, fields of words of 4 and of 8 bits, AWQ's fields.
NO_ZEROS, SAME_ZERO, PLAIN_ZEROS, FIELDS4, FIELDS8, AWQ_FIELDS = range(6)
NO_OVERALL, MULTIPLIED, DIVIDED = range(3)  # what overall factors do to those of groups


class Matrix(NamedTuple):
    """Pointers to the first of E matrices (tensors, None where there are none), strides in elements, and sizes.

    `extra`: the table of IN_TABLE, the bases of WINDOW4, or which stored row each row of blocks is. `row_step`:
    rows from one expert to the next where they lie in one tall matrix, 0 where `..._expert` strides lead there.
    `first_row`: the row of the first field of words.
    """

    body: Any = None
    scales: Any = None
    zeros: Any = None
    groups: Any = None
    extra: Any = None
    overall: Any = None
    body_expert: int = 0
    scales_expert: int = 0
    zeros_expert: int = 0
    groups_expert: int = 0
    extra_expert: int = 0
    overall_expert: int = 0
    body_row: int = 0
    body_column: int = 0
    scales_row: int = 0
    scales_group: int = 0
    zeros_row: int = 0
    zeros_group: int = 0
    overall_row: int = 0
    scale_rows: int = 1
    num_columns: int = 0
    num_groups: int = 0
    row_step: int = 0
    first_row: int = 0
    last: float = 1.0


class Kind(NamedTuple):
    """What a kernel is compiled for. `width`: columns of a group, 0 for one group in a row. `group_tile`: groups in a
    tile; as many as columns where each column's is looked up, in `groups` if it `has_groups`."""

    way: int
    scales: int
    zeros: int
    added: int
    overall: int
    has_last: bool
    has_groups: bool
    is_reordered: bool
    width: int
    group_tile: int
