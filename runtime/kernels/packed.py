"""Decodes packed rows of weights of any encoding to float32, inside a product or for whole rows.

Packed rows hold codes instead of numbers. To widen codes is to decode them to float32. WINDOW4 is lossless bfloat16 in
12 bits (see `formats/kinds/window4.py`): a group is GROUP_NUMBERS numbers in GROUP_BYTES bytes, first the sign and
mantissa bytes, then 4-bit codes of exponents. Its escapes are numbers whose exponent has no code. The encodings of
published checkpoints are decoded in `grouped.py`, those of GGUF in `gguf_blocks.py`.

Functions marked `@intrinsic` are explained in `primitives.py`, and documented at their public names below.

R rows of K numbers (the inputs of a product).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import (
    BLOCK_NUMBERS,
    BYTES,
    CODE_RUN,
    FLOAT4,
    FLOAT8,
    GROUP_NUMBERS,
    INT4,
    INT4_MIDDLE,
    INT8,
    NIBBLES,
    Q8_0,
    SCALED_FLOAT8,
    SIGNED_BYTES,
    TABLE_NIBBLES,
    WINDOW4,
    WORDS4,
    WORDS8,
    Span,
    StoredRows,
)
from .compiled import REORDERED, cached_kernel
from .gguf_blocks import widen_blocks
from .grouped import (
    GroupArrays,
    widen_bytes,
    widen_float4,
    widen_nibbles,
    widen_row_words,
    widen_scaled_float8,
    widen_signed_bytes,
    widen_table_nibbles,
    widen_words4,
    widen_words8,
)
from .primitives import (
    FLOATS,
    INT,
    LANES,
    ArrayAt,
    Builder,
    RowsAt,
    Value,
    for_rows,
    load,
    load_pairs,
    multiply_add,
    pointer_and_stride,
    splat,
    store,
)

HALF = GROUP_NUMBERS // 2
LANE = 16  # bytes in 128 bits of a vector, within which shuffles of bytes are cheap
_BYTE, _WORD = ir.IntType(8), ir.IntType(16)
# Vectors of a WINDOW4 group: a byte per number, the same as 16-bit words, its bytes of two exponent codes each, and
# half of its numbers as pairs of bfloat16.
_BYTES, _WORDS = ir.VectorType(_BYTE, GROUP_NUMBERS), ir.VectorType(_WORD, HALF)
_NIBBLES, _PAIRS = ir.VectorType(_BYTE, HALF), ir.VectorType(INT, HALF // 2)


class Escapes(NamedTuple):
    """The escapes of a matrix: numbers whose exponent has no code. Row n has escapes [starts[n], starts[n + 1]), in
    ascending `columns`, with the given `exponents`. The exponents of other numbers are code + `base` for codes above 0;
    code 0 means exponent 0."""

    base: int
    starts: np.ndarray
    columns: np.ndarray
    exponents: np.ndarray


@intrinsic
def _widen_window4(typing: Any, rows: Any, num_rows: Any, num_inputs: Any, base: Any, out: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        arrays = [pointer_and_stride(context, builder, kind, arguments[i]) for kind, i in ((rows, 0), (out, 4))]
        end, size = arguments[2], GROUP_NUMBERS
        n, added = end.type, _splat_byte(builder, builder.trunc(arguments[3], _BYTE))

        def widen_row(addresses: list[Value]) -> None:
            stored, widened = addresses
            with cgutils.for_range_slice(builder, n(0), end, n(size), n) as (k, _):
                group = builder.gep(stored, [builder.add(k, builder.lshr(k, n(1)))])
                address = builder.gep(widened, [k])
                for half, pairs in enumerate(_load_pairs(builder, group, added)):
                    low = builder.shl(pairs, _constant(16, _PAIRS))
                    high = builder.and_(pairs, _constant(0xFFFF0000, _PAIRS))
                    _store_bits(builder, low, address, half * HALF)
                    _store_bits(builder, high, address, half * HALF + HALF // 2)

        for_rows(builder, arguments[1], arrays, widen_row)
        return context.get_dummy_value()

    n = types.intp
    return types.void(rows, n, n, n, out), build


def _load_pairs(builder: Builder, group: Value, added: Value) -> list[Value]:
    """Decodes a WINDOW4 group to pairs of bfloat16, a vector for each half of the group: number i of the half in the
    low 16 bits, number 16 + i in the high ones."""
    # A bfloat16 has a high byte (sign, upper 7 exponent bits) and a low byte (last exponent bit, mantissa). Computes
    # all low bytes and all high bytes of the group, then interleaves them with shuffles.
    exponents = _exponents(builder, _load_vector(builder, group, GROUP_NUMBERS, _NIBBLES), added)
    words, body = builder.bitcast(exponents, _WORDS), _load_vector(builder, group, 0, _BYTES)
    last_bits = builder.bitcast(builder.shl(words, _constant(7, _WORDS)), _BYTES)
    others = builder.bitcast(builder.lshr(words, _constant(1, _WORDS)), _BYTES)
    low = _merge_bits(builder, 0x7F, body, last_bits)
    high = _merge_bits(builder, 0x80, body, others)
    pairs_of_halves = []
    for first in (0, LANE // 2):
        lanes = [lane + first + i for lane in range(0, GROUP_NUMBERS, LANE) for i in range(LANE // 2)]
        order = [at for i in lanes for at in (i, GROUP_NUMBERS + i)]
        pairs_of_halves.append(builder.bitcast(builder.shuffle_vector(low, high, _lane_order(order)), _PAIRS))
    return pairs_of_halves


def _exponents(builder: Builder, nibbles: Value, added: Value) -> Value:
    """Decodes a group's exponent codes to one byte per number. Low nibbles are codes of its first half, high nibbles
    those of the second."""
    twice = builder.shuffle_vector(nibbles, nibbles, _lane_order([*range(HALF)] * 2))
    shifts = _WORDS([0] * (HALF // 2) + [4] * (HALF // 2))
    shifted = builder.bitcast(builder.lshr(builder.bitcast(twice, _WORDS), shifts), _BYTES)
    codes = builder.and_(shifted, _constant(15, _BYTES))
    is_zero = builder.icmp_unsigned("==", codes, _constant(0, _BYTES))
    return builder.select(is_zero, _constant(0, _BYTES), builder.add(codes, added))


def _merge_bits(builder: Builder, mask: int, one: Value, other: Value) -> Value:
    """Returns `one` where bits of `mask` are set, `other` elsewhere."""
    return builder.or_(builder.and_(one, _constant(mask, _BYTES)), builder.and_(other, _constant(0xFF ^ mask, _BYTES)))


def _constant(number: int, kind: Any) -> Value:
    """Returns a vector of type `kind` with `number` in all lanes."""
    return kind([number] * kind.count)


def _lane_order(order: list[int]) -> Value:
    return ir.VectorType(INT, len(order))(order)


def _splat_byte(builder: Builder, number: Value) -> Value:
    first = builder.insert_element(_BYTES(ir.Undefined), number, INT(0))
    return builder.shuffle_vector(first, first, _lane_order([0] * GROUP_NUMBERS))


def _load_vector(builder: Builder, group: Value, at: int, kind: Any) -> Value:
    return builder.load(builder.bitcast(builder.gep(group, [INT(at)]), kind.as_pointer()), align=1)


def _store_bits(builder: Builder, bits: Value, address: Value, at: int) -> None:
    builder.store(bits, builder.bitcast(builder.gep(address, [INT(at)]), bits.type.as_pointer()), align=4)


# Decodes WINDOW4 rows to bits of float32, `num_inputs` numbers (a multiple of GROUP_NUMBERS) per row. Escapes get
# exponent 0. Arguments: rows, num_rows, num_inputs, base, out.
widen_window4: Callable[[RowsAt, int, int, int, RowsAt], None] = cast(Any, _widen_window4)


@njit(fastmath=REORDERED, forceinline=True)
def write_escapes(escapes: Escapes, at: int, row: int, first: int, last: int, bits: np.ndarray, begin: int) -> int:
    """Adds the exponents of escapes to decoded numbers of a row, in its columns [first, last). `at`: index of its first
    escape from column `first` on. `bits[begin]`: the float32 bits of column `first`. Returns the index of the next
    escape after these columns."""
    # Files may be damaged: never write outside of the row, nor read past the last escape.
    end = min(np.int64(escapes.starts[np.uint64(row + 1)]), escapes.columns.size)
    while at < end and escapes.columns[np.uint64(at)] < last:
        column = np.int64(escapes.columns[np.uint64(at)])
        if column >= first:
            index = begin + column - first
            bits[np.uint64(index)] |= np.uint32(escapes.exponents[np.uint64(at)]) << np.uint32(23)
        at += 1
    return at


# Emits code that decodes one run of CODE_RUN codes. Arguments: builder, pointers to the stored and the decoded row,
# index of the run's first number, and its scale in all lanes.
WidenRun = Callable[[Builder, Value, Value, Value, Value], None]


def _load_scale(builder: Builder, scales: Value, k: Value, shift: Value) -> Value:
    """Loads the scale of number k into all lanes; number k has scale k >> shift."""
    bits = builder.load(builder.gep(scales, [builder.lshr(k, shift)]))
    return splat(builder, builder.bitcast(builder.shl(builder.zext(bits, INT), INT(16)), ir.FloatType()))


def _make_widener(run: WidenRun) -> Any:
    """Returns a compiled function that decodes rows, one run of CODE_RUN numbers at a time."""

    @intrinsic
    def widen(typing: Any, rows: Any, num_rows: Any, num_inputs: Any, scales: Any, shift: Any, out: Any) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            operands = ((rows, 0), (scales, 3), (out, 5))
            arrays = [pointer_and_stride(context, builder, kind, arguments[i]) for kind, i in operands]
            end, n = arguments[2], arguments[2].type

            def widen_row(addresses: list[Value]) -> None:
                stored, factors, widened = addresses
                with cgutils.for_range_slice(builder, n(0), end, n(CODE_RUN), n) as (k, _):
                    run(builder, stored, widened, k, _load_scale(builder, factors, k, arguments[4]))

            for_rows(builder, arguments[1], arrays, widen_row)
            return context.get_dummy_value()

        n = types.intp
        return types.void(rows, n, n, scales, n, out), build

    return widen


def _byte_run(kind: Any) -> WidenRun:
    """Returns code for runs with a byte of dtype `kind` per number."""

    def run(builder: Builder, stored: Value, widened: Value, k: Value, scale: Value) -> None:
        for at in range(0, CODE_RUN, LANES):
            address = builder.add(k, k.type(at))
            numbers = load(builder, kind, builder.gep(stored, [address]), None)
            store(builder, builder.fmul(numbers, scale), builder.gep(widened, [address]))

    return run


def _nibble_run(builder: Builder, stored: Value, widened: Value, k: Value, scale: Value) -> None:
    """Decodes a run of 4-bit codes; its first half is in the low nibbles."""
    n = k.type
    offset = builder.fmul(scale, FLOATS([-float(INT4_MIDDLE)] * LANES))
    for at in range(0, CODE_RUN // 2, LANES):
        address = builder.add(builder.lshr(k, n(1)), n(at))
        for half, codes in enumerate(load_pairs(builder, builder.gep(stored, [address]), None)):
            to = builder.add(k, n(half * CODE_RUN // 2 + at))
            store(builder, multiply_add(builder, codes, scale, offset), builder.gep(widened, [to]))


# Decodes rows of codes to float32, `num_inputs` numbers (a multiple of CODE_RUN) per row. Scales are bfloat16 bits;
# number k of a row has scale k >> shift. Arguments: rows, num_rows, num_inputs, scales, shift, out.
widen_int8: Callable[[RowsAt, int, int, RowsAt, int, RowsAt], None] = cast(Any, _make_widener(_byte_run(types.int8)))
widen_float8: Callable[[RowsAt, int, int, RowsAt, int, RowsAt], None] = cast(Any, _make_widener(_byte_run(types.uint8)))
widen_int4: Callable[[RowsAt, int, int, RowsAt, int, RowsAt], None] = cast(Any, _make_widener(_nibble_run))


class Scales(NamedTuple):
    """Scales as bfloat16 bits, `num_groups` per row; number k of a row has scale k >> shift."""

    bits: np.ndarray
    num_groups: int
    shift: int


class RowPacking(NamedTuple):
    """The layout of `num_rows` packed rows. `encoding`: a constant of `arguments.py`. If codes are stored row by row,
    BLOCK_NUMBERS numbers take `block_bytes`. If words of columns are stored (WORDS4, WORDS8, ROW_WORDS), the same row's
    next word is `word_stride` bytes further. `escapes` are for WINDOW4, `scales` for INT8, INT4 and FLOAT8, `groups`
    for published encodings, `order` for GGUF's."""

    encoding: int
    num_rows: int
    block_bytes: int
    word_stride: int
    escapes: Escapes
    scales: Scales
    groups: GroupArrays
    order: np.ndarray


