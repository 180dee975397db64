"""Vector code that decodes the quantized formats of published checkpoints to float32: a number is (code - zero point) *
factor, with a zero point and a factor per row and group of columns. Operations have the order that the format defines,
so results equal those of torch operators bit by bit. To widen codes is to decode them to float32.

Codes stored row by row: a vector holds neighboring columns of one row.

Codes stored in 32-bit words (see `WORDS4` and `ROW_WORDS` in `arguments.py`): a unit is UNIT_ROWS rows, half as many as
a vector has lanes. Half of the lanes hold one column of these rows, the other half the column eight further. Eight such
vectors, for 16 columns, are then transposed. A word row is the words of all rows for the same column or columns.

N rows, G groups of columns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiled import features
from .primitives import (
    FLOATS,
    INT,
    INTS,
    LANES,
    ArrayAt,
    Builder,
    RowsAt,
    Value,
    call,
    for_rows,
    ints,
    load,
    pointer_and_stride,
    pointer_of,
    shuffle,
    splat,
    store,
    stride_of,
)
from .squares import transpose_vectors

UNIT_ROWS = LANES // 2
WORD_COLUMNS = 8  # columns from one half of the lanes to the other
HAS_TABLE_LOOKUP = bool(features().get("avx2"))  # True if the CPU can look up numbers in a vector register
ROW_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # bit positions of the eight rows in an AWQ word, encoding ROW_WORDS


class GroupArrays(NamedTuple):
    """Zero points and factors, as flat arrays. For codes stored row by row they are (N, G), and column k is in group
    k >> shift; `table`: the 16 numbers that codes index, if any. For codes in words they are (G, N), and column k is in
    group `columns[k]`; `is_wide`: columns 8i to 8i + 7 share a group."""

    zeros: np.ndarray
    factors: np.ndarray
    table: np.ndarray
    columns: np.ndarray
    is_wide: bool


# Emits float32 numbers. Arguments: builder, codes, zero points and factors of the lanes, and a pointer to the table.
Dequantize = Callable[[Builder, Value, Value, Value, Value], Value]
# Loads codes of 2 * LANES columns as two vectors. Arguments: builder, pointer to the row, first column.
LoadCodes = Callable[[Builder, Value, Value], tuple[Value, Value]]


def _byte_loader(kind: Any) -> LoadCodes:
    """Returns a loader for a code per byte: int8 or uint8."""

    def load_codes(builder: Builder, row: Value, k: Value) -> tuple[Value, Value]:
        addresses = [builder.gep(row, [builder.add(k, k.type(at))]) for at in (0, LANES)]
        first, second = (_load_vector(builder, address, LANES) for address in addresses)
        widen = builder.sext if kind is types.int8 else builder.zext
        return widen(first, INTS), widen(second, INTS)

    return load_codes


def _nibble_loader(*, is_low_first: bool) -> LoadCodes:
    """Returns a loader for two codes per byte; `is_low_first`: the low nibble has the first column."""

    def load_codes(builder: Builder, row: Value, k: Value) -> tuple[Value, Value]:
        both = _load_vector(builder, builder.gep(row, [builder.lshr(k, k.type(1))]), LANES)
        low, high = builder.and_(both, both.type([15] * LANES)), builder.lshr(both, both.type([4] * LANES))
        pair = (low, high) if is_low_first else (high, low)
        byte_lanes = [at for lane in range(LANES) for at in (lane, LANES + lane)]  # shuffled as bytes: half the work
        first, second = (shuffle(builder, *pair, half) for half in (byte_lanes[:LANES], byte_lanes[LANES:]))
        return builder.zext(first, INTS), builder.zext(second, INTS)

    return load_codes


def _load_float8(builder: Builder, row: Value, k: Value) -> tuple[Value, Value]:
    low, high = (builder.gep(row, [builder.add(k, k.type(at))]) for at in (0, LANES))
    return load(builder, types.uint8, low, None), load(builder, types.uint8, high, None)


def _load_vector(builder: Builder, address: Value, count: int) -> Value:
    """Loads `count` adjacent elements, unaligned."""
    kind = ir.VectorType(address.type.pointee, count)
    return builder.load(builder.bitcast(address, kind.as_pointer()), align=1)


def _dequantize(builder: Builder, codes: Value, zero: Value, factor: Value, table: Value | None = None) -> Value:
    return builder.fmul(builder.fsub(builder.sitofp(codes, FLOATS), zero), factor)


def _scale(builder: Builder, numbers: Value, zero: Value, factor: Value, table: Value) -> Value:
    return builder.fmul(numbers, factor)


def _scale_float4(builder: Builder, codes: Value, zero: Value, factor: Value, table: Value) -> Value:
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # E2M1 (FP4) numbers by their low three bits; bit 3 is the sign
    if LANES == 16:
        signed = FLOATS([*numbers, *(-number for number in numbers)])
        return builder.fmul(_look_up(builder, signed, codes), factor)
    sign = builder.shl(builder.and_(codes, ints(8)), ints(28))
    if HAS_TABLE_LOOKUP:
        magnitude = _look_up(builder, FLOATS(numbers), codes)
    else:  # shifts exponent and mantissa to their places in float32; a product corrects the exponent, exactly
        bits = builder.shl(builder.and_(codes, ints(7)), ints(22))
        magnitude = builder.fmul(builder.bitcast(bits, FLOATS), FLOATS([2.0**126] * LANES))
    return builder.fmul(builder.bitcast(builder.or_(builder.bitcast(magnitude, INTS), sign), FLOATS), factor)


def _look_up(builder: Builder, numbers: Value, lanes: Value) -> Value:
    """Looks up LANES numbers of the vector `numbers`, by the low bits of each lane of `lanes`."""
    name = "avx512.permvar.sf.512" if LANES == 16 else "avx2.permps"
    return call(builder, f"llvm.x86.{name}", FLOATS, [numbers, lanes])


def _scale_from_table(builder: Builder, codes: Value, zero: Value, factor: Value, table: Value) -> Value:
    # With 8 lanes, the table takes two vectors: looks up in both and selects by the code's highest bit.
    parts = [_load_vector(builder, builder.gep(table, [INT(at)]), LANES) for at in range(0, 16, LANES)]
    looked_up = [_look_up(builder, part, codes) for part in parts]
    if LANES == 16:
        return builder.fmul(looked_up[0], factor)
    return builder.fmul(builder.select(builder.icmp_unsigned("<", codes, ints(8)), *looked_up), factor)


def _make_row_widener(load_codes: LoadCodes, dequantize: Dequantize) -> Any:
    """Returns a compiled function that decodes codes stored row by row to float32."""

    @intrinsic
    def widen(
        typing: Any,
        rows: Any,
        num_rows: Any,
        num_inputs: Any,
        zeros: Any,
        factors: Any,
        shift: Any,
        table: Any,
        out: Any,
    ) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            operands = ((rows, 0), (zeros, 3), (factors, 4), (out, 7))
            runs = [pointer_and_stride(context, builder, kind, arguments[i]) for kind, i in operands]
            numbers = pointer_of(context, builder, table, arguments[6])
            end, group_shift, n = arguments[2], arguments[5], arguments[2].type

            def widen_row(addresses: list[Value]) -> None:
                stored, zero, factor, widened = addresses
                with cgutils.for_range_slice(builder, n(0), end, n(2 * LANES), n) as (k, _):
                    for i, codes in enumerate(load_codes(builder, stored, k)):
                        address = builder.add(k, n(i * LANES))
                        group = builder.lshr(address, group_shift)
                        zero_lanes, factor_lanes = (
                            splat(builder, builder.load(builder.gep(pointer, [group]))) for pointer in (zero, factor)
                        )
                        store(
                            builder,
                            dequantize(builder, codes, zero_lanes, factor_lanes, numbers),
                            builder.gep(widened, [address]),
                        )

            for_rows(builder, arguments[1], runs, widen_row)
            return context.get_dummy_value()

        n = types.intp
        return types.void(rows, n, n, zeros, factors, n, table, out), build

    return widen


class _Unit(NamedTuple):
    """A unit of rows from a column k on."""

    words: Value  # pointer to the unit's words in the word row of column k
    stride: Value  # bytes from one word row to the next
    shift: Value  # number of bits by which to shift words right first

    def load_halves(self, builder: Builder, first: int, second: int, *, are_rows: bool) -> Value:
        """Loads words of two word rows into a vector: of `first` into its lower half, of `second` into its upper half.
        `are_rows`: each row has its own word; otherwise one word holds all rows of the unit."""
        n, word = self.stride.type, INT
        parts = list[Value]()
        for word_row in (first, second):
            address = builder.gep(self.words, [builder.mul(self.stride, n(word_row))])
            address = builder.bitcast(address, word.as_pointer())
            parts.append(_load_vector(builder, address, UNIT_ROWS if are_rows else 1))
        width = parts[0].type.count
        lanes = [half * width + (i if are_rows else 0) for half in range(2) for i in range(UNIT_ROWS)]
        words = builder.shuffle_vector(parts[0], parts[1], ir.VectorType(INT, LANES)(lanes))
        return builder.lshr(words, splat(builder, self.shift))


# Loads codes of column k + j into the lower half of the lanes, of column k + 8 + j into the upper half.
LoadColumn = Callable[[Builder, _Unit, int], Value]


def _column_word_loader(num_bits: int) -> LoadColumn:
    """Returns a loader for words that hold codes of neighboring columns, `num_bits` each."""
    per_word, mask = 32 // num_bits, (1 << num_bits) - 1

    def load_codes(builder: Builder, unit: _Unit, j: int) -> Value:
        word_row = j // per_word
        words = unit.load_halves(builder, word_row, word_row + WORD_COLUMNS // per_word, are_rows=True)
        return builder.and_(builder.lshr(words, ints(j % per_word * num_bits)), ints(mask))

    return load_codes


def _load_row_word_codes(builder: Builder, unit: _Unit, j: int) -> Value:
    """Loads codes from words that hold eight neighboring rows."""
    words = unit.load_halves(builder, j, j + WORD_COLUMNS, are_rows=False)
    return builder.and_(builder.lshr(words, INTS([*ROW_SHIFTS[:UNIT_ROWS]] * 2)), ints(15))


class _GroupScales(NamedTuple):
    """Zero points and factors of a unit's rows."""

    zeros: Value  # pointer to the unit's zero points in group 0
    factors: Value
    stride: Value  # numbers from one group to the next
    columns: Value  # pointer to the group numbers of all columns

    def load_columns(self, builder: Builder, k: Value, j: int) -> tuple[Value, Value]:
        """Loads zero points and factors: of column k + j into the lower half of the lanes, of k + 8 + j into the
        upper half."""
        n, starts = self.stride.type, list[Value]()
        for at in (j, j + WORD_COLUMNS):
            group = builder.sext(builder.load(builder.gep(self.columns, [builder.add(k, n(at))])), n)
            starts.append(builder.mul(group, self.stride))
        return _load_halves(builder, self.zeros, starts), _load_halves(builder, self.factors, starts)


