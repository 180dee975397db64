"""Argument types of kernels: stored weights, KV pages, work items and scratch memory. Loads neither numba nor Triton.

A product multiplies x (M rows of K inputs) by the transpose of a weight matrix w (N rows, one per output). A row of an
attention kernel is the new token of one sequence. A chunk is CHUNK_TOKENS adjacent positions of a sequence, scored
before the next ones.

Axes in names of arrays: W work items, B rows, n pages of a row, P positions of a page, H KV heads, G query heads per
KV head (argument `group`), D numbers per head (Dk of a key), S positions of a chunk.
"""

import math
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

ISA_VARIABLE = "WEIGHTSTREAM_ISA"  # environment variable that limits the instruction set, see compiled.py
PAIR_ROWS = 32  # rows of w per step of a product, two AMX tiles; kernels skip the last N % PAIR_ROWS rows of w
GROUP_NUMBERS = 64  # K of packed rows is a multiple of it
BLOCK_NUMBERS = 256  # numbers of a packed row that take `block_bytes`
GROUP_BYTES = 96  # bytes of GROUP_NUMBERS in WINDOW4: 64 of sign and mantissa, then 32 of two exponent codes each
# Encodings that `weightstream pack` writes. WINDOW4: lossless bfloat16 in 12 bits, see formats/kinds/window4.py.
WINDOW4, INT8, INT4, FLOAT8 = range(4)
# Encodings of published checkpoints, with a zero point and a factor per group of columns.
# Stored row by row: a byte, FP8, a nibble (4 bits), FP4 or a nibble that indexes a table, for each number.
# Stored in 32-bit words: WORDS4 and WORDS8 hold 4- and 8-bit codes of neighboring columns, ROW_WORDS 4-bit codes of
# neighboring rows.
BYTES, SIGNED_BYTES, SCALED_FLOAT8, NIBBLES, FLOAT4, TABLE_NIBBLES = range(4, 10)
WORDS4, WORDS8, ROW_WORDS = range(10, 13)
WORD_ROWS = 8  # rows of w whose 4-bit codes share a word of ROW_WORDS
FLOAT8_E5M2, PLAIN = range(13, 15)  # for accelerators only: FP8 E5M2, and unquantized numbers of x's dtype
# GGUF's blocks of 32 or 256 numbers; the first five also for accelerators.
Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K = range(15, 25)
GGUF = {"Q8_0": Q8_0, "Q4_0": Q4_0, "Q4_K": Q4_K, "Q5_K": Q5_K, "Q6_K": Q6_K}
GGUF |= {"Q4_1": Q4_1, "Q5_0": Q5_0, "Q5_1": Q5_1, "Q2_K": Q2_K, "Q3_K": Q3_K}
DEVICE_GGUF = (Q8_0, Q4_0, Q4_K, Q5_K, Q6_K)
INT4_MIDDLE = 8  # added to INT4 codes, -8 to 7, to store them unsigned
FLOAT32, BFLOAT16, FLOAT16 = range(3)  # dtypes of a product's output
CODE_RUN = 32  # adjacent INT4 codes in 16 bytes: the first 16 in their low nibbles, the others in the high ones
CHUNK_TOKENS = 64  # positions per chunk: its scores, queries and sums fit 48 KiB of L1 cache at 32 heads of 128
Span: TypeAlias = tuple[int, int]  # begin, end (exclusive)


class StoredRows(NamedTuple):
    """Packed rows of weights as flat arrays. `layout` has the fields of `packed_rows.Layout` in linear/. `body`: codes.
    `starts`, `columns`, `exponents`: see `packed.Escapes`; `scales`: see `packed.Scales`; `zeros`, `factors`, `table`
    and `groups` (of each column): see `grouped.GroupArrays`; `order`: see `gguf_blocks.widen_blocks`. Arrays that the
    encoding does not use are empty."""

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
    order: np.ndarray


class VectorProduct(NamedTuple):
    """Arguments of a product in the vector kernels, for one thread. `inputs`: `num_rows` rows of x, as `lay_out_inputs`
    wrote them. `halves`: the output (M, N) as uint16, two for a float32. `kind`: its dtype, such as BFLOAT16. `begin`:
    its column for row 0 of w.

    Threads take `step` rows of w at a time, a multiple of PAIR_ROWS up to CHUNK_ROWS. `counter` (1,) is the next row of
    w, shared by all threads and initially 0. `words`, `tile` and `sums` are this thread's scratch memory: see
    `split_workspace` in `linear_wide.py` or `linear_narrow.py`.
    """

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
    """KV pages as flat arrays; page i begins at element i * stride of `keys` or `values`, and holds (P, H, D)."""

    keys: np.ndarray
    values: np.ndarray
    key_stride: int
    value_stride: int
    num_pages: int
    page_tokens: int


class QuantizedPages(NamedTuple):
    """Quantized KV pages as flat arrays; in each array, pages are `stride_bytes` apart. Codes of a page: int8
    (P, H, D), or uint8 (P, H, D/2) if `codes_in_byte` is 2. Scales: bfloat16 bits, (H, Dk) for keys and (H, P) for
    values. Zero points: int8 in the shape of the scales, or an empty uint8 array if the format has none."""

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
    """The unquantized last page of each row: row b has page `slots_B1[b]` of `pages`."""

    pages: Pages
    slots_B1: np.ndarray


class RowTables(NamedTuple):
    """Page tables: row b attends to positions [begins[b], ends[b]); `tables[b]` lists its pages. Its first `shared[b]`
    positions, a multiple of CHUNK_TOKENS, are in pages that a neighboring row also has."""

    tables_Bn: np.ndarray
    begins_B: np.ndarray
    ends_B: np.ndarray
    shared_B: np.ndarray


