"""Building blocks of kernels: vector code in LLVM for any vector size, an atomic work counter, and exp.

A vector has LANES lanes of 32 bits. A step on the last, partial vector of a loop has a mask: lanes beyond the end are
neither read nor written. A word is 32 bits. A number is stored if it is in a dtype narrower than the float32 that
kernels compute with. Numba has no 16- or 8-bit floats: uint16 holds bits of bfloat16, int16 bits of float16, uint8 bits
of float8.

Functions with a `builder` run at compile time and emit LLVM instructions; a `Value` is an LLVM value of the compiled
code. `gep` emits the address of an element, `alloca_once` a local variable. Calling an LLVM type with a number, such as
n(0), makes a constant of this type.

`@intrinsic` makes such a function callable in compiled code. Its arguments are numba types; its inner function `build`
gets their values as `arguments`, in the same order. It loses its Python type, so a public name without underscore is
assigned below each, with a type and a comment that documents it.

Numba's own loops reached half the speed at most: 10 GB/s of bfloat16 instead of 18, at 32/8 heads of 128 on one AVX-512
thread with cached data.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from .compiled import FUSED, features

Builder: TypeAlias = Any  # llvmlite is mostly untyped
Value: TypeAlias = Any
LANES = 16 if features().get("avx512f") else 8  # 32-bit numbers in a vector
INT = ir.IntType(32)
INTS, FLOATS = ir.VectorType(INT, LANES), ir.VectorType(ir.FloatType(), LANES)
HAS_BF16_PAIRS = LANES == 16 and bool(features().get("avx512bf16"))  # see `add_pairs`
ONE, ZERO = np.float32(1), np.float32(0)
# Constants of `exp`. LN_2_HIGH + LN_2_LOW is ln 2; the high part has few bits, so its product with a small integer is
# exact. T2 to T7: coefficients of the Taylor series.
LOG2_E, LN_2_HIGH, LN_2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
ROUND = np.float32(1.5 * 2**23)  # adding it rounds to an integer, which is then in the low bits of the sum
T2, T3, T4, T5, T6, T7 = (np.float32(1 / factorial) for factorial in (2, 6, 24, 120, 720, 5040))
EXP_MIN = np.float32(-87)  # below, exp would be subnormal


class _BFloat16(ir.Type):
    """The LLVM type bfloat, which llvmlite lacks. Used only in vectors that are bitcasts of other types."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


def pointer_at(context: Any, builder: Builder, array: Any, value: Value, index: Value) -> Value:
    """Returns the pointer to element `index` of an array."""
    return builder.gep(make_array(array)(context, builder, value).data, [index])


class ArrayAt(NamedTuple):
    """The elements of an array from index `at` on."""

    numbers: np.ndarray
    at: int


class RowsAt(NamedTuple):
    """Rows of an array: the first begins at index `at`, and each further row `stride` elements after the previous."""

    numbers: np.ndarray
    at: int
    stride: int


def pointer_of(context: Any, builder: Builder, kind: Any, value: Value) -> Value:
    """Returns the pointer to the start of an `ArrayAt` or `RowsAt`, given its numba type and LLVM value."""
    return pointer_at(context, builder, kind.types[0], *(builder.extract_value(value, i) for i in range(2)))


def stride_of(builder: Builder, rows: Value) -> Value:
    return builder.extract_value(rows, RowsAt._fields.index("stride"))


def for_rows(
    builder: Builder, num_rows: Value, arrays: "list[tuple[Value, Value]]", emit_row: Callable[[list[Value]], None]
) -> None:
    """Emits a loop over rows of several arrays. `arrays`: pointer to the first row and stride of each. `emit_row` emits
    the code for one row, given a pointer to this row in each array. The code is inlined: passing arrays to a function
    would take as long as a row."""
    with cgutils.for_range(builder, num_rows, intp=num_rows.type) as loop:
        emit_row([builder.gep(first, [builder.mul(loop.index, stride)]) for first, stride in arrays])


def pointer_and_stride(context: Any, builder: Builder, kind: Any, value: Value) -> tuple[Value, Value]:
    """Returns the start pointer and the stride of `RowsAt`."""
    return pointer_of(context, builder, kind, value), stride_of(builder, value)


