"""Reads properties of a model class (kind of lanes, experts, KV cache) and the sizes of a staged model that the planner
needs.

A lane runs a micro-batch. Packed lanes concatenate sequences of different lengths; padded lanes pad on the left.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import nn
from torch.fx.experimental import _config as fx_config
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, get_layer_types_and_kwargs

from ..config.settings import Lanes
from ..errors import ConfigError, require
from ..plan.shape.attention import DeltaRule
from ..plan.shape.model import ModelShape
from ..plan.shape.shapes import Parameter, Stage, StageKind
from ..probing.empty_weights import copy_on_meta
from ..probing.guards import NO_DECODER
from ..probing.layer_lists import (
    config_behind_encoder,
    decoder_config,
    head_size,
    layer_lists,
    max_over_layers,
    num_attention_heads,
)
from ..probing.packed_probe import is_latent, latent_rank, packed_lanes_obstacle
from ..probing.padded_probe import cache_argument
from .experts import is_bare, is_experts
from .fused import FusedGatedMLP
from .stages import StagedModel

log = logging.getLogger(__name__)

NO_WINDOW = 2**30  # positions, more than any prompt has
NO_LIMIT_TOKENS = 2**31  # context length of models without a limit
COMPUTE_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}  # safetensors' names
PACKED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}  # supported by packed lanes


class ExpertKind(Enum):
    """The code that runs the experts of a model."""

    none = "-"
    sorted = "sorted"  # Weightstream's function, through transformers' experts interface
    own = "own loop"  # the model class's code


class CacheKind(Enum):
    """What a model caches for each sequence."""

    kv = "KV"
    sliding = "KV, sliding"
    latent = "latents (MLA)"
    recurrent = "state"
    hybrid = "KV + state"


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The size of a model's cache: keys and values per position, and states per sequence regardless of its length."""

    layer_bytes_per_token: tuple[int, ...]  # of each layer
    bytes_per_sequence: int  # of all layers
    is_latent: bool  # MLA: layers cache compressed KV, and expand all of it in each attention
    cross_bytes_per_token: int = 0  # in an encoder-decoder: keys and values per encoder position
    heads: tuple[tuple[int, int, int], ...] = ()  # of each layer: KV heads, sizes of a key and a value
    layer_bytes_per_sequence: tuple[int, ...] = ()  # of each layer, if measured
    is_kept: bool = True  # False for an encoder, which runs a prompt once and needs no cache

    @property
    def bytes_per_token(self) -> int:
        return sum(self.layer_bytes_per_token)


def choose_lanes(model: PreTrainedModel, setting: Lanes) -> tuple[bool, str]:
    """Returns (True, "") for packed lanes, or (False, reason) for padded lanes. Raises ConfigError if the setting
    requires packed lanes that the class does not support, and for a class that is not a decoder."""
    types = set(layer_types(model))
    if "linear_attention" in types or "conv" in types or any(kind.startswith("hybrid") for kind in types):
        reason = "recurrent state"
    elif model.config.is_encoder_decoder:
        reason = "encoder and decoder"
    elif not getattr(model, "_supports_attention_backend", False):
        reason = "own attention code"
    elif types - PACKED_LAYER_TYPES:
        reason = f"layers of type {min(types - PACKED_LAYER_TYPES)}"
    else:
        reason = packed_lanes_obstacle(model)
    if reason == NO_DECODER:
        raise ConfigError(f"model.path: {type(model).__name__} is not a decoder: {reason}")
    if setting is Lanes.padded:
        return False, reason or "model.lanes=padded"
    if setting is Lanes.packed and reason:
        raise ConfigError(f"model.lanes=packed: not possible for {type(model).__name__}: {reason}; set auto or padded")
    return not reason, reason


def layer_types(model: PreTrainedModel) -> list[str]:
    """The type of each layer in transformers' names, such as "sliding_attention"."""
    return get_layer_types_and_kwargs(decoder_config(model.config))[0]


def cache_kind(model: PreTrainedModel, *, is_latent: bool) -> CacheKind:
    types = set(layer_types(model))
    recurrent = {kind for kind in types if kind in ("linear_attention", "conv") or kind.startswith("hybrid")}
    if recurrent:
        return CacheKind.recurrent if types <= {"linear_attention", "conv"} else CacheKind.hybrid
    if is_latent:
        return CacheKind.latent
    return CacheKind.sliding if types & {"sliding_attention", "chunked_attention"} else CacheKind.kv


def expert_kind(model: PreTrainedModel) -> ExpertKind:
    if any(is_experts(module) for module in model.modules()):
        return ExpertKind.sorted
    is_mixture = any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
    return ExpertKind.own if is_mixture else ExpertKind.none


def bounded_layers(model: PreTrainedModel) -> frozenset[int]:
    """Indices of layers whose cache does not grow without limit: transformers keeps only a window or a state."""
    layers = DynamicCache(config=decoder_config(model.config)).layers
    return frozenset(index for index, layer in enumerate(layers) if type(layer) is not DynamicLayer)


