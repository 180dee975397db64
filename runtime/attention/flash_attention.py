"""Attention of many sequences at once by torch's flash kernels (Dao 2023), where they know what is asked. All else is
plain_attention.py's and `scaled_dot_product_attention`'s.

A sink is a score without a value: it takes its share of the weights, so what the kernels return is scaled by the
logistic function of how far the sum of all other scores lies above it.

Letters as in paged.py.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .rule import Rule
from .stretches import Stretches

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
ALIGNMENT_BYTES = 16  # what kernels load at a time
OPERATOR_PLACES = (
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
)  # fmt: skip
OPERATOR_NAMES = {"scale", "window_size_left", "window_size_right"}


class _Asked(NamedTuple):
    """Runs of tokens beside the positions that they look at, one behind the other, as torch names them."""

    query: torch.Tensor  # (T, H, D)
    key: torch.Tensor  # (S, H, D), and so is `value`
    value: torch.Tensor
    cum_seq_q: torch.Tensor
    cum_seq_k: torch.Tensor
    max_q: int
    max_k: int
    scale: float
    window: tuple[int, int]


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
    of them at most. For what `flash_applies` to; keys and values begin where kernels can load."""
    missing = k_SHD.shape[2] - v_SHD.shape[2]
    is_single = stretches.most_new == 1  # and then what it looks at is all that it is handed
    asked = _Asked(
        aligned(q_THD),
        k_SHD,
        F.pad(v_SHD, (0, missing)) if missing else v_SHD,
        *stretches.bounds,
        stretches.most_new,
        stretches.most_positions,
        rule.scale,
        (-1, -1) if is_single else (-1 if window is None else window - 1, 0),
    )
    operator = flash_operator()
    out_THD, sums_HT = _by_name(asked) if operator is None else _by_operator(operator, asked)
    if rule.sinks is not None:
        out_THD *= torch.sigmoid(sums_HT.T - rule.sinks.float())[..., None]
    return out_THD[..., : v_SHD.shape[2]] if missing else out_THD


@cache
def flash_operator() -> Callable[..., Sequence[torch.Tensor]] | None:
    """torch's own operator behind `varlen_attn`, which takes 40 us and more of Python to call it. None where it is not
    certain that it takes and returns what `_by_operator` thinks."""
    found = getattr(torch.ops.aten, "_flash_attention_forward", None)
    if found is None or "default" not in found.overloads():
        return None
    schema = found.default._schema
    places = tuple(each.name for each in schema.arguments if not each.kwarg_only)
    names = {each.name for each in schema.arguments if each.kwarg_only and each.has_default_value()}
    is_known = places == OPERATOR_PLACES and names >= OPERATOR_NAMES
    is_all = len(places) + len(names) == len(schema.arguments)
    returned = tuple(each.name for each in schema.returns[:2])
    return found.default if is_known and is_all and returned == ("output", "softmax_logsumexp") else None


def _by_operator(operator: Callable[..., Sequence[torch.Tensor]], asked: _Asked) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention gives (T, H, D), and the logarithms of the sums of its weights (H, T)."""
    left, right = asked.window
    found = operator(
        *asked[:7],
        0.0,  # dropout_p
        asked.window == (-1, 0),  # is_causal
        False,  # return_debug_mask
        scale=asked.scale,
        window_size_left=left,
        window_size_right=right,
    )
    return found[0], found[1]


def _by_name(asked: _Asked) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the name that torch documents."""
    from torch.nn.attention.varlen import AuxRequest

    found = varlen_attn()(
        *asked[:7],
        scale=asked.scale,
        window_size=asked.window,
        return_aux=AuxRequest(lse=True),
        **_grouped(is_grouped=asked.query.shape[1] != asked.key.shape[1]),
    )
    assert isinstance(found, tuple), "sums were asked for"
    return found


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Itself or a copy, which begins where kernels can load, as all of its heads do."""
    *strides, step = tensor.stride()
    is_even = gcd(*strides) * tensor.itemsize % ALIGNMENT_BYTES == 0
    if step == 1 and is_even and tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@cache
def _grouped(*, is_grouped: bool) -> dict[str, bool]:
    """Some versions of torch group heads without being told."""
    is_asked = "enable_gqa" in inspect.signature(varlen_attn()).parameters
    return {"enable_gqa": is_grouped} if is_asked else {}
