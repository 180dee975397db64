"""What kernels are given: arrays that begin where loads want them to, and what goes along with queries.

W work items, B rows, n pages of a row, P positions of a page, H KV heads, G query heads of each, D of a head, S
positions of a chunk.
"""

import math
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

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
    codes in each, of (P, H, D/2); scales, the bits of bfloat16, of (H, Dk) and (H, P); zeros such as these, int8, or
    empty uint8 where there are none. A page is `stride_bytes` behind the one before it in each of them."""

    key_codes: np.ndarray
    value_codes: np.ndarray
    key_scales: np.ndarray
    value_scales: np.ndarray
    key_zeros: np.ndarray
    value_zeros: np.ndarray
    stride_bytes: int
    num_pages: int
    page_tokens: int


class Rows(NamedTuple):
    """Row b sees positions [begins[b], ends[b]) of the pages that `tables[b]` names, in order. The first `shared[b]`,
    whole chunks of them, are in the same pages as those of a row next to it."""

    tables_Bn: np.ndarray
    begins_B: np.ndarray
    ends_B: np.ndarray
    shared_B: np.ndarray


class WorkItems(NamedTuple):
    """The work items of threads that share them: of each its first row and that behind the last, its first KV head and
    that behind the last. `begun`: one number, how many items have been begun."""

    spans_W4: np.ndarray
    begun: np.ndarray


class Paused(NamedTuple):
    """The maxima and the sums of weights of rows, from one chunk that they share with others to the next."""

    tops_BHG: np.ndarray
    totals_BHG: np.ndarray


class Softmax(NamedTuple):
    """Scores are capped to +-softcap, 0 is not at all. Maxima begin at `tops_HG`, the sinks' scores if there are any,
    whose weight there is `total`."""

    softcap: np.float32
    tops_HG: np.ndarray
    total: np.float32


class Scores(Protocol):
    """What a softmax turns into weights."""

    @property
    def scores_HGS(self) -> np.ndarray: ...
    @property
    def tops_HG(self) -> np.ndarray: ...
    @property
    def totals_HG(self) -> np.ndarray: ...


class QuantizedScratch(NamedTuple):
    """A thread's own, beside that of `Scratch`: queries by a page's scales, and what zeros add to scores or sums."""

    scores_HGS: np.ndarray
    tops_HG: np.ndarray
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
    tops_HG: np.ndarray
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
