"""Attention where an accelerator computes: few launches, and nothing that the host waits for.

Keys and values are gathered in the precision that they are cached in, once per layer and pass, and then go through
flash kernels, or through torch's fused attention. That is handed each KV head as a sequence of its own, with its query
heads beside it: told of grouped heads, it takes a backend that lays scores out in float32 wherever there is a mask, and
without flash kernels always.

Many sequences at once go through torch's flash kernels (Dao 2023), where they know what is asked. A sink is a score
without a value: it takes its share of the weights, so what the kernels return is scaled by the logistic function of how
far the sum of all other scores lies above it.

Letters as in paged.py; G query heads of a KV head.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from math import gcd

import torch
import torch.nn.functional as F

from ..plan.shape.attention import GATHERED_BYTES, SCORED_BYTES
from .layout import LayerKV, QuantizedKV
from .views import DecodeRows, Prompts, Reach, Rule, Segment, TokenRanges

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
ALIGNMENT_BYTES = 16  # what kernels load at a time
OPERATOR_PLACES = (
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
)  # fmt: skip
OPERATOR_NAMES = {"scale", "window_size_left", "window_size_right"}


def can_use_flash(like_q: torch.Tensor, like_k: torch.Tensor, like_v: torch.Tensor, rule: Rule) -> bool:
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
        and has_window_size()
    )


@cache
def varlen_attn() -> Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    from torch.nn.attention import varlen  # takes 0.2 s to import

    return varlen.varlen_attn


def has_window_size() -> bool:
    """Whether this torch's `varlen_attn` is told of causality by a window, as from 2.11 on."""
    return {"window_size", "return_aux"} <= inspect.signature(varlen_attn()).parameters.keys()


def flash_attention(
    q_THD: torch.Tensor,
    k_SHD: torch.Tensor,
    v_SHD: torch.Tensor,
    spans: TokenRanges,
    window: int | None,
    rule: Rule,
) -> torch.Tensor:
    """(T, H, Dv) of the stretches' tokens, which look at their positions one behind the other (S), at the last `window`
    of them at most. For what `flash_applies` to; keys and values begin where kernels can load."""
    padding = k_SHD.shape[2] - v_SHD.shape[2]
    is_single = spans.most_new == 1  # and then what it looks at is all that it is handed
    window_size = (-1, -1) if is_single else (-1 if window is None else window - 1, 0)
    inputs = (  # in the order of both: tokens, positions, where runs of them end, and how long the longest ones are
        align(q_THD),
        k_SHD,
        F.pad(v_SHD, (0, padding)) if padding else v_SHD,
        *spans.bounds,
        spans.most_new,
        spans.most_positions,
    )
    operator = flash_operator()
    if operator is not None:
        result = operator(
            *inputs,
            0.0,  # dropout_p
            window_size == (-1, 0),  # is_causal
            False,  # return_debug_mask
            scale=rule.scale,
            window_size_left=window_size[0],
            window_size_right=window_size[1],
        )
    else:
        from torch.nn.attention.varlen import AuxRequest

        result = varlen_attn()(
            *inputs,
            scale=rule.scale,
            window_size=window_size,
            return_aux=AuxRequest(lse=True),
            **_gqa_options(is_grouped=q_THD.shape[1] != k_SHD.shape[1]),
        )
    out_THD, sums_HT = result[:2]  # the answer, and the logarithms of the sums of its weights
    if rule.sinks is not None:
        out_THD *= torch.sigmoid(sums_HT.T - rule.sinks.float())[..., None]
    return out_THD[..., : v_SHD.shape[2]] if padding else out_THD


@cache
def flash_operator() -> Callable[..., Sequence[torch.Tensor]] | None:
    """torch's own operator behind `varlen_attn`, which takes 40 us and more of Python to call it. None where it is not
    certain that it takes and returns what `flash_attention` thinks."""
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    if operator is None or "default" not in operator.overloads():
        return None
    schema = operator.default._schema
    positional = tuple(each.name for each in schema.arguments if not each.kwarg_only)
    keywords = {each.name for each in schema.arguments if each.kwarg_only and each.has_default_value()}
    is_known = positional == OPERATOR_PLACES and keywords >= OPERATOR_NAMES
    covers_all = len(positional) + len(keywords) == len(schema.arguments)
    returned = tuple(each.name for each in schema.returns[:2])
    return operator.default if is_known and covers_all and returned == ("output", "softmax_logsumexp") else None


def align(tensor: torch.Tensor) -> torch.Tensor:
    """Itself or a copy, which begins where kernels can load, as all of its heads do."""
    *strides, step = tensor.stride()
    is_even = gcd(*strides) * tensor.itemsize % ALIGNMENT_BYTES == 0
    if step == 1 and is_even and tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@cache
def _gqa_options(*, is_grouped: bool) -> dict[str, bool]:
    """Some versions of torch group heads without being told."""
    is_supported = "enable_gqa" in inspect.signature(varlen_attn()).parameters
    return {"enable_gqa": is_grouped} if is_supported else {}


def can_use_fused(like_q: torch.Tensor, like_v: torch.Tensor, rule: Rule) -> bool:
    """Whether torch's fused attention takes such heads on any device, masked or not."""
    return rule.is_plain and not any(like.shape[-1] % HEAD_MULTIPLE for like in (like_q, like_v))


