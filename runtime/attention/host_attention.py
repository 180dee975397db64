"""Decode attention on the CPU: reads keys and values in place, once, without copies.

The compiled kernels release the GIL, so their threads run in parallel. Work is divided by rows (sequences), and if
there are few rows also by KV heads. Without numba, `decode_attention_torch` is used, which gathers pages first and is
also the reference for tests. Quantized pages use another compiled kernel, or without numba the operators for
accelerators.

Letters of tensor dimensions: B rows, N pages, P positions of a page, n pages of a row, H heads, G query heads of a KV
head, D elements of a head (Dv of a value head), W work items.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from ..config.settings import KVDType
from ..kernels.arguments import (
    CHUNK_TOKENS,
    TILE_DIMS,
    TILE_ROWS,
    AttentionItem,
    Pages,
    QuantizedPages,
    QuantizedScratch,
    RowTables,
    Scratch,
    Softmax,
    SoftmaxState,
    TailPages,
    TileScratch,
    WorkItems,
)
from ..kernels.compiler import has_compiler, has_matrix_unit
from ..plan.shape.dtypes import PAGE_TOKENS
from ..shared_work import parallel_for
from ..units import MIB
from .device_attention import decode_on_device
from .layout import PassLayout, QuantizedKV
from .page_codes import PageFormat, cast_to_compute
from .views import DecodeRows, Reach, Rule

GATHERED_BYTES = 16 * MIB  # float32 keys that `decode_attention_torch` gathers at once; values take as much again
ITEMS_PER_THREAD = 4  # several, so that all threads finish at about the same time
MIN_ITEM_BYTES = MIB // 2  # takes about 50 us, as long as waking a thread
# torch dtype -> dtype of the array that kernels get: NumPy lacks bfloat16. uint8 has the bits of float8.
BITS = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
    torch.uint8: torch.uint8,
}

# A function that processes items until none is left, and the output that it writes (B, H, G, D).
Work = tuple[Callable[[WorkItems], None], torch.Tensor]


def decode_attention(
    q_BHD: torch.Tensor,
    k_NPHD: torch.Tensor,
    v_NPHD: torch.Tensor,
    tables_Bn: torch.Tensor,
    begins_B: torch.Tensor,
    ends_B: torch.Tensor,
    rule: Rule,
    num_threads: int | None = None,
) -> torch.Tensor:
    """Attention of one query per row over positions [begins_B[b], ends_B[b]) of the row's pages: (B, H, Dv).

    The output has the dtype of the queries and is accumulated in float32. Rows with an empty range get zeros. `q_BHD`
    has all query heads; those of a KV head are adjacent. Keys and values may have any stride between pages; they are
    float32, bfloat16, float16, or float8 bits as uint8. `tables_Bn`: page numbers of each row. `num_threads`: None is
    torch's number in the calling thread, which is 1 in a worker of `AttentionWorkers`.

    Blocks until done. `tables_Bn`, `begins_B` and `ends_B` must never be modified afterwards, as `work_items` caches by
    tensor identity.
    """
    # Compiled code does not check bounds: wrong shapes would read or write other memory. `work_items` checks rows.
    assert k_NPHD.device.type == v_NPHD.device.type == "cpu", f"KV pages are on {k_NPHD.device}, {v_NPHD.device}"
    assert k_NPHD.dtype == v_NPHD.dtype, f"keys are {k_NPHD.dtype}, values {v_NPHD.dtype}"
    assert k_NPHD.shape[:3] == v_NPHD.shape[:3], f"pages of keys {k_NPHD.shape} and values {v_NPHD.shape}"
    num_kv_heads, num_threads = k_NPHD.shape[2], num_threads or torch.get_num_threads()
    position_bytes = num_kv_heads * (k_NPHD.shape[3] + v_NPHD.shape[3]) * k_NPHD.itemsize
    tables = (tables_Bn, begins_B, ends_B)
    rows, spans_W4 = work_items(*tables, k_NPHD.shape[1], num_kv_heads, position_bytes, num_threads)
    if not has_compiler():
        return decode_attention_torch(q_BHD, k_NPHD, v_NPHD, *tables, rule)
    q_BHGD = q_BHD.unflatten(1, (num_kv_heads, -1))
    prepare_work = prepare_tile_work if can_use_tiles(k_NPHD, v_NPHD) and has_matrix_unit() else prepare_vector_work
    softmax = make_softmax(rule, q_BHGD.shape[1:3])
    work = prepare_work(q_BHGD, rule.scale, make_pages(k_NPHD, v_NPHD), rows, softmax, v_NPHD.shape[3])
    return _run_items(work, spans_W4, num_threads).flatten(1, 2).to(q_BHD.dtype)


def decode_quantized(
    q_BHD: torch.Tensor, kv: QuantizedKV, rows: DecodeRows, reach: Reach, rule: Rule, num_threads: int | None = None
) -> torch.Tensor:
    """Attention of one new token per row over quantized pages: (B, H, Dv).

    The output has the dtype of the queries and is accumulated in float32. Blocks until done.
    """
    if not has_compiler():
        return decode_on_device(q_BHD, kv, rows, reach, rule)
    from ..kernels.attention_quantized import attend

    num_kv_heads, num_threads = kv.format.num_heads, num_threads or torch.get_num_threads()
    q_BHGD = (q_BHD.unflatten(1, (num_kv_heads, -1)).float() * rule.scale).contiguous()
    out_BHGD = q_BHGD.new_zeros(*q_BHGD.shape[:3], kv.format.value_dim)
    tables = (kv.layout.tables_Bn, rows.begins(reach), rows.ends)
    position_bytes = kv.format.page_bytes // PAGE_TOKENS
    host_rows, spans_W4 = work_items(*tables, PAGE_TOKENS, num_kv_heads, position_bytes, num_threads)
    parts = kv.format.split(kv.pages)
    flat = [_flat_array(part) if part.numel() else np.empty(0, np.uint8) for part in parts]  # int8 has no zero points
    pages = QuantizedPages(
        *flat,
        codes_in_byte=kv.format.codes_in_byte,
        stride_bytes=kv.pages.stride(0),
        num_pages=len(kv.pages),
        page_tokens=PAGE_TOKENS,
    )
    tails = TailPages(make_pages(*kv.tails), kv.layout.slots_B[:, None].int().contiguous().numpy())
    softmax = make_softmax(rule, q_BHGD.shape[1:3])
    q, out = q_BHGD.numpy(), out_BHGD.numpy()

    def run(items: WorkItems) -> None:
        scratch = QuantizedScratch.make(q.shape[1], q.shape[2], q.shape[3], CHUNK_TOKENS)
        attend(q, pages, tails, host_rows, softmax, out, items, scratch)

    return _run_items((run, out_BHGD), spans_W4, num_threads).flatten(1, 2).to(q_BHD.dtype)


def _run_items(work: Work, spans_W4: np.ndarray, num_threads: int) -> torch.Tensor:
    """Runs all items on threads and returns the output. `spans_W4`: see `work_items`."""
    run, out_BHGD = work
    items = WorkItems(spans_W4, np.zeros(1, np.int64))
    parallel_for([items] * min(num_threads, len(spans_W4)), run, num_threads)
    return out_BHGD


def decode_attention_torch(
    q_BHD: torch.Tensor,
    k_NPHD: torch.Tensor,
    v_NPHD: torch.Tensor,
    tables_Bn: torch.Tensor,
    begins_B: torch.Tensor,
    ends_B: torch.Tensor,
    rule: Rule,
) -> torch.Tensor:
    """The same as `decode_attention` in torch operators, on any device."""
    num_kv_heads, page_tokens = k_NPHD.shape[2], k_NPHD.shape[1]
    out_BHD = q_BHD.new_zeros(*q_BHD.shape[:2], v_NPHD.shape[3])
    nonempty_rows = torch.nonzero(ends_B > begins_B).flatten()
    sinks_HG1 = None if rule.sinks is None else rule.sinks.float().view(num_kv_heads, -1, 1)
    row_bytes = 4 * max(1, tables_Bn.shape[1]) * page_tokens * num_kv_heads * k_NPHD.shape[3]
    # A few rows at a time, to limit the memory of gathered keys and values.
    for rows in nonempty_rows.split(max(1, GATHERED_BYTES // row_bytes)) if len(nonempty_rows) else ():
        begins, ends = begins_B[rows], ends_B[rows]
        first, last = int(begins.min()) // page_tokens, -(-int(ends.max()) // page_tokens)
        positions_S = torch.arange(first * page_tokens, last * page_tokens, device=q_BHD.device)
        hidden_BS = (positions_S < begins[:, None]) | (positions_S >= ends[:, None])
        is_unused_Bn = hidden_BS.unflatten(1, (-1, page_tokens)).all(2)
        pages_Bn = tables_Bn[rows, first:last].long().masked_fill(is_unused_Bn, 0)
        k_BHSD, v_BHSD = (pages[pages_Bn].flatten(1, 2).transpose(1, 2) for pages in (k_NPHD, v_NPHD))
        k_BHSD, v_BHSD = cast_to_compute(k_BHSD, torch.float32), cast_to_compute(v_BHSD, torch.float32)
        q_BHGD = q_BHD[rows].float().unflatten(1, (num_kv_heads, -1)) * rule.scale
        weights_BHGS = rule.weights(q_BHGD @ k_BHSD.transpose(2, 3), sinks_HG1, hidden_BS[:, None, None])
        # Hidden values have weight 0, but memory that was never written may be NaN, and 0 times NaN is NaN.
        visible_BHSD = v_BHSD.masked_fill(hidden_BS[:, None, :, None], 0)
        out_BHD[rows] = (weights_BHGS @ visible_BHSD).flatten(1, 2).to(out_BHD.dtype)
    return out_BHD


def prepare_vector_work(
    q_BHGD: torch.Tensor, scale: float, pages: Pages, rows: RowTables, softmax: Softmax, value_dim: int
) -> Work:
    """Work for the kernel with vector instructions, with float32 queries and outputs."""
    from ..kernels.attention import attend

    scaled_BHGD = (q_BHGD.float() * scale).contiguous()
    out_BHGD = scaled_BHGD.new_zeros(*q_BHGD.shape[:3], value_dim)
    q, out = scaled_BHGD.numpy(), out_BHGD.numpy()
    # Rows that share pages are computed in turns, chunk by chunk, and each pauses with its softmax state.
    num_paused = len(q) if rows.shared_B.any() else 0
    paused = SoftmaxState(*(np.empty((num_paused, *q.shape[1:3]), np.float32) for _ in range(2)))

    def run(items: WorkItems) -> None:
        attend(q, pages, rows, softmax, out, items, Scratch.make(q.shape[1], q.shape[2], CHUNK_TOKENS), paused)

    return run, out_BHGD


def prepare_tile_work(
    q_BHGD: torch.Tensor, scale: float, pages: Pages, rows: RowTables, softmax: Softmax, value_dim: int
) -> Work:
    """Work for the tile (AMX) kernel, with bfloat16 or float32 queries and outputs."""
    from ..kernels.amx.attention import attend

    # bfloat16 queries are not converted: torch's OpenMP threads would spin afterwards, and delay ours by 2 of 11 ms.
    q_BHGD = (q_BHGD if q_BHGD.dtype == torch.bfloat16 else q_BHGD.float()).contiguous()
    out_BHGD = q_BHGD.new_empty(*q_BHGD.shape[:3], value_dim)
    q, out = (x_BHGD.view(BITS[x_BHGD.dtype]).numpy() for x_BHGD in (q_BHGD, out_BHGD))
    (H, G, D), factor = q.shape[1:], np.float32(scale)

    def run(items: WorkItems) -> None:
        scratch = TileScratch.make(H, G, D, value_dim, CHUNK_TOKENS)
        attend(q, factor, pages, rows, softmax, out, items, scratch)

    return run, out_BHGD


def can_use_tiles(k_NPHD: torch.Tensor, v_NPHD: torch.Tensor) -> bool:
    """True if the tile (AMX) kernel supports such pages."""
    is_short = k_NPHD.shape[1] <= TILE_ROWS
    has_whole_tiles = k_NPHD.shape[3] % TILE_DIMS == v_NPHD.shape[3] % TILE_DIMS == 0
    return k_NPHD.dtype == torch.bfloat16 and is_short and has_whole_tiles


def _flat_array(pages: torch.Tensor) -> np.ndarray:
    """1-D array over the memory of all pages, with the gaps between them.

    The compiler vectorizes loads from contiguous arrays only.
    """
    span, bits = pages.numel(), BITS.get(pages.dtype, pages.dtype)
    if not pages.is_contiguous():
        page = pages[0]
        assert page.is_contiguous(), f"a KV page has strides {page.stride()}: each page must be contiguous"
        span = (len(pages) - 1) * pages.stride(0) + page.numel()
    return pages.as_strided((span,), (1,)).view(bits).numpy()


def make_pages(k_NPHD: torch.Tensor, v_NPHD: torch.Tensor) -> Pages:
    strides = k_NPHD.stride(0), v_NPHD.stride(0)
    return Pages(
        _flat_array(k_NPHD), _flat_array(v_NPHD), *strides, num_pages=k_NPHD.shape[0], page_tokens=k_NPHD.shape[1]
    )


def make_row_tables(
    tables_Bn: torch.Tensor, begins_B: torch.Tensor, ends_B: torch.Tensor, page_tokens: int
) -> RowTables:
    tables, ends = _numpy(tables_Bn, torch.int32), _numpy(ends_B, torch.int64)
    return RowTables(
        tables, _numpy(begins_B, torch.int64), ends, _shared_positions(tables, ends // page_tokens, page_tokens)
    )


def _shared_positions(tables_Bn: np.ndarray, num_pages_B: np.ndarray, page_tokens: int) -> np.ndarray:
    """Number of leading positions of each row whose pages a neighboring row shares.

    Counts full pages only (`num_pages_B` of each row), rounded down to whole chunks of the kernel.
    """
    shared_B = np.zeros(len(tables_Bn), np.int64)
    if len(tables_Bn) < 2:
        return shared_B
    # A padding column is always different, so that argmax finds the first different page, or the number of pages.
    differs = np.pad(tables_Bn[1:] != tables_Bn[:-1], ((0, 0), (0, 1)), constant_values=True)
    common = np.minimum(differs.argmax(axis=1), np.minimum(num_pages_B[1:], num_pages_B[:-1]))
    shared_B[1:] = common
    shared_B[:-1] = np.maximum(shared_B[:-1], common)
    return np.maximum(shared_B, 0) * page_tokens // CHUNK_TOKENS * CHUNK_TOKENS


def make_softmax(rule: Rule, shape: torch.Size) -> Softmax:
    from ..kernels.attention import LOWEST

    maxima_HG = torch.full(shape, float(LOWEST)) if rule.sinks is None else rule.sinks.view(shape)
    total = 0.0 if rule.sinks is None else 1.0
    return Softmax(np.float32(rule.softcap or 0.0), _numpy(maxima_HG, torch.float32), np.float32(total))


def _numpy(tensor: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    return tensor.to(dtype).contiguous().numpy()


def prepare_decode_attention(dtype: torch.dtype) -> None:
    """Loads or compiles the kernels for KV of this dtype before the first pass. They take about 110 MiB of memory."""
    begin, end = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    for dim in (1, TILE_DIMS):
        page = torch.zeros(1, 1, 1, dim, dtype=dtype)
        decode_attention(page[0], page, page, begin[None], begin, end, Rule(1.0))


def cut_items(
    num_positions_B: np.ndarray, num_kv_heads: int, position_bytes: int, num_threads: int
) -> list[AttentionItem]:
    """Work items of about equal bytes: ranges of rows. A row larger than an item is split by KV heads."""
    ends_B = np.cumsum(num_positions_B)
    total = int(ends_B[-1]) if len(ends_B) else 0
    num_items = min(ITEMS_PER_THREAD * num_threads if num_threads > 1 else 1, total * position_bytes // MIN_ITEM_BYTES)
    if num_items <= 1:
        return [AttentionItem(rows=(0, len(ends_B)), heads=(0, num_kv_heads))]
    # Row numbers at equal shares of all positions; equal numbers belong to one large row.
    inner = np.searchsorted(ends_B, total * np.arange(1, num_items) / num_items) + 1
    bounds = np.unique([0, *inner, len(ends_B)]).tolist()
    items = []
    for begin, end in pairwise(bounds):
        share = int(num_positions_B[begin:end].sum()) * num_items / total
        num_parts = min(num_kv_heads, max(1, round(share)))
        cuts = [num_kv_heads * part // num_parts for part in range(num_parts + 1)]
        items += [AttentionItem(rows=(begin, end), heads=heads) for heads in pairwise(cuts)]
    return items


# The key is the identity of the tensors: all layers of one kind pass the same ones. `maxsize` must exceed the number of
# lanes times the kinds of layers, otherwise every lookup misses.
@lru_cache(maxsize=128)
def work_items(
    tables_Bn: torch.Tensor,
    begins_B: torch.Tensor,
    ends_B: torch.Tensor,
    page_tokens: int,
    num_kv_heads: int,
    position_bytes: int,
    num_threads: int,
) -> tuple[RowTables, np.ndarray]:
    """Row tables for a kernel, and work items (W, 4): first and end row, first and end KV head."""
    assert len(tables_Bn) == len(begins_B) == len(ends_B)
    capacity = tables_Bn.shape[1] * page_tokens
    if len(ends_B):
        first, last = int(begins_B.min()), int(ends_B.max())
        assert first >= 0, f"a row begins at position {first}"
        assert last <= capacity, f"a row ends at position {last}, its pages hold {capacity}"
    rows = make_row_tables(tables_Bn, begins_B, ends_B, page_tokens)
    num_positions_B = np.maximum(rows.ends_B - rows.begins_B, 0)
    items = cut_items(num_positions_B, num_kv_heads, position_bytes, num_threads)
    return rows, np.array([(*item.rows, *item.heads) for item in items], np.int64)


def prepare_decode_quantized(kv_dtype: KVDType, dtype: torch.dtype) -> None:
    """Loads or compiles the kernels for pages of `kv_dtype`, with unquantized last pages ("tails") of `dtype`."""
    page_format, rows = PageFormat(kv_dtype, 1, 2, 2), DecodeRows((0,), (0,), (0,), torch.device("cpu"))
    layout = PassLayout([[0]], [], rows, [], torch.device("cpu"), expands=False, slots=(0,))
    tail = torch.zeros(1, PAGE_TOKENS, 1, 2, dtype=dtype)
    kv = QuantizedKV(page_format, page_format.encode(tail, tail), (tail, tail), {}, layout)
    decode_quantized(tail[:, 0], kv, rows, Reach(), Rule(1.0), 1)
