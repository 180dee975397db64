"""Attention where an accelerator computes: few launches, and nothing that the host waits for.

Keys and values are gathered in the precision that they are cached in, once per layer and pass, and then go through
flash kernels, or through torch's fused attention. That is handed each KV head as a sequence of its own, with its query
heads beside it: told of grouped heads, it takes a backend that lays scores out in float32 wherever there is a mask, and
without flash kernels always.

Letters as in paged.py; G query heads of a KV head.
"""

import torch
import torch.nn.functional as F

from ..plan.shape.attention import GATHERED_BYTES, SCORED_BYTES
from .flash_attention import HEAD_MULTIPLE, aligned, flash_applies, flash_attention
from .layout import LayerKV
from .quantized import QuantizedKV
from .rule import Rule
from .stretches import Stretches
from .views import DecodeRows, Prompts, Reach, Segment


def fused_applies(like_q: torch.Tensor, like_v: torch.Tensor, rule: Rule) -> bool:
    """Whether torch's fused attention takes such heads on any device, masked or not."""
    return rule.is_plain and not any(like.shape[-1] % HEAD_MULTIPLE for like in (like_q, like_v))


def decode_on_device(
    q_BHD: torch.Tensor, kv: LayerKV | QuantizedKV, rows: DecodeRows, reach: Reach, rule: Rule
) -> torch.Tensor:
    """One new token per row, over pages: (B, H, Dv)."""
    stretches = rows.stretches(reach)
    is_flash = isinstance(kv, LayerKV) and flash_applies(q_BHD, *kv.likes, rule)
    is_gathered = is_flash or fused_applies(q_BHD, kv.likes[1], rule)
    most = _most_positions(kv, GATHERED_BYTES if is_gathered else SCORED_BYTES)
    groups = stretches.groups(most, are_padded=not is_flash)
    decode = _decode_in_flash if is_flash else _decode_padded
    if len(groups) == 1:
        return decode(q_BHD, kv, groups[0], rule)
    queries = q_BHD.split([len(group.parts) for group in groups])
    return torch.cat([decode(q, kv, group, rule) for q, group in zip(queries, groups, strict=True)])


def prefill_in_flash(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], kv: LayerKV | None, prompts: Prompts, reach: Reach, rule: Rule
) -> list[tuple[slice | torch.Tensor, torch.Tensor]] | None:
    """Tokens of the pass and what attention gives for them, (T, H, Dv), until all segments are through. None where
    flash kernels do not apply. Without `kv`, key and value hold all that the segments look at, one behind the other
    from the first one's `kv_start` on."""
    query, key, value = (each[0].transpose(0, 1) for each in qkv)
    if not flash_applies(query, key, value, rule) or (kv is None and reach.chunk is not None):
        return None
    if kv is None:
        stretches = prompts.stretches(Reach())
        begin = prompts.segments[0].kv_start
        k_SHD, v_SHD = (aligned(each[begin : begin + stretches.num_positions]) for each in (key, value))
        tokens = stretches.tokens
        return [(tokens, flash_attention(query[tokens], k_SHD, v_SHD, stretches, reach.window, rule))]
    stretches, found = prompts.stretches(reach), []
    for group in stretches.groups(_most_positions(kv, GATHERED_BYTES), are_padded=False):
        tokens = group.tokens
        k_SHD, v_SHD = (aligned(key[tokens]), aligned(value[tokens])) if group.is_fresh else kv.packed(group)
        found.append((tokens, flash_attention(query[tokens], k_SHD, v_SHD, group, reach.window, rule)))
    return found


def prefill_fused(
    q_HTD: torch.Tensor, k_HSD: torch.Tensor, v_HSD: torch.Tensor, segment: Segment, reach: Reach, scale: float
) -> torch.Tensor:
    """(T, H, Dv) of one segment's tokens, which look at these positions as its view says."""
    view = segment.view(reach)
    is_causal = view is None and segment.new > 1
    return attend_fused(q_HTD, k_HSD, v_HSD, None if view is None else view.seen, scale, is_causal=is_causal)


def attend_fused(
    q_HTD: torch.Tensor,
    k_HSD: torch.Tensor,
    v_HSD: torch.Tensor,
    seen_TS: torch.Tensor | None,
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
        attn_mask=seen_TS,
        is_causal=is_causal,
        scale=scale,
    )
    return out_HGTD.flatten(0, 1).transpose(0, 1)


def _decode_in_flash(q_BHD: torch.Tensor, kv: LayerKV | QuantizedKV, group: Stretches, rule: Rule) -> torch.Tensor:
    assert isinstance(kv, LayerKV), "quantised pages are padded"
    k_SHD, v_SHD = kv.packed(group)
    return flash_attention(q_BHD, k_SHD, v_SHD, group, None, rule)


def _decode_padded(q_BHD: torch.Tensor, kv: LayerKV | QuantizedKV, group: Stretches, rule: Rule) -> torch.Tensor:
    """Query heads of a KV head stand where other tokens would, so that no head is repeated."""
    k_BHSD, v_BHSD = (each.transpose(1, 2) for each in kv.padded(group))
    q_BHGD = q_BHD.unflatten(1, (k_BHSD.shape[1], -1))
    if fused_applies(q_BHD, v_BHSD, rule):
        seen = None if group.seen_BS is None else group.seen_BS[:, None, None]
        out_BHGD = F.scaled_dot_product_attention(q_BHGD, k_BHSD, v_BHSD, attn_mask=seen, scale=rule.scale)
        return out_BHGD.flatten(1, 2)
    sinks = None if rule.sinks is None else rule.sinks.float().view(k_BHSD.shape[1], -1, 1)
    scores = (q_BHGD.float() * rule.scale) @ k_BHSD.float().transpose(2, 3)
    weights = rule.weights(scores, sinks, None if group.hidden_BS is None else group.hidden_BS[:, None, None])
    return (weights @ v_BHSD.float()).flatten(1, 2).to(q_BHD.dtype)


def _most_positions(kv: LayerKV | QuantizedKV, num_bytes: int) -> int:
    """Whose keys and values take no more than this."""
    return max(1, num_bytes // kv.position_bytes)
