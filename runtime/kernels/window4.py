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
from .compiled import REORDERED, kept
from .primitives import Builder, Place, Value, first_of

HALF = GROUP_NUMBERS // 2
_BYTE, _WORD, _INT = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_BYTES, _WORDS, _PAIRS = ir.VectorType(_BYTE, HALF), ir.VectorType(_WORD, HALF), ir.VectorType(_INT, HALF // 2)


class Escapes(NamedTuple):
    """Numbers whose exponents have no code: those of row n are [starts[n], starts[n + 1]), in ascending columns.
    `base`: what a code above 0 is an exponent less."""

    base: int
    starts: np.ndarray
    columns: np.ndarray
    exponents: np.ndarray


@intrinsic
def _widen(typing: Any, row: Any, num_inputs: Any, base: Any, out: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        stored, end = first_of(context, builder, row, arguments[0]), arguments[1]
        widened, n, size = first_of(context, builder, out, arguments[3]), end.type, GROUP_NUMBERS
        added = _everywhere(builder, builder.trunc(builder.shl(arguments[2], n(7)), _WORD))
        with cgutils.for_range_slice(builder, n(0), end, n(size), n) as (k, _):
            group = builder.gep(stored, [builder.add(k, builder.lshr(k, n(1)))])
            for half, pairs in enumerate(_halves(builder, group, added)):
                place = builder.gep(widened, [builder.add(k, n(half * HALF))])
                _put(builder, builder.shl(pairs, _same(16, _PAIRS)), place, 0)
                _put(builder, builder.and_(pairs, _same(0xFFFF0000, _PAIRS)), place, HALF // 2)
        return context.get_dummy_value()

    return types.void(row, types.intp, types.intp, out), build


def _halves(builder: Builder, group: Value, added: Value) -> list[Value]:
    """Pairs of bfloat16 of both halves of a group: number i of a half in the low bits, 16 + i above it."""
    codes = builder.zext(_take(builder, group, GROUP_NUMBERS), _WORDS)
    found = list[Value]()
    for half, shift in enumerate((7, 3)):
        code = builder.and_(builder.shl(codes, _same(shift, _WORDS)), _same(15 << 7, _WORDS))
        is_zero = builder.icmp_unsigned("==", code, _same(0, _WORDS))
        exponent = builder.select(is_zero, _same(0, _WORDS), builder.add(code, added))
        rest = builder.sext(_take(builder, group, half * HALF), _WORDS)
        bits = builder.or_(builder.and_(rest, _same(0x807F, _WORDS)), exponent)
        found.append(builder.bitcast(bits, _PAIRS))
    return found


def _same(number: int, kind: Any) -> Value:
    return kind([number] * kind.count)


def _everywhere(builder: Builder, number: Value) -> Value:
    first = builder.insert_element(_WORDS(ir.Undefined), number, _INT(0))
    return builder.shuffle_vector(first, first, ir.VectorType(_INT, HALF)([0] * HALF))


def _take(builder: Builder, group: Value, at: int) -> Value:
    return builder.load(builder.bitcast(builder.gep(group, [_INT(at)]), _BYTES.as_pointer()), align=1)


def _put(builder: Builder, bits: Value, place: Value, at: int) -> None:
    builder.store(bits, builder.bitcast(builder.gep(place, [_INT(at)]), bits.type.as_pointer()), align=4)


# So many numbers, a multiple of GROUP_NUMBERS, of a packed row as bits of float32, escapes with an exponent of 0. The
# base is that of the row's codes.
widen_window4: Callable[[Place, int, int, Place], None] = cast(Any, _widen)


@njit(fastmath=REORDERED)
def put_escapes(escapes: Escapes, at: int, row: int, first: int, last: int, bits: np.ndarray, begin: int) -> int:
    """Puts in the exponents of a row's numbers in columns [first, last), from escape `at` on; number `first` is
    bits[begin], of float32. Returns the first escape behind them."""
    end = escapes.starts[row + 1]
    while at < end and escapes.columns[at] < last:
        place = begin + np.int64(escapes.columns[at]) - first
        bits[place] |= np.uint32(escapes.exponents[at]) << np.uint32(23)
        at += 1
    return at


@kept
def unpack_rows(
    body: np.ndarray,
    base: int,
    starts: np.ndarray,
    columns: np.ndarray,
    exponents: np.ndarray,
    first: int,
    out_RK: np.ndarray,
) -> None:
    """Rows from `first` on as bits of float32, as many as `out_RK` (uint32, contiguous) holds."""
    escapes, (R, K), apart = Escapes(base, starts, columns, exponents), out_RK.shape, body.shape[1]
    bits = out_RK.reshape(R * K)
    for r in range(R):
        widen_window4(Place(body, (first + r) * apart), K, base, Place(bits, r * K))
        put_escapes(escapes, int(starts[first + r]), first + r, 0, K, bits, r * K)
