"""The compiled decode attention: one new token per row over KV pages, each read once and in the order of its bytes.

Softmax goes along with it (Milakov and Gimelshein 2018): scores of CHUNK_TOKENS positions, their maximum, their values.
numba knows no 16-bit floats, so uint16 stands for the bits of bfloat16 and int16 for those of float16. Nothing here
promises that numbers are finite: NaN and infinities end as they do in torch.

The annotations are for the reader; the compiler takes the types of what it is given. All of it is in one file, as the
file's time of change is all that numba's cache on disk looks at.

B rows, H KV heads, G query heads of each, D of a head, P positions of a page, n pages of a row.
"""

import logging
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from .kernel_arguments import Pages, Rows, Scratch, Softmax, Span

log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., object])

CHUNK_TOKENS = 64  # with its queries and sums a chunk's scores stay in 48 KiB of L1, at 32 heads of 128
LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
INT = ir.IntType(32)
INTS, FLOATS = ir.VectorType(INT, LANES), ir.VectorType(ir.FloatType(), LANES)
BLOCK = 4 if LANES == 16 else 2
REORDERED = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; never nnan or ninf
FUSED = {"contract"}  # said, or a caller's permission to reorder would undo the rounding of `_exp`
ONE, ZERO = np.float32(1), np.float32(0)
LOWEST = np.float32(np.finfo(np.float32).min)  # where maxima begin: not -inf, as -inf less -inf is NaN
LOG2_E, LN_2_HIGH, LN_2_LOW = np.float32(1.4426950408889634), np.float32(0.693359375), np.float32(-2.12194440e-4)
ROUND = np.float32(1.5 * 2**23)  # added to a small number it leaves the nearest integer in the low bits
T2, T3, T4, T5, T6, T7 = (np.float32(1 / factorial) for factorial in (2, 6, 24, 120, 720, 5040))
EXP_MIN, TANH_MAX = np.float32(-87), np.float32(10)  # exp stays a normal number; tanh is 1 from 9.1 on


def kept(function: Function) -> Function:
    """Compiled at its first call, for the types of its arguments, in 2 to 4 s, and kept on disk, beside the source
    or in the user's cache."""
    options = {"nogil": True, "fastmath": REORDERED, "error_model": "numpy"}
    try:
        return cast(Function, njit(cache=True, **options)(function))
    except RuntimeError as error:
        log.info("decode attention is compiled anew in each process, in 2 to 4 s: %s", error)
        return cast(Function, njit(**options)(function))


def _at(context: Any, builder: ir.IRBuilder, array: types.Array, value: ir.Value, index: ir.Value) -> ir.Value:
    """Where the number lies that is `index` numbers after the first."""
    return builder.gep(make_array(array)(context, builder, value).data, [index])


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Value]) -> ir.Value:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _load(builder: ir.IRBuilder, dtype: types.Type, pointer: ir.Value, mask: ir.Value | None) -> ir.Value:
    """float32 of as many stored numbers as lanes, 0 where the mask is, which reads nothing there."""
    stored = ir.VectorType(pointer.type.pointee, LANES)
    place, num_bytes = builder.bitcast(pointer, stored.as_pointer()), dtype.bitwidth // 8
    if mask is None:
        vector = builder.load(place, align=num_bytes)
    else:
        name = f"llvm.masked.load.v{LANES}{'f' if dtype == types.float32 else 'i'}{dtype.bitwidth}.p0"
        vector = _call(builder, name, stored, [place, INT(num_bytes), mask, stored(None)])
    if dtype == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(vector, INTS), INTS([16] * LANES)), FLOATS)
    if dtype == types.int16:
        return builder.fpext(builder.bitcast(vector, ir.VectorType(ir.HalfType(), LANES)), FLOATS)
    return vector


def _store(builder: ir.IRBuilder, vector: ir.Value, pointer: ir.Value, mask: ir.Value | None = None) -> None:
    place = builder.bitcast(pointer, vector.type.as_pointer())
    if mask is None:
        builder.store(vector, place, align=4)
    else:
        _call(builder, f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), [vector, place, INT(4), mask])


def _multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """One instruction where there is one."""
    return _call(builder, f"llvm.fmuladd.v{LANES}f32", FLOATS, [a, b, c])


