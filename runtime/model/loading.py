"""From a directory or hub id to a model that asks for its weights: config, tokenizer, stages and shapes. Reads no
weight."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoTokenizer, DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..config import DType, ModelConfig
from ..errors import CheckpointError, ConfigError
from ..plan.shapes import ModelShape, Parameter, Stage, StageKind
from ..store.checkpoint import Checkpoint, open_checkpoint
from . import attention, experts
from .converted import cache_root, convert_once
from .layout import map_weights
from .meta import build_meta_model
from .stages import EMBEDDING, StagedModel, stage_model
from .synthesize import tiny_checkpoint

HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "tokenizer*"]
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
    checkpoint: Checkpoint
    fingerprint: str


def load_model(
    config: ModelConfig, device: torch.device, cache_dir: str | None, *, express: bool = True
) -> LoadedModel:
    """Raises CheckpointError or ConfigError with what to change. `express`: see `map_weights`."""
    directory = find_checkpoint(config, cache_dir)
    checkpoint = open_checkpoint(directory)
    try:
        hf_config = AutoConfig.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory}: no usable config.json: {error}") from error
    dtype = _compute_dtype(config.dtype, hf_config, device)
    model = build_meta_model(hf_config, dtype)
    is_packed = takes_packed_lanes(model)
    _register(model, is_packed)
    weights = map_weights(model, checkpoint.tensors, express=express)
    fingerprint = checkpoint.fingerprint()
    parameters = dict(weights.parameters)
    if weights.inexpressible:
        parameters |= convert_once(model, weights.inexpressible, cache_root(cache_dir), fingerprint)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict(keep_vars=True).items()}
    staged = stage_model(model)
    _move_buffers(model, device)
    return LoadedModel(
        staged=staged,
        shape=_shape(config.name, staged, parameters, dtype, is_packed),
        dtypes=dtypes,
        compute_dtype=dtype,
        tokenizer=_load_tokenizer(config, directory),
        eos_token_ids=_eos_token_ids(directory, hf_config),
        checkpoint=checkpoint,
        fingerprint=fingerprint,
    )


def find_checkpoint(config: ModelConfig, cache_dir: str | None) -> Path:
    """A local directory, the built-in tiny model, or what the hub or its cache holds under the id."""
    if config.path is None:
        if config.name != "tiny":
            raise ConfigError(f"model={config.name} needs model.path: a local directory or a hub id")
        return tiny_checkpoint(cache_root(cache_dir) / "tiny")
    path = Path(config.path).expanduser()
    if path.is_dir():
        return path
    if path.suffix or config.path.startswith((".", "/", "~")) or config.path.count("/") > 1:
        raise CheckpointError(_three_ways(config, f"{path} is not a directory"))
    try:
        return Path(snapshot_download(config.path, revision=config.revision, allow_patterns=HUB_PATTERNS))
    except (OSError, ValueError) as error:  # huggingface_hub's errors derive from these
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(_three_ways(config, f"the hub and its cache gave nothing for it: {reason}")) from error


def _three_ways(config: ModelConfig, reason: str) -> str:
    return (
        f"model={config.name}: no weights at model.path={config.path}: {reason}\n"
        f"three ways on:\n"
        f"  1. hub: run `hf download {config.path}` where there is network (gated models: `hf auth login` first)\n"
        f"  2. local: model.path=/directory/with/config.json/and/safetensors\n"
        f"  3. random weights: python -m jobs.synthesize model={config.name} out=DIR, then model.path=DIR"
    )


def _compute_dtype(wanted: DType, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """On a CPU `auto` is float32: the exact answer, and on most CPUs the faster one."""
    if wanted is not DType.auto:
        return getattr(torch, wanted.value)
    stored = getattr(config, "dtype", None)
    return torch.float32 if device.type == "cpu" or not isinstance(stored, torch.dtype) else stored


def takes_packed_lanes(model: PreTrainedModel) -> bool:
    """Whether the class calls a registered attention function in every layer and keeps nothing but plain KV."""
    config = model.config.get_text_config()
    extras = ("attn_logit_softcapping", "kv_lora_rank", "alibi")
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
        and not any(getattr(config, name, None) for name in extras)
        and not any(hasattr(module, "sinks") for module in model.modules())
    )


def _register(model: PreTrainedModel, is_packed: bool) -> None:
    if is_packed:
        attention.register()
        model.set_attn_implementation(attention.NAME)
        assert model.config._attn_implementation == attention.NAME, "transformers did not take the attention function"
    if any(hasattr(module, "has_gate") for module in model.modules()):
        experts.register()
        model.set_experts_implementation(experts.NAME)


def _move_buffers(model: PreTrainedModel, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _shape(
    name: str, staged: StagedModel, parameters: Mapping[str, Parameter], dtype: torch.dtype, is_packed: bool
) -> ModelShape:
    config = staged.model.config.get_text_config()
    by_stage: list[list[Parameter]] = [[] for _ in range(staged.num_layers + 2)]
    for full_name, parameter in parameters.items():
        if full_name in staged.stage_of:
            by_stage[staged.stage_of[full_name]].append(parameter)
    layer_parameters = [p for group in by_stage[1:-1] for p in group]
    num_heads = config.num_attention_heads if hasattr(config, "num_attention_heads") else 1
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return ModelShape(
        name=name,
        stages=tuple(_stage(index, group, staged, config) for index, group in enumerate(by_stage)),
        hidden_size=config.hidden_size,
        intermediate_size=_intermediate_size(layer_parameters),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads if is_packed else num_heads,  # own caches may keep KV heads repeated
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        vocab_size=config.vocab_size,
        context_tokens=getattr(config, "max_position_embeddings", None) or NO_LIMIT_TOKENS,
        num_kv_layers=staged.num_layers,
        compute_dtype_bytes=dtype.itemsize,
        is_packed=is_packed,
    )


def _intermediate_size(parameters: list[Parameter]) -> int:
    """The widest feed-forward activation of a token. Of experts, which run one after the other, that of one: the down
    projection shows it, where gate and up may lie fused."""
    dense = [max(p.shape) for p in parameters if len(p.shape) == 2]
    experts = [max(p.shape[-2:]) for p in parameters if len(p.shape) == 3]
    return max(max(dense, default=1), min(experts, default=1))


def _stage(index: int, parameters: list[Parameter], staged: StagedModel, config: PreTrainedConfig) -> Stage:
    kinds = {EMBEDDING: StageKind.embedding, staged.head: StageKind.head}
    kind = kinds.get(index, StageKind.layer)
    num_experts = max((p.shape[0] for p in parameters if len(p.shape) == 3 and kind is StageKind.layer), default=0)
    return Stage(
        index=index,
        name=kind.value if kind is not StageKind.layer else f"layer {index - 1}",
        kind=kind,
        parameters=tuple(parameters),
        num_experts=num_experts,
        num_experts_per_token=int(getattr(config, "num_experts_per_tok", 0) or 0) or num_experts,
    )


def _load_tokenizer(config: ModelConfig, directory: Path) -> PreTrainedTokenizerBase | None:
    """None when the checkpoint has none: token ids can still be generated from."""
    source = config.tokenizer or str(directory)
    has_files = any(directory.glob("tokenizer*")) or any(directory.glob("vocab*")) or any(directory.glob("*.model"))
    if config.tokenizer is None and not has_files:
        return None
    try:
        return AutoTokenizer.from_pretrained(source, padding_side="left")
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"model.tokenizer={source}: cannot be loaded: {error}") from error


def _eos_token_ids(directory: Path, config: PreTrainedConfig) -> frozenset[int]:
    """As transformers' generate finds them: generation_config.json first, then config.json."""
    try:
        eos = GenerationConfig.from_pretrained(directory).eos_token_id
    except OSError:
        eos = getattr(config.get_text_config(), "eos_token_id", None)
    return frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
