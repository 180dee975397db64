"""LLVM instructions for the CPU's matrix unit (Intel AMX), and steps of decode attention.

The unit has eight tiles: registers of up to 16 rows of 64 bytes. A product of tiles adds to each float32 of one tile
the dot product of a row of the second tile and a column of the third, in words of two bfloat16. Kernels use the tiles,
whose sizes `arguments.attention_tile_configs` sets, as follows:

    step     tiles 0-3   tile 4         tile 5        tiles 6, 7
    scores   queries     scores                       keys
    values   sums        high weights   low weights   values

Four tiles hold 128 numbers of a head; kernels repeat the step for longer heads. High and low weights are the two
bfloat16 parts of a float32, see `arguments.TileScratch`. Tile numbers are constants in instructions, so loops over
tiles are unrolled. Rows in memory should be aligned to 64 bytes: otherwise a load takes six times as long.

Functions marked `@intrinsic` are explained in `../primitives.py`, and documented at their public names below.
In their arguments, `at` is the index of an array's first element to use, and `row_bytes` the distance of a tile's rows
in memory.
"""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import config, types
from numba.extending import intrinsic

from ..arguments import CHUNK_TOKENS, PAIRED, TILE_DIMS, TILE_ROWS
from ..compiled import features
from ..primitives import LANES, Builder, Value, call, pointer_at

log = logging.getLogger(__name__)

NUM_TILES = 4  # tiles of queries or sums, for adjacent numbers of a head
SCORES, HIGH_WEIGHTS, LOW_WEIGHTS = 4, 4, 5
READ_TILES = (6, 7)  # keys or values, alternating: a load need not wait for the previous product
BYTE, WORD = ir.IntType(8), ir.IntType(64)
# Linux on x86-64: system call arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA) requests the use of tiles.
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18


@cache
def may_use_tiles() -> bool:
    """True if the CPU has the matrix unit and Linux lets this process use it. Requests the permission once."""
    is_native = all(getattr(config, name) is None for name in ("CPU_NAME", "CPU_FEATURES"))  # no instruction set is set
    if not is_native or LANES != 16 or not features().get("amx-bf16"):
        return False
    # Without the permission, the first tile instruction would kill the process.
    if ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0:
        return True
    log.info("Linux denies access to the CPU's matrix unit (AMX): bfloat16 products take up to three times as long")
    return False


def emit_tile_op(builder: Builder, name: str, *arguments: Value) -> None:
    """Emits a tile instruction; tile numbers are constants of type BYTE."""
    call(builder, f"llvm.x86.{name}", ir.VoidType(), list(arguments))


def _emit_for_tiles(builder: Builder, num: Value, act: Callable[[int], None]) -> None:
    """Emits the code of `act(i)` for each of the first `num` tiles."""
    for i in range(NUM_TILES):
        with builder.if_then(builder.icmp_signed(">", num, num.type(i))):
            act(i)


@dataclass(frozen=True, kw_only=True)
class _TileRows:
    """Tiles in memory, to load or store. The first begins at `first`, each further one `tile_numbers` elements after
    the previous. `row_bytes`: bytes from one row of a tile to the next."""

    builder: Builder
    first: Value
    row_bytes: Value
    tile_numbers: int = 0

    def move(self, name: str, tile: int, i: int = 0) -> None:
        """Emits the load or store instruction `name` for register `tile` and tile `i` in memory."""
        address = self.builder.gep(self.first, [WORD(i * self.tile_numbers)])
        emit_tile_op(self.builder, name, BYTE(tile), self.builder.bitcast(address, BYTE.as_pointer()), self.row_bytes)

    def load(self, tile: int, i: int = 0) -> None:
        self.move("tileloadd64", tile, i)

    def store(self, tile: int, i: int = 0) -> None:
        self.move("tilestored64", tile, i)