def delta_rule(model: PreTrainedModel) -> DeltaRule | None:
    """Sizes of a model's gated delta nets (linear attention); None if it has none."""
    config = decoder_config(model.config)
    if "linear_attention" not in layer_types(model) or not hasattr(config, "linear_num_value_heads"):
        return None
    return DeltaRule(
        num_key_heads=config.linear_num_key_heads,
        num_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
    )


def measure_cache(model: PreTrainedModel) -> CacheShape:
    """Measures the cache by forward passes on the meta device. Estimates it from the attention heads if the class does
    not run there, or has an encoder."""
    if model.config.is_encoder_decoder:
        cache = _estimated_cache(config_behind_encoder(model), model.dtype)
        return replace(cache, cross_bytes_per_token=cache.bytes_per_token)
    probe = copy_on_meta(model)
    try:
        cache_2, cache_3 = (fill_cache(probe, num_tokens) for num_tokens in (2, 3))
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
        log.debug("%s does not run on the meta device (%s); cache size estimated", type(model).__name__, error)
        return _estimated_cache(model.config, model.dtype)
    bytes_2, bytes_3 = (  # bytes of each layer after 2 and after 3 tokens
        [sum(t.nbytes for t in _layer_tensors(layer)) for layer in cache.layers] for cache in (cache_2, cache_3)
    )
    # What the third token adds is needed per token; the rest is needed per sequence, such as a recurrent state.
    per_token = tuple(more - less for less, more in zip(bytes_2, bytes_3, strict=True))
    rank = latent_rank(model)
    heads = list[tuple[int, int, int]]()
    for layer in cache_2.layers:
        k, v = getattr(layer, "keys", None), getattr(layer, "values", None)
        if k is not None and v is not None and k.ndim == 4:
            heads.append((k.shape[1], k.shape[3], v.shape[3]))
        else:  # no keys and values
            heads.append((0, 0, 0))
    return CacheShape(
        layer_bytes_per_token=per_token,
        bytes_per_sequence=sum(bytes_2) - 2 * sum(per_token),
        layer_bytes_per_sequence=tuple(two - 2 * token for two, token in zip(bytes_2, per_token, strict=True)),
        is_latent=any(is_latent(_layer_tensors(layer), rank) for layer in cache_2.layers),
        heads=tuple(heads),
    )


def encoder_cache_shape(model: PreTrainedModel) -> CacheShape:
    """Returns the empty cache of an encoder. Raises ConfigError if layers share weights, as in ALBERT."""
    [layer_list] = layer_lists(model)
    num_layers = decoder_config(model.config).num_hidden_layers
    if len(layer_list.layers) != num_layers:
        raise ConfigError(
            f"model.path: {type(model).__name__} has {num_layers} layers but {len(layer_list.layers)} in "
            f"{layer_list.path}: layers that share weights cannot be streamed"
        )
    return CacheShape(layer_bytes_per_token=(0,) * num_layers, bytes_per_sequence=0, is_latent=False, is_kept=False)


def _estimated_cache(config: PreTrainedConfig, dtype: torch.dtype) -> CacheShape:
    config = decoder_config(config)
    num_heads = max_over_layers(config, "num_key_value_heads") or num_attention_heads(config)
    per_token = (2 * num_heads * head_size(config) * dtype.itemsize,) * config.num_hidden_layers
    heads = ((num_heads, head_size(config), head_size(config)),) * config.num_hidden_layers
    return CacheShape(layer_bytes_per_token=per_token, bytes_per_sequence=0, is_latent=False, heads=heads)


@torch.inference_mode()
def fill_cache(model: PreTrainedModel, num_tokens: int) -> Cache:
    """Returns transformers' cache after a pass of `num_tokens`. `model` is a copy on the meta device (`copy_on_meta`),
    so the cache has shapes but no values."""
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        if hasattr(layer, "sliding_window"):  # a short window would hide the cost of a token
            setattr(layer, "sliding_window", NO_WINDOW)  # noqa: B010 - layers without a window do not declare it
    ids = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
    # The indexer of Qwen4 selects tokens by `nonzero`. Which it selects does not change the sizes of the cache.
    with fx_config.patch(meta_nonzero_assume_all_nonzero=True):  # pyright: ignore[reportAttributeAccessIssue]
        model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
    return cache


def _layer_tensors(layer: object) -> Iterator[torch.Tensor]:
    """Yields the tensors of a cache layer: keys and values (rows, heads, positions, head size), and recurrent states.
    Skips the counters that sliding layers have."""
    for value in vars(layer).values():
        for tensor in value.values() if isinstance(value, dict) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1:
                yield tensor


