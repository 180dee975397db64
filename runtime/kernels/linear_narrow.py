"""Products x @ w.T in vectors of 8 lanes and 16 registers (AVX2). A vector holds the same input of 8 rows of w, and is
multiplied by one number of x.

| term | meaning |
|---|---|
| chain | up to CHAIN_INPUTS adjacent inputs, whose products are summed in registers |
| panel | a chain of PANEL_ROWS rows of w as float32, (inputs, 2 vectors, LANES), in the L1 cache |
| group | up to MOST_ROWS rows of x that are multiplied together, laid out as (K, rows) |
| block | adjacent groups, which fit the L2 cache for one chain |
| chunk | the rows of w that are multiplied by a block before the next block |
| register block | one or two panels times one group; all sums are in registers |

Each panel is multiplied by all groups of a block, while the next rows of w are prefetched. The order of summation of an
output does not depend on other rows. `linear_parts.py` has code shared with `linear_wide.py`. Functions marked
`@intrinsic` are explained in `primitives.py`, and documented at their public names below.

Blocking for caches and registers after Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication"
(2008), and Van Zee and van de Geijn, "BLIS" (2015).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import GROUP_NUMBERS, PAIR_ROWS, WINDOW4, Span, VectorProduct
from .compiled import REORDERED, has_fma_without_avx512
from .linear_parts import (
    OutputRows,
    PrefetchRows,
    RowBlock,
    add_sums,
    as_output,
    count_blocks,
    group_elements,
    group_start,
    input_index,
    make_cursors,
    row_stride,
    set_cursors,
    write_rows,
)
from .packed import RowPacking, widen_packed, write_escapes
from .primitives import (
    FLOATS,
    INT,
    LANES,
    ArrayAt,
    Builder,
    RowsAt,
    Value,
    claim_items,
    equals,
    from_float16,
    ints,
    load,
    multiply_add,
    pointer_of,
    prefetch,
    splat,
    store,
    stride_of,
)
from .squares import load_columns

binding.initialize_native_asmparser()  # for inline assembly; numba does not do it

CHAIN_INPUTS = 256
PANEL_ROWS = 2 * LANES
PANEL_NUMBERS = PANEL_ROWS * CHAIN_INPUTS
MOST_ROWS, FEW_ROWS = 6, 3  # most rows of x in a group that is multiplied by one panel, or by two
# Shapes of register blocks: (vectors of one or two panels, rows of x).
SHAPES = [(2, rows) for rows in range(1, MOST_ROWS + 1)] + [(4, rows) for rows in range(1, FEW_ROWS + 1)]
STEP_INPUTS = 16  # inputs between prefetches
GROUP_SHIFT = GROUP_NUMBERS.bit_length() - 1  # log2 of GROUP_NUMBERS
_COLUMNS = 8  # 32-bit words of each row transposed at a time
_UNROLLED = 4  # inputs per iteration of the innermost loop
_NUMBER_BYTES, _VECTOR_BYTES = 4, 4 * LANES
_POINTER, _COUNT = ir.IntType(8).as_pointer(), ir.IntType(64)


class Shape(NamedTuple):
    """The shape of a register block: number of vectors of w, and number of rows of x."""

    vectors: int
    rows: int

    def vector_at(self, vector: int, k: int) -> int:
        """Returns the byte offset of a vector of input k in the panels: two adjacent vectors belong to one panel."""
        return vector // 2 * PANEL_NUMBERS * _NUMBER_BYTES + (2 * k + vector % 2) * _VECTOR_BYTES


@intrinsic
def _lay_out_row(typing: Any, row: Any, num_inputs: Any, out: Any, stride: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        stored, end = pointer_of(context, builder, row, arguments[0]), arguments[1]
        target, n = pointer_of(context, builder, out, arguments[2]), end.type
        with cgutils.for_range_slice(builder, n(0), end, n(LANES), n) as (k, _):
            vector = load(builder, row.types[0].dtype, builder.gep(stored, [k]), None)
            for lane in range(LANES):
                address = builder.gep(target, [builder.mul(builder.add(k, n(lane)), arguments[3])])
                builder.store(builder.extract_element(vector, INT(lane)), address)
        return context.get_dummy_value()

    return types.void(row, types.intp, out, types.intp), build


@intrinsic
def _transpose_weights(typing: Any, rows: Any, num_inputs: Any, panel: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first, stride = pointer_of(context, builder, rows, arguments[0]), stride_of(builder, arguments[0])
        end, target, stored = arguments[1], pointer_of(context, builder, panel, arguments[2]), rows.types[0].dtype
        n, per_word = end.type, INT.width // stored.bitwidth
        addresses = [builder.gep(first, [builder.mul(stride, n(row))]) for row in range(LANES)]
        with cgutils.for_range_slice(builder, n(0), end, n(_COLUMNS * per_word), n) as (k, _):
            columns = load_columns(builder, [builder.gep(address, [k]) for address in addresses], _COLUMNS)
            for i, column in enumerate(columns):
                for j, vector in enumerate(_word_numbers(builder, stored, column)):
                    number = builder.add(k, n(i * per_word + j))
                    store(builder, vector, builder.gep(target, [builder.mul(number, n(PANEL_ROWS))]))
        return context.get_dummy_value()

    return types.void(rows, types.intp, panel), build


def _word_numbers(builder: Builder, stored: Any, words: Value) -> list[Value]:
    """Converts words to vectors of float32: one for float32 words, two for words of two 16-bit numbers."""
    if stored == types.float32:
        return [words]
    if stored == types.uint16:
        return [builder.shl(words, ints(16)), builder.and_(words, ints(0xFFFF0000))]
    halves = builder.and_(words, ints(0xFFFF)), builder.lshr(words, ints(16))
    return [from_float16(builder, half) for half in halves]


class _NarrowArguments(NamedTuple):
    """The arguments of `add_products` in order, as numba types or LLVM values."""

    panels: Any
    num_vectors: Any
    inputs: Any
    num_rows: Any
    num_inputs: Any
    sums: Any
    is_first: Any
    ahead: Any
    num_ahead: Any
    group_stride: Any


@intrinsic
def _add_products(
    typing: Any,
    panels: Any,
    num_vectors: Any,
    inputs: Any,
    num_rows: Any,
    num_inputs: Any,
    sums: Any,
    is_first: Any,
    ahead: Any,
    num_ahead: Any,
    group_stride: Any,
) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        values = _NarrowArguments(*arguments)
        weights, numbers, totals = (
            pointer_of(context, builder, kind, value)
            for kind, value in ((panels, values.panels), (inputs, values.inputs), (sums, values.sums))
        )
        next_rows, stride = pointer_of(context, builder, ahead, values.ahead), stride_of(builder, values.ahead)
        n, add_inputs = values.num_inputs.type, _emit_assembly if has_fma_without_avx512() else _emit_ir

        def emit_prefetches(k: Value) -> None:
            # Prefetches the cache line of the step's last input in each next row. Not of its first input: rows of
            # checkpoints are not aligned to cache lines, so a step may end in a new line.
            end = builder.mul(builder.add(k, n(STEP_INPUTS)), values.group_stride)
            last = builder.sub(builder.lshr(end, n(GROUP_SHIFT)), n(1))
            with cgutils.for_range(builder, values.num_ahead, intp=n) as loop:
                prefetch(builder, next_rows, builder.add(builder.mul(loop.index, stride), last))

        for shape in (Shape(*sizes) for sizes in SHAPES):
            has_vectors = equals(builder, values.num_vectors, shape.vectors)
            has_rows = equals(builder, values.num_rows, shape.rows)
            with builder.if_then(builder.and_(has_vectors, has_rows)):
                addresses = [cgutils.alloca_once(builder, FLOATS) for _ in range(shape.vectors * shape.rows)]
                for address in addresses:
                    builder.store(FLOATS(None), address)
                with cgutils.for_range_slice(builder, n(0), values.num_inputs, n(STEP_INPUTS), n) as (k, _):
                    emit_prefetches(k)
                    w = builder.gep(weights, [builder.mul(k, n(PANEL_ROWS))])
                    x = builder.gep(numbers, [builder.mul(k, n(shape.rows))])
                    results = add_inputs(builder, shape, w, x, [builder.load(address) for address in addresses])
                    for address, total in zip(addresses, results, strict=True):
                        builder.store(total, address)
                add_sums(builder, [builder.load(address) for address in addresses], totals, values.is_first)
        return context.get_dummy_value()

    n = types.intp
    return types.void(panels, n, inputs, n, n, sums, types.boolean, ahead, n, n), build


def _emit_assembly(builder: Builder, shape: Shape, panels: Value, inputs: Value, sums: list[Value]) -> list[Value]:
    """Returns the sums plus products of STEP_INPUTS inputs, in inline assembly.

    Per input, it first loads the vectors of w or the numbers of x, whichever are fewer, into one register each. Then it
    loads the more numerous kind, one at a time, into a scratch register and multiplies it by all registers loaded
    first."""
    # Operands $0, $1, ... in order: sums, loaded registers, scratch register, pointers to w and x, inputs left.
    vectors, rows = shape
    loads_vectors, num_loaded = vectors <= rows, min(vectors, rows)
    num_registers = len(sums) + num_loaded + 1
    loaded, scratch = [f"${len(sums) + i}" for i in range(num_loaded)], f"${num_registers - 1}"
    panel, x, left = (f"${num_registers + i}" for i in range(3))
    lines = ["1:"]
    for k in range(_UNROLLED):
        vector_loads = [f"vmovups {shape.vector_at(v, k)}({panel}), " for v in range(vectors)]
        row_loads = [f"vbroadcastss {(k * rows + j) * _NUMBER_BYTES}({x}), " for j in range(rows)]
        first_loads, later_loads = (vector_loads, row_loads) if loads_vectors else (row_loads, vector_loads)
        lines += [instruction + register for instruction, register in zip(first_loads, loaded, strict=True)]
        for later, instruction in enumerate(later_loads):
            lines.append(instruction + scratch)
            for first, register in enumerate(loaded):
                total = later * vectors + first if loads_vectors else first * vectors + later
                lines.append(f"vfmadd231ps {register}, {scratch}, ${total}")
    lines.append(f"addq $${_UNROLLED * 2 * _VECTOR_BYTES}, {panel}")
    lines.append(f"addq $${_UNROLLED * rows * _NUMBER_BYTES}, {x}")
    lines += [f"subq $${_UNROLLED}, {left}", "jne 1b"]
    # LLVM constraints: all operands are outputs, in vector ("x") or general registers ("r"); sums, pointers and count
    # are also inputs, tied to the outputs of these numbers.
    outputs = ["=&x"] * num_registers + ["=&r"] * 3
    tied = [*range(len(sums)), *range(num_registers, num_registers + 3)]
    clobbers = ["~{memory}", "~{dirflag}", "~{fpsr}", "~{flags}"]
    operands = [*sums, builder.bitcast(panels, _POINTER), builder.bitcast(inputs, _POINTER), _COUNT(STEP_INPUTS)]
    result = ir.LiteralStructType([FLOATS] * num_registers + [_POINTER, _POINTER, _COUNT])
    kind = ir.FunctionType(result, [value.type for value in operands])
    constraints = ",".join([*outputs, *map(str, tied), *clobbers])
    results = builder.call(ir.InlineAsm(kind, "\n".join(lines), constraints, side_effect=True), operands)
    return [builder.extract_value(results, i) for i in range(len(sums))]


def _emit_ir(builder: Builder, shape: Shape, panels: Value, inputs: Value, sums: list[Value]) -> list[Value]:
    """Same as `_emit_assembly`, for any CPU."""
    vectors, rows = shape
    n = ir.IntType(64)
    addresses = [cgutils.alloca_once(builder, FLOATS) for _ in sums]
    for address, total in zip(addresses, sums, strict=True):
        builder.store(total, address)
    with cgutils.for_range(builder, n(STEP_INPUTS), intp=n) as loop:
        at, row = builder.mul(loop.index, n(PANEL_ROWS)), builder.mul(loop.index, n(rows))
        starts = [builder.add(at, n(shape.vector_at(v, 0) // _NUMBER_BYTES)) for v in range(vectors)]
        w = [load(builder, types.float32, builder.gep(panels, [start]), None) for start in starts]
        for j in range(rows):
            number = splat(builder, builder.load(builder.gep(inputs, [builder.add(row, n(j))])))
            for v, vector in enumerate(w):
                address = addresses[j * vectors + v]
                builder.store(multiply_add(builder, vector, number, builder.load(address)), address)
    return [builder.load(address) for address in addresses]


# Writes `num_inputs` numbers of a row of x, a multiple of LANES, as float32, `stride` numbers apart. Arguments: row,
# num_inputs, out, stride.
lay_out_row: Callable[[ArrayAt, int, ArrayAt, int], None] = cast(Any, _lay_out_row)
# Writes `num_inputs` stored numbers, a multiple of 16, of LANES rows of w as float32 to one of the two vectors of a
# panel (num_inputs, 2, LANES). Arguments: rows, num_inputs, panel.
transpose_weights: Callable[[RowsAt, int, ArrayAt], None] = cast(Any, _transpose_weights)
# Multiplies one or two panels (`num_vectors` 2 or 4) by a group of inputs (num_inputs, num_rows) and adds the products
# to sums (num_rows, num_vectors, LANES), or overwrites them if `is_first`. Prefetches to L2 as many inputs of
# `num_ahead` rows of stored weights, from `ahead` on. Arguments: see `_NarrowArguments`.
add_products: Callable[[ArrayAt, int, ArrayAt, int, int, ArrayAt, bool, RowsAt, int, int], None] = cast(
    Any, _add_products
)


CHUNK_ROWS = 256  # most rows of w in a chunk
INPUT_ROWS = 1  # rows of x that `lay_out` can write independently of others
BLOCK_GROUPS = 240 // MOST_ROWS  # usual groups in a block: 240 rows, whose chain takes 240 KiB
MAX_GROUPS = BLOCK_GROUPS + BLOCK_GROUPS // 2
CACHED_NUMBERS = 1 << 15  # numbers of x that fit the L2 cache: 128 KiB
TILE_NUMBERS = LANES * CHAIN_INPUTS  # numbers of the tile: decoded rows of w, before they are written to a panel
SUM_NUMBERS = CHUNK_ROWS * MAX_GROUPS * MOST_ROWS  # sums of a chunk and a block
WORK_NUMBERS = 2 * PANEL_NUMBERS + TILE_NUMBERS


def split_workspace(work: np.ndarray, *, pairs: bool) -> tuple[np.ndarray, np.ndarray]:
    """Splits a thread's WORK_NUMBERS of scratch memory into two panels and a tile of decoded rows."""
    assert not pairs, "products of bfloat16 pairs need AVX-512"
    return work[TILE_NUMBERS:], work[:TILE_NUMBERS]


