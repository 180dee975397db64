"""Decode attention over quantised pages on a CPU: by the compiled kernel, or without it as an accelerator does.

B rows, N pages, P positions of a page, n pages of a row, H KV heads, G query heads of each, D of a head.
"""

import numpy as np
import torch

from ..config.settings import KVDType
from ..kernels.arguments import CHUNK_TOKENS, QuantizedPages, QuantizedScratch, WorkItems
from ..kernels.compiler import has_compiler
from ..plan.shape.dtypes import PAGE_TOKENS
from ..shared_work import parallel_for
from .device_attention import decode_on_device
from .host_attention import work_items
from .host_work import pages_of, softmax_of
from .layout import PassLayout
from .page_codes import PageFormat
from .quantized import QuantizedKV
from .rule import Rule
from .views import DecodeRows, Reach


def decode_quantized(
    q_BHD: torch.Tensor, kv: QuantizedKV, rows: DecodeRows, reach: Reach, rule: Rule, num_threads: int | None = None
) -> torch.Tensor:
    """One new token per row: (B, H, Dv) in the queries' dtype, summed in float32. Returns when all is done."""
    if not has_compiler():
        return decode_on_device(q_BHD, kv, rows, reach, rule)
    from ..kernels.attention_quantized import attend  # numba takes 0.2 s to import

    num_kv_heads, num_threads = kv.format.num_heads, num_threads or torch.get_num_threads()
    q_BHGD = (q_BHD.unflatten(1, (num_kv_heads, -1)).float() * rule.scale).contiguous()
    out_BHGD = q_BHGD.new_zeros(*q_BHGD.shape[:3], kv.format.value_dim)
    held = (kv.layout.tables_Bn, rows.begins(reach), rows.ends)
    position_bytes = kv.format.page_bytes // PAGE_TOKENS
    host_rows, spans_W4 = work_items(*held, PAGE_TOKENS, num_kv_heads, position_bytes, num_threads)
    pages, tails = quantized_pages_of(kv), pages_of(*kv.tails)
    slots_B1 = kv.layout.slots_B[:, None].int().contiguous().numpy()
    softmax = softmax_of(rule.softcap, rule.sinks, q_BHGD.shape[1:3])
    q, out, codes = q_BHGD.numpy(), out_BHGD.numpy(), kv.format.codes_in_byte

    def run(items: WorkItems) -> None:
        scratch = QuantizedScratch.make(q.shape[1], q.shape[2], q.shape[3], CHUNK_TOKENS)
        attend(q, pages, tails, slots_B1, host_rows, softmax, codes, out, items, scratch)

    items = WorkItems(spans_W4, np.zeros(1, np.int64))
    parallel_for([items] * min(num_threads, len(spans_W4)), run, num_threads)
    return out_BHGD.flatten(1, 2).to(q_BHD.dtype)


def prepare_decode_quantized(kv_dtype: KVDType, dtype: torch.dtype) -> None:
    """Loads, and at the first time compiles, what pages of `kv_dtype` beside tails of `dtype` need."""
    page_format, rows = PageFormat(kv_dtype, 1, 2, 2), DecodeRows((0,), (0,), (0,), torch.device("cpu"))
    layout = PassLayout([[0]], [], rows, [], torch.device("cpu"), expands=False, slots=(0,))
    tail = torch.zeros(1, PAGE_TOKENS, 1, 2, dtype=dtype)
    kv = QuantizedKV(page_format, page_format.encode(tail, tail), (tail, tail), {}, layout)
    decode_quantized(tail[:, 0], kv, rows, Reach(), Rule(1.0), 1)


def quantized_pages_of(kv: QuantizedKV) -> QuantizedPages:
    """The pages as the kernel knows them; their memory is theirs."""
    flat = [_flat(part) for part in kv.format.split(kv.pages)]
    return QuantizedPages(*flat, stride_bytes=kv.pages.stride(0), num_pages=len(kv.pages), page_tokens=PAGE_TOKENS)


def _flat(part: torch.Tensor) -> np.ndarray:
    """All numbers from the first page's first to the last page's last, with what lies between; nothing of zeros that
    are not there."""
    if not part.numel():
        return np.empty(0, np.uint8)
    page = part[0]
    span = (len(part) - 1) * part.stride(0) + page.numel()
    bits = torch.uint16 if part.dtype is torch.bfloat16 else part.dtype
    return part.as_strided((span,), (1,)).view(bits).numpy()
