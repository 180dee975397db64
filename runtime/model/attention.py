"""The attention function of packed lanes, registered with transformers. A packed lane is a micro-batch of sequences of
different lengths, whose tokens are concatenated: there is no padding, and transformers builds no mask.

Supports sliding windows, chunks, soft-capped scores (Gemma-2) and sinks (gpt-oss). A layer's reach is the positions
that a token attends to: all, a window or a chunk. Its rule is the softmax: scale, soft cap and sinks.

Letters: T tokens of the pass; B decoding rows (sequences with one new token); S cached positions; N pages of P
positions, n pages of a row; H KV heads, each with G query heads (H alone in a tensor of queries or outputs: all query
heads); D size of a head, Dv of a value.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

from ..attention.device_attention import (
    attend_fused,
    can_use_flash,
    can_use_fused,
    decode_on_device,
    prefill_flash,
    prefill_fused,
)
from ..attention.host_attention import decode_attention, decode_quantized
from ..attention.layout import LayerKV, QuantizedKV
from ..attention.views import DecodeRows, Prompts, Reach, Rule, Segment
from ..cache.host_lane import HostAttention
from ..cache.paged import PagedKV
from ..errors import ConfigError
from ..events import NeedAttention, current_lane_run, need_tensor
from ..plan.shape.attention import AttentionMethod
from ..plan.shape.model import ModelShape
from ..probing import guards
from ..probing.guards import chunk_size, layer_index
from ..probing.layer_lists import decoder_config
from ..stream.device import ComputeDevice

NAME = "weightstream_ragged"


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Maps query (1, H*G, T, D) to (1, T, H*G, D), with the arguments of transformers' attention functions. All keys
    and values, including those of the new tokens, are already in the lane's cache."""
    if reason := guards.unsupported_argument(kwargs) or guards.custom_mask(attention_mask):
        raise _unsupported_error(module, reason)
    cache = current_lane_run().cache
    assert isinstance(cache, PagedKV), "ragged attention was called in a padded lane"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer, reach, rule = _find_layer_rule(module, scale, sliding_window, softcap, kwargs.get("is_causal"))
    heads = cache.applied_head_share(layer)
    if heads is not None:
        query = heads.slice_heads(query, 1)
    if s_aux is not None and cache.heads is not None and len(s_aux) > query.shape[1]:
        s_aux = cache.heads.slice_heads(s_aux, 0)
    if s_aux is not None:
        rule = Rule(rule.scale, softcap, s_aux)
    if reason := guards.changed_kv(are_cached=cache.expands or cache.is_last_update(layer, key, value)):
        raise _unsupported_error(module, reason)

    num_threads = torch.get_num_threads()  # read here: a worker thread would report 1
    host_attention, view = cache.begin_host_attention(layer, query, key, value, rule.sinks), cache.view
    kv = None if cache.expands else cache.layer(layer, key, value)
    snapshot = _PassSnapshot(kv, view.decoding, view.prompts, cache.is_on_accelerator)
    compute = partial(_attend, snapshot, (query, key, value), reach, rule, num_threads, host_attention)
    out = need_tensor(NeedAttention(compute, is_decode=not view.prompts.segments))
    out = (host_attention.receive(out) if host_attention is not None else out).unsqueeze(0)
    return out if heads is None else heads.gather_heads(out, 2), None


class _LayerRule(NamedTuple):
    """The attention parameters of a layer. Without sinks, since these are streamed weights."""

    layer: int  # index
    reach: Reach
    rule: Rule


# For each attention module: the arguments of `_find_layer_rule`, and its result.
_LAYER_RULES = WeakKeyDictionary[torch.nn.Module, tuple[tuple[object, ...], _LayerRule]]()


def _find_layer_rule(
    module: torch.nn.Module, scale: float, sliding_window: int | None, softcap: float | None, is_causal: object
) -> _LayerRule:
    """Returns the attention parameters of a layer, cached, since every pass has the same arguments. Raises ConfigError
    if packed lanes do not support them."""
    arguments = scale, sliding_window, softcap, is_causal
    cached = _LAYER_RULES.get(module)
    if cached is None or cached[0] != arguments:
        layer = layer_index(module)
        reach = Reach(sliding_window, chunk_size(module, layer))
        if reason := guards.looks_ahead(module, is_causal) or guards.hidden_window(module, layer, reach):
            raise _unsupported_error(module, reason)
        cached = _LAYER_RULES[module] = arguments, _LayerRule(layer, reach, Rule(scale, softcap))
    return cached[1]


