"""Arguments of kernels: stored weights, KV pages, work items and scratch memory. Loads neither numba nor Triton.

W work items, B rows, n pages of a row, P positions of a page, H KV heads, G query heads of each, D of a head, S
positions of a chunk.
"""

import math
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

ISA = "WEIGHTSTREAM_ISA"  # environment variable that limits the instruction set, see compiled.py
PAIR_ROWS = 32  # rows of weights in a step of a product; kernels skip a last, partial step
GROUP_NUMBERS, GROUP_BYTES = 64, 96  # window4: sign and mantissa bytes, then nibbles
WINDOW4, INT8, INT4, FLOAT8 = range(4)  # encodings that `weightstream pack` writes
# Published encodings, with zero points and factors per group. By rows: bytes, FP8, nibbles, FP4, and nibbles that index
# a table. By columns: words of neighboring columns (4 or 8 bits each), words of neighboring rows (4 bits).
BYTES, SIGNED_BYTES, SCALED_FLOAT8, NIBBLES, FLOAT4, TABLE_NIBBLES = range(4, 10)
WORDS4, WORDS8, ROW_WORDS = range(10, 13)
WORD_ROWS = 8  # rows whose 4-bit fields share a 32-bit word
# Encodings for accelerators only: FP8 E5M2, plain numbers, and GGUF's blocks.
FLOAT8_E5M2, PLAIN, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K = range(13, 20)
GGUF = {"Q8_0": Q8_0, "Q4_0": Q4_0, "Q4_K": Q4_K, "Q5_K": Q5_K, "Q6_K": Q6_K}
INT4_MIDDLE = 8  # added to INT4 codes to make them unsigned
FLOAT32, BFLOAT16, FLOAT16 = range(3)  # output dtypes
CODE_RUN = 32  # codes in a run; INT4: its first half in the low nibbles, its second half in the high ones
CHUNK_TOKENS = 64  # positions; their scores, queries and sums fit 48 KiB of L1 cache at 32 heads of 128
Span: TypeAlias = tuple[int, int]  # begin, end (exclusive)


class StoredRows(NamedTuple):
    """Packed rows of weights as flat arrays. `layout`: see `linear/packed_rows.py`; for the others see
    `packed.RowPacking` and `grouped.GroupArrays`."""

    body: np.ndarray
    layout: np.ndarray
    starts: np.ndarray
    columns: np.ndarray
    exponents: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    factors: np.ndarray
    table: np.ndarray
    groups: np.ndarray


class VectorProduct(NamedTuple):
    """Arguments of a product in the vector kernels: `num_rows` rows of x in `inputs`, written to columns from `begin`
    on of an output of dtype `kind` (`halves`: see `linear_parts.OutputRows`). Threads claim `step` rows of w at a time,
    a multiple of PAIR_ROWS up to CHUNK_ROWS, from a shared `counter`, initially 0. `words`, `tile` and `sums` are one
    thread's scratch memory, see `split_workspace`."""

    step: int
    counter: np.ndarray
    inputs: np.ndarray
    halves: np.ndarray
    kind: int
    begin: int
    num_rows: int
    words: np.ndarray
    tile: np.ndarray
    sums: np.ndarray


class Pages(NamedTuple):
    """KV pages as flat arrays; page i begins at i * stride and holds (P, H, D)."""

    keys: np.ndarray
    values: np.ndarray
    key_stride: int
    value_stride: int
    num_pages: int
    page_tokens: int


class QuantizedPages(NamedTuple):
    """Quantized KV pages as flat arrays, with `stride_bytes` from one page to the next in each. Codes: int8 (P, H, D),
    or uint8 (P, H, D/2) with two `codes_in_byte`. Scales: bfloat16 bits, (H, Dk) for keys and (H, P) for values. Zeros:
    int8 of the same shapes, or empty uint8 if there are none."""

    key_codes: np.ndarray
    value_codes: np.ndarray
    key_scales: np.ndarray
    value_scales: np.ndarray
    key_zeros: np.ndarray
    value_zeros: np.ndarray
    codes_in_byte: int
    stride_bytes: int
    num_pages: int
    page_tokens: int


