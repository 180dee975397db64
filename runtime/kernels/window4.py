"""bfloat16 in 12 bits, decoded in vectors while it is widened: `formats/kinds/window4.py` says how it lies.

Codes of exponents are a contiguous window and zero, so decoding is integer arithmetic, without tables: of one AVX-512
thread it hides behind the memory that it reads. Exponents outside of the window, escapes, are put in one by one.

N rows of K numbers; R of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import GROUP_NUMBERS
from .compiled import REORDERED
from .primitives import Builder, RowsAt, Value, for_rows, run_of

HALF, LANE = GROUP_NUMBERS // 2, 16  # two bytes of numbers are brought together within so many bytes
_BYTE, _WORD, _INT = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_BYTES, _WORDS = ir.VectorType(_BYTE, GROUP_NUMBERS), ir.VectorType(_WORD, HALF)
_NIBBLES, _PAIRS = ir.VectorType(_BYTE, HALF), ir.VectorType(_INT, HALF // 2)


class Escapes(NamedTuple):
    """Numbers whose exponents have no code: those of row n are [starts[n], starts[n + 1]), in ascending columns.
    `base`: what a code above 0 is an exponent less."""

    base: int
    starts: np.ndarray
    columns: np.ndarray
    exponents: np.ndarray


@intrinsic
def _widen(typing: Any, rows: Any, num_rows: Any, num_inputs: Any, base: Any, out: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        runs = [run_of(context, builder, each, arguments[i]) for each, i in ((rows, 0), (out, 4))]
        end, size = arguments[2], GROUP_NUMBERS
        n, added = end.type, _everywhere(builder, builder.trunc(arguments[3], _BYTE))

        def widen_row(places: list[Value]) -> None:
            stored, widened = places
            with cgutils.for_range_slice(builder, n(0), end, n(size), n) as (k, _):
                group = builder.gep(stored, [builder.add(k, builder.lshr(k, n(1)))])
                place = builder.gep(widened, [k])
                for half, pairs in enumerate(_pairs(builder, group, added)):
                    _put(builder, builder.shl(pairs, _same(16, _PAIRS)), place, half * HALF)
                    _put(builder, builder.and_(pairs, _same(0xFFFF0000, _PAIRS)), place, half * HALF + HALF // 2)

        for_rows(builder, arguments[1], runs, widen_row)
        return context.get_dummy_value()

    n = types.intp
    return types.void(rows, n, n, n, out), build


def _pairs(builder: Builder, group: Value, added: Value) -> list[Value]:
    """Pairs of bfloat16 of both halves of a group: number i of a half in the low bits, 16 + i above it. All is done to
    a group's bytes at once, until each number's two are brought together."""
    exponents = _exponents(builder, _take(builder, group, GROUP_NUMBERS, _NIBBLES), added)
    words, rest = builder.bitcast(exponents, _WORDS), _take(builder, group, 0, _BYTES)
    last_bits = builder.bitcast(builder.shl(words, _same(7, _WORDS)), _BYTES)
    others = builder.bitcast(builder.lshr(words, _same(1, _WORDS)), _BYTES)
    low = _merged(builder, 0x7F, rest, last_bits)
    high = _merged(builder, 0x80, rest, others)
    together = []
    for first in (0, LANE // 2):
        lanes = [lane + first + i for lane in range(0, GROUP_NUMBERS, LANE) for i in range(LANE // 2)]
        order = [at for i in lanes for at in (i, GROUP_NUMBERS + i)]
        together.append(builder.bitcast(builder.shuffle_vector(low, high, _numbers(order)), _PAIRS))
    return together


def _exponents(builder: Builder, nibbles: Value, added: Value) -> Value:
    """A byte for each number, from codes of which those of the second half are the high nibbles."""
    twice = builder.shuffle_vector(nibbles, nibbles, _numbers([*range(HALF)] * 2))
    shifts = _WORDS([0] * (HALF // 2) + [4] * (HALF // 2))
    shifted = builder.bitcast(builder.lshr(builder.bitcast(twice, _WORDS), shifts), _BYTES)
    codes = builder.and_(shifted, _same(15, _BYTES))
    is_zero = builder.icmp_unsigned("==", codes, _same(0, _BYTES))
    return builder.select(is_zero, _same(0, _BYTES), builder.add(codes, added))


def _merged(builder: Builder, mask: int, one: Value, other: Value) -> Value:
    """The bits of `mask` of one, the rest of the other."""
    return builder.or_(builder.and_(one, _same(mask, _BYTES)), builder.and_(other, _same(0xFF ^ mask, _BYTES)))


def _same(number: int, kind: Any) -> Value:
    return kind([number] * kind.count)


def _numbers(order: list[int]) -> Value:
    return ir.VectorType(_INT, len(order))(order)


def _everywhere(builder: Builder, number: Value) -> Value:
    first = builder.insert_element(_BYTES(ir.Undefined), number, _INT(0))
    return builder.shuffle_vector(first, first, _numbers([0] * GROUP_NUMBERS))


def _take(builder: Builder, group: Value, at: int, kind: Any) -> Value:
    return builder.load(builder.bitcast(builder.gep(group, [_INT(at)]), kind.as_pointer()), align=1)


def _put(builder: Builder, bits: Value, place: Value, at: int) -> None:
    builder.store(bits, builder.bitcast(builder.gep(place, [_INT(at)]), bits.type.as_pointer()), align=4)


# Of so many packed rows as many numbers, a multiple of GROUP_NUMBERS, as bits of float32, escapes with an exponent of
# 0. The base is that of the rows' codes.
widen_window4: Callable[[RowsAt, int, int, int, RowsAt], None] = cast(Any, _widen)


@njit(fastmath=REORDERED, forceinline=True)
def put_escapes(escapes: Escapes, at: int, row: int, first: int, last: int, bits: np.ndarray, begin: int) -> int:
    """Puts in the exponents of a row's numbers in columns [first, last), from escape `at` on; number `first` is
    bits[begin], of float32. Returns the first escape behind them. The table may be a stranger's or damaged: what it
    says of escapes that there are not, or of columns elsewhere, reads and writes nothing."""
    end = min(np.int64(escapes.starts[np.uint64(row + 1)]), escapes.columns.size)
    while at < end and escapes.columns[np.uint64(at)] < last:
        column = np.int64(escapes.columns[np.uint64(at)])
        if column >= first:
            place = begin + column - first
            bits[np.uint64(place)] |= np.uint32(escapes.exponents[np.uint64(at)]) << np.uint32(23)
        at += 1
    return at