def _load_halves(builder: Builder, numbers: Value, starts: list[Value]) -> Value:
    """Loads the lower half of the lanes from index `starts[0]` on, the upper half from `starts[1]` on."""
    low, high = (_load_vector(builder, builder.gep(numbers, [start]), UNIT_ROWS) for start in starts)
    return shuffle(builder, low, high, [*range(LANES)])


def _store_unit(builder: Builder, vectors: list[Value], out: Value, stride: Value, k: Value) -> None:
    """Transposes a unit and writes its rows, `stride` numbers apart. Vector j has columns k + j and k + 8 + j."""
    n = k.type
    for i, vector in enumerate(transpose_vectors(builder, vectors)):
        row, column = i % UNIT_ROWS, i // UNIT_ROWS * WORD_COLUMNS
        address = builder.add(builder.mul(stride, n(row)), builder.add(k, n(column)))
        store(builder, vector, builder.gep(out, [address]))


def _make_unit_widener(load_codes: LoadColumn, word_shift: int, *, are_rows_in_words: bool = False) -> Any:
    """Returns a compiled function that decodes codes in words to float32, a unit of UNIT_ROWS rows at a time. Column k
    is in word row k >> word_shift."""

    @intrinsic
    def widen(
        typing: Any,
        words: Any,
        first: Any,
        num_rows: Any,
        num_inputs: Any,
        zeros: Any,
        factors: Any,
        columns: Any,
        is_wide: Any,
        out: Any,
    ) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            stored, zero, factor, groups, widened = (
                pointer_of(context, builder, kind, arguments[i])
                for kind, i in ((words, 0), (zeros, 4), (factors, 5), (columns, 6), (out, 8))
            )
            top, count, end, n = *arguments[1:4], arguments[3].type
            stride, shared_stride, out_stride = (stride_of(builder, arguments[i]) for i in (0, 4, 8))

            def decode_unit(row: Value, k: Value, *, is_shared: bool) -> None:
                stored_row, word_row = builder.add(top, row), builder.lshr(k, n(word_shift))
                word, bit_shift = stored_row, INT(0)
                if are_rows_in_words:  # AWQ: a word has 8 rows, rows 4 to 7 at the bits of rows 0 to 3 plus 8
                    word = builder.lshr(stored_row, n(3))
                    bit_shift = builder.trunc(builder.shl(builder.and_(stored_row, n(7)), n(1)), INT)
                at = builder.add(builder.mul(word_row, stride), builder.shl(word, n(2)))
                unit = _Unit(builder.gep(stored, [at]), stride, bit_shift)
                own_zero, own_factor = (builder.gep(pointer, [row]) for pointer in (zero, factor))
                scales = _GroupScales(own_zero, own_factor, shared_stride, groups)
                shared_scales = scales.load_columns(builder, k, 0) if is_shared else None
                vectors = list[Value]()
                for j in range(WORD_COLUMNS):
                    zero_points, by_factors = shared_scales or scales.load_columns(builder, k, j)
                    vectors.append(_dequantize(builder, load_codes(builder, unit, j), zero_points, by_factors))
                _store_unit(builder, vectors, builder.gep(widened, [builder.mul(row, out_stride)]), out_stride, k)

            for is_shared, condition in ((True, arguments[7]), (False, builder.not_(arguments[7]))):
                rows, inputs = n(UNIT_ROWS), n(2 * WORD_COLUMNS)
                with (
                    builder.if_then(condition),
                    cgutils.for_range_slice(builder, n(0), count, rows, n) as (row, _),
                    cgutils.for_range_slice(builder, n(0), end, inputs, n) as (k, _),
                ):
                    decode_unit(row, k, is_shared=is_shared)
            return context.get_dummy_value()

        n = types.intp
        return types.void(words, n, n, n, zeros, factors, columns, types.boolean, out), build

    return widen


