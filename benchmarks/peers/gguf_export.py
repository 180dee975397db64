"""Converts a Llama or Mixtral checkpoint to a GGUF file, with llama.cpp's tensor names and order of rotary dimensions.
The file has no vocabulary, because measurements use token ids."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open

from runtime.errors import ConfigError

LAYER_NAMES = {  # name in a layer: llama.cpp's name
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
NON_LAYER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
EXPERT_NAMES = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


class TensorSource(NamedTuple):
    """The parts of a GGUF tensor in the checkpoint: one tensor, or one matrix of each expert, in order.
    `num_rotated_heads`: heads of a Q or K projection; None for other tensors."""

    parts: Sequence[tuple[Path, str]]  # shard, tensor name
    shape: Sequence[int]
    num_rotated_heads: int | None = None


def export_gguf(checkpoint: Path, target: Path, kind: str) -> None:
    """Writes `target`. `kind`: the type of matrices, F16, Q8_0 or Q4_0; vectors are F32. Needs memory for one tensor.
    Raises ConfigError for other models than Llama and Mixtral."""
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] not in ("llama", "mixtral"):
        raise ConfigError(f"{checkpoint}: model_type must be llama or mixtral, got {config['model_type']}")
    part = target.with_suffix(".part")
    try:
        _write(part, checkpoint, config, kind)
        part.replace(target)  # atomic: an interrupted export leaves no incomplete target
    finally:
        part.unlink(missing_ok=True)  # as large as the model, and never resumed


def _write(target: Path, checkpoint: Path, config: Mapping[str, Any], kind: str) -> None:
    """Writes the GGUF file: keys, the list of all tensors, then their numbers one by one."""
    import gguf

    writer = gguf.GGUFWriter(target, "llama")
    _add_keys(writer, config)
    types, factors = gguf.GGMLQuantizationType, _frequency_factors(config)
    sources = _tensor_sources(checkpoint, config)
    tensor_types = {name: types[kind] if _is_converted(name, source) else types.F32 for name, source in sources.items()}
    for name, source in sources.items():
        dtype, shape = _numpy_layout(source.shape, tensor_types[name])
        writer.add_tensor_info(name, shape, dtype, math.prod(shape) * dtype.itemsize, raw_dtype=tensor_types[name])
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, source in sources.items():
        writer.write_tensor_data(_quantize(source, tensor_types[name]))
    if factors is not None:
        writer.write_tensor_data(factors)
    writer.close()


def _is_converted(name: str, source: TensorSource) -> bool:
    """True for matrices, except routers, which llama.cpp keeps in F32."""
    return len(source.shape) > 1 and not name.endswith("ffn_gate_inp.weight")


def _numpy_layout(shape: Sequence[int], kind: Any) -> tuple[np.dtype[Any], Sequence[int]]:
    """The dtype and shape of the array with a tensor's encoded bytes. `kind`: a GGMLQuantizationType."""
    from gguf.quants import quant_shape_to_byte_shape

    if kind.name in ("F16", "F32"):
        return np.dtype("float16" if kind.name == "F16" else "float32"), shape
    return np.dtype("uint8"), quant_shape_to_byte_shape(shape, kind)


def _quantize(source: TensorSource, kind: Any) -> np.ndarray:
    from gguf.quants import quantize

    matrices = list[np.ndarray]()
    for file, key in source.parts:
        with safe_open(file, framework="pt") as weights:
            tensor = weights.get_tensor(key).float()
        heads = source.num_rotated_heads
        matrices.append(quantize((tensor if heads is None else _interleave_rotary_pairs(tensor, heads)).numpy(), kind))
    return np.stack(matrices) if len(source.shape) > 2 else matrices[0]


def _add_keys(writer: Any, config: Mapping[str, Any]) -> None:
    heads, size = config["num_attention_heads"], config["hidden_size"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config.get("head_dim") or size // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])


def _tensor_sources(checkpoint: Path, config: Mapping[str, Any]) -> dict[str, TensorSource]:
    """Where each tensor of the GGUF file is in the checkpoint, by llama.cpp's name."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    sources = dict[str, TensorSource]()
    stacks = dict[str, dict[int, TensorSource]]()  # name: expert: its matrix; stacked to one tensor below
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for key in weights.keys():  # noqa: SIM118 - the file is no mapping
                source = TensorSource([(file, key)], weights.get_slice(key).get_shape())
                if key in NON_LAYER_NAMES:
                    sources[NON_LAYER_NAMES[key]] = source
                    continue
                layer, _, inner = key.removeprefix("model.layers.").partition(".")
                inner = inner.removesuffix(".weight")
                if ".experts." in inner:
                    _, expert, matrix = inner.rsplit(".", 2)
                    stacks.setdefault(f"blk.{layer}.{EXPERT_NAMES[matrix]}.weight", {})[int(expert)] = source
                    continue
                name = LAYER_NAMES[inner]
                sources[f"blk.{layer}.{name}.weight"] = source._replace(num_rotated_heads=heads.get(name))
    for name, stack in stacks.items():
        parts = [part for expert in sorted(stack) for part in stack[expert].parts]
        sources[name] = TensorSource(parts, [len(parts), *stack[0].shape])
    return sources


def _interleave_rotary_pairs(weights: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorders the rows of a Q or K projection. transformers rotates pairs of dimensions (i, i + half), llama.cpp pairs
    of neighbors."""
    return weights.view(num_heads, 2, -1, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)


def _frequency_factors(config: Mapping[str, Any]) -> np.ndarray | None:
    """The numbers by which Llama 3 divides low rotary frequencies, for contexts longer than in pretraining; None for
    other models."""
    if config["rope_parameters"]["rope_type"] != "llama3":
        return None
    rope = config["rope_parameters"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for number in range(0, dim, 2):
        periods = original / (2 * math.pi * rope["rope_theta"] ** (number / dim))  # in the original context
        share = min(1.0, max(0.0, (periods - low) / (high - low)))
        factors.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(factors, np.float32)