@njit(fastmath=REORDERED)
def _most_rows(num_rows: int) -> int:
    """Returns the most rows of x in a group. Returns FEW_ROWS, for register blocks of two panels, if groups for one
    panel would have too few sums to keep the FMA units busy."""
    return FEW_ROWS if num_rows <= FEW_ROWS or MOST_ROWS < num_rows <= 3 * FEW_ROWS else MOST_ROWS


@njit(fastmath=REORDERED)
def _groups(num_rows: int) -> tuple[int, int, int]:
    """Splits rows of x into groups. Returns the number of groups, the least rows per group, and the number of groups
    with one more row, which are the first ones."""
    num_groups = -(-num_rows // _most_rows(num_rows))
    return num_groups, num_rows // num_groups, num_rows % num_groups


@njit(fastmath=REORDERED)
def lay_out(x_MK: np.ndarray, first: int, last: int, inputs: np.ndarray) -> None:
    """Writes rows [first, last) of x to their groups in `inputs`. Groups (K, rows) are adjacent."""
    M, K = x_MK.shape
    num_groups, least, num_larger = _groups(M)
    for g in range(num_groups):
        top, height = group_start(g, least, num_larger), least + (g < num_larger)
        for row in range(max(first, top), min(last, top + height)):
            lay_out_row(ArrayAt(x_MK, row * K), K, ArrayAt(inputs, top * K + row - top), height)


@njit(fastmath=REORDERED)
def _write_output(sums: np.ndarray, width: int, height: int, rows: Span, out: OutputRows, begin: int) -> None:
    """Writes sums of `width` rows of w and the given rows of x to columns of `out` from `begin` on. `height`: rows of
    w per register block."""
    num_rows = rows[1] - rows[0]
    for row in range(num_rows):
        own = RowsAt(sums, row * height, num_rows * height)
        at = (rows[0] + row) * out.stride + begin * out.per_number
        write_rows(own, width // height, height, RowsAt(out.halves, at, height * out.per_number), out.kind)


@njit(fastmath=REORDERED)
def _multiply_panels(
    panels: np.ndarray,
    rows: Span,
    inputs: np.ndarray,
    chain: Span,
    block: RowBlock,
    sums: np.ndarray,
    K: int,
    w: np.ndarray,
    ahead: PrefetchRows,
) -> None:
    """Multiplies one or two panels, with the given rows of a chunk of w, by a chain of inputs of a block of x.
    Prefetches the rows of `ahead`, an equal part of them per group."""
    k, height = chain[0], rows[1] - rows[0]
    top = group_start(block.first, block.least, block.num_larger)
    block_rows = group_start(block.last, block.least, block.num_larger) - top
    next_at, num_left, begin = ahead.at, ahead.num_rows, top
    prefetch_share = -(-num_left // (block.last - block.first))  # prefetched per group
    for g in range(block.first, block.last):
        count, num = block.least + (g < block.num_larger), min(prefetch_share, num_left)
        out = ArrayAt(sums, rows[0] * block_rows + (begin - top) * height)
        x, next_rows = ArrayAt(inputs, begin * K + k * count), RowsAt(w, next_at, ahead.stride)
        weights, num_vectors, num_inputs = ArrayAt(panels, 0), height // LANES, chain[1] - k
        add_products(weights, num_vectors, x, count, num_inputs, out, k == 0, next_rows, num, ahead.group_stride)
        next_at, num_left, begin = next_at + num * ahead.stride, num_left - num, begin + count


@njit(fastmath=REORDERED, forceinline=True)
def _lay_out_weights(
    w: np.ndarray,
    K: int,
    packed: RowPacking | None,
    cursors: np.ndarray,
    first_cursor: int,
    rows: Span,
    chain: Span,
    tile: np.ndarray,
    bits: np.ndarray,
    panels: np.ndarray,
) -> None:
    """Writes a chain of inputs of the given rows of w to `panels`. Decodes packed rows to `tile` before (`bits`: the
    tile viewed as uint32). Entries of `cursors` from `first_cursor` on are for these rows, see `make_cursors`."""
    (first, last), (k, end) = rows, chain
    for top in range(first, last, LANES):
        vector = (top - first) // LANES
        address = ArrayAt(panels, vector // 2 * PANEL_NUMBERS + vector % 2 * LANES)
        if packed is None:
            transpose_weights(RowsAt(w, top * K + k, K), end - k, address)
            continue
        widen_packed(packed, w, K, (top, top + LANES), chain, tile, CHAIN_INPUTS)
        if packed.encoding == WINDOW4:
            escapes = packed.escapes
            for row in range(LANES):
                at = first_cursor + top - first + row
                cursors[at] = write_escapes(escapes, cursors[at], top + row, k, end, bits, row * CHAIN_INPUTS)
        transpose_weights(RowsAt(tile, 0, CHAIN_INPUTS), end - k, address)


@njit(fastmath=REORDERED)
def multiply(w: np.ndarray, num_weights: int, K: int, packed: RowPacking | None, product: VectorProduct) -> None:
    """Multiplies rows of x by the rows of w that this thread takes, see `linear.linear`. `num_weights`: rows of w.
    `packed`: None for plain rows."""
    step, counter, inputs, halves, kind, begin, num_rows, panels, tile, sums = product
    num_groups, least, num_larger = _groups(num_rows)
    num_blocks, cursors = count_blocks(num_groups, BLOCK_GROUPS), make_cursors(packed, CHUNK_ROWS)
    # Views of arrays are made once: counting references to an array takes as long as a row.
    out, bits = as_output(halves, kind), tile.view(np.uint32)
    stride, group_stride = row_stride(w, num_weights, packed), group_elements(packed)
    height = 2 * PANEL_ROWS if _most_rows(num_rows) == FEW_ROWS else PANEL_ROWS
    chunk = height if num_rows * K <= CACHED_NUMBERS else step  # if all of x fits the cache, one register block
    whole = num_weights // PAIR_ROWS * PAIR_ROWS
    item = claim_items(counter, step)
    while item < whole:
        end = min(item + step, whole)
        for top in range(item, end, chunk):
            width = min(chunk, end - top)  # of the chunk: multiplied by each block of x, chain by chain
            for b in range(num_blocks):
                block = RowBlock(b * num_groups // num_blocks, (b + 1) * num_groups // num_blocks, least, num_larger)
                set_cursors(packed, cursors, top, width)
                for k in range(0, K, CHAIN_INPUTS):
                    chain = (k, min(K, k + CHAIN_INPUTS))
                    for n in range(0, width, height):
                        panel_rows, rows = (n, n + height), (top + n, top + n + height)
                        _lay_out_weights(w, K, packed, cursors, n, rows, chain, tile, bits, panels)
                        # Next are the chunk's next rows, else its first rows in the next chain, else the next chunk.
                        next_top, next_k = (top + n + height, k) if n + height < width else (top, chain[1])
                        if next_k >= K:
                            next_top, next_k = top + width, 0
                        num_next = height if stride and next_top < end else 0
                        ahead = PrefetchRows(input_index(K, packed, next_top, next_k), num_next, stride, group_stride)
                        _multiply_panels(panels, panel_rows, inputs, chain, block, sums, K, w, ahead)
                span = group_start(block.first, least, num_larger), group_start(block.last, least, num_larger)
                _write_output(sums, width, height, span, out, begin + top)
        item = claim_items(counter, step)
