"""The steps of a product in vectors of eight lanes and sixteen registers.

The lanes are rows of w, which are laid out as **panels**: two vectors of rows, number after number. A number of a row
of x meets both, and up to six rows of x do, or three where two panels are in registers: twelve sums, which stay there
until a chain of inputs ends. So nothing is added up across lanes, and no lane is idle whatever the number of rows of x.

The innermost loop is in x86's own instructions where there is FMA: of the loop in its own terms the compiler kept too
few sums in registers, and made two thirds of the rate. Elsewhere it is left to the compiler.

M rows of x, N of w, K inputs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .arguments import GROUP_NUMBERS
from .primitives import (
    FLOATS,
    INT,
    LANES,
    Builder,
    Place,
    RowsAt,
    Value,
    apart_of,
    first_of,
    from_float16,
    ints,
    is_equal,
    load,
    multiply_add,
    prefetch,
    splat,
    store,
)
from .squares import columns_of
from .target import has_fma_alone

binding.initialize_native_asmparser()  # numba leaves it out

CHAIN_INPUTS = 256  # that are added up in registers, at most
PANEL_ROWS = 2 * LANES
PANEL_NUMBERS = PANEL_ROWS * CHAIN_INPUTS
MOST_ROWS, FEW_ROWS = 6, 3  # of x that meet a panel at once, or two panels
SHAPES = [(2, rows) for rows in range(1, MOST_ROWS + 1)] + [(4, rows) for rows in range(1, FEW_ROWS + 1)]
STEP_INPUTS = 16  # after which lines of memory are asked for
GROUP_SHIFT = GROUP_NUMBERS.bit_length() - 1
_COLUMNS = 8  # words of 32 bits of each row that are turned at a time
_UNROLLED = 4  # inputs of a turn of the innermost loop
_NUMBER_BYTES, _VECTOR_BYTES = 4, 4 * LANES
_PLACE, _COUNT = ir.IntType(8).as_pointer(), ir.IntType(64)


class Shape(NamedTuple):
    """Vectors of rows of w, and rows of x that they meet."""

    vectors: int
    rows: int

    def vector_at(self, vector: int, k: int) -> int:
        """The byte of panels at which a vector of input k begins."""
        return vector // 2 * PANEL_NUMBERS * _NUMBER_BYTES + (2 * k + vector % 2) * _VECTOR_BYTES


@intrinsic
def _lay_out_row(typing: Any, row: Any, num_inputs: Any, out: Any, apart: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        stored, end = first_of(context, builder, row, arguments[0]), arguments[1]
        target, n = first_of(context, builder, out, arguments[2]), end.type
        with cgutils.for_range_slice(builder, n(0), end, n(LANES), n) as (k, _):
            vector = load(builder, row.types[0].dtype, builder.gep(stored, [k]), None)
            for lane in range(LANES):
                place = builder.gep(target, [builder.mul(builder.add(k, n(lane)), arguments[3])])
                builder.store(builder.extract_element(vector, INT(lane)), place)
        return context.get_dummy_value()

    return types.void(row, types.intp, out, types.intp), build


@intrinsic
def _turn(typing: Any, rows: Any, num_inputs: Any, panel: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first, apart = first_of(context, builder, rows, arguments[0]), apart_of(builder, arguments[0])
        end, target, stored = arguments[1], first_of(context, builder, panel, arguments[2]), rows.types[0].dtype
        n, per_word = end.type, INT.width // stored.bitwidth
        places = [builder.gep(first, [builder.mul(apart, n(row))]) for row in range(LANES)]
        with cgutils.for_range_slice(builder, n(0), end, n(_COLUMNS * per_word), n) as (k, _):
            columns = columns_of(builder, [builder.gep(place, [k]) for place in places], _COLUMNS)
            for i, column in enumerate(columns):
                for j, vector in enumerate(_numbers(builder, stored, column)):
                    number = builder.add(k, n(i * per_word + j))
                    store(builder, vector, builder.gep(target, [builder.mul(number, n(PANEL_ROWS))]))
        return context.get_dummy_value()

    return types.void(rows, types.intp, panel), build


def _numbers(builder: Builder, stored: Any, words: Value) -> list[Value]:
    """float32 of what words hold: one number, or two of 16 bits."""
    if stored == types.float32:
        return [words]
    if stored == types.uint16:
        return [builder.shl(words, ints(16)), builder.and_(words, ints(0xFFFF0000))]
    return [
        from_float16(builder, builder.and_(words, ints(0xFFFF))),
        from_float16(builder, builder.lshr(words, ints(16))),
    ]


class _Given(NamedTuple):
    """What `add_products` is given, in its order: the compiler's types of arguments, or their values."""

    panels: Any
    num_vectors: Any
    inputs: Any
    num_rows: Any
    num_inputs: Any
    sums: Any
    is_first: Any
    ahead: Any
    num_ahead: Any
    group_apart: Any


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
    group_apart: Any,
) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        given = _Given(*arguments)
        weights, numbers, totals = (
            first_of(context, builder, kind, value)
            for kind, value in ((panels, given.panels), (inputs, given.inputs), (sums, given.sums))
        )
        next_rows, apart = first_of(context, builder, ahead, given.ahead), apart_of(builder, given.ahead)
        n, add_inputs = given.num_inputs.type, _in_assembly if has_fma_alone() else _in_ir

        def ask_ahead(k: Value) -> None:
            # Up to the last of a step's inputs: rows of published files begin inside a cache line and end inside one.
            behind = builder.mul(builder.add(k, n(STEP_INPUTS)), given.group_apart)
            last = builder.sub(builder.lshr(behind, n(GROUP_SHIFT)), n(1))
            with cgutils.for_range(builder, given.num_ahead, intp=n) as loop:
                prefetch(builder, next_rows, builder.add(builder.mul(loop.index, apart), last))

        for shape in (Shape(*each) for each in SHAPES):
            vectors, rows = (is_equal(builder, found, own) for found, own in zip(given[1:4:2], shape, strict=True))
            with builder.if_then(builder.and_(vectors, rows)):
                places = [cgutils.alloca_once(builder, FLOATS) for _ in range(shape.vectors * shape.rows)]
                for place in places:
                    builder.store(FLOATS(None), place)
                with cgutils.for_range_slice(builder, n(0), given.num_inputs, n(STEP_INPUTS), n) as (k, _):
                    ask_ahead(k)
                    w = builder.gep(weights, [builder.mul(k, n(PANEL_ROWS))])
                    x = builder.gep(numbers, [builder.mul(k, n(shape.rows))])
                    found = add_inputs(builder, shape, w, x, [builder.load(place) for place in places])
                    for place, total in zip(places, found, strict=True):
                        builder.store(total, place)
                _give(builder, [builder.load(place) for place in places], totals, given.is_first)
        return context.get_dummy_value()

    n = types.intp
    return types.void(panels, n, inputs, n, n, sums, types.boolean, ahead, n, n), build