def _splat(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    vector = ir.VectorType(number.type, LANES)
    first = builder.insert_element(vector(ir.Undefined), number, INT(0))
    return _shuffle(builder, first, first, [0] * LANES)


def _each_vector(builder: ir.IRBuilder, dim: ir.Value, step: Callable[[ir.Value, ir.Value | None], None]) -> None:
    """Calls `step` for the code at a place of a head's numbers, with a mask for the last ones."""
    whole = builder.and_(dim, dim.type(-LANES))
    with cgutils.for_range_slice(builder, dim.type(0), whole, dim.type(LANES), dim.type) as (d, _):
        step(d, None)
    with builder.if_then(builder.icmp_signed("<", whole, dim), likely=False):
        rest = _splat(builder, builder.trunc(builder.sub(dim, whole), INT))
        step(whole, builder.icmp_signed("<", INTS(list(range(LANES))), rest))


def _shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
    return builder.shuffle_vector(a, b, ir.VectorType(ir.IntType(32), len(lanes))(lanes))


def _sums(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """The sum of each vector in a lane of its own. Two become one whose lanes are, in turns, half as many partial sums
    of either, until one vector is left; its neighbouring lanes are then added."""
    lanes = width = vectors[0].type.count
    while len(vectors) > 1:
        width //= 2
        is_first = [lane // width % 2 == 0 for lane in range(lanes)]
        straight = [lane + (0 if first else lanes) for lane, first in enumerate(is_first)]
        crossed = [lane + (width if first else lanes - width) for lane, first in enumerate(is_first)]
        pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :], strict=True)
        vectors = [builder.fadd(_shuffle(builder, a, b, straight), _shuffle(builder, a, b, crossed)) for a, b in pairs]
    total = vectors[0]
    while width > 1:
        width //= 2
        lower = [lane for lane in range(total.type.count) if lane // width % 2 == 0]
        upper = [lane + width for lane in lower]
        total = builder.fadd(_shuffle(builder, total, total, lower), _shuffle(builder, total, total, upper))
    return total


def _dots(num_keys: int, num_queries: int) -> Callable[..., None]:
    """Scores of keys that lie `step` apart, of queries side by side: each loaded once, their sums in registers."""

    @intrinsic
    def dots(typing, queries, query_at, keys, key_at, step, dim, scores, at):  # noqa: ANN
        def build(context, builder, signature, arguments):  # noqa: ANN
            q, query_at, k, key_at, step, dim, out, at = arguments
            q, out = (_at(context, builder, queries, q, query_at), _at(context, builder, scores, out, at))
            offset = [builder.mul(step, step.type(i)) for i in range(num_keys)]
            rows = [_at(context, builder, keys, k, builder.add(key_at, o)) for o in offset]
            columns = [builder.gep(q, [builder.mul(dim, dim.type(g))]) for g in range(num_queries)]
            sums = [[cgutils.alloca_once(builder, FLOATS) for _ in rows] for _ in columns]
            for place in chain(*sums):
                builder.store(FLOATS(None), place)

            def step(d: ir.Value, mask: ir.Value | None) -> None:
                xs = [_load(builder, keys.dtype, builder.gep(row, [d]), mask) for row in rows]
                for column, places in zip(columns, sums, strict=True):
                    y = _load(builder, types.float32, builder.gep(column, [d]), mask)
                    for x, place in zip(xs, places, strict=True):
                        builder.store(_multiply_add(builder, x, y, builder.load(place)), place)

            _each_vector(builder, dim, step)
            total = _sums(builder, [builder.load(place) for place in chain(*sums)])
            for g in range(num_queries):
                picked = _shuffle(builder, total, total, list(range(g * num_keys, (g + 1) * num_keys)))
                _store(builder, picked, builder.gep(out, [dim.type(g * CHUNK_TOKENS)]))
            return context.get_dummy_value()

        n = types.intp
        return types.void(queries, n, keys, n, n, n, scores, n), build

    return dots


def _additions(num_values: int, num_queries: int) -> Callable[..., None]:
    """Adds values that lie `step` apart, by their weights, to the sums of queries side by side."""

    @intrinsic
    def additions(typing, sums, sum_at, values, value_at, step, dim, weights, at):  # noqa: ANN
        def build(context, builder, signature, arguments):  # noqa: ANN
            s, sum_at, v, value_at, step, dim, w, at = arguments
            s, w = (_at(context, builder, sums, s, sum_at), _at(context, builder, weights, w, at))
            offset = [builder.mul(step, step.type(i)) for i in range(num_values)]
            rows = [_at(context, builder, values, v, builder.add(value_at, o)) for o in offset]
            columns = [builder.gep(s, [builder.mul(dim, dim.type(g))]) for g in range(num_queries)]
            ws = [
                [_splat(builder, builder.load(builder.gep(w, [at.type(g * CHUNK_TOKENS + i)]))) for i in range(num_values)]
                for g in range(num_queries)
            ]

            def step(d: ir.Value, mask: ir.Value | None) -> None:
                xs = [_load(builder, values.dtype, builder.gep(row, [d]), mask) for row in rows]
                for column, factors in zip(columns, ws, strict=True):
                    place = builder.gep(column, [d])
                    total = _load(builder, types.float32, place, mask)
                    for x, factor in zip(xs, factors, strict=True):
                        total = _multiply_add(builder, x, factor, total)
                    _store(builder, total, place, mask)

            _each_vector(builder, dim, step)
            return context.get_dummy_value()

        n = types.intp
        return types.void(sums, n, values, n, n, n, weights, n), build

    return additions


@intrinsic
def _highest(typing, scores, num):  # noqa: ANN
    """NaN is passed over. In plain code each maximum waits for the one before it, which takes as long as the weights."""

    def build(context, builder, signature, arguments):  # noqa: ANN
        first = make_array(scores)(context, builder, arguments[0]).data
        place = cgutils.alloca_once(builder, FLOATS)
        builder.store(FLOATS([float(LOWEST)] * LANES), place)

        def step(i: ir.Value, mask: ir.Value | None) -> None:
            x, top = _load(builder, types.float32, builder.gep(first, [i]), mask), builder.load(place)
            is_higher = builder.fcmp_ordered(">", x, top)
            is_higher = is_higher if mask is None else builder.and_(is_higher, mask)
            builder.store(builder.select(is_higher, x, top), place)

        _each_vector(builder, arguments[1], step)
        top, width = builder.load(place), LANES
        while width > 1:
            width //= 2
            other = _shuffle(builder, top, top, list(range(width, 2 * width)))
            top = _shuffle(builder, top, top, list(range(width)))
            top = builder.select(builder.fcmp_ordered(">", top, other), top, other)
        return builder.extract_element(top, INT(0))

    return types.float32(scores, types.intp), build


def _blocks(make: Callable[[int, int], Callable[..., None]], num: int) -> Function:
    """Blocks of `num` positions of a page, of all heads, four queries at a time and then one by one."""
    four, one = make(num, 4), make(num, 1)

    @njit
    def blocks(x_HGD, numbers, base, heads, scores_HGS, at):
        H, G, D = x_HGD.shape
        for h in range(heads[0], heads[1]):
            g, begin = 0, base + h * D
            while g < G:
                if G - g >= 4:
                    four(x_HGD, (h * G + g) * D, numbers, begin, H * D, D, scores_HGS, (h * G + g) * CHUNK_TOKENS + at)
                    g += 4
                else:
                    one(x_HGD, (h * G + g) * D, numbers, begin, H * D, D, scores_HGS, (h * G + g) * CHUNK_TOKENS + at)
                    g += 1

    return blocks


_score_four, _score_one = _blocks(_dots, BLOCK), _blocks(_dots, 1)
_add_four, _add_one = _blocks(_additions, BLOCK), _blocks(_additions, 1)


@njit(fastmath=FUSED)
def _exp(x: np.float32, shift: np.float32) -> np.float32:
    """e^x - 1 + shift for x in [-87, 88], shift 0 or 1, each exact to 2e-7: 2^n times a Taylor series around 0."""
    rounded = np.float32(x * LOG2_E + ROUND)
    n = np.float32(rounded - ROUND)
    r = np.float32(np.float32(x - n * LN_2_HIGH) - n * LN_2_LOW)
    series = np.float32(np.float32(T7 * r + T6) * r + T5)
    series = np.float32(np.float32(series * r + T4) * r + T3)
    series = np.float32(np.float32(np.float32(series * r + T2) * r) * r + r)
    power = np.uint32(np.uint32(rounded.view(np.uint32) + np.uint32(127)) << np.uint32(23)).view(np.float32)
    return np.float32(series * power + np.float32(power - np.float32(ONE - shift)))


@njit(fastmath=FUSED)
def _cap(scores: np.ndarray, num: int, softcap: np.float32) -> None:
    for i in range(num):
        x = np.float32(scores[i] / softcap)
        x = x if not x > TANH_MAX else TANH_MAX  # so that NaN stays
        x = x if not x < -TANH_MAX else -TANH_MAX
        e = _exp(np.float32(x + x), ZERO)
        scores[i] = softcap * np.float32(e / np.float32(e + np.float32(2)))


@njit(fastmath=REORDERED)
def _exponentiate(scores: np.ndarray, num: int, top: np.float32) -> np.float32:
    """Returns their sum. One loop, as a second one would wait for the stores of the first."""
    total = ZERO
    for i in range(num):
        x = np.float32(scores[i] - top)
        scores[i] = _exp(x if not x < EXP_MIN else EXP_MIN, ONE)
        total += scores[i]
    return total


@njit(fastmath=REORDERED)
def _score(
    q_HGD: np.ndarray, keys: np.ndarray, base: int, num: int, heads: Span, scores_HGS: np.ndarray, at: int
) -> None:
    """Scores of `num` positions of a page."""
    step = q_HGD.shape[0] * q_HGD.shape[2]
    whole = num // BLOCK * BLOCK
    for p in range(0, whole, BLOCK):
        _score_four(q_HGD, keys, base + p * step, heads, scores_HGS, at + p)
    for p in range(whole, num):
        _score_one(q_HGD, keys, base + p * step, heads, scores_HGS, at + p)


@njit(fastmath=REORDERED)
def _raise(
    scores_S: np.ndarray,
    num: int,
    softcap: np.float32,
    tops_G: np.ndarray,
    totals_G: np.ndarray,
    g: int,
    sums_D: np.ndarray,
) -> None:
    """Raises one query's maximum to that of its scores; its total and sums are then seen from there."""
    if softcap > ZERO:
        _cap(scores_S, num, softcap)
    highest = max(tops_G[g], _highest(scores_S, num))
    if highest > tops_G[g]:
        x = np.float32(tops_G[g] - highest)
        fade = _exp(x, ONE) if x > EXP_MIN else ZERO
        tops_G[g] = highest
        totals_G[g] *= fade
        for d in range(len(sums_D)):
            sums_D[d] *= fade


@njit(fastmath=REORDERED)
def _add(
    sums_HGD: np.ndarray, values: np.ndarray, base: int, num: int, heads: Span, scores_HGS: np.ndarray, at: int
) -> None:
    """Adds the weighted values of `num` positions of a page."""
    step = sums_HGD.shape[0] * sums_HGD.shape[2]
    whole = num // BLOCK * BLOCK
    for p in range(0, whole, BLOCK):
        _add_four(sums_HGD, values, base + p * step, heads, scores_HGS, at + p)
    for p in range(whole, num):
        _add_one(sums_HGD, values, base + p * step, heads, scores_HGS, at + p)


@njit(fastmath=REORDERED)
def _run(pages: Pages, table_n: np.ndarray, place: int, last: int) -> tuple[int, int, int]:
    """The page where `place` lies, the offset in it and how many positions up to `last` it holds."""
    page, offset = table_n[place // pages.page_tokens], place % pages.page_tokens
    if page < 0 or page >= pages.num_pages:
        raise IndexError("a page table names a KV page that does not exist")
    return page, offset, min(pages.page_tokens - offset, last - place)


@njit(fastmath=REORDERED)
def _attend_chunk(
    q_HGD: np.ndarray,
    pages: Pages,
    table_n: np.ndarray,
    first: int,
    last: int,
    heads: Span,
    softcap: np.float32,
    scratch: Scratch,
    sums_HGD: np.ndarray,
) -> None:
    """Takes up positions [first, last), a chunk at most, of one row."""
    H, G, Dk = q_HGD.shape
    Dv, place = sums_HGD.shape[2], first
    while place < last:
        page, offset, num = _run(pages, table_n, place, last)
        base = page * pages.key_stride + offset * H * Dk
        _score(q_HGD, pages.keys, base, num, heads, scratch.scores_HGS, place - first)
        place += num
    for h in range(heads[0], heads[1]):
        for g in range(G):
            scores_S, tops_G, totals_G = scratch.scores_HGS[h, g], scratch.tops_HG[h], scratch.totals_HG[h]
            _raise(scores_S, last - first, softcap, tops_G, totals_G, g, sums_HGD[h, g])
    for h in range(heads[0], heads[1]):  # apart, or each query would wait for its maximum: 1.8 us instead of 0.9
        for g in range(G):
            weights = _exponentiate(scratch.scores_HGS[h, g], last - first, scratch.tops_HG[h, g])
            scratch.totals_HG[h, g] += weights
    place = first
    while place < last:
        page, offset, num = _run(pages, table_n, place, last)
        base = page * pages.value_stride + offset * H * Dv
        _add(sums_HGD, pages.values, base, num, heads, scratch.scores_HGS, place - first)
        place += num


@kept
def attend(
    q_BHGD: np.ndarray,
    pages: Pages,
    rows: Rows,
    softmax: Softmax,
    out_BHGD: np.ndarray,
    piece: Span,
    heads: Span,
    scratch: Scratch,
) -> None:
    """Adds to `out`, which holds zeros, rows and KV heads from the first up to the second number. Scaled queries and
    `out` are float32. A row that sees nothing stays zero."""
    G, Dv = out_BHGD.shape[2:]
    for row in range(piece[0], piece[1]):
        first, end = rows.begins_B[row], rows.ends_B[row]
        if first >= end:
            continue
        for h in range(heads[0], heads[1]):
            for g in range(G):
                scratch.tops_HG[h, g], scratch.totals_HG[h, g] = softmax.tops_HG[h, g], softmax.total
        while first < end:
            last = min(end, (first // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
            _attend_chunk(
                q_BHGD[row], pages, rows.tables_Bn[row], first, last, heads, softmax.softcap, scratch, out_BHGD[row]
            )
            first = last
        for h in range(heads[0], heads[1]):
            for g in range(G):
                share = ONE / scratch.totals_HG[h, g]
                for d in range(Dv):
                    out_BHGD[row, h, g, d] *= share
