"""Attention of many sequences at once by the flash kernels behind torch's `varlen_attn` (Dao 2023), where they know
what is asked. All else is plain_attention.py's and `scaled_dot_product_attention`'s.

A sink is a score without a value: it takes its share of the weights, so what the kernels return is scaled by the
logistic function of how far the sum of all other scores lies above it.

Letters as in paged.py.
"""

import inspect
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from .rule import Rule
from .stretches import Stretches

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
ALIGNMENT_BYTES = 16  # what kernels load at a time


def flash_applies(like_q: torch.Tensor, like_k: torch.Tensor, like_v: torch.Tensor, rule: Rule) -> bool:
    """Looks at head sizes (the last dimension), dtypes and the device alone."""
    head_dim = like_q.shape[-1]
    return (
        like_q.dtype in KERNEL_DTYPES
        and like_q.dtype == like_k.dtype == like_v.dtype
        and rule.softcap is None
        and like_k.shape[-1] == head_dim >= like_v.shape[-1]
        and head_dim <= LARGEST_HEAD
        and head_dim % HEAD_MULTIPLE == 0
        and has_flash(like_q.device)
    )


@cache
def has_flash(device: torch.device) -> bool:
    """FlashAttention-2 runs from compute capability 8.0 on. ROCm's kernels align a short run of queries with the first
    keys and not the last."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and torch.backends.cuda.is_flash_attention_available()
        and knows_windows()
    )


@cache
def varlen_attn() -> Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    from torch.nn.attention import varlen  # takes 0.2 s to import

    return varlen.varlen_attn


def knows_windows() -> bool:
    """Whether this torch's `varlen_attn` is told of causality by a window, as from 2.11 on."""
    return {"window_size", "return_aux"} <= inspect.signature(varlen_attn()).parameters.keys()


def flash_attention(
    q_THD: torch.Tensor, k_SHD: torch.Tensor, v_SHD: torch.Tensor, stretches: Stretches, window: int | None, rule: Rule
) -> torch.Tensor:
    """(T, H, Dv) of the stretches' tokens, which look at their positions one behind the other (S), at the last `window`
    of them at most. For what `flash_applies` to."""
    token_bounds, position_bounds = stretches.bounds
    missing = k_SHD.shape[2] - v_SHD.shape[2]
    is_single = stretches.most_new == 1  # and then what it looks at is all that it is handed
    found = varlen_attn()(
        aligned(q_THD),
        aligned(k_SHD),
        aligned(v_SHD) if missing == 0 else F.pad(v_SHD, (0, missing)),
        token_bounds,
        position_bounds,
        stretches.most_new,
        stretches.most_positions,
        scale=rule.scale,
        window_size=(-1, -1) if is_single else (-1 if window is None else window - 1, 0),
        return_aux=None if rule.sinks is None else _with_sums(),
        **_grouped(is_grouped=q_THD.shape[1] != k_SHD.shape[1]),
    )
    if isinstance(found, torch.Tensor):
        return found[..., : v_SHD.shape[2]]
    assert rule.sinks is not None, "sums of scores were not asked for"
    out_THD, sums_HT = found
    out_THD *= torch.sigmoid(sums_HT.T - rule.sinks.float())[..., None]
    return out_THD[..., : v_SHD.shape[2]]


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Itself or a copy, which begins where kernels can load, as all of its heads do."""
    steps = (stride * tensor.itemsize % ALIGNMENT_BYTES for stride in tensor.stride()[:-1])
    if tensor.stride(-1) == 1 and not any(steps) and tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _with_sums() -> tuple[bool]:
    from torch.nn.attention.varlen import AuxRequest

    return AuxRequest(lse=True)


@cache
def _grouped(*, is_grouped: bool) -> dict[str, bool]:
    """Some versions of torch group heads without being told."""
    is_asked = "enable_gqa" in inspect.signature(varlen_attn()).parameters
    return {"enable_gqa": is_grouped} if is_asked else {}