def _in_assembly(builder: Builder, shape: Shape, panels: Value, inputs: Value, sums: list[Value]) -> list[Value]:
    """The sums with the products of STEP_INPUTS inputs. Operands: the sums, the fewer of vectors and rows, which stay
    in registers of their own, and one register that the others pass through; then both places and the count."""
    vectors, rows = shape
    hold_vectors, num_held = vectors <= rows, min(vectors, rows)
    num_registers = len(sums) + num_held + 1
    held, passing = [f"${len(sums) + i}" for i in range(num_held)], f"${num_registers - 1}"
    panel, x, left = (f"${num_registers + i}" for i in range(3))
    lines = ["1:"]
    for k in range(_UNROLLED):
        take_vectors = [f"vmovups {shape.vector_at(v, k)}({panel}), " for v in range(vectors)]
        take_rows = [f"vbroadcastss {(k * rows + j) * _NUMBER_BYTES}({x}), " for j in range(rows)]
        kept, others = (take_vectors, take_rows) if hold_vectors else (take_rows, take_vectors)
        lines += [take + register for take, register in zip(kept, held, strict=True)]
        for i, take in enumerate(others):
            lines.append(take + passing)
            for h, register in enumerate(held):
                total = i * vectors + h if hold_vectors else h * vectors + i
                lines.append(f"vfmadd231ps {register}, {passing}, ${total}")
    lines.append(f"addq $${_UNROLLED * 2 * _VECTOR_BYTES}, {panel}")
    lines.append(f"addq $${_UNROLLED * rows * _NUMBER_BYTES}, {x}")
    lines += [f"subq $${_UNROLLED}, {left}", "jne 1b"]
    outputs = ["=&x"] * num_registers + ["=&r"] * 3
    tied = [*range(len(sums)), *range(num_registers, num_registers + 3)]
    changed = ["~{memory}", "~{dirflag}", "~{fpsr}", "~{flags}"]
    given = [*sums, builder.bitcast(panels, _PLACE), builder.bitcast(inputs, _PLACE), _COUNT(STEP_INPUTS)]
    result = ir.LiteralStructType([FLOATS] * num_registers + [_PLACE, _PLACE, _COUNT])
    kind = ir.FunctionType(result, [value.type for value in given])
    constraints = ",".join([*outputs, *map(str, tied), *changed])
    found = builder.call(ir.InlineAsm(kind, "\n".join(lines), constraints, side_effect=True), given)
    return [builder.extract_value(found, i) for i in range(len(sums))]


