"""Attention over a packed lane: the tokens of sequences of different lengths side by side, no padding, no mask.

Registered under its own name, which makes transformers build no mask at all. Letters as in cache/ragged.py.
"""

import torch
import torch.nn.functional as F
from greenlet import getcurrent
from transformers import AttentionInterface

from ..cache.ragged import DecodeSpan, RaggedKV, Segment
from .events import LaneRun

NAME = "millrace_ragged"
UNSUPPORTED = ("softcap", "s_aux", "sliding_window", "position_bias")  # the model's lanes must be padded instead


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query (1, H*G, T, D) -> (1, T, H*G, D). Keys and values, the new ones included, are in the lane's cache."""
    for name in UNSUPPORTED:
        assert kwargs.get(name) is None, f"{type(module).__name__} wants {name}, which packed lanes do not offer"
    run = getcurrent()
    assert isinstance(run, LaneRun), "ragged attention was called outside a lane"
    cache = run.cache
    assert isinstance(cache, RaggedKV), "ragged attention was called in a padded lane"
    layer = getattr(module, "layer_idx", None)
    assert isinstance(layer, int), f"{type(module).__name__} does not say which layer it is"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = value.new_empty(query.shape[2], query.shape[1], value.shape[-1])
    for span in cache.spans:
        group = cache.groups[span.group]
        out[span.start : span.start + span.num_rows] = _decode(
            query, group.keys[layer], group.values[layer], span, scale
        )
    for segment in cache.segments:
        group = cache.groups[segment.group]
        out[segment.start : segment.start + segment.new] = _prefill(
            query, group.keys[layer][segment.row], group.values[layer][segment.row], segment, scale
        )
    return out[None], None


def _decode(
    query: torch.Tensor, k_BHSD: torch.Tensor, v_BHSD: torch.Tensor, span: DecodeSpan, scale: float
) -> torch.Tensor:
    """One new token per row. Queries are folded to (B, H, G, D) so that KV heads are never repeated."""
    num_rows, num_kv_heads, head_dim = span.num_rows, k_BHSD.shape[1], query.shape[-1]
    q = query[0, :, span.start : span.start + num_rows].transpose(0, 1)
    q_BHGD = q.reshape(num_rows, num_kv_heads, -1, head_dim) * scale
    scores = torch.matmul(q_BHGD, k_BHSD[:num_rows, :, : span.longest].transpose(-1, -2))
    if span.hidden_BS is not None:
        scores.masked_fill_(span.hidden_BS[:, None, None], float("-inf"))
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, v_BHSD[:num_rows, :, : span.longest]).reshape(num_rows, query.shape[1], -1)


def _prefill(
    query: torch.Tensor, k_HSD: torch.Tensor, v_HSD: torch.Tensor, segment: Segment, scale: float
) -> torch.Tensor:
    """A run of one sequence's prompt, behind `past` positions that are cached already."""
    q = query[:, :, segment.start : segment.start + segment.new]
    end = segment.past + segment.new
    mask = None
    if segment.past:
        mask = torch.ones(segment.new, end, dtype=torch.bool, device=query.device).tril(segment.past)
    out = F.scaled_dot_product_attention(
        q,
        k_HSD[None, :, :end],
        v_HSD[None, :, :end],
        attn_mask=mask,
        is_causal=mask is None and segment.new > 1,
        scale=scale,
        enable_gqa=q.shape[1] != k_HSD.shape[0],
    )
    return out[0].transpose(0, 1)


def register() -> None:
    AttentionInterface.register(NAME, ragged_attention)
