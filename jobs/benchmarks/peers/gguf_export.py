"""A checkpoint as the file that llama.cpp reads: the same weights under its names, in its order of a head's numbers.

For the models of the comparison, Llama and Mixtral; without a vocabulary, as token ids go in and come out.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from runtime.errors import ConfigError

NAMES = {  # of a layer
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
EXPERT_NAMES = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def export_gguf(checkpoint: Path, target: Path, kind: str) -> None:
    """`kind`: of matrices, "F16", "Q8_0" or "Q4_0"; vectors are F32. Raises ConfigError for another model."""
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] not in ("llama", "mixtral"):
        raise ConfigError(f"{checkpoint}: llama.cpp is measured on Llama and Mixtral, this is {config['model_type']}")
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama", use_temp_file=True)  # it would hold all of it in memory
    _add_keys(writer, config)
    types = gguf.GGMLQuantizationType
    for name, weights in _tensors(checkpoint, config):
        is_matrix = weights.dim() > 1 and not name.endswith("ffn_gate_inp.weight")
        stored = types[kind] if is_matrix else types.F32
        writer.add_tensor(name, gguf.quants.quantize(weights.float().numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(target)


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


def _tensors(checkpoint: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for key in weights.keys():  # noqa: SIM118 - the file is no mapping
                tensor = weights.get_tensor(key)
                if key in OUTER:
                    yield OUTER[key], tensor
                    continue
                layer, _, inner = key.removeprefix("model.layers.").partition(".")
                inner = inner.removesuffix(".weight")
                if ".experts." in inner:
                    _, expert, matrix = inner.rsplit(".", 2)
                    stack = stacks.setdefault(f"blk.{layer}.{EXPERT_NAMES[matrix]}.weight", {})
                    stack[int(expert)] = tensor
                    continue
                name = NAMES[inner]
                yield f"blk.{layer}.{name}.weight", _interleaved(tensor, heads[name]) if name in heads else tensor
    for name, stack in stacks.items():
        yield name, torch.stack([stack[expert] for expert in sorted(stack)])
    if config["rope_parameters"]["rope_type"] == "llama3":
        yield "rope_freqs.weight", _frequency_factors(config)


def _interleaved(weights: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rotary pairs side by side, where transformers has them in halves."""
    return weights.view(num_heads, 2, -1, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)


def _frequency_factors(config: Mapping[str, Any]) -> torch.Tensor:
    """The factors by which Llama 3 divides the rotary frequencies of waves that are longer than its first context."""
    rope = config["rope_parameters"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    first, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for number in range(0, dim, 2):
        turns = first / (2 * math.pi * rope["rope_theta"] ** (number / dim))  # of this wave in the first context
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - share) / rope["factor"] + share))
    return torch.tensor(factors)