@intrinsic
def _configure(typing: Any, shapes: Any, at: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        address = pointer_at(context, builder, shapes, *arguments)
        emit_tile_op(builder, "ldtilecfg", builder.bitcast(address, BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(shapes, types.intp), build


@intrinsic
def _release(typing: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        emit_tile_op(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def _load_queries(typing: Any, queries: Any, at: Any, num: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        first = pointer_at(context, builder, queries, *arguments[:2])
        rows = _TileRows(builder=builder, first=first, row_bytes=WORD(4 * PAIRED), tile_numbers=TILE_ROWS * PAIRED)
        _emit_for_tiles(builder, arguments[2], lambda i: rows.load(i, i))
        return context.get_dummy_value()

    return types.void(queries, types.intp, types.intp), build


@intrinsic
def _score(typing: Any, keys: Any, at: Any, row_bytes: Any, num: Any, scores: Any, score_at: Any, adds: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        all_keys, first_key, key_bytes, num_tiles, all_scores, first_score, is_later = arguments
        first = pointer_at(context, builder, keys, all_keys, first_key)
        rows = _TileRows(builder=builder, first=first, row_bytes=key_bytes, tile_numbers=TILE_DIMS)
        score_first = pointer_at(context, builder, scores, all_scores, first_score)
        score = _TileRows(builder=builder, first=score_first, row_bytes=WORD(4 * PAIRED))

        def multiply(i: int) -> None:
            rows.load(READ_TILES[i % 2], i)
            emit_tile_op(builder, "tdpbf16ps", BYTE(SCORES), BYTE(READ_TILES[i % 2]), BYTE(i))

        with builder.if_else(is_later) as (resumed, started):
            with resumed:
                score.load(SCORES)
            with started:
                emit_tile_op(builder, "tilezero", BYTE(SCORES))
        _emit_for_tiles(builder, num_tiles, multiply)
        score.store(SCORES)
        return context.get_dummy_value()

    n = types.intp
    return types.void(keys, n, n, n, scores, n, types.boolean), build


def _make_sum_mover(name: str) -> Callable[..., None]:
    """Returns a compiled function that loads or stores tiles of sums with the instruction `name`."""

    @intrinsic
    def transfer(typing: Any, sums: Any, at: Any, row_bytes: Any, num: Any) -> Any:
        def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
            first = pointer_at(context, builder, sums, *arguments[:2])
            rows = _TileRows(builder=builder, first=first, row_bytes=arguments[2], tile_numbers=TILE_DIMS // 2)
            _emit_for_tiles(builder, arguments[3], lambda i: rows.move(name, i, i))
            return context.get_dummy_value()

        return types.void(sums, types.intp, types.intp, types.intp), build

    return transfer


@intrinsic
def _add(typing: Any, values: Any, at: Any, row_bytes: Any, num: Any, weights: Any, weight_at: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        all_values, first_value, value_bytes, num_tiles, all_weights, first_weight = arguments
        first = pointer_at(context, builder, values, all_values, first_value)
        rows = _TileRows(builder=builder, first=first, row_bytes=value_bytes, tile_numbers=TILE_DIMS)
        weight = _TileRows(
            builder=builder,
            first=pointer_at(context, builder, weights, all_weights, first_weight),
            row_bytes=WORD(4 * CHUNK_TOKENS),
            tile_numbers=PAIRED * CHUNK_TOKENS,
        )

        def multiply(i: int) -> None:
            rows.load(READ_TILES[i % 2], i)
            for factor in (HIGH_WEIGHTS, LOW_WEIGHTS):
                emit_tile_op(builder, "tdpbf16ps", BYTE(i), BYTE(factor), BYTE(READ_TILES[i % 2]))

        weight.load(HIGH_WEIGHTS)
        weight.load(LOW_WEIGHTS, 1)
        _emit_for_tiles(builder, num_tiles, multiply)
        return context.get_dummy_value()

    n = types.intp
    return types.void(values, n, n, n, weights, n), build


# Sets the sizes of tiles to the 64-byte configuration at `shapes[at]`. Call `release` after the last tile instruction.
configure: Callable[[np.ndarray, int], None] = cast(Any, _configure)
release: Callable[[], None] = cast(Any, _release)
# Load or store the first `num` tiles, from element `at` on. Arguments: queries, at, num; or sums, at, row_bytes, num.
load_queries: Callable[[np.ndarray, int, int], None] = cast(Any, _load_queries)
load_sums, store_sums = _make_sum_mover("tileloadd64"), _make_sum_mover("tilestored64")
# Multiplies keys from element `at` on by the `num` loaded tiles of queries. Adds to the scores from `score_at` on if
# `adds`, or overwrites them. Arguments: keys, at, row_bytes, num, scores, score_at, adds.
score: Callable[[np.ndarray, int, int, int, np.ndarray, int, bool], None] = cast(Any, _score)
# Adds values from element `at` on, times high and low weights from `weight_at` on, to the `num` loaded tiles of sums.
# Arguments: values, at, row_bytes, num, weights, weight_at.
add: Callable[[np.ndarray, int, int, int, np.ndarray, int], None] = cast(Any, _add)