class TailPages(NamedTuple):
    """The last, unquantized page of each row; row b's is page `slots_B1[b]`."""

    pages: Pages
    slots_B1: np.ndarray


class RowTables(NamedTuple):
    """Page tables: row b attends to positions [begins[b], ends[b]) of the pages in `tables[b]`. Its first `shared[b]`
    positions, a multiple of CHUNK_TOKENS, are in the same pages as a neighboring row's."""

    tables_Bn: np.ndarray
    begins_B: np.ndarray
    ends_B: np.ndarray
    shared_B: np.ndarray


class AttentionItem(NamedTuple):
    """A work item: a run of rows and a run of their KV heads."""

    rows: Span
    heads: Span


class WorkItems(NamedTuple):
    """Work items shared by threads. `spans_W4`: first row, end row, first KV head, end head. `counter` (1,): the next
    item; threads claim items atomically."""

    spans_W4: np.ndarray
    counter: np.ndarray


class SoftmaxState(NamedTuple):
    """Running maxima and sums of weights per row, saved between chunks that rows share."""

    maxima_BHG: np.ndarray
    totals_BHG: np.ndarray


class Softmax(NamedTuple):
    """Softmax parameters. `softcap`: limit of absolute scores; 0 disables it. `maxima_HG` and `total`: initial maxima
    and sums of weights; with attention sinks, the sinks' scores and weight."""

    softcap: np.float32
    maxima_HG: np.ndarray
    total: np.float32


class ScoreScratch(Protocol):
    """Scratch memory that the softmax uses."""

    @property
    def scores_HGS(self) -> np.ndarray: ...
    @property
    def maxima_HG(self) -> np.ndarray: ...
    @property
    def totals_HG(self) -> np.ndarray: ...


class QuantizedScratch(NamedTuple):
    """A `Scratch`, queries times a page's scales, and terms of zero points."""

    scores_HGS: np.ndarray
    maxima_HG: np.ndarray
    totals_HG: np.ndarray
    scaled_HGD: np.ndarray
    added_HG: np.ndarray

    @classmethod
    def make(cls, num_kv_heads: int, group: int, dim: int, chunk_tokens: int) -> "QuantizedScratch":
        scratch, shape = Scratch.make(num_kv_heads, group, chunk_tokens), (num_kv_heads, group)
        return cls(*scratch, np.empty((*shape, dim), np.float32), np.empty(shape, np.float32))


class Scratch(NamedTuple):
    """A thread's scratch memory: scores of a chunk, then their weights; running maxima; sums of weights."""

    scores_HGS: np.ndarray
    maxima_HG: np.ndarray
    totals_HG: np.ndarray

    @classmethod
    def make(cls, num_kv_heads: int, group: int, chunk_tokens: int) -> "Scratch":
        shape = (num_kv_heads, group)
        return cls(*(np.empty(s, np.float32) for s in ((*shape, chunk_tokens), shape, shape)))


