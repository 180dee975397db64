"""From a checkpoint to a model that asks for its weights: config, tokenizer, stages and shapes. Reads no weight."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..config import DType, ModelConfig
from ..errors import ConfigError
from ..plan.model_shape import ModelShape
from ..plan.shapes import Parameter, Stage, StageKind
from ..store.cache_root import cache_root
from ..store.checkpoint import Checkpoint, open_checkpoint
from . import attention, experts
from .converted import convert_once
from .gguf import map_gguf
from .layout import map_weights
from .meta import build_meta_model
from .origin import eos_token_ids, find_checkpoint, load_tokenizer, read_config, start_token_id
from .quantization import pair_scales, take_quantization
from .stages import StagedModel, stage_model
from .traits import (
    CacheShape,
    ExpertKind,
    bounded_layers,
    choose_lanes,
    delta_rule,
    expanded_width,
    expert_kind,
    measure_cache,
)

log = logging.getLogger(__name__)

NO_LIMIT_TOKENS = 2**31


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """`dtypes` holds, per full parameter name, the precision that the model computes with."""

    staged: StagedModel
    shape: ModelShape
    dtypes: Mapping[str, torch.dtype]
    compute_dtype: torch.dtype
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: frozenset[int]
    start_token_id: int | None  # a decoder's first token behind an encoder; None without one
    checkpoint: Checkpoint
    fingerprint: str
    expands_latents: bool  # see traits.CacheShape


def load_model(
    config: ModelConfig, device: torch.device, cache_dir: str | None, *, express: bool = True
) -> LoadedModel:
    """Raises CheckpointError or ConfigError with what to change. `express`: see `map_weights`."""
    path = find_checkpoint(config, cache_dir)
    checkpoint = open_checkpoint(path)
    hf_config = read_config(path)
    quantization = take_quantization(hf_config)
    dtype = _compute_dtype(config.dtype, hf_config, device)
    model = build_meta_model(hf_config, dtype)
    is_packed, reason = choose_lanes(model, config.lanes)
    if reason:
        log.info("lanes are padded: %s", reason)
    cache = measure_cache(model)
    _register(model, is_packed=is_packed)
    if checkpoint.gguf is not None:
        weights = map_gguf(model, checkpoint)
    else:
        weights = map_weights(model, pair_scales(checkpoint.tensors, quantization), express=express)
    fingerprint = checkpoint.fingerprint()
    parameters = dict(weights.parameters)
    if weights.inexpressible:
        parameters |= convert_once(model, weights.inexpressible, cache_root(cache_dir), fingerprint)
    parameters |= {name: replace(parameters[name], is_experts=True) for name in experts.stacks(model)}
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict(keep_vars=True).items()}
    staged = stage_model(model)
    _move_buffers(model, device)
    return LoadedModel(
        staged=staged,
        shape=_shape(config.name, staged, parameters, cache, is_packed=is_packed),
        expands_latents=cache.is_latent,
        dtypes=dtypes,
        compute_dtype=dtype,
        tokenizer=load_tokenizer(config.tokenizer, checkpoint),
        eos_token_ids=eos_token_ids(path, hf_config),
        start_token_id=start_token_id(path, hf_config) if hf_config.is_encoder_decoder else None,
        checkpoint=checkpoint,
        fingerprint=fingerprint,
    )


def _compute_dtype(wanted: DType, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """On a CPU `auto` is float32: the exact answer, and on most CPUs the faster one."""
    if wanted is not DType.auto:
        return getattr(torch, wanted.value)
    stored = getattr(config, "dtype", None)
    return torch.float32 if device.type == "cpu" or not isinstance(stored, torch.dtype) else stored


def _register(model: PreTrainedModel, *, is_packed: bool) -> None:
    if expert_kind(model) is ExpertKind.sorted:
        experts.register()
        model.set_experts_implementation(experts.NAME)
        assert model.config.get_text_config()._experts_implementation == experts.NAME, (
            "experts run without our function"
        )
    if is_packed:
        attention.register()
        model.set_attn_implementation(attention.NAME)
        if model.config._attn_implementation != attention.NAME:
            raise ConfigError(
                f"model.lanes: {type(model).__name__} ignores attention functions; use model.lanes=padded"
            )


def _move_buffers(model: PreTrainedModel, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _shape(
    name: str, staged: StagedModel, parameters: Mapping[str, Parameter], cache: CacheShape, *, is_packed: bool
) -> ModelShape:
    model = staged.model
    config = model.config.get_text_config()
    by_stage: list[list[Parameter]] = [[] for _ in staged.kinds]
    for full_name, parameter in parameters.items():
        if full_name in staged.stage_of:
            by_stage[staged.stage_of[full_name]].append(parameter)
    layer_parameters = [p for group, kind in zip(by_stage, staged.kinds, strict=True) if kind.is_layer for p in group]
    num_heads = getattr(config, "num_attention_heads", None) or 1
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    has_own_scores = getattr(config, "attn_logit_softcapping", None) or any(
        hasattr(m, "sinks") for m in model.modules()
    )
    return ModelShape(
        name=name,
        stages=tuple(_stage(index, group, staged.kinds, config) for index, group in enumerate(by_stage)),
        hidden_size=config.hidden_size,
        intermediate_size=_intermediate_size(layer_parameters),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads if is_packed else num_heads,  # own attention code may repeat KV heads
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        vocab_size=config.vocab_size,
        context_tokens=getattr(config, "max_position_embeddings", None) or NO_LIMIT_TOKENS,
        kv_layer_bytes=cache.layer_bytes_per_token,
        compute_dtype_bytes=model.dtype.itemsize,
        is_packed=is_packed,
        state_bytes_per_sequence=cache.bytes_per_sequence,
        cross_kv_bytes_per_token=cache.cross_bytes_per_token,
        expanded_kv_width=expanded_width(model) if cache.is_latent else 0,
        bounded_layers=frozenset() if is_packed else bounded_layers(model),
        delta_rule=delta_rule(model),
        score_heads=num_heads // num_kv_heads if has_own_scores else 0,
    )


def _intermediate_size(parameters: list[Parameter]) -> int:
    """The widest feed-forward activation of a token. Of experts, which run one after the other, that of one: the down
    projection shows it, where gate and up may lie fused."""
    dense = [max(p.shape) for p in parameters if len(p.shape) == 2]
    experts = [max(p.shape[-2:]) for p in parameters if len(p.shape) == 3]
    return max(max(dense, default=1), min(experts, default=1))


def _stage(index: int, parameters: list[Parameter], kinds: tuple[StageKind, ...], config: PreTrainedConfig) -> Stage:
    kind = kinds[index]
    stacks = [p for p in parameters if p.is_experts] or [p for p in parameters if ".experts." in p.name]
    num_experts = max((p.shape[0] for p in stacks if len(p.shape) == 3 and kind is StageKind.layer), default=0)
    return Stage(
        index=index,
        name=f"{kind.value} {index - kinds.index(kind)}" if kind.is_layer else kind.value,
        kind=kind,
        parameters=tuple(parameters),
        num_experts=num_experts,
        num_experts_per_token=int(getattr(config, "num_experts_per_tok", 0) or 0) or num_experts,
    )
