"""Decode attention in plain torch operators: what the compiled kernel is held against, and what runs without numba.

It gathers the pages of a few rows into one piece before it multiplies, so it reads the KV once and moves it twice more.

B rows, N pages, P positions of a page, n pages of a row, H heads, G query heads of a KV head, S positions, D of a head.
"""

import torch

from ..units import MIB
from .page_codes import widened
from .rule import Rule

GATHERED_BYTES = 16 * MIB  # keys of a few rows in float32; values take as much again


def decode_attention_torch(
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
) -> torch.Tensor:
    """What `decode_attention` computes, in torch operators that run on any device."""
    rule = Rule(scale, softcap, sinks_H)
    num_kv_heads, page_tokens = k_NPHD.shape[2], k_NPHD.shape[1]
    out_BHD = q_BHD.new_zeros(*q_BHD.shape[:2], v_NPHD.shape[3])
    seeing = torch.nonzero(ends_B > begins_B).flatten()
    sinks_HG1 = None if sinks_H is None else sinks_H.float().view(num_kv_heads, -1, 1)
    row_bytes = 4 * max(1, tables_Bn.shape[1]) * page_tokens * num_kv_heads * k_NPHD.shape[3]
    for rows in seeing.split(max(1, GATHERED_BYTES // row_bytes)) if len(seeing) else ():
        begins, ends = begins_B[rows], ends_B[rows]
        first, last = int(begins.min()) // page_tokens, -(-int(ends.max()) // page_tokens)
        places_S = torch.arange(first * page_tokens, last * page_tokens, device=q_BHD.device)
        hidden_BS = (places_S < begins[:, None]) | (places_S >= ends[:, None])
        is_unused_Bn = hidden_BS.unflatten(1, (-1, page_tokens)).all(2)
        pages_Bn = tables_Bn[rows, first:last].long().masked_fill(is_unused_Bn, 0)
        k_BHSD, v_BHSD = (pages[pages_Bn].flatten(1, 2).transpose(1, 2) for pages in (k_NPHD, v_NPHD))
        k_BHSD, v_BHSD = widened(k_BHSD, torch.float32), widened(v_BHSD, torch.float32)
        q_BHGD = q_BHD[rows].float().unflatten(1, (num_kv_heads, -1)) * scale
        weights_BHGS = rule.weights(q_BHGD @ k_BHSD.transpose(2, 3), sinks_HG1, hidden_BS[:, None, None])
        seen_BHSD = v_BHSD.masked_fill(hidden_BS[:, None, :, None], 0)  # 0 times NaN is NaN
        out_BHD[rows] = (weights_BHGS @ seen_BHSD).flatten(1, 2).to(out_BHD.dtype)
    return out_BHD
