"""What kernels are given: arrays that begin where loads want them to, rows of weights as they are stored, what goes
along with queries, and of a stored matrix on an accelerator. To import it loads neither numba nor Triton.

W work items, B rows, n pages of a row, P positions of a page, H KV heads, G query heads of each, D of a head, S
positions of a chunk.
"""

import math
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

ISA = "WEIGHTSTREAM_ISA"  # the environment variable that asks for less than the processor has, see compiled.py
PAIR_ROWS = 32  # of weights, which products take at once; what is left behind the last ones they leave to others
GROUP_NUMBERS, GROUP_BYTES = 64, 96  # of packed weights: a sign and seven bits of each number, then a nibble of each
WINDOW4, INT8, INT4, FLOAT8 = range(4)  # ways of packing: so, and codes with scales
# Codes with zero points and factors of groups. In rows: of a byte, with a sign, as FP8, of half a byte, as FP4, or of a
# table. In columns: of four or eight bits in words of neighbouring columns, of four in words of neighbouring rows.
BYTES, SIGNED_BYTES, SCALED_FLOAT8, HALVES, FLOAT4, IN_TABLE = range(4, 10)
WORDS4, WORDS8, ROW_WORDS = range(10, 13)
# On an accelerator alone: FP8 with five bits of exponent, numbers as they are, and GGUF's blocks.
FLOAT8_E5M2, PLAIN, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K = range(13, 20)
GGUF = {"Q8_0": Q8_0, "Q4_0": Q4_0, "Q4_K": Q4_K, "Q5_K": Q5_K, "Q6_K": Q6_K}
INT4_MIDDLE = 8  # what is added to codes of four bits, so that they are not negative
FLOAT32, BFLOAT16, FLOAT16 = range(3)  # what numbers of an output are
CODE_RUN = 32  # codes side by side: those of four bits lie in as many half bytes, the first half of them in low ones
CHUNK_TOKENS = 64  # with its queries and sums a chunk's scores stay in 48 KiB of L1, at 32 heads of 128
Span: TypeAlias = tuple[int, int]  # from the first number up to the second


class StoredRows(NamedTuple):
    """Rows of packed weights as bytes, one behind the other, and what goes along with them, flat. `layout`: see
    `linear/packed_rows.py`; for the rest `packed.RowPacking` and `grouped.GroupArrays`."""

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
    """A product in vectors, whatever its weights are: of the `num_rows` rows of x in `inputs`, into columns from
    `begin` on of an output of a `kind`, all of whose rows the `halves` are, see `linear_parts.OutputRows`. Threads that
    share one `counter`, of which the first number was 0, share the rows of w, `step` at a time, a multiple of PAIR_ROWS
    up to CHUNK_ROWS; each has `words`, a `tile` and `sums` of its own, used anew again and again, see `split`."""

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
    """Keys and values as flat runs of numbers; page i begins at i times the stride and holds (P, H, D)."""

    keys: np.ndarray
    values: np.ndarray
    key_stride: int
    value_stride: int
    num_pages: int
    page_tokens: int


class QuantizedPages(NamedTuple):
    """Pages of codes as flat runs of numbers, each beginning with the first page's: int8 of (P, H, D), or uint8, two
    `codes_in_byte`, of (P, H, D/2); scales, the bits of bfloat16, of (H, Dk) and (H, P); zeros such as these, int8, or
    empty uint8 where there are none. A page is `stride_bytes` behind the one before it in each of them."""

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
    """Rows' own pages, the last ones, as computed: that of row b is `slots_B1[b]` of them."""

    pages: Pages
    slots_B1: np.ndarray


class RowTables(NamedTuple):
    """Row b sees positions [begins[b], ends[b]) of the pages that `tables[b]` names, in order. The first `shared[b]`,
    whole chunks of them, are in the same pages as those of a row next to it."""

    tables_Bn: np.ndarray
    begins_B: np.ndarray
    ends_B: np.ndarray
    shared_B: np.ndarray


class AttentionItem(NamedTuple):
    """A run of rows, and of their KV heads."""

    rows: Span
    heads: Span


class WorkItems(NamedTuple):
    """The work items of threads that share them: of each its first row and that behind the last, its first KV head and
    that behind the last. `counter`: one number, how many items have been begun."""

    spans_W4: np.ndarray
    counter: np.ndarray


