# type: ignore - what Triton compiles has types of Triton's own
"""Kernels on stored matrices: `decode` writes all numbers of a stack of them, `add_escapes` those of bfloat16 in 12
bits that have no code; `multiply` and `multiply_groups` multiply rows of x and decode inside. None asks the device for
anything: where sizes are known to it alone, the grid is that of the worst case, and programs without work end at once.

Sums are float32's; weights are rounded to x's dtype first, as a decoded matrix would be.

E experts of N rows and K columns; M rows of x, V of them sorted by expert; tiles of BM, BN and BK.
"""

import triton
import triton.language as tl

from .tiles import GROUP_BYTES, GROUP_NUMBERS, INTERPRETED, PLAIN, decode_tile, rounded


@triton.jit
def decode(matrix, out, num_rows, out_expert, out_row, lead, kind: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Grid: tiles of rows of all experts, tiles of columns. Writes `out` in its own dtype, rounded once. `lead`: rows
    by which the first tile begins before the first row."""
    num_tiles = tl.cdiv(num_rows + lead, BN)
    expert = (tl.program_id(0) // num_tiles).to(tl.int64)
    row = (tl.program_id(0) % num_tiles).to(tl.int64) * BN - lead
    column = tl.program_id(1) * BK
    rows, columns = row + tl.arange(0, BN), column + tl.arange(0, BK)
    has_row = (rows >= 0) & (rows < num_rows)
    numbers = decode_tile(matrix, expert, row, has_row, column, kind, BN, BK)
    at = out + expert * out_expert + rows[:, None] * out_row + columns[None, :]
    has = has_row[:, None] & (columns < matrix.num_columns)[None, :]
    tl.store(at, rounded(numbers, out.dtype.element_ty), mask=has)


@triton.jit
def add_escapes(
    matrix, starts, columns, exponents, begins, out, num_rows, num_escapes,
    starts_expert, columns_expert, exponents_expert, out_expert, out_row, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: rows of all experts. Writes the numbers of escapes of each, from `starts` [row] to the next, behind those
    `begins` [expert] of the matrices before: sign and mantissa lie in the body. Whatever the companion says, nothing
    outside of the row is written."""
    expert = (tl.program_id(0) // num_rows).to(tl.int64)
    row = (tl.program_id(0) % num_rows).to(tl.int64)
    own_row = row + expert * matrix.row_step
    at = starts + expert * starts_expert + own_row
    begin, end = tl.load(at), tl.load(at + 1)
    if begins is not None:
        before = tl.load(begins + expert)
        begin, end = begin + before, end + before
    begin, end = tl.maximum(begin, 0), tl.minimum(end, num_escapes)
    body = matrix.body + expert * matrix.body_expert + own_row * matrix.body_row
    for first in range(begin, end, BLOCK):
        places = first + tl.arange(0, BLOCK)
        own = tl.load(columns + expert * columns_expert + places, mask=places < end, other=0).to(tl.int32) & 0xFFFF
        exponent = tl.load(exponents + expert * exponents_expert + places, mask=places < end, other=0).to(tl.uint32)
        has, place = (places < end) & (own < matrix.num_columns), own % GROUP_NUMBERS
        turn = (place >> 2 & 3) * 16 + (place >> 5) * 8 + (place & 3) * 2 + (place >> 4 & 1)
        kept = tl.load(body + own // GROUP_NUMBERS * GROUP_BYTES + turn, mask=has, other=0).to(tl.uint32)
        bits = (kept & 0x80) << 24 | exponent << 23 | (kept & 0x7F) << 16
        numbers = rounded(bits.to(tl.float32, bitcast=True), out.dtype.element_ty)
        tl.store(out + expert * out_expert + row * out_row + own, numbers, mask=has)


@triton.jit
def _product(
    x_rows, has_x, matrix, expert, row, has_row, kind: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """float32 (BM, BN): rows of x at these pointers (BM), by rows of an expert from `row` on."""
    sums = tl.zeros([BM, BN], tl.float32)
    for column in range(0, matrix.num_columns, BK):
        columns = column + tl.arange(0, BK)
        has = has_x[:, None] & (columns < matrix.num_columns)[None, :]
        x = tl.load(x_rows[:, None] + columns[None, :], mask=has, other=0.0)
        numbers = decode_tile(matrix, expert, row, has_row, column, kind, BN, BK)
        if kind.way != PLAIN:
            numbers = rounded(numbers, x.dtype)
        if INTERPRETED:  # it multiplies no bfloat16
            sums = tl.dot(x.to(tl.float32), tl.trans(numbers.to(tl.float32)), sums, input_precision="ieee")
        else:
            sums = tl.dot(x, tl.trans(numbers), sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_x"])
def multiply(
    x, matrix, out, num_x, num_rows, x_row, out_row, lead, kind: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows of x, which follow each other first, so that a tile of codes is read from memory once, and
    tiles of rows of the matrix."""
    first, row = tl.program_id(0) * BM, tl.program_id(1).to(tl.int64) * BN - lead
    own, rows = first.to(tl.int64) + tl.arange(0, BM), row + tl.arange(0, BN)
    has_x, has_row = own < num_x, (rows >= 0) & (rows < num_rows)
    sums = _product(x + own * x_row, has_x, matrix, 0, row, has_row, kind, BM, BN, BK)
    at = out + own[:, None] * out_row + rows[None, :]
    tl.store(at, rounded(sums, out.dtype.element_ty), mask=has_x[:, None] & has_row[None, :])


@triton.jit
def multiply_groups(
    x, matrix, out, ends, num_experts, num_rows, x_row, out_row, lead, kind: tl.constexpr,
    EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid: as many tiles of rows of x as there can be, tiles of rows of an expert. Rows of x before ends[e] are those
    of experts up to e. `EXPERTS`: a power of two from `num_experts` on."""
    tile, each = tl.program_id(0), tl.arange(0, EXPERTS)
    ends_E = tl.load(ends + each, mask=each < num_experts, other=0)
    begins_E = tl.load(ends + each - 1, mask=(each < num_experts) & (each > 0), other=0)
    tiles_E = tl.where(each < num_experts, tl.cdiv(ends_E - begins_E, BM), 0)
    is_before = tl.cumsum(tiles_E) <= tile
    expert = tl.sum(((each < num_experts) & is_before).to(tl.int32))
    if expert < num_experts:
        is_own = each == expert
        begin = tl.sum(tl.where(is_own, begins_E, 0)) + (tile - tl.sum(tl.where(is_before, tiles_E, 0))) * BM
        end = tl.sum(tl.where(is_own, ends_E, 0))
        row = tl.program_id(1).to(tl.int64) * BN - lead
        own, rows = begin.to(tl.int64) + tl.arange(0, BM), row + tl.arange(0, BN)
        has_x, has_row = own < end, (rows >= 0) & (rows < num_rows)
        sums = _product(
            x + own * x_row, has_x, matrix, expert.to(tl.int64), row, has_row, kind, BM, BN, BK
        )  # fmt: skip
        at = out + own[:, None] * out_row + rows[None, :]
        tl.store(at, rounded(sums, out.dtype.element_ty), mask=has_x[:, None] & has_row[None, :])