@njit(fastmath=REORDERED)
def unpack_arguments(stored: StoredRows) -> RowPacking:
    """Returns the layout of packed rows, from the flat arguments of a kernel."""
    layout = stored.layout  # numbers in the order of `Layout` in linear/packed_rows.py
    escapes = Escapes(layout[5], stored.starts, stored.columns, stored.exponents)
    scales = Scales(stored.scales, layout[6], layout[7])
    groups = GroupArrays(stored.zeros, stored.factors, stored.table, stored.groups, layout[8] > 0)
    return RowPacking(layout[0], layout[1], layout[3], layout[4], escapes, scales, groups, stored.order)


@njit(fastmath=REORDERED, forceinline=True)
def packed_offset(K: int, block_bytes: int, row: int, k: int) -> int:
    """Returns the byte offset of number `k` of a row, for codes stored row by row. A block must begin there."""
    return (row * K + k) * block_bytes // BLOCK_NUMBERS


@njit(fastmath=REORDERED, forceinline=True)
def _widen_grouped(packed: RowPacking, stored: RowsAt, num_rows: int, num_inputs: int, at: int, to: RowsAt) -> None:
    """Same as `widen_packed` for published encodings stored row by row. `at`: index of the first zero point and factor
    to use."""
    encoding, num_groups, shift = packed.encoding, packed.scales.num_groups, packed.scales.shift
    zeros, factors = RowsAt(packed.groups.zeros, at, num_groups), RowsAt(packed.groups.factors, at, num_groups)
    table = ArrayAt(packed.groups.table, 0)
    if encoding == NIBBLES:
        widen_nibbles(stored, num_rows, num_inputs, zeros, factors, shift, table, to)
    elif encoding == FLOAT4:
        widen_float4(stored, num_rows, num_inputs, zeros, factors, shift, table, to)
    elif encoding == TABLE_NIBBLES:
        widen_table_nibbles(stored, num_rows, num_inputs, zeros, factors, shift, table, to)
    elif encoding == SCALED_FLOAT8:
        widen_scaled_float8(stored, num_rows, num_inputs, zeros, factors, shift, table, to)
    elif encoding == BYTES:
        widen_bytes(stored, num_rows, num_inputs, zeros, factors, shift, table, to)
    elif encoding == SIGNED_BYTES:
        widen_signed_bytes(stored, num_rows, num_inputs, zeros, factors, shift, table, to)


