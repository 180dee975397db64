"""What threads do with their work items of a decode attention: the arguments of the compiled kernels, made of tensors.

B rows, N pages, P positions of a page, n pages of a row, H KV heads, G query heads of each, D of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.amx.scratch import TILE_DIMS, TILE_ROWS, TileScratch
from ..kernels.arguments import CHUNK_TOKENS, Pages, Paused, Rows, Scratch, Softmax, WorkItems

# As the kernels know it; uint8 holds the bits of float8.
BITS = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.uint16,
    torch.float16: torch.int16,
    torch.uint8: torch.uint8,
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What does work items until none is left, on any thread, and where the answer then is."""

    run: Callable[[WorkItems], None]
    out_BHGD: torch.Tensor


def in_vectors(q_BHGD: torch.Tensor, scale: float, pages: Pages, rows: Rows, softmax: Softmax, value_dim: int) -> Work:
    from ..kernels.attention import attend  # numba takes 0.2 s to import

    scaled_BHGD = (q_BHGD.float() * scale).contiguous()
    out_BHGD = scaled_BHGD.new_zeros(*q_BHGD.shape[:3], value_dim)
    q, out = scaled_BHGD.numpy(), out_BHGD.numpy()
    num_paused = len(q) if rows.shared_B.any() else 0
    paused = Paused(*(np.empty((num_paused, *q.shape[1:3]), np.float32) for _ in range(2)))

    def run(items: WorkItems) -> None:
        attend(q, pages, rows, softmax, out, items, Scratch.make(q.shape[1], q.shape[2], CHUNK_TOKENS), paused)

    return Work(run=run, out_BHGD=out_BHGD)


def in_tiles(q_BHGD: torch.Tensor, scale: float, pages: Pages, rows: Rows, softmax: Softmax, value_dim: int) -> Work:
    """Takes queries and gives answers in bfloat16 as they are. Torch would convert them on OpenMP's threads, and these
    then wait actively, in the way of ours: of 11 ms a thread began its first item 2 ms late."""
    from ..kernels.amx.attention import attend

    q_BHGD = (q_BHGD if q_BHGD.dtype == torch.bfloat16 else q_BHGD.float()).contiguous()
    out_BHGD = q_BHGD.new_empty(*q_BHGD.shape[:3], value_dim)
    q, out = (x_BHGD.view(BITS[x_BHGD.dtype]).numpy() for x_BHGD in (q_BHGD, out_BHGD))
    (H, G, D), factor = q.shape[1:], np.float32(scale)

    def run(items: WorkItems) -> None:
        scratch = TileScratch.make(H, G, D, value_dim, CHUNK_TOKENS)
        attend(q, factor, pages, rows, softmax, out, items, scratch)

    return Work(run=run, out_BHGD=out_BHGD)


def fit_tiles(k_NPHD: torch.Tensor, v_NPHD: torch.Tensor) -> bool:
    """Whether `amx.attention` takes such pages, where there is a matrix unit."""
    is_short = k_NPHD.shape[1] <= TILE_ROWS
    has_whole_tiles = k_NPHD.shape[3] % TILE_DIMS == v_NPHD.shape[3] % TILE_DIMS == 0
    return k_NPHD.dtype == torch.bfloat16 and is_short and has_whole_tiles


def pages_of(k_NPHD: torch.Tensor, v_NPHD: torch.Tensor) -> Pages:
    strides = k_NPHD.stride(0), v_NPHD.stride(0)
    return Pages(_flat(k_NPHD), _flat(v_NPHD), *strides, num_pages=k_NPHD.shape[0], page_tokens=k_NPHD.shape[1])


def rows_of(tables_Bn: torch.Tensor, begins_B: torch.Tensor, ends_B: torch.Tensor, page_tokens: int) -> Rows:
    tables, ends = _numpy(tables_Bn, torch.int32), _numpy(ends_B, torch.int64)
    return Rows(tables, _numpy(begins_B, torch.int64), ends, _shared(tables, ends // page_tokens, page_tokens))


def _shared(tables_Bn: np.ndarray, num_pages_B: np.ndarray, page_tokens: int) -> np.ndarray:
    """How many positions each row has in the same pages as a row beside it: whole chunks, of pages that are full."""
    shared_B = np.zeros(len(tables_Bn), np.int64)
    if len(tables_Bn) < 2:
        return shared_B
    differs = np.pad(tables_Bn[1:] != tables_Bn[:-1], ((0, 0), (0, 1)), constant_values=True)
    common = np.minimum(differs.argmax(axis=1), np.minimum(num_pages_B[1:], num_pages_B[:-1]))
    shared_B[1:] = common
    shared_B[:-1] = np.maximum(shared_B[:-1], common)
    return np.maximum(shared_B, 0) * page_tokens // CHUNK_TOKENS * CHUNK_TOKENS


def softmax_of(softcap: float | None, sinks_H: torch.Tensor | None, shape: torch.Size) -> Softmax:
    from ..kernels.attention import LOWEST

    tops_HG = torch.full(shape, float(LOWEST)) if sinks_H is None else sinks_H.view(shape)
    total = 0.0 if sinks_H is None else 1.0
    return Softmax(np.float32(softcap or 0.0), _numpy(tops_HG, torch.float32), np.float32(total))


def _flat(pages_NPHD: torch.Tensor) -> np.ndarray:
    """All numbers from the first of the first page to the last of the last page, with what lies between pages. For a
    contiguous run of numbers the compiler makes vector loads."""
    if pages_NPHD.is_contiguous():
        return pages_NPHD.view(BITS[pages_NPHD.dtype]).numpy().reshape(-1)
    page = pages_NPHD[0]
    assert page.is_contiguous(), f"a KV page has strides {page.stride()}: only pages may lie apart"
    span = (len(pages_NPHD) - 1) * pages_NPHD.stride(0) + page.numel()
    return pages_NPHD.as_strided((span,), (1,)).view(BITS[pages_NPHD.dtype]).numpy()


def _numpy(tensor: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    return tensor.to(dtype).contiguous().numpy()