def _unsupported_error(module: torch.nn.Module, reason: str) -> ConfigError:
    """Returns the error for a model class that should have been refused at load time, but was not."""
    return ConfigError(f"{type(module).__name__} cannot run in packed lanes: {reason}; use model.lanes=padded")


class _PassSnapshot(NamedTuple):
    """The pass as one layer's attention sees it. A snapshot, because a worker thread may use it after the lane's own
    state has changed. `kv`: None if the layer expands latents: its key and value tensors then hold all positions."""

    kv: LayerKV | QuantizedKV | None
    decoding: DecodeRows | None
    prompts: Prompts
    is_on_accelerator: bool

    @property
    def segments(self) -> Sequence[Segment]:
        return self.prompts.segments


def _attend(
    snapshot: _PassSnapshot,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    reach: Reach,
    rule: Rule,
    num_threads: int,
    host_attention: HostAttention | None,
) -> torch.Tensor:
    """Returns the attention output (T, H*G, D) of the pass. If `host_attention` is given, it computes decoding rows on
    the CPU, and their output is in it instead."""
    query, _, value = qkv
    if host_attention is not None and not snapshot.segments:
        return host_attention.attend(reach, scale=rule.scale, softcap=rule.softcap, num_threads=num_threads)
    rows = snapshot.decoding
    if rows is not None and not snapshot.segments:  # decoding rows are the whole pass, in its order
        return _decode(snapshot, rows, query.squeeze(0).transpose(0, 1), qkv, reach, rule, num_threads)
    out = value.new_empty(query.shape[2], query.shape[1], value.shape[-1])
    if rows is not None and host_attention is None:
        q_BHD = query[0, :, rows.tokens_B].transpose(0, 1)
        out[rows.tokens_B] = _decode(snapshot, rows, q_BHD, qkv, reach, rule, num_threads)
    for tokens, prefilled in _prefill(snapshot, qkv, reach, rule):
        out[tokens] = prefilled
    if host_attention is not None:  # after the launches of prompts: the device computes them meanwhile
        host_attention.attend(reach, scale=rule.scale, softcap=rule.softcap, num_threads=num_threads)
    return out


def _decode(
    snapshot: _PassSnapshot,
    rows: DecodeRows,
    q_BHD: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    reach: Reach,
    rule: Rule,
    num_threads: int,
) -> torch.Tensor:
    """Returns the attention output (B, H*G, D) of the decoding rows."""
    kv, (_, key, value) = snapshot.kv, qkv
    if kv is None:
        return _decode_expanded(q_BHD, key, value, rows, reach, rule)
    if snapshot.is_on_accelerator:
        return decode_on_device(q_BHD, kv, rows, reach, rule)
    if isinstance(kv, QuantizedKV):
        return decode_quantized(q_BHD, kv, rows, reach, rule, num_threads)
    return decode_attention(
        q_BHD, kv.k_NPHD, kv.v_NPHD, kv.layout.tables_Bn, rows.begins(reach), rows.ends, rule, num_threads
    )


def _decode_expanded(
    q_BHD: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: DecodeRows, reach: Reach, rule: Rule
) -> torch.Tensor:
    """Returns the attention output (B, H*G, D) over expanded latents (MLA). Folds queries to (B, H, G, D), so that KV
    heads are not repeated. `key`, `value`: (1, H, positions, D), in which each row is padded to `rows.longest`."""
    shape = (len(rows.rows), rows.longest)
    k, v = (t[0, :, : shape[0] * shape[1]].unflatten(1, shape).transpose(0, 1) for t in (key, value))
    hidden = rows.hidden(reach)
    q_BHGD = q_BHD.reshape(shape[0], k.shape[1], -1, q_BHD.shape[-1]) * rule.scale
    sinks = None if rule.sinks is None else rule.sinks.view(1, k.shape[1], -1, 1)
    weights = rule.weights(
        torch.matmul(q_BHGD, k.transpose(-1, -2)), sinks, None if hidden is None else hidden[:, None, None]
    )
    return torch.matmul(weights, v).reshape(shape[0], q_BHD.shape[1], -1)


