"""What the compiled decode attention is given, beside its queries.

B rows, n pages of a row, P positions of a page, H KV heads, G query heads of each, D of a head, S positions of a chunk.
"""

from typing import NamedTuple, TypeAlias

import numpy as np

Span: TypeAlias = tuple[int, int]  # from the first number up to the second


class Pages(NamedTuple):
    """Keys and values as flat runs of numbers; page i begins at i times the stride and holds (P, H, D)."""

    keys: np.ndarray
    values: np.ndarray
    key_stride: int
    value_stride: int
    num_pages: int
    page_tokens: int


class Rows(NamedTuple):
    """Row b sees positions [begins[b], ends[b]) of the pages that `tables[b]` names, in order."""

    tables_Bn: np.ndarray
    begins_B: np.ndarray
    ends_B: np.ndarray


class Pieces(NamedTuple):
    """Of the work, for threads that share it: the first row and that behind the last, the first KV head and that behind
    the last. `taken`: one number, how many pieces have been begun."""

    spans_P4: np.ndarray
    taken: np.ndarray


class Softmax(NamedTuple):
    """Scores are capped to +-softcap, 0 is not at all. Maxima begin at `tops_HG`, the sinks' scores if there are any,
    whose weight there is `total`."""

    softcap: np.float32
    tops_HG: np.ndarray
    total: np.float32


class Scratch(NamedTuple):
    """A thread's own: scores, then weights, of a chunk; the maxima so far; the sums of weights as seen from there."""

    scores_HGS: np.ndarray
    tops_HG: np.ndarray
    totals_HG: np.ndarray

    @classmethod
    def make(cls, num_kv_heads: int, group: int, chunk_tokens: int) -> "Scratch":
        shape = (num_kv_heads, group)
        return cls(*(np.empty(s, np.float32) for s in ((*shape, chunk_tokens), shape, shape)))