WidenRow = Callable[[RowsAt, int, int, RowsAt, RowsAt, int, ArrayAt, RowsAt], None]
WidenUnit = Callable[[RowsAt, int, int, int, RowsAt, RowsAt, ArrayAt, bool, RowsAt], None]

# Arguments: rows of codes, number of rows, numbers per row (a multiple of 2 * LANES), zero points and factors (from the
# group of the first number on), shift (number k is in group k >> shift), table, output rows.
widen_bytes: WidenRow = cast(Any, _make_row_widener(_byte_loader(types.uint8), _dequantize))
widen_signed_bytes: WidenRow = cast(Any, _make_row_widener(_byte_loader(types.int8), _dequantize))
widen_nibbles: WidenRow = cast(Any, _make_row_widener(_nibble_loader(is_low_first=True), _dequantize))
widen_scaled_float8: WidenRow = cast(Any, _make_row_widener(_load_float8, _scale))
widen_float4: WidenRow = cast(Any, _make_row_widener(_nibble_loader(is_low_first=True), _scale_float4))
# Without HAS_TABLE_LOOKUP it is never called, but must compile.
widen_table_nibbles: WidenRow = cast(
    Any, _make_row_widener(_nibble_loader(is_low_first=False), _scale_from_table if HAS_TABLE_LOOKUP else _scale_float4)
)
# Arguments: words of row 0, first row, number of rows (a multiple of UNIT_ROWS), numbers per row (a multiple of 16),
# zero points and factors from the first row on (one row per group), each column's group, `is_wide`, output rows.
widen_words4: WidenUnit = cast(Any, _make_unit_widener(_column_word_loader(4), 3))
widen_words8: WidenUnit = cast(Any, _make_unit_widener(_column_word_loader(8), 2))
widen_row_words: WidenUnit = cast(Any, _make_unit_widener(_load_row_word_codes, 0, are_rows_in_words=True))
