"""Decode attention on the CPU, beside the keys and values: they are read where they lie, once, and never copied.

The compiled kernel lets go of the interpreter, so that its threads run beside torch's and beside each other; the work
is cut into rows, and into KV heads where rows are few.

B rows, N pages, P positions of a page, n pages of a row, H heads, G query heads of a KV head, D of a head.
"""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ..kernels.amx.scratch import TILE_DIMS
from ..kernels.arguments import Rows, Span, WorkItems
from ..kernels.compiler import has_compiler, has_matrix_unit
from ..shared_work import parallel_for
from ..units import MIB
from .host_work import fit_tiles, in_tiles, in_vectors, pages_of, rows_of, softmax_of
from .plain_attention import decode_attention_torch

ITEMS_PER_THREAD = 4  # so that nobody waits long for the last one
MIN_ITEM_BYTES = MIB // 2  # takes about 50 us, as long as it takes to wake a thread


class WorkItem(NamedTuple):
    rows: Span
    heads: Span


def decode_attention(
    q_BHD: torch.Tensor,
    k_NPHD: torch.Tensor,
    v_NPHD: torch.Tensor,
    tables_Bn: torch.Tensor,
    begins_B: torch.Tensor,
    ends_B: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    num_threads: int | None = None,
) -> torch.Tensor:
    """One query per row over positions [begins_B[b], ends_B[b]) of the pages that its table names: (B, H, Dv) in the
    queries' dtype, summed in float32. Nothing outside of a row's range is looked at; a row without any gets zeros.

    `q_BHD` holds H times G query heads, those of a KV head side by side. Keys and values may be strided over N and are
    float32, bfloat16, float16 or, as uint8, the bits of float8. Scores are `scale * q.k`, capped to +-softcap; the
    sinks are scores beside them whose weight is dropped. `num_threads` None: as many as torch has in the calling
    thread, which is one in a worker of `AttentionWorkers`. Returns when all is done. `tables_Bn`, `begins_B` and
    `ends_B` must never be written to again: the layers of a pass bring the same ones.
    """
    _check(k_NPHD, v_NPHD)
    num_kv_heads, num_threads = k_NPHD.shape[2], num_threads or torch.get_num_threads()
    position_bytes = num_kv_heads * (k_NPHD.shape[3] + v_NPHD.shape[3]) * k_NPHD.itemsize
    held = (tables_Bn, begins_B, ends_B)
    rows, spans_W4 = work_items(*held, k_NPHD.shape[1], num_kv_heads, position_bytes, num_threads)
    if not has_compiler():
        return decode_attention_torch(q_BHD, k_NPHD, v_NPHD, *held, scale=scale, softcap=softcap, sinks_H=sinks_H)
    q_BHGD = q_BHD.unflatten(1, (num_kv_heads, -1))
    work_in = in_tiles if fit_tiles(k_NPHD, v_NPHD) and has_matrix_unit() else in_vectors
    softmax = softmax_of(softcap, sinks_H, q_BHGD.shape[1:3])
    work = work_in(q_BHGD, scale, pages_of(k_NPHD, v_NPHD), rows, softmax, v_NPHD.shape[3])
    items = WorkItems(spans_W4, np.zeros(1, np.int64))
    parallel_for([items] * min(num_threads, len(spans_W4)), work.run, num_threads)
    return work.out_BHGD.flatten(1, 2).to(q_BHD.dtype)


def prepare_decode_attention(dtype: torch.dtype) -> None:
    """Loads, and at the first time compiles, what KV of this dtype needs, so that no pass takes its time and memory:
    about 110 MiB, most of it the compiler's."""
    begin, end = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    for dim in (1, TILE_DIMS):
        page = torch.zeros(1, 1, 1, dim, dtype=dtype)
        decode_attention(page[0], page, page, begin[None], begin, end, scale=1.0)


def cut(num_positions_B: np.ndarray, num_kv_heads: int, position_bytes: int, num_threads: int) -> list[WorkItem]:
    """Work items of about the same bytes: neighbouring rows, and of a row that alone is more than an item, KV heads."""
    ends_B = np.cumsum(num_positions_B)
    total = int(ends_B[-1]) if len(ends_B) else 0
    wanted = min(ITEMS_PER_THREAD * num_threads if num_threads > 1 else 1, total * position_bytes // MIN_ITEM_BYTES)
    if wanted <= 1:
        return [WorkItem(rows=(0, len(ends_B)), heads=(0, num_kv_heads))]
    inner = np.searchsorted(ends_B, total * np.arange(1, wanted) / wanted) + 1
    bounds = np.unique([0, *inner, len(ends_B)]).tolist()
    items = []
    for begin, end in pairwise(bounds):
        share = int(num_positions_B[begin:end].sum()) * wanted / total
        num_parts = min(num_kv_heads, max(1, round(share)))
        cuts = [num_kv_heads * part // num_parts for part in range(num_parts + 1)]
        items += [WorkItem(rows=(begin, end), heads=heads) for heads in pairwise(cuts)]
    return items


def _check(k_NPHD: torch.Tensor, v_NPHD: torch.Tensor) -> None:
    """What compiled code would not notice before it reads or writes elsewhere; of rows, `work_items` does."""
    assert k_NPHD.device.type == v_NPHD.device.type == "cpu", f"KV pages are on {k_NPHD.device}, {v_NPHD.device}"
    assert k_NPHD.dtype == v_NPHD.dtype, f"keys are {k_NPHD.dtype}, values {v_NPHD.dtype}"
    assert k_NPHD.shape[:3] == v_NPHD.shape[:3], f"pages of keys {k_NPHD.shape} and values {v_NPHD.shape}"


# Of tensors themselves: layers of a pass bring the same ones, those of each kind theirs, lane after lane. With fewer
# places than that nothing would be found again; a table is a hundred-thousandth of the keys and values it leads to.
@lru_cache(maxsize=128)
def work_items(
    tables_Bn: torch.Tensor,
    begins_B: torch.Tensor,
    ends_B: torch.Tensor,
    page_tokens: int,
    num_kv_heads: int,
    position_bytes: int,
    num_threads: int,
) -> tuple[Rows, np.ndarray]:
    assert len(tables_Bn) == len(begins_B) == len(ends_B)
    capacity = tables_Bn.shape[1] * page_tokens
    if len(ends_B):
        first, last = int(begins_B.min()), int(ends_B.max())
        assert first >= 0, f"a row begins at position {first}"
        assert last <= capacity, f"a row ends at position {last}, its pages hold {capacity}"
    rows = rows_of(tables_Bn, begins_B, ends_B, page_tokens)
    num_positions_B = np.maximum(rows.ends_B - rows.begins_B, 0)
    items = cut(num_positions_B, num_kv_heads, position_bytes, num_threads)
    return rows, np.array([(*item.rows, *item.heads) for item in items], np.int64)