def _in_ir(builder: Builder, shape: Shape, panels: Value, inputs: Value, sums: list[Value]) -> list[Value]:
    vectors, rows = shape
    n = ir.IntType(64)
    places = [cgutils.alloca_once(builder, FLOATS) for _ in sums]
    for place, total in zip(places, sums, strict=True):
        builder.store(total, place)
    with cgutils.for_range(builder, n(STEP_INPUTS), intp=n) as loop:
        at, row = builder.mul(loop.index, n(PANEL_ROWS)), builder.mul(loop.index, n(rows))
        starts = [builder.add(at, n(shape.vector_at(v, 0) // _NUMBER_BYTES)) for v in range(vectors)]
        w = [load(builder, types.float32, builder.gep(panels, [start]), None) for start in starts]
        for j in range(rows):
            number = splat(builder, builder.load(builder.gep(inputs, [builder.add(row, n(j))])))
            for v, vector in enumerate(w):
                place = places[j * vectors + v]
                builder.store(multiply_add(builder, vector, number, builder.load(place)), place)
    return [builder.load(place) for place in places]


def _give(builder: Builder, totals: list[Value], results: Value, is_first: Value) -> None:
    """One behind the other, added to what is there unless they are the first."""
    for i, total in enumerate(totals):
        place = cgutils.gep_inbounds(builder, results, i * LANES)
        before = builder.select(is_first, FLOATS(None), load(builder, types.float32, place, None))
        store(builder, builder.fadd(before, total), place)


# So many numbers of a row of x, a multiple of LANES, as float32, `apart` numbers apart.
lay_out_row: Callable[[Place, int, Place, int], None] = cast(Any, _lay_out_row)
# So many stored numbers, a multiple of 16, of LANES rows of w, as float32 in one of both vectors of a panel (numbers,
# 2, LANES).
turn: Callable[[RowsAt, int, Place], None] = cast(Any, _turn)
# Panels of `num_vectors` vectors times `num_rows` rows of inputs (num_inputs, num_rows), into (num_rows, num_vectors,
# LANES) of sums, which begin with it where it `is_first`. Meanwhile the same inputs of `num_ahead` rows of stored
# weights are asked into the second cache: neither waits for the other. GROUP_NUMBERS inputs of these lie `group_apart`
# elements apart.
add_products: Callable[[Place, int, Place, int, int, Place, bool, RowsAt, int, int], None] = cast(Any, _add_products)
