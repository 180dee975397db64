"""Decode attention over pages by the flash kernels behind torch's `varlen_attn`, where they know what is asked.

Those that torch brings along (FlashAttention-2) take pages of whole multiples of 256 positions, so with our pages of
`PAGE_TOKENS` = 16 they never apply. FlashAttention-3 takes any: it applies where a user's code has called
`torch.nn.attention.activate_flash_attention_impl("FA3")`. All else is `decode_attention_torch`'s.

Letters as in host_attention.py.
"""

import inspect
from functools import cache

import torch
from torch.nn import attention as kernels

from .views import Reach

PAGE_MULTIPLES: dict[str | None, int] = {None: 256, "FA3": 1}  # by the activated kernels; None: torch's own
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8


def flash_applies(
    q_BHD: torch.Tensor,
    k_NPHD: torch.Tensor,
    v_NPHD: torch.Tensor,
    *,
    reach: Reach,
    softcap: float | None,
    has_sinks: bool,
    activated: str | None,
) -> bool:
    """Looks at shapes and dtypes alone. `activated`: the flash kernels in use, see `activated_kernels`."""
    head_dim = q_BHD.shape[2]
    return (
        q_BHD.device.type == "cuda"
        and q_BHD.dtype in (torch.bfloat16, torch.float16)
        and q_BHD.dtype == k_NPHD.dtype == v_NPHD.dtype
        and softcap is None
        and not has_sinks
        and reach.chunk is None
        and k_NPHD.shape[3] == v_NPHD.shape[3] == head_dim
        and head_dim <= LARGEST_HEAD
        and head_dim % HEAD_MULTIPLE == 0
        and activated in PAGE_MULTIPLES
        and k_NPHD.shape[1] % PAGE_MULTIPLES[activated] == 0
    )


@cache
def takes_pages() -> bool:
    """Whether this torch's `varlen_attn` knows page tables."""
    from torch.nn.attention.varlen import varlen_attn  # takes 0.2 s to import

    return {"block_table", "seqused_k"} <= inspect.signature(varlen_attn).parameters.keys()


def activated_kernels() -> str | None:
    return kernels.current_flash_attention_impl()


def decode_attention_flash(
    q_BHD: torch.Tensor,
    k_NPHD: torch.Tensor,
    v_NPHD: torch.Tensor,
    tables_Bn: torch.Tensor,
    ends_B: torch.Tensor,
    *,
    scale: float,
    reach: Reach,
    longest: int,
) -> torch.Tensor:
    """As `decode_attention` where `flash_applies`; rows begin where `reach` says, `longest` is the largest end."""
    from torch.nn.attention.varlen import varlen_attn

    counts_B = torch.arange(len(q_BHD) + 1, dtype=torch.int32, device=q_BHD.device)
    sums_B = torch.nn.functional.pad(ends_B.cumsum(0, dtype=torch.int32), (1, 0))
    out_BHD = varlen_attn(
        q_BHD.contiguous(),
        k_NPHD,
        v_NPHD,
        counts_B,
        sums_B if activated_kernels() is None else None,  # FlashAttention-3 takes them or a page table, not both
        1,
        longest,
        scale=scale,
        window_size=(-1, -1) if reach.window is None else (reach.window - 1, 0),
        enable_gqa=q_BHD.shape[1] != k_NPHD.shape[2],
        seqused_k=ends_B,
        block_table=tables_Bn,
    )
    assert isinstance(out_BHD, torch.Tensor), "no auxiliary output was asked for"
    return out_BHD