@njit(fastmath=REORDERED, forceinline=True)
def _widen_columns(packed: RowPacking, body: np.ndarray, rows: Span, k: int, num_inputs: int, to: RowsAt) -> None:
    """Same as `widen_packed` for words of columns, from number `k` of the rows on. Needs a multiple of UNIT_ROWS
    rows."""
    first, num_rows, encoding, stride = rows[0], rows[1] - rows[0], packed.encoding, packed.word_stride
    zeros = RowsAt(packed.groups.zeros, first, packed.num_rows)
    factors = RowsAt(packed.groups.factors, first, packed.num_rows)
    is_wide, columns = packed.groups.is_wide, ArrayAt(packed.groups.columns, k)
    if encoding == WORDS4:
        words = RowsAt(body, (k >> 3) * stride, stride)
        widen_words4(words, first, num_rows, num_inputs, zeros, factors, columns, is_wide, to)
    elif encoding == WORDS8:
        words = RowsAt(body, (k >> 2) * stride, stride)
        widen_words8(words, first, num_rows, num_inputs, zeros, factors, columns, is_wide, to)
    else:
        words = RowsAt(body, k * stride, stride)
        widen_row_words(words, first, num_rows, num_inputs, zeros, factors, columns, is_wide, to)


@njit(fastmath=REORDERED, forceinline=True)
def widen_packed(
    packed: RowPacking, body: np.ndarray, K: int, rows: Span, chain: Span, out: np.ndarray, stride: int
) -> None:
    """Decodes numbers [chain[0], chain[1]) of the given rows to float32, written `stride` numbers apart in `out`.
    Escapes get exponent 0. K: numbers of a row. Call it once for several rows: counting references to arrays takes as
    long as a row."""
    (first, last), k, num_inputs = rows, chain[0], chain[1] - chain[0]
    num_rows, encoding, block_bytes, scales = last - first, packed.encoding, packed.block_bytes, packed.scales
    shift, at = scales.shift, first * scales.num_groups + (k >> scales.shift)
    row_scales, to = RowsAt(scales.bits, at, scales.num_groups), RowsAt(out, 0, stride)
    row_bytes = packed_offset(K, block_bytes, 1, 0)
    stored = RowsAt(body, packed_offset(K, block_bytes, first, k), row_bytes)
    if encoding == WINDOW4:
        widen_window4(stored, num_rows, num_inputs, packed.escapes.base, to)
    elif encoding == INT8:
        widen_int8(stored, num_rows, num_inputs, row_scales, shift, to)
    elif encoding == INT4:
        widen_int4(stored, num_rows, num_inputs, row_scales, shift, to)
    elif encoding == FLOAT8:
        widen_float8(stored, num_rows, num_inputs, row_scales, shift, to)
    elif encoding >= Q8_0:
        at = packed_offset(K, block_bytes, 0, k)
        widen_blocks(body, packed.order, encoding, row_bytes, at, rows, num_inputs, out, stride)
    elif encoding >= WORDS4:
        _widen_columns(packed, body, rows, k, num_inputs, to)
    else:
        _widen_grouped(packed, stored, num_rows, num_inputs, at, to)


@cached_kernel
def unpack_rows(stored: StoredRows, first: int, out_RK: np.ndarray) -> None:
    """Decodes R rows from `first` on to `out_RK`, float32 and contiguous. Only for codes stored row by row."""
    packed, (R, K) = unpack_arguments(stored), out_RK.shape
    numbers = out_RK.reshape(R * K)
    widen_packed(packed, stored.body, K, (first, first + R), (0, K), numbers, K)
    if packed.encoding == WINDOW4:
        escapes, bits = packed.escapes, numbers.view(np.uint32)
        for r in range(R):
            write_escapes(escapes, int(stored.starts[first + r]), first + r, 0, K, bits, r * K)