class AttentionItem(NamedTuple):
    """A work item of decode attention: adjacent rows, and the KV heads to compute for them."""

    rows: Span
    heads: Span


class WorkItems(NamedTuple):
    """Work items shared by threads. `spans_W4`: per item its first row, end row, first KV head and end head. `counter`
    (1,): index of the next item; threads increase it atomically."""

    spans_W4: np.ndarray
    counter: np.ndarray


class SoftmaxState(NamedTuple):
    """Running maxima of scores and running totals of softmax weights, per row and query head. Saved here while other
    rows compute a shared chunk."""

    maxima_BHG: np.ndarray
    totals_BHG: np.ndarray


class Softmax(NamedTuple):
    """Softmax parameters. `softcap`: limit of absolute scores; 0 disables it. `maxima_HG` and `total`: initial maxima
    and initial total of weights; with attention sinks, the scores of the sinks and their weight 1."""

    softcap: np.float32
    maxima_HG: np.ndarray
    total: np.float32


class ScoreScratch(Protocol):
    """The scratch memory that the softmax uses, see `Scratch`."""

    @property
    def scores_HGS(self) -> np.ndarray: ...
    @property
    def maxima_HG(self) -> np.ndarray: ...
    @property
    def totals_HG(self) -> np.ndarray: ...


class QuantizedScratch(NamedTuple):
    """A thread's scratch memory for quantized pages: a `Scratch`, `scaled_HGD` (queries times a page's key scales), and
    `added_HG` (the zero points' part of each query's scores, later of its sums)."""

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
    """A thread's scratch memory. `scores_HGS`: scores of a chunk, replaced by their softmax weights. `maxima_HG`:
    running maxima. `totals_HG`: running totals of weights."""

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
    buffer = np.zeros(num_bytes + 63, np.uint8)
    return np.ndarray(shape, dtype, buffer, -buffer.__array_interface__["data"][0] % 64)


# A tile is a register of the CPU's matrix unit (AMX): up to TILE_ROWS rows of 64 bytes, or TILE_DIMS bfloat16.
TILE_ROWS, TILE_DIMS, TILE_QUERIES = 16, 32, 4  # TILE_QUERIES: queries in a tile
PAIRED = 2 * TILE_QUERIES  # two numbers per query: high and low bfloat16 part, or sums of an even and an odd dim


class TileScratch(NamedTuple):
    """A thread's scratch memory for attention in tiles. A float32 is split into a high and a low bfloat16 part. The
    unit multiplies 32-bit words, each a pair of bfloat16. J groups of TILE_QUERIES queries, T tiles of a head, R pairs
    of dims in a tile, C = PAIRED.

    `queries`: word [r, c] has dims 2r and 2r + 1 of the high part of query c; of the low part from TILE_QUERIES on.
    `products`: of each position's key with these C parts.
    `weights`: high, then low parts (axis of length 2). A query takes two of the C rows: one has the part in the lower
    half of each word and so multiplies even dims of values, the next has it in the upper half, for odd dims.
    `sums`: even dims, then odd dims. `shapes`: see `attention_tile_configs`.
    """

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
    """Returns tile configurations (2, 16, 64) uint8: first for scores, then for values; entry n - 1 is for n positions
    of a page. Each has bytes per row and rows for tiles 0 to 7, whose use is in `amx/unit.py`. The format is in Intel's
    manual under LDTILECFG."""
    shapes = aligned_zeros((2, TILE_ROWS, 64), np.uint8)
    shapes[..., 0] = 1  # palette 1: the only one with tiles
    for n in range(1, TILE_ROWS + 1):
        row_bytes = shapes[:, n - 1, 16:32].view(np.uint16)  # for each of the eight tiles
        num_rows = shapes[:, n - 1, 48:56]  # for each of the eight tiles
        row_bytes[0], num_rows[0] = [32] * 6 + [64] * 2, [TILE_ROWS] * 4 + [n] * 4
        row_bytes[1], num_rows[1] = [64] * 4 + [4 * n] * 2 + [64] * 2, [PAIRED] * 6 + [n] * 2
    return shapes


# Constants of Triton kernels. A factor is a group's scale; an overall factor is a second one, per row.
PLAIN_FLOATS, EXPONENTS, SMALL_FLOATS = range(3)  # dtypes of factors: float16 to float32, E8M0, E4M3
# Kinds of zero points: none, one constant, a number per group, 4-bit or 8-bit fields of words, 4-bit in AWQ's order.
NO_ZEROS, CONSTANT_ZERO, PLAIN_ZEROS, FIELDS4, FIELDS8, AWQ_FIELDS = range(6)
NO_OVERALL, MULTIPLIED, DIVIDED = range(3)  # group factors are multiplied or divided by the overall factor


class Matrix(NamedTuple):
    """A stack of stored matrices, one per expert, as argument of a Triton kernel. Tensors or None, then their strides
    in elements (`..._expert`: from one matrix to the next), then sizes. For the tensors see `Codes` in linear/rows.py.

    `extra`: the table of TABLE_NIBBLES, the exponent bases of WINDOW4, or `Codes.order`. `scale_rows`: rows that share
    a factor. `row_step`: rows per expert if all experts are in one tall matrix, otherwise 0. `first_row`: the stored
    row that is row 0 of this matrix, if words hold several rows; `body` begins with the word of that row.
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
    """Compile-time constants of a Triton kernel: how matrices are stored, and how a tile splits into groups of columns
    that share a factor. `encoding`, `scales`, `zeros` and `overall` are constants of this module. `has_groups`: each
    column's group is in `Matrix.groups`. `is_reordered`: stored row numbers are in `Matrix.extra`. `width`: columns per
    group; 0 for one group per row. `group_tile`: groups per tile; equal to the tile's columns if each column's group is
    computed or looked up by itself."""

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