class SoftmaxState(NamedTuple):
    """The maxima and the sums of weights of rows, from one chunk that they share with others to the next."""

    maxima_BHG: np.ndarray
    totals_BHG: np.ndarray


class Softmax(NamedTuple):
    """Scores are capped to +-softcap, 0 is not at all. Maxima begin at `maxima_HG`, the sinks' scores if there are any,
    whose weight there is `total`."""

    softcap: np.float32
    maxima_HG: np.ndarray
    total: np.float32


class ScoreScratch(Protocol):
    """What a softmax turns into weights."""

    @property
    def scores_HGS(self) -> np.ndarray: ...
    @property
    def maxima_HG(self) -> np.ndarray: ...
    @property
    def totals_HG(self) -> np.ndarray: ...


class QuantizedScratch(NamedTuple):
    """A thread's own, beside that of `Scratch`: queries by a page's scales, and what zeros add to scores or sums."""

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
    """A thread's own: scores, then weights, of a chunk; the maxima so far; the sums of weights as seen from there."""

    scores_HGS: np.ndarray
    maxima_HG: np.ndarray
    totals_HG: np.ndarray

    @classmethod
    def make(cls, num_kv_heads: int, group: int, chunk_tokens: int) -> "Scratch":
        shape = (num_kv_heads, group)
        return cls(*(np.empty(s, np.float32) for s in ((*shape, chunk_tokens), shape, shape)))


def aligned_zeros(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Begins at a multiple of 64 bytes: a load of a tile whose rows do not takes six times as long."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(num_bytes + 63, np.uint8)
    return np.ndarray(shape, dtype, room, -room.__array_interface__["data"][0] % 64)


TILE_ROWS, TILE_DIMS, TILE_QUERIES = 16, 32, 4  # TILE_DIMS bfloat16 are the 64 bytes of a row
PAIRED = 2 * TILE_QUERIES  # what stands side by side: high and low parts, or sums of even and of odd dims


class TileScratch(NamedTuple):
    """`queries`: rows of pairs of dims, in each the high parts of four queries and then the low ones. `products`: of
    each position with the same eight. `weights`: high, then low; of each query with a zero behind it, which meets the
    odd dims of values, and before it. `sums`: of each query the even dims, then the odd ones."""

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
    """(2, 16, 64) bytes: how scores, and how values, of 1 to 16 positions of a page have the eight tiles: their numbers
    in `unit.py`, the form in Intel's manual under LDTILECFG."""
    shapes = aligned_zeros((2, TILE_ROWS, 64), np.uint8)
    shapes[..., 0] = 1  # the form
    for n in range(1, TILE_ROWS + 1):
        row_bytes_of = shapes[:, n - 1, 16:32].view(np.uint16)
        rows_of = shapes[:, n - 1, 48:56]
        row_bytes_of[0], rows_of[0] = [32] * 6 + [64] * 2, [TILE_ROWS] * 4 + [n] * 4
        row_bytes_of[1], rows_of[1] = [64] * 4 + [4 * n] * 2 + [64] * 2, [PAIRED] * 6 + [n] * 2
    return shapes


FLOATS, EXPONENTS, SMALL_FLOATS = range(3)  # dtypes of factors: any plain float, E8M0, E4M3
# Kinds of zero points: none, one for all, plain numbers, fields of words of 4 and of 8 bits, AWQ's fields.
NO_ZEROS, SAME_ZERO, PLAIN_ZEROS, FIELDS4, FIELDS8, AWQ_FIELDS = range(6)
NO_OVERALL, MULTIPLIED, DIVIDED = range(3)  # what overall factors do to those of groups


class Matrix(NamedTuple):
    """Pointers to the first of E matrices (tensors, None where there are none), strides in elements, and sizes.

    `extra`: the table of IN_TABLE, the bases of WINDOW4, or which stored row each row of blocks is. `row_step`:
    rows from one expert to the next where they lie in one tall matrix, 0 where `..._expert` strides lead there.
    `first_row`: the row of the first field of words.
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
    """What a kernel is compiled for. `width`: columns of a group, 0 for one group in a row. `group_tile`: groups in a
    tile; as many as columns where each column's is looked up, in `groups` if it `has_groups`."""

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
