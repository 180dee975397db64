"""Attention on an accelerator: few launches, and no synchronization with the host.

Keys and values are gathered from the cache in the cache's dtype, once per layer and pass. Then flash kernels (Dao 2023)
or torch's fused attention run over them. Fused attention gets each KV head as a sequence of its own, with its query
heads as tokens, because with `enable_gqa` torch may choose a backend that materializes scores in float32.

An attention sink is a score without a value. So the flash output is multiplied by sigmoid(logsumexp - sink).

Letters of tensor dimensions: B rows (sequences) that decode, T tokens of the pass, S positions, H heads, G query heads
of a KV head, D elements of a head (Dv of a value head), N pages, P positions of a page.
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
MAX_HEAD_DIM, HEAD_MULTIPLE = 256, 8  # head sizes that kernels support: multiples of 8 up to 256
ALIGNMENT_BYTES = 16  # kernels load this many bytes at once
# Arguments of aten's flash operator that this module knows.
POSITIONAL_ARGUMENTS = (
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
)  # fmt: skip
KEYWORD_ARGUMENTS = {"scale", "window_size_left", "window_size_right"}


def can_use_flash(like_q: torch.Tensor, like_k: torch.Tensor, like_v: torch.Tensor, rule: Rule) -> bool:
    """True if flash kernels support the head sizes (last dimension), dtypes and device of these tensors, and `rule`."""
    head_dim = like_q.shape[-1]
    return (
        like_q.dtype in KERNEL_DTYPES
        and like_q.dtype == like_k.dtype == like_v.dtype
        and rule.softcap is None
        and like_k.shape[-1] == head_dim >= like_v.shape[-1]
        and head_dim <= MAX_HEAD_DIM
        and head_dim % HEAD_MULTIPLE == 0
        and has_flash(like_q.device)
    )


@cache
def has_flash(device: torch.device) -> bool:
    """True if torch has usable flash kernels for `device`. FlashAttention-2 needs compute capability 8.0.

    ROCm is excluded: if there are fewer queries than keys, its kernels align queries with the first keys, not the last.
    """
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and torch.backends.cuda.is_flash_attention_available()
        and has_window_size()
    )


@cache
def varlen_attn() -> Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    """torch's flash attention for sequences of different lengths."""
    from torch.nn.attention import varlen  # takes 0.2 s to import

    return varlen.varlen_attn


def has_window_size() -> bool:
    """True if `varlen_attn` has the parameters `window_size` and `return_aux`, as since torch 2.11."""
    return {"window_size", "return_aux"} <= inspect.signature(varlen_attn()).parameters.keys()