def make_shape(
    name: str, staged: StagedModel, parameters: Mapping[str, Parameter], cache: CacheShape, *, is_packed: bool
) -> ModelShape:
    """Returns the sizes of a staged model. `parameters`: by full name; `cache`: as measured before staging."""
    model = staged.model
    config = decoder_config(model.config)
    by_stage: list[list[Parameter]] = [[] for _ in staged.kinds]
    for full_name, parameter in parameters.items():
        if full_name in staged.stage_of:
            by_stage[staged.stage_of[full_name]].append(parameter)
    # For `intermediate_size`. The smallest stack counts, since a larger one may be gate and up together.
    table_names = {
        ".".join(part for part in (streamed.name, path, "weight") if part)
        for streamed in staged.modules
        for path, module in streamed.inner.named_modules()
        if isinstance(module, nn.Embedding)
    }
    in_layers = [
        p
        for group, kind in zip(by_stage, staged.kinds, strict=True)
        for p in (group if kind.is_layer else ())
        if p.name not in table_names  # no product has the height of a table
    ]
    dense_widths = [max(p.shape) for p in in_layers if len(p.shape) == 2]
    expert_widths = [max(p.shape[-2:]) for p in in_layers if len(p.shape) == 3]
    num_heads = num_attention_heads(config)
    num_kv_heads = max_over_layers(config, "num_key_value_heads") or num_heads
    # For `context_tokens`. A position table with a row for padding, as in RoBERTa, begins positions after that row.
    num_rows = getattr(config, "max_position_embeddings", None) or NO_LIMIT_TOKENS
    tables = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    paddings = [t.padding_idx for name, t in tables if "position" in name and t.num_embeddings == num_rows]
    # A soft cap or sinks need the scores in memory: fused attention kernels of torch do not support them.
    has_own_scores = getattr(config, "attn_logit_softcapping", None) or any(
        hasattr(m, "sinks") for m in model.modules()
    )
    per_token = max_over_layers(config, "num_experts_per_tok") or 0
    stages = list[Stage]()
    for index, (group, kind) in enumerate(zip(by_stage, staged.kinds, strict=True)):
        # Stacks of experts that run through transformers' interface, or else of experts in the class's own code.
        stacks = [p for p in group if p.is_experts] or [p for p in group if ".experts." in p.name]
        counts = [p.num_experts or p.shape[0] for p in stacks if len(p.shape) == 3 and kind is StageKind.layer]
        num_in_layer = max(counts, default=0)
        stages.append(
            Stage(
                index=index,
                name=f"{kind.value} {index - staged.kinds.index(kind)}" if kind.is_layer else kind.value,
                kind=kind,
                parameters=tuple(group),
                num_experts=num_in_layer,
                num_experts_per_token=min(per_token or num_in_layer, num_in_layer),
            )
        )
    num_experts = max(stage.num_experts for stage in stages)
    require(
        not num_experts or per_token <= num_experts,
        f"model.path: config.json: num_experts_per_tok={per_token}, but layers have {num_experts} experts",
    )
    all_experts = [module for module in model.modules() if is_experts(module)]
    expanded_width = 0  # numbers to which a layer expands the latents of one position, with temporaries
    if cache.is_latent:
        head_width = 2 * (config.qk_nope_head_dim + config.v_head_dim) + config.qk_rope_head_dim
        expanded_width = config.num_attention_heads * head_width
    return ModelShape(
        name=name,
        stages=tuple(stages),
        hidden_size=config.hidden_size,
        intermediate_size=max(max(dense_widths, default=1), min(expert_widths, default=1)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads if is_packed else num_heads,  # the class's attention code may repeat KV heads
        head_dim=head_size(config),
        vocab_size=config.vocab_size,
        context_tokens=num_rows - max((padding + 1 for padding in paddings if padding is not None), default=0),
        kv_layer_bytes=cache.layer_bytes_per_token,
        kv_heads=cache.heads,
        compute_dtype_bytes=model.dtype.itemsize,
        compute_dtype=COMPUTE_DTYPES.get(model.dtype, ""),
        is_packed=is_packed,
        state_bytes_per_sequence=cache.bytes_per_sequence,
        state_layer_bytes=cache.layer_bytes_per_sequence,
        cross_kv_bytes_per_token=cache.cross_bytes_per_token,
        expanded_kv_width=expanded_width,
        bounded_layers=frozenset() if is_packed or not cache.is_kept else bounded_layers(model),
        has_fused_gates=not cache.bytes_per_sequence  # recurrent layers may have activations as wide as feed-forwards
        and all(has_fused_gate(m.inner) for m in staged.modules if staged.kinds[m.stage].is_layer),
        has_bare_experts=bool(all_experts) and all(map(is_bare, all_experts)),
        delta_rule=delta_rule(model),
        score_heads=num_heads // num_kv_heads if has_own_scores else 0,
    )


def has_fused_gate(layer: nn.Module) -> bool:
    """True if a layer's only feed-forward is a FusedGatedMLP that runs a few rows at a time."""
    fused = [module for module in layer.modules() if isinstance(module, FusedGatedMLP)]
    is_only = len(fused) == 1 and not any(is_experts(module) for module in layer.modules())
    return is_only and fused[0].ops.mlp_rows is not None