def _prefill(
    snapshot: _PassSnapshot, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], reach: Reach, rule: Rule
) -> Iterator[tuple[slice | torch.Tensor, torch.Tensor]]:
    """Yields indices of tokens in the pass and their attention output (T, H, Dv), for all prompts. A segment is the
    part of one prompt that this pass computes."""
    query, key, value = qkv
    if isinstance(snapshot.kv, QuantizedKV):
        for segment in snapshot.segments:
            tokens = slice(segment.start, segment.start + segment.new)
            k, v, hidden_TS = snapshot.kv.gather_for_segment(segment, reach)
            q = query[0, :, tokens]
            if rule.is_plain and (q.device.type == "cpu" or can_use_fused(q, v, rule)):
                yield tokens, attend_fused(q, k, v, ~hidden_TS, rule.scale)
            else:
                yield tokens, _prefill_by_head(q, k, v, hidden_TS, rule)
        return
    if snapshot.is_on_accelerator and snapshot.segments:
        outputs = prefill_flash(qkv, snapshot.kv, snapshot.prompts, reach, rule)
        if outputs is not None:
            yield from outputs
            return
    for segment in snapshot.segments:
        tokens = slice(segment.start, segment.start + segment.new)
        if snapshot.kv is not None and segment.past:
            k, v = snapshot.kv.gather_row(segment)
        else:
            # First position of the row in `key` and `value`: of new tokens, or of all positions of expanded latents.
            start = segment.start if snapshot.kv is not None else segment.kv_start
            k, v = (tensor[0, :, start : start + segment.end] for tensor in (key, value))
        view = segment.view(reach)
        positions = slice(0, segment.end) if view is None else slice(view.first, view.end)
        qkv_HSD = query[0, :, tokens], k[:, positions], v[:, positions]
        is_fused = not snapshot.is_on_accelerator or can_use_fused(query, value, rule)
        if not (rule.is_plain and is_fused):
            yield tokens, _prefill_by_head(*qkv_HSD, None if view is None else view.hidden, rule)
        elif snapshot.is_on_accelerator:
            yield tokens, prefill_fused(*qkv_HSD, segment, reach, rule.scale)
        else:
            q_HTD, k_HSD, v_HSD = qkv_HSD
            out = F.scaled_dot_product_attention(
                q_HTD[None],
                k_HSD[None],
                v_HSD[None],
                attn_mask=None if view is None or view.hidden is None else ~view.hidden,
                is_causal=view is None and segment.new > 1,
                scale=rule.scale,
                enable_gqa=len(q_HTD) != len(k_HSD),
            )
            yield tokens, out[0].transpose(0, 1)


def _prefill_by_head(
    q_HTD: torch.Tensor, k_HSD: torch.Tensor, v_HSD: torch.Tensor, hidden: torch.Tensor | None, rule: Rule
) -> torch.Tensor:
    """Returns the attention output (T, H, Dv) without a fused kernel, one KV head at a time to bound the memory of
    scores. `hidden` (T, S): True where a token does not see a position; None: causal."""
    num_heads, num_tokens, _ = q_HTD.shape
    if hidden is None and num_tokens > 1:
        hidden = torch.ones(num_tokens, k_HSD.shape[1], dtype=torch.bool, device=q_HTD.device).triu(1)
    group = num_heads // k_HSD.shape[0]
    out = q_HTD.new_empty(num_tokens, num_heads, v_HSD.shape[-1])
    for head in range(k_HSD.shape[0]):
        heads = slice(head * group, (head + 1) * group)
        sinks = None if rule.sinks is None else rule.sinks[heads, None, None]
        weights = rule.weights(torch.matmul(q_HTD[heads] * rule.scale, k_HSD[head].T), sinks, hidden)
        out[:, heads] = torch.matmul(weights, v_HSD[head]).transpose(0, 1)
    return out


def register() -> None:
    AttentionInterface.register(NAME, ragged_attention)


def attention_method(model: PreTrainedModel, shape: ModelShape, device: ComputeDevice) -> AttentionMethod:
    """Chooses the attention implementation for the ordinary layers of a loaded model."""
    if not (device.is_accelerator and shape.is_packed):
        return AttentionMethod.host
    softcap = getattr(decoder_config(model.config), "attn_logit_softcapping", None)
    like = torch.empty(0, shape.head_dim, dtype=model.dtype, device=device.torch_device)
    if can_use_flash(like, like, like, Rule(1.0, softcap)) and not shape.kv_dtype.is_quantized:
        return AttentionMethod.flash
    is_fused = not shape.score_heads and can_use_fused(like, like, Rule(1.0))
    return AttentionMethod.fused if is_fused else AttentionMethod.scored
