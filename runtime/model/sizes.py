"""A staged model in the sizes that it is planned by."""

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..errors import require
from ..plan.shape.model import ModelShape
from ..plan.shape.shapes import Parameter, Stage, StageKind
from ..probing.decoder_config import decoder_config, head_size, largest, num_attention_heads
from .experts import is_bare, is_experts
from .fused import FusedGatedMLP
from .stages import StagedModel
from .traits import CacheShape, bounded_layers, delta_rule, expanded_width

NO_LIMIT_TOKENS = 2**31
COMPUTE_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}  # as safetensors calls them


def shape_of(
    name: str, staged: StagedModel, parameters: Mapping[str, Parameter], cache: CacheShape, *, is_packed: bool
) -> ModelShape:
    """`parameters` by full name, wherever their bytes lie; `cache` as measured before the model was staged."""
    model = staged.model
    config = decoder_config(model.config)
    by_stage: list[list[Parameter]] = [[] for _ in staged.kinds]
    for full_name, parameter in parameters.items():
        if full_name in staged.stage_of:
            by_stage[staged.stage_of[full_name]].append(parameter)
    layer_parameters = [p for group, kind in zip(by_stage, staged.kinds, strict=True) if kind.is_layer for p in group]
    num_heads = num_attention_heads(config)
    num_kv_heads = largest(config, "num_key_value_heads") or num_heads
    has_own_scores = getattr(config, "attn_logit_softcapping", None) or any(
        hasattr(m, "sinks") for m in model.modules()
    )
    stages = tuple(_stage(index, group, staged.kinds, config) for index, group in enumerate(by_stage))
    num_experts = max(stage.num_experts for stage in stages)
    per_token = largest(config, "num_experts_per_tok") or 0
    require(
        not num_experts or per_token <= num_experts,
        f"model.path: config.json sends each token to {per_token} experts (num_experts_per_tok), but a layer has "
        f"{num_experts}: one of the two numbers is wrong",
    )
    return ModelShape(
        name=name,
        stages=stages,
        hidden_size=config.hidden_size,
        intermediate_size=_intermediate_size(layer_parameters),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads if is_packed else num_heads,  # own attention code may repeat KV heads
        head_dim=head_size(config),
        vocab_size=config.vocab_size,
        context_tokens=_context_tokens(model, config),
        kv_layer_bytes=cache.layer_bytes_per_token,
        kv_heads=cache.heads,
        compute_dtype_bytes=model.dtype.itemsize,
        compute_dtype=COMPUTE_DTYPES.get(model.dtype, ""),
        is_packed=is_packed,
        state_bytes_per_sequence=cache.bytes_per_sequence,
        state_layer_bytes=cache.layer_bytes_per_sequence,
        cross_kv_bytes_per_token=cache.cross_bytes_per_token,
        expanded_kv_width=expanded_width(model) if cache.is_latent else 0,
        bounded_layers=frozenset() if is_packed or not cache.is_kept else bounded_layers(model),
        has_fused_gates=not cache.bytes_per_sequence  # beside recurrent mixers, which may be as wide
        and all(has_fused_gate(m.inner) for m in staged.modules if staged.kinds[m.stage].is_layer),
        has_bare_experts=_has_bare_experts(model),
        delta_rule=delta_rule(model),
        score_heads=num_heads // num_kv_heads if has_own_scores else 0,
    )


def _context_tokens(model: nn.Module, config: PreTrainedConfig) -> int:
    """The rows of a table of positions, or what else bounds them. In one with a row for padding, as RoBERTa's, the
    first token's row is the one behind that."""
    num_rows = getattr(config, "max_position_embeddings", None) or NO_LIMIT_TOKENS
    tables = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    paddings = [t.padding_idx for name, t in tables if "position" in name and t.num_embeddings == num_rows]
    return num_rows - max((padding + 1 for padding in paddings if padding is not None), default=0)


def has_fused_gate(layer: nn.Module) -> bool:
    """Tells whether a layer's one feed-forward is ours and takes a few rows at a time."""
    ours = [module for module in layer.modules() if isinstance(module, FusedGatedMLP)]
    is_alone = len(ours) == 1 and not any(is_experts(module) for module in layer.modules())
    return is_alone and ours[0].ops.mlp_rows is not None


def _has_bare_experts(model: nn.Module) -> bool:
    found = [module for module in model.modules() if is_experts(module)]
    return bool(found) and all(map(is_bare, found))


def _intermediate_size(parameters: list[Parameter]) -> int:
    """The widest feed-forward activation of a token. Of experts, which run one after the other, that of one: the down
    projection shows it, where gate and up may lie fused."""
    dense = [max(p.shape) for p in parameters if len(p.shape) == 2]
    experts = [max(p.shape[-2:]) for p in parameters if len(p.shape) == 3]
    return max(max(dense, default=1), min(experts, default=1))


def _stage(index: int, parameters: list[Parameter], kinds: tuple[StageKind, ...], config: PreTrainedConfig) -> Stage:
    kind = kinds[index]
    stacks = [p for p in parameters if p.is_experts] or [p for p in parameters if ".experts." in p.name]
    counts = [p.num_experts or p.shape[0] for p in stacks if len(p.shape) == 3 and kind is StageKind.layer]
    num_experts, per_token = max(counts, default=0), largest(config, "num_experts_per_tok") or 0
    return Stage(
        index=index,
        name=f"{kind.value} {index - kinds.index(kind)}" if kind.is_layer else kind.value,
        kind=kind,
        parameters=tuple(parameters),
        num_experts=num_experts,
        num_experts_per_token=min(per_token or num_experts, num_experts),  # layers may differ in both
    )
