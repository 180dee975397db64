"""Vector code that decodes GGUF's blocks (Q8_0, Q4_K ...) to float32, bit by bit like the torch operators of
`formats/kinds/gguf.py`, which names the source of the layouts. A block is 32 or 256 adjacent numbers of a row with
their scales. A number is code * scale, or code * scale + offset. A group is the 16 or 32 numbers of a block that share
a scale."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, Span
from .primitives import (
    FLOATS,
    INT,
    INTS,
    LANES,
    ArrayAt,
    Builder,
    Value,
    equals,
    from_float16,
    ints,
    pointer_of,
    splat,
    store,
)

_BYTE, _HALF = ir.IntType(8), ir.IntType(16)
_BYTES = ir.VectorType(_BYTE, LANES)


class _Block:
    """Emits code for one block. A vector holds LANES adjacent numbers."""

    def __init__(self, builder: Builder, start: Value):
        self.builder, self._start, self._emitted = builder, start, dict[object, Value]()

    def once(self, key: object, emit: Callable[[], Value]) -> Value:
        """Emits code at the first call with `key`. LLVM cannot join equal loads, as the output might overlap."""
        if key not in self._emitted:
            self._emitted[key] = emit()
        return self._emitted[key]

    def _load(self, at: int, kind: Any) -> Value:
        address = self.builder.bitcast(self.builder.gep(self._start, [INT(at)]), kind.as_pointer())
        return self.once((at, str(kind)), lambda: self.builder.load(address, align=1))

    def byte(self, at: int) -> Value:
        """Returns a byte as a 32-bit integer."""
        return self.builder.zext(self._load(at, _BYTE), INT)

    def signed_byte(self, at: int) -> Value:
        return self.builder.sext(self._load(at, _BYTE), INT)

    def signed_bytes(self, at: int) -> Value:
        return self.builder.sext(self._load(at, _BYTES), INTS)

    def half(self, at: int) -> Value:
        """Returns the float16 at byte `at`, as float32 in all lanes."""
        bits = self.builder.zext(self._load(at, _HALF), INT)
        return self.once(("half", at), lambda: from_float16(self.builder, splat(self.builder, bits)))

    def fields(self, at: int, num_bits: int, run: int, number: int, shift: int = 0) -> Value:
        """Returns the fields of numbers from `number` on, shifted left by `shift`. The order of fields is that of
        `_extract_fields` in formats/kinds/gguf.py."""
        per_byte = 8 // num_bits
        byte, field = number // (run * per_byte) * run + number % run, number // run % per_byte
        return self._bits(self.builder.zext(self._load(at + byte, _BYTES), INTS), field * num_bits, num_bits, shift)

    def word_bits(self, at: int, number: int, shift: int) -> Value:
        """Returns bits of the 32-bit word at byte `at`, from bit `number` on, shifted left by `shift`."""
        word = splat(self.builder, self._load(at, INT))
        bits = self.builder.lshr(word, INTS([*range(number, number + LANES)]))
        return self._bits(bits, 0, 1, shift)

    def _bits(self, words: Value, first: int, count: int, shift: int) -> Value:
        """Returns `count` bits of each word, from bit `first` on, at bit `shift`."""
        moved = self.builder.lshr(words, ints(first - shift)) if first > shift else words
        moved = self.builder.shl(words, ints(shift - first)) if first < shift else moved
        return self.builder.and_(moved, ints(((1 << count) - 1) << shift))

    def scaled(self, factor: Value, number: Value, key: object) -> Value:
        """Returns `factor` times a 32-bit integer, in all lanes; emitted once for `key`."""

        def emit() -> Value:
            return self.builder.fmul(factor, splat(self.builder, self.builder.sitofp(number, ir.FloatType())))

        return self.once(key, emit)


class _Numbers(NamedTuple):
    """Adjacent numbers of a block: codes (INTS), scale and offset (FLOATS)."""

    codes: Value
    scale: Value
    offset: Value | None = None


def _small(block: _Block, i: int, *, codes_at: int, bits_at: int | None = None, zero: int = 0) -> _Numbers:
    """Decodes the blocks of 32 numbers with 4 or 5 bits. `bits_at`: where the fifth bits are. Without `zero`, numbers
    have an offset."""
    codes = block.fields(codes_at, 4, 16, i)
    if bits_at is not None:
        codes = block.builder.or_(codes, block.word_bits(bits_at, i, 4))
    if zero:
        return _Numbers(block.builder.sub(codes, ints(zero)), block.half(0))
    return _Numbers(codes, block.half(0), block.half(2))


def _q2_k(block: _Block, i: int) -> _Numbers:
    builder, group = block.builder, i // 16
    scale = block.scaled(block.half(80), builder.and_(block.byte(group), INT(15)), ("scale", group))
    negative = block.once("negative", lambda: builder.fneg(block.half(82)))
    return _Numbers(
        block.fields(16, 2, 32, i),
        scale,
        block.scaled(negative, builder.lshr(block.byte(group), INT(4)), ("offset", group)),
    )


def _q3_k(block: _Block, i: int) -> _Numbers:
    builder, group = block.builder, i // 16
    low = builder.and_(builder.lshr(block.byte(96 + group % 8), INT(group // 8 * 4)), INT(15))
    high = builder.and_(builder.lshr(block.byte(104 + group % 4), INT(group // 4 * 2)), INT(3))
    factor = builder.sub(builder.or_(low, builder.shl(high, INT(4))), INT(32))
    codes = builder.or_(block.fields(32, 2, 32, i), block.fields(0, 1, 32, i, 2))
    return _Numbers(builder.sub(codes, ints(4)), block.scaled(block.half(108), factor, group))


def _q4_k(block: _Block, i: int) -> _Numbers:
    return _Numbers(block.fields(16, 4, 32, i), *_scale_and_offset(block, i // 32))


def _q5_k(block: _Block, i: int) -> _Numbers:
    codes = block.builder.or_(block.fields(48, 4, 32, i), block.fields(16, 1, 32, i, 4))
    return _Numbers(codes, *_scale_and_offset(block, i // 32))


def _scale_and_offset(block: _Block, group: int) -> tuple[Value, Value]:
    """Decodes the scale and offset of a group of Q4_K and Q5_K: see `_scales_and_minima` in formats/kinds/gguf.py."""
    builder, at = block.builder, group % 4
    if group < 4:
        factors = [builder.and_(block.byte(start + at), INT(63)) for start in (4, 8)]
    else:
        rest = block.byte(12 + at)
        lows = builder.and_(rest, INT(15)), builder.lshr(rest, INT(4))
        highs = (builder.shl(builder.lshr(block.byte(start + at), INT(6)), INT(4)) for start in (4, 8))
        factors = [builder.or_(low, high) for low, high in zip(lows, highs, strict=True)]
    negative = block.once("negative", lambda: builder.fneg(block.half(2)))
    scale = block.scaled(block.half(0), factors[0], ("scale", group))
    return scale, block.scaled(negative, factors[1], ("offset", group))


def _q6_k(block: _Block, i: int) -> _Numbers:
    codes = block.builder.or_(block.fields(0, 4, 64, i), block.fields(128, 2, 32, i, 4))
    scale = block.scaled(block.half(208), block.signed_byte(192 + i // 16), i // 16)
    return _Numbers(block.builder.sub(codes, ints(32)), scale)


class _Format(NamedTuple):
    """A block format. `decode` returns the LANES numbers of a block from number i on."""

    num_numbers: int
    num_bytes: int
    decode: Callable[[_Block, int], _Numbers]


_FORMATS: Mapping[int, _Format] = {
    Q8_0: _Format(32, 34, lambda block, i: _Numbers(block.signed_bytes(2 + i), block.half(0))),
    Q4_0: _Format(32, 18, partial(_small, codes_at=2, zero=8)),
    Q4_1: _Format(32, 20, partial(_small, codes_at=4)),
    Q5_0: _Format(32, 22, partial(_small, codes_at=6, bits_at=2, zero=16)),
    Q5_1: _Format(32, 24, partial(_small, codes_at=8, bits_at=4)),
    Q2_K: _Format(256, 84, _q2_k),
    Q3_K: _Format(256, 110, _q3_k),
    Q4_K: _Format(256, 144, _q4_k),
    Q5_K: _Format(256, 176, _q5_k),
    Q6_K: _Format(256, 210, _q6_k),
}


@intrinsic
def _widen_row(typing: Any, row: Any, num_numbers: Any, encoding: Any, out: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        stored, widened = (pointer_of(context, builder, kind, arguments[i]) for kind, i in ((row, 0), (out, 3)))
        end, n = arguments[1], arguments[1].type
        for number, form in _FORMATS.items():
            is_here, step = equals(builder, arguments[2], number), n(form.num_numbers)
            with builder.if_then(is_here), cgutils.for_range_slice(builder, n(0), end, step, n) as (k, index):
                block = _Block(builder, builder.gep(stored, [builder.mul(index, n(form.num_bytes))]))
                address = builder.gep(widened, [k])
                for i in range(0, form.num_numbers, LANES):
                    codes, scale, offset = form.decode(block, i)
                    result = builder.fmul(builder.sitofp(codes, FLOATS), scale)
                    result = result if offset is None else builder.fadd(result, offset)
                    store(builder, result, builder.gep(address, [n(i)]))
        return context.get_dummy_value()

    return types.void(row, types.intp, types.intp, out), build


# Decodes `num_numbers` numbers of a row, whole blocks of `encoding`. Arguments: row, num_numbers, encoding, out.
_decode_row: Callable[[ArrayAt, int, int, ArrayAt], None] = cast(Any, _widen_row)


@njit(fastmath=False)  # a product and a sum must not become one operation, which rounds only once
def widen_blocks(
    body: np.ndarray, order: np.ndarray, encoding: int, row_bytes: int, at: int, rows: Span, num_numbers: int,
    out: np.ndarray, stride: int,
) -> None:  # fmt: skip
    """Decodes `num_numbers` numbers of the given rows, from byte `at` of each on, to float32, written `stride` numbers
    apart in `out`. `order`: index of the stored row of each row; empty if the order is the same."""
    for row in range(rows[0], rows[1]):
        source = int(order[np.uint64(row)]) if order.size else row
        _decode_row(
            ArrayAt(body, source * row_bytes + at), num_numbers, encoding, ArrayAt(out, (row - rows[0]) * stride)
        )