def decode_on_device(
    q_BHD: torch.Tensor, kv: LayerKV | QuantizedKV, rows: DecodeRows, reach: Reach, rule: Rule
) -> torch.Tensor:
    """One new token per row, over pages: (B, H, Dv)."""
    spans = rows.token_ranges(reach)
    is_flash = isinstance(kv, LayerKV) and can_use_flash(q_BHD, *kv.likes, rule)
    is_gathered = is_flash or can_use_fused(q_BHD, kv.likes[1], rule)
    most = max(1, (GATHERED_BYTES if is_gathered else SCORED_BYTES) // kv.position_bytes)
    groups = spans.groups(most, are_padded=not is_flash)

    def decode(q_BHD: torch.Tensor, group: TokenRanges) -> torch.Tensor:
        if isinstance(kv, LayerKV) and is_flash:
            return flash_attention(q_BHD, *kv.gather_packed(group), group, None, rule)
        return _decode_padded(q_BHD, kv, group, rule)

    if len(groups) == 1:
        return decode(q_BHD, groups[0])
    queries = q_BHD.split([len(group.parts) for group in groups])
    return torch.cat([decode(q, group) for q, group in zip(queries, groups, strict=True)])


def prefill_flash(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], kv: LayerKV | None, prompts: Prompts, reach: Reach, rule: Rule
) -> list[tuple[slice | torch.Tensor, torch.Tensor]] | None:
    """Tokens of the pass and what attention gives for them, (T, H, Dv), until all segments are through. None where
    flash kernels do not apply. Without `kv`, key and value hold all that the segments look at, one behind the other
    from the first one's `kv_start` on."""
    query, key, value = (each[0].transpose(0, 1) for each in qkv)
    if not can_use_flash(query, key, value, rule) or (kv is None and reach.chunk is not None):
        return None
    if kv is None:
        spans = prompts.token_ranges(Reach())
        begin = prompts.segments[0].kv_start
        k_SHD, v_SHD = (align(each[begin : begin + spans.num_positions]) for each in (key, value))
        tokens = spans.tokens
        return [(tokens, flash_attention(query[tokens], k_SHD, v_SHD, spans, reach.window, rule))]
    spans, found = prompts.token_ranges(reach), []
    for group in spans.groups(max(1, GATHERED_BYTES // kv.position_bytes), are_padded=False):
        tokens = group.tokens
        k_SHD, v_SHD = (align(key[tokens]), align(value[tokens])) if group.is_fresh else kv.gather_packed(group)
        found.append((tokens, flash_attention(query[tokens], k_SHD, v_SHD, group, reach.window, rule)))
    return found


def prefill_fused(
    q_HTD: torch.Tensor, k_HSD: torch.Tensor, v_HSD: torch.Tensor, segment: Segment, reach: Reach, scale: float
) -> torch.Tensor:
    """(T, H, Dv) of one segment's tokens, which look at these positions as its view says."""
    view = segment.view(reach)
    is_causal = view is None and segment.new > 1
    return attend_fused(q_HTD, k_HSD, v_HSD, None if view is None else view.visible, scale, is_causal=is_causal)


def attend_fused(
    q_HTD: torch.Tensor,
    k_HSD: torch.Tensor,
    v_HSD: torch.Tensor,
    visible_TS: torch.Tensor | None,
    scale: float,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """(T, H, Dv) of tokens that look at the positions which are `seen`; None is all of them, or, where it is causal, of
    as many positions those up to their own."""
    q_HGTD = q_HTD.unflatten(0, (k_HSD.shape[0], -1))
    k_HGSD, v_HGSD = (each[:, None].expand(-1, q_HGTD.shape[1], -1, -1) for each in (k_HSD, v_HSD))
    out_HGTD = F.scaled_dot_product_attention(
        q_HGTD,
        k_HGSD,
        v_HGSD,
        attn_mask=visible_TS,
        is_causal=is_causal,
        scale=scale,
    )
    return out_HGTD.flatten(0, 1).transpose(0, 1)


def _decode_padded(q_BHD: torch.Tensor, kv: LayerKV | QuantizedKV, group: TokenRanges, rule: Rule) -> torch.Tensor:
    """Query heads of a KV head stand where other tokens would, so that no head is repeated."""
    k_BHSD, v_BHSD = (each.transpose(1, 2) for each in kv.gather_padded(group))
    q_BHGD = q_BHD.unflatten(1, (k_BHSD.shape[1], -1))
    if can_use_fused(q_BHD, v_BHSD, rule):
        seen = None if group.visible_BS is None else group.visible_BS[:, None, None]
        out_BHGD = F.scaled_dot_product_attention(q_BHGD, k_BHSD, v_BHSD, attn_mask=seen, scale=rule.scale)
        return out_BHGD.flatten(1, 2)
    sinks = None if rule.sinks is None else rule.sinks.float().view(k_BHSD.shape[1], -1, 1)
    scores = (q_BHGD.float() * rule.scale) @ k_BHSD.float().transpose(2, 3)
    weights = rule.weights(scores, sinks, None if group.hidden_BS is None else group.hidden_BS[:, None, None])
    return (weights @ v_BHSD.float()).flatten(1, 2).to(q_BHD.dtype)