def aligned_zeros(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Returns zeros aligned to 64 bytes, because loads of unaligned tile rows take six times as long."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(num_bytes + 63, np.uint8)
    return np.ndarray(shape, dtype, room, -room.__array_interface__["data"][0] % 64)


TILE_ROWS, TILE_DIMS, TILE_QUERIES = 16, 32, 4  # TILE_DIMS bfloat16 fill a 64-byte tile row
PAIRED = 2 * TILE_QUERIES  # columns: high and low parts, or sums of even and of odd dims


class TileScratch(NamedTuple):
    """A thread's scratch memory for attention in tiles. `queries`: a row per pair of dims, with the high parts of four
    queries, then their low parts. `products`: of each position with these eight. `weights`: high, then low parts, each
    twice: with a zero after it (for even dims of values) and before it (odd dims). `sums`: even dims, then odd."""

    queries_HJTRC: np.ndarray
    products_SC: np.ndarray
    scores_HGS: np.ndarray
    weights_HJPCS: np.ndarray
    sums_HGD: np.ndarray
    maxima_HG: np.ndarray
    totals_HG: np.ndarray
    shapes: np.ndarray

    @classmethod
    def make(cls, num_kv_heads: int, group: int, key_dim: int, value_dim: int, chunk_tokens: int) -> "TileScratch":
        H, J = num_kv_heads, -(-group // TILE_QUERIES)
        return cls(
            queries_HJTRC=aligned_zeros((H, J, key_dim // TILE_DIMS, TILE_ROWS, PAIRED), np.uint32),
            products_SC=aligned_zeros((chunk_tokens, PAIRED), np.float32),
            scores_HGS=aligned_zeros((H, J * TILE_QUERIES, chunk_tokens), np.float32),
            weights_HJPCS=aligned_zeros((H, J, 2, PAIRED, chunk_tokens), np.uint32),
            sums_HGD=aligned_zeros((H, J * TILE_QUERIES, value_dim), np.float32),
            maxima_HG=aligned_zeros((H, group), np.float32),
            totals_HG=aligned_zeros((H, group), np.float32),
            shapes=attention_tile_configs(),
        )


@cache
def attention_tile_configs() -> np.ndarray:
    """Returns tile configurations for 1 to 16 positions of a page, (2, 16, 64) uint8: for scores, for values. Tile
    numbers are in `amx/unit.py`; the format is in Intel's manual under LDTILECFG."""
    shapes = aligned_zeros((2, TILE_ROWS, 64), np.uint8)
    shapes[..., 0] = 1  # palette
    for n in range(1, TILE_ROWS + 1):
        row_bytes = shapes[:, n - 1, 16:32].view(np.uint16)
        num_rows = shapes[:, n - 1, 48:56]
        row_bytes[0], num_rows[0] = [32] * 6 + [64] * 2, [TILE_ROWS] * 4 + [n] * 4
        row_bytes[1], num_rows[1] = [64] * 4 + [4 * n] * 2 + [64] * 2, [PAIRED] * 6 + [n] * 2
    return shapes


PLAIN_FLOATS, EXPONENTS, SMALL_FLOATS = range(3)  # dtypes of factors: plain float, E8M0, E4M3
# Kinds of zero points: none, one constant, plain numbers, 4-bit and 8-bit fields of words, AWQ's fields.
NO_ZEROS, CONSTANT_ZERO, PLAIN_ZEROS, FIELDS4, FIELDS8, AWQ_FIELDS = range(6)
NO_OVERALL, MULTIPLIED, DIVIDED = range(3)  # operation of overall factors on group factors


class Matrix(NamedTuple):
    """A stack of E matrices for Triton: pointers to the first (tensors or None), strides in elements, sizes.

    `extra`: the table of TABLE_NIBBLES, the bases of WINDOW4, or the stored row of each row (GGUF). `row_step`: rows
    from one expert to the next in one tall matrix; 0 if `..._expert` strides are used. `first_row`: row of the first
    field of words.
    """

    body: Any = None
    scales: Any = None
    zeros: Any = None
    groups: Any = None
    extra: Any = None
    overall: Any = None
    body_expert: int = 0
    scales_expert: int = 0
    zeros_expert: int = 0
    groups_expert: int = 0
    extra_expert: int = 0
    overall_expert: int = 0
    body_row: int = 0
    body_column: int = 0
    scales_row: int = 0
    scales_group: int = 0
    zeros_row: int = 0
    zeros_group: int = 0
    overall_row: int = 0
    scale_rows: int = 1
    num_columns: int = 0
    num_groups: int = 0
    row_step: int = 0
    first_row: int = 0
    last_factor: float = 1.0


class MatrixKind(NamedTuple):
    """Compile-time constants of a Triton kernel. `width`: columns per group; 0 for one group per row. `group_tile`:
    groups per tile; equal to its columns if each column's group is looked up (in `groups` if `has_groups`)."""

    encoding: int
    scales: int
    zeros: int
    zero_offset: int
    overall: int
    has_last_factor: bool
    has_groups: bool
    is_reordered: bool
    width: int
    group_tile: int