def flash_attention(
    q_THD: torch.Tensor, k_SHD: torch.Tensor, v_SHD: torch.Tensor, ranges: TokenRanges, window: int | None, rule: Rule
) -> torch.Tensor:
    """Causal attention of the tokens of `ranges` over their positions, which are concatenated (S): (T, H, Dv).

    A token attends to at most the last `window` positions. Requires `can_use_flash`, and keys and values from `align`.
    """
    padding = k_SHD.shape[2] - v_SHD.shape[2]
    is_single = ranges.most_new == 1
    # Positions to the left and right of a token that it attends to; -1: all. A single token attends to all positions of
    # its range, so that it needs no mask.
    window_size = (-1, -1) if is_single else (-1 if window is None else window - 1, 0)
    inputs = (  # positional arguments of the operator and of `varlen_attn`
        align(q_THD),
        k_SHD,
        F.pad(v_SHD, (0, padding)) if padding else v_SHD,
        *ranges.bounds,
        ranges.most_new,
        ranges.most_positions,
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
    out_THD, lse_HT = result[:2]  # output and logsumexp of the scores
    if rule.sinks is not None:
        out_THD *= torch.sigmoid(lse_HT.T - rule.sinks.float())[..., None]
    return out_THD[..., : v_SHD.shape[2]] if padding else out_THD


@cache
def flash_operator() -> Callable[..., Sequence[torch.Tensor]] | None:
    """The aten operator that `varlen_attn` calls; calling it directly saves 40 us per call.

    None if its schema is not the known one: aten operators may change with any version of torch.
    """
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    if operator is None or "default" not in operator.overloads():
        return None
    schema = operator.default._schema
    positional = tuple(each.name for each in schema.arguments if not each.kwarg_only)
    keywords = {each.name for each in schema.arguments if each.kwarg_only and each.has_default_value()}
    is_known = positional == POSITIONAL_ARGUMENTS and keywords >= KEYWORD_ARGUMENTS
    covers_all = len(positional) + len(keywords) == len(schema.arguments)
    returned = tuple(each.name for each in schema.returns[:2])
    return operator.default if is_known and covers_all and returned == ("output", "softmax_logsumexp") else None


def align(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a contiguous copy if its address or strides are not aligned for the kernels."""
    *strides, step = tensor.stride()
    has_aligned_strides = gcd(*strides) * tensor.itemsize % ALIGNMENT_BYTES == 0
    if step == 1 and has_aligned_strides and tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@cache
def _gqa_options(*, is_grouped: bool) -> dict[str, bool]:
    """The keyword argument of `varlen_attn` for grouped query heads. Some versions of torch do not need it."""
    is_supported = "enable_gqa" in inspect.signature(varlen_attn()).parameters
    return {"enable_gqa": is_grouped} if is_supported else {}


def can_use_fused(like_q: torch.Tensor, like_v: torch.Tensor, rule: Rule) -> bool:
    """True if torch's fused attention supports these head sizes and `rule` on any device, with or without a mask."""
    return rule.is_plain and not any(like.shape[-1] % HEAD_MULTIPLE for like in (like_q, like_v))


def decode_on_device(
    q_BHD: torch.Tensor, kv: LayerKV | QuantizedKV, rows: DecodeRows, reach: Reach, rule: Rule
) -> torch.Tensor:
    """Attention of one new token per row over the cached positions of the row: (B, H, Dv)."""
    ranges = rows.token_ranges(reach)
    is_flash = isinstance(kv, LayerKV) and can_use_flash(q_BHD, *kv.likes, rule)
    has_kernel = is_flash or can_use_fused(q_BHD, kv.likes[1], rule)
    # Groups of rows, to limit the memory of gathered keys and values, and of scores without a kernel.
    max_positions = max(1, (GATHERED_BYTES if has_kernel else SCORED_BYTES) // kv.position_bytes)
    groups = ranges.groups(max_positions, are_padded=not is_flash)

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
    """Attention of all prompt chunks by flash kernels; None if they do not support the layer.

    Returns pairs of token indices and outputs (T, H, Dv). `qkv`: queries, keys and values (1, H, T, D). Without `kv`,
    keys and values include the cached positions: all positions of all rows, concatenated in `kv_start` order.
    """
    query, key, value = (each[0].transpose(0, 1) for each in qkv)
    if not can_use_flash(query, key, value, rule) or (kv is None and reach.chunk is not None):
        return None
    if kv is None:
        ranges = prompts.token_ranges(Reach())
        begin = prompts.segments[0].kv_start
        k_SHD, v_SHD = (align(each[begin : begin + ranges.num_positions]) for each in (key, value))
        tokens = ranges.tokens
        return [(tokens, flash_attention(query[tokens], k_SHD, v_SHD, ranges, reach.window, rule))]
    ranges, outputs = prompts.token_ranges(reach), []
    for group in ranges.groups(max(1, GATHERED_BYTES // kv.position_bytes), are_padded=False):
        tokens = group.tokens
        # Fresh ranges attend to tokens of this pass only, whose keys and values need not be gathered.
        k_SHD, v_SHD = (align(key[tokens]), align(value[tokens])) if group.is_fresh else kv.gather_packed(group)
        outputs.append((tokens, flash_attention(query[tokens], k_SHD, v_SHD, group, reach.window, rule)))
    return outputs


def prefill_fused(
    q_HTD: torch.Tensor, k_HSD: torch.Tensor, v_HSD: torch.Tensor, segment: Segment, reach: Reach, scale: float
) -> torch.Tensor:
    """Attention of one prompt chunk over the positions that its tokens see: (T, H, Dv)."""
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
    """Fused attention of tokens over positions where `visible_TS` is True: (T, H, Dv).

    Without `visible_TS`, tokens attend to all positions. With `is_causal`, which needs T = S, a token attends to
    positions up to its own.
    """
    q_HGTD = q_HTD.unflatten(0, (k_HSD.shape[0], -1))
    k_HGSD, v_HGSD = (each[:, None].expand(-1, q_HGTD.shape[1], -1, -1) for each in (k_HSD, v_HSD))
    out_HGTD = F.scaled_dot_product_attention(
        q_HGTD, k_HGSD, v_HGSD, attn_mask=visible_TS, is_causal=is_causal, scale=scale
    )
    return out_HGTD.flatten(0, 1).transpose(0, 1)


def _decode_padded(q_BHD: torch.Tensor, kv: LayerKV | QuantizedKV, group: TokenRanges, rule: Rule) -> torch.Tensor:
    """Decode attention over padded rows. The query heads of a KV head are its tokens, to avoid copies of KV heads."""
    k_BHSD, v_BHSD = (each.transpose(1, 2) for each in kv.gather_padded(group))
    q_BHGD = q_BHD.unflatten(1, (k_BHSD.shape[1], -1))
    if can_use_fused(q_BHD, v_BHSD, rule):
        visible = None if group.visible_BS is None else group.visible_BS[:, None, None]
        out_BHGD = F.scaled_dot_product_attention(q_BHGD, k_BHSD, v_BHSD, attn_mask=visible, scale=rule.scale)
        return out_BHGD.flatten(1, 2)
    sinks = None if rule.sinks is None else rule.sinks.float().view(k_BHSD.shape[1], -1, 1)
    scores = (q_BHGD.float() * rule.scale) @ k_BHSD.float().transpose(2, 3)
    weights = rule.weights(scores, sinks, None if group.hidden_BS is None else group.hidden_BS[:, None, None])
    return (weights @ v_BHSD.float()).flatten(1, 2).to(q_BHD.dtype)