def call(builder: Builder, name: str, result: ir.Type, arguments: list[Value]) -> Value:
    """Emits a call of the LLVM function `name`, such as an instruction of the CPU."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def load(builder: Builder, dtype: Any, pointer: Value, mask: Value | None) -> Value:
    """Loads LANES numbers of `dtype` as float32. The pointer may be unaligned. Lanes outside the mask are 0."""
    stored = ir.VectorType(pointer.type.pointee, LANES)
    address, num_bytes = builder.bitcast(pointer, stored.as_pointer()), dtype.bitwidth // 8
    if mask is None:
        vector = builder.load(address, align=num_bytes)
    else:
        name = f"llvm.masked.load.v{LANES}{'f' if dtype == types.float32 else 'i'}{dtype.bitwidth}.p0"
        vector = call(builder, name, stored, [address, INT(num_bytes), mask, stored(None)])
    return widen(builder, dtype, vector)


def widen(builder: Builder, dtype: Any, vector: Value) -> Value:
    """Converts a vector of `dtype` to float32: uint16 is bfloat16, int16 float16, int8 an integer, uint8 E4M3."""
    if dtype == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(vector, INTS), ints(16)), FLOATS)
    if dtype == types.int16:
        return from_float16(builder, builder.zext(vector, INTS))
    if dtype == types.int8:
        return builder.sitofp(builder.sext(vector, INTS), FLOATS)
    if dtype == types.uint8:
        return _from_float8(builder, builder.sext(vector, INTS))
    return vector


def load_pairs(builder: Builder, pointer: Value, mask: Value | None) -> tuple[Value, Value]:
    """Loads LANES bytes and returns their low and high nibbles (0 to 15) as float32."""
    stored = ir.VectorType(ir.IntType(8), LANES)
    address = builder.bitcast(pointer, stored.as_pointer())
    if mask is None:
        vector = builder.load(address, align=1)
    else:
        vector = call(builder, f"llvm.masked.load.v{LANES}i8.p0", stored, [address, INT(1), mask, stored(None)])
    both = builder.zext(vector, INTS)
    low, high = builder.and_(both, ints(15)), builder.lshr(both, ints(4))
    return builder.sitofp(low, FLOATS), builder.sitofp(high, FLOATS)


def _from_float8(builder: Builder, signed: Value) -> Value:
    """Converts sign-extended E4M3 bytes to float32, exactly. E4M3 has no infinity: all bits set mean NaN."""
    # Shifts the 4-bit exponent and 3-bit mantissa to their places in float32. Multiplying by 2^120 then corrects the
    # exponent (bias 127 instead of 7), also of subnormal numbers.
    moved = builder.shl(signed, ints(20))
    scaled = builder.fmul(builder.bitcast(builder.and_(moved, ints(0x87F00000)), FLOATS), FLOATS([2.0**120] * LANES))
    is_nan = builder.icmp_unsigned("==", builder.and_(moved, ints(0x07F00000)), ints(0x07F00000))
    special = builder.and_(builder.sext(is_nan, INTS), ints(0x7FC00000))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, INTS), special), FLOATS)


def from_float16(builder: Builder, bits: Value) -> Value:
    """Converts float16 bits to float32. LLVM's own conversion would call a missing library function on CPUs without the
    instruction."""
    # As in `_from_float8`: shifts exponent and mantissa, corrects the exponent (bias 127 instead of 15) by a product.
    shifted = builder.shl(builder.and_(bits, ints(0x7FFF)), ints(13))
    moved = builder.fmul(builder.bitcast(shifted, FLOATS), FLOATS([2.0**112] * LANES))  # exact, also for subnormals
    is_special = builder.icmp_unsigned(">=", shifted, ints(0x0F800000))
    special = builder.select(is_special, ints(0x7F800000), ints(0))
    sign = builder.shl(builder.and_(bits, ints(0x8000)), ints(16))
    return builder.bitcast(builder.or_(builder.bitcast(moved, INTS), builder.or_(special, sign)), FLOATS)


def ints(number: int) -> Value:
    return INTS([number] * LANES)


def store(builder: Builder, vector: Value, pointer: Value, mask: Value | None = None, align: int = 4) -> None:
    address = builder.bitcast(pointer, vector.type.as_pointer())
    if mask is None:
        builder.store(vector, address, align=align)
    else:
        call(builder, f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), [vector, address, INT(4), mask])


def prefetch(builder: Builder, pointer: Value, index: Value, level: int = 2) -> None:
    """Prefetches the cache line of element `index` to L1 or L2 (`level`). A hint, not a read: the address may be out of
    bounds."""
    address = builder.bitcast(builder.gep(pointer, [index]), ir.IntType(8).as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [address, INT(0), INT(4 - level), INT(1)])


def multiply_add(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """Returns a * b + c, rounded once if the CPU has a fused instruction."""
    return call(builder, f"llvm.fmuladd.v{LANES}f32", FLOATS, [a, b, c])


def add_pairs(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    """Multiplies two bfloat16 in each word of a by those in b, and adds both products to c (float32), one after the
    other. Each addition is rounded like a float32 multiply-add. Instruction `vdpbf16ps` of AVX512-BF16."""
    numbers = ir.VectorType(_BFloat16(), 2 * LANES)
    pairs = [builder.bitcast(words, numbers) for words in (a, b)]
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [c, *pairs])


def round_to_words(builder: Builder, low: Value, high: Value) -> Value:
    """Rounds two vectors of float32 to one vector of bfloat16, two per word: the numbers of `low`, then of `high`."""
    both = shuffle(builder, low, high, [*range(2 * LANES)])
    rounded = builder.fptrunc(both, ir.VectorType(_BFloat16(), 2 * LANES))
    return builder.bitcast(rounded, INTS)


def nearest_bfloat16(builder: Builder, numbers: Value) -> Value:
    """Rounds float32, scalar or vector, to bfloat16 bits in the low half of a word: ties to even, NaN stays NaN."""
    is_vector = numbers.type == FLOATS
    bits = builder.bitcast(numbers, INTS if is_vector else INT)

    def constant(number: int) -> Value:
        return ints(number) if is_vector else INT(number)

    # Adds just under half of the last bit that stays; with that bit itself added, a tie rounds to even.
    last_bit = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    nearest = builder.lshr(builder.add(bits, builder.add(last_bit, constant(0x7FFF))), constant(16))
    return builder.select(builder.fcmp_unordered("uno", numbers, numbers), constant(0x7FC0), nearest)


def equals(builder: Builder, number: Value, expected: int) -> Value:
    return builder.icmp_signed("==", number, number.type(expected))


def splat(builder: Builder, number: Value) -> Value:
    """Returns a vector with `number` in all lanes."""
    vector = ir.VectorType(number.type, LANES)
    first = builder.insert_element(vector(ir.Undefined), number, INT(0))
    return shuffle(builder, first, first, [0] * LANES)


def for_vectors(builder: Builder, dim: Value, step: Callable[[Value, ir.Value | None], None]) -> None:
    """Emits a loop over `dim` numbers, a vector at a time: `step(index, None)` for whole vectors, then `step(index,
    mask)` for the last, partial one."""
    whole = builder.and_(dim, dim.type(-LANES))
    with cgutils.for_range_slice(builder, dim.type(0), whole, dim.type(LANES), dim.type) as (d, _):
        step(d, None)
    with builder.if_then(builder.icmp_signed("<", whole, dim), likely=False):
        tail = splat(builder, builder.trunc(builder.sub(dim, whole), INT))
        step(whole, builder.icmp_signed("<", INTS(list(range(LANES))), tail))


def shuffle(builder: Builder, a: Value, b: Value, lanes: list[int]) -> Value:
    """Returns a vector with the given lanes of a followed by b: lane LANES + i is lane i of b, if a has LANES."""
    return builder.shuffle_vector(a, b, ir.VectorType(ir.IntType(32), len(lanes))(lanes))


def sum_lanes(builder: Builder, vectors: list[Value]) -> Value:
    """Returns a vector with the sum of all lanes of vector i in its lane i. The number of vectors is a power of two."""
    # Merges vectors a and b into one by adding halves of each run of 2 x `width` lanes: the sums of a go to the first
    # half of the run, those of b to the second. When one vector is left, its neighboring lanes are added likewise.
    lanes = width = vectors[0].type.count
    while len(vectors) > 1:
        width //= 2
        is_first = [lane // width % 2 == 0 for lane in range(lanes)]
        straight = [lane + (0 if first else lanes) for lane, first in enumerate(is_first)]
        crossed = [lane + (width if first else lanes - width) for lane, first in enumerate(is_first)]
        pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :], strict=True)
        vectors = [builder.fadd(shuffle(builder, a, b, straight), shuffle(builder, a, b, crossed)) for a, b in pairs]
    total = vectors[0]
    while width > 1:
        width //= 2
        lower = [lane for lane in range(total.type.count) if lane // width % 2 == 0]
        upper = [lane + width for lane in lower]
        total = builder.fadd(shuffle(builder, total, total, lower), shuffle(builder, total, total, upper))
    return total


@intrinsic
def _max_ignoring_nan(typing: Any, scores: Any, at: Any, num: Any, minimum: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first = pointer_at(context, builder, scores, arguments[0], arguments[1])
        address = cgutils.alloca_once(builder, FLOATS)
        builder.store(splat(builder, arguments[3]), address)

        def step(i: Value, mask: Value | None) -> None:
            x, highest = load(builder, types.float32, builder.gep(first, [i]), mask), builder.load(address)
            is_higher = builder.fcmp_ordered(">", x, highest)
            is_higher = is_higher if mask is None else builder.and_(is_higher, mask)
            builder.store(builder.select(is_higher, x, highest), address)

        for_vectors(builder, arguments[2], step)
        highest, width = builder.load(address), LANES
        while width > 1:
            width //= 2
            other = shuffle(builder, highest, highest, list(range(width, 2 * width)))
            highest = shuffle(builder, highest, highest, list(range(width)))
            highest = builder.select(builder.fcmp_ordered(">", highest, other), highest, other)
        return builder.extract_element(highest, INT(0))

    return types.float32(scores, types.intp, types.intp, types.float32), build


# Returns the maximum of `minimum` (not -inf) and `num` scores from index `at` on, ignoring NaN. In vectors, because in
# a loop over numbers each step would wait for the previous one.
max_ignoring_nan: Callable[[np.ndarray, int, int, np.float32], np.float32] = cast(Any, _max_ignoring_nan)


@intrinsic
def _to_float32(typing: Any, number: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        if number == types.float32:
            return arguments[0]
        return builder.bitcast(builder.shl(builder.zext(arguments[0], INT), INT(16)), ir.FloatType())

    return types.float32(number), build


@intrinsic
def _round_like(typing: Any, number: Any, stored: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        if stored == types.float32:
            return arguments[0]
        return builder.trunc(nearest_bfloat16(builder, arguments[0]), ir.IntType(16))

    return stored(number, stored), build


# Converts a stored number (float32 or bfloat16 bits) to float32.
to_float32: Callable[[Any], np.float32] = cast(Any, _to_float32)
# Rounds a float32 to the dtype of the second argument: float32 or bfloat16 bits.
round_like: Callable[[Any, Any], Any] = cast(Any, _round_like)


@intrinsic
def _claim_items(typing: Any, counter: Any, count: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        address = pointer_at(context, builder, counter, arguments[0], arguments[1].type(0))
        return builder.atomic_rmw("add", address, arguments[1], "monotonic")

    return types.intp(counter, types.intp), build


# Atomically adds `count` to the first number of `counter` (int64) and returns its old value: the first of `count` items
# that now belong to the calling thread. Needs no GIL.
claim_items: Callable[[np.ndarray, int], int] = cast(Any, _claim_items)


@njit(fastmath=FUSED)
def exp(x: np.float32, shift: np.float32) -> np.float32:
    """Returns e^x - 1 + shift, for x in [-87, 88] and shift 0 or 1, with an error of at most 2e-7. Shift 0 is precise
    for x near 0."""
    # e^x = 2^n * e^r, with n the integer nearest to x / ln 2 and |r| at most ln 2 / 2. `series` is e^r - 1.
    rounded = np.float32(x * LOG2_E + ROUND)
    n = np.float32(rounded - ROUND)
    # Exact in this order only: compiled FUSED, never REORDERED.
    r = np.float32(np.float32(x - n * LN_2_HIGH) - n * LN_2_LOW)
    series = np.float32(np.float32(T7 * r + T6) * r + T5)
    series = np.float32(np.float32(series * r + T4) * r + T3)
    series = np.float32(np.float32(np.float32(series * r + T2) * r) * r + r)
    # 2^n: the low bits of `rounded` are n, which plus the bias 127 is the exponent of a float32.
    power = np.uint32(np.uint32(rounded.view(np.uint32) + np.uint32(127)) << np.uint32(23)).view(np.float32)
    return np.float32(series * power + np.float32(power - np.float32(ONE - shift)))
