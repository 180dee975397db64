"""GGUF files as llama.cpp's converter writes them, from synthesised checkpoints."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

HALVES = {  # where a K-block keeps its scale and its minimum, and the mean number times the scale of the group
    Type.Q2_K: (80, 82, 1.5), Type.Q3_K: (108, None, 0.0), Type.Q4_K: (0, 2, 7.5), Type.Q5_K: (0, 2, 15.5),
    Type.Q6_K: (208, None, 0.0),
}  # fmt: skip
Weights = dict[str, np.ndarray]
Metadata = int | float | list[int]


def random_blocks(shape: tuple[int, ...], kind: Type, std: float, seed: int) -> np.ndarray:
    """Bytes of random blocks of a K type (which `gguf` reads and does not write); numbers around zero with this
    deviation."""
    num_numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (np.prod(shape) // num_numbers, num_bytes), dtype=np.uint8)
    at, minimum, mean = HALVES[kind]
    for scale in (1.0, None):
        half = np.array([scale or std / gguf.dequantize(blocks, kind).std()], dtype=np.float16)
        blocks[:, at : at + 2] = half.view(np.uint8)
        if minimum is not None:
            blocks[:, minimum : minimum + 2] = (half * np.float16(mean)).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def packed(weights: np.ndarray, kind: Type, seed: int) -> np.ndarray:
    """As `kind`; of K types only the shape and the deviation of `weights` are kept."""
    if kind in HALVES:
        return random_blocks(weights.shape, kind, float(weights.std()), seed)
    return gguf.quants.quantize(weights.astype(np.float32), kind)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How llama.cpp calls and changes a family. `keys`: metadata by the config's keys; `more`: others, by their own;
    `undo`: what its converter does to a tensor (GGUF name, weights, config)."""

    name: str
    keys: Mapping[str, str]
    undo: Callable[[str, np.ndarray, PreTrainedConfig], Weights] = lambda name, weights, config: {name: weights}
    more: Callable[[PreTrainedConfig], Mapping[str, Metadata]] = lambda config: {}


def _interleave(weights: np.ndarray, num_heads: int) -> np.ndarray:
    return weights.reshape(num_heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _llama(name: str, weights: np.ndarray, config: PreTrainedConfig) -> Weights:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    part = name.split(".")[-2]
    return {name: _interleave(weights, heads[part]) if part in heads else weights}


def _experts(name: str, weights: np.ndarray, config: PreTrainedConfig) -> Weights:
    layer = name.rpartition(".ffn_")[0]
    if name.endswith(("ffn_gate_exps", "ffn_up_exps")):  # one parameter has both names
        gate, up = np.split(weights, 2, axis=1)
        return {f"{layer}.ffn_gate_exps.weight": gate, f"{layer}.ffn_up_exps.weight": up}
    return {f"{name}.weight" if name.endswith("_exps") else name: weights}


def _gpt2(name: str, weights: np.ndarray, config: PreTrainedConfig) -> Weights:
    is_conv = name.endswith(("attn_qkv.weight", "ffn_down.weight", "ffn_up.weight", "attn_output.weight"))
    return {name: weights.T if is_conv else weights}


def _gemma(name: str, weights: np.ndarray, config: PreTrainedConfig) -> Weights:
    return {name: weights + 1 if name.endswith("norm.weight") else weights}


def _bloom(name: str, weights: np.ndarray, config: PreTrainedConfig) -> Weights:
    if "attn_qkv" not in name:
        return {name: weights}
    parts = weights.reshape(config.n_head, 3, -1, *weights.shape[1:])
    return {name: parts.swapaxes(0, 1).reshape(weights.shape)}


def _lfm2(name: str, weights: np.ndarray, config: PreTrainedConfig) -> Weights:
    return {name: weights.squeeze(1) if weights.ndim == 3 else weights}


def _qwen35(name: str, weights: np.ndarray, config: PreTrainedConfig) -> Weights:
    """Rows and columns keep their order, which is another model's: as good a test."""
    if name.endswith("ssm_a"):
        weights = -np.exp(weights)
    elif name.endswith("norm.weight") and "ssm" not in name:
        weights = weights + 1
    return {name: weights.squeeze(1) if weights.ndim == 3 else weights}


_LLAMA_KEYS = {
    "max_position_embeddings": "context_length", "num_hidden_layers": "block_count", "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "head_dim": "rope.dimension_count", "vocab_size": "vocab_size",
}  # fmt: skip
_KEY_LENGTH = {**_LLAMA_KEYS, "head_dim": "attention.key_length"}
ARCHITECTURES = {
    "llama": Architecture(name="llama", keys=_LLAMA_KEYS, undo=_llama),
    "qwen3_moe": Architecture(
        name="qwen3moe",
        keys=_KEY_LENGTH | {
            "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        undo=_experts,
    ),
    "gemma2": Architecture(
        name="gemma2", keys=_KEY_LENGTH | {"sliding_window": "attention.sliding_window"}, undo=_gemma,
    ),
    "gpt2": Architecture(
        name="gpt2",
        keys={
            "n_layer": "block_count", "n_positions": "context_length", "n_embd": "embedding_length",
            "n_head": "attention.head_count", "layer_norm_epsilon": "attention.layer_norm_epsilon",
        },
        undo=_gpt2,
    ),
    "bloom": Architecture(
        name="bloom",
        keys={
            "n_layer": "block_count", "hidden_size": "embedding_length", "n_head": "attention.head_count",
            "layer_norm_epsilon": "attention.layer_norm_epsilon", "vocab_size": "vocab_size",
        },
        undo=_bloom,
    ),
    "lfm2": Architecture(
        name="lfm2",
        keys={
            "max_position_embeddings": "context_length", "num_hidden_layers": "block_count",
            "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
            "num_attention_heads": "attention.head_count", "norm_eps": "attention.layer_norm_rms_epsilon",
            "conv_L_cache": "shortconv.l_cache",
        },
        undo=_lfm2,
        more=lambda c: {
            "attention.head_count_kv": [c.num_key_value_heads * (kind != "conv") for kind in c.layer_types],
            "rope.freq_base": c.rope_parameters["rope_theta"],
        },
    ),
    "qwen3_5_text": Architecture(
        name="qwen35",
        keys=_KEY_LENGTH | {
            "linear_num_value_heads": "ssm.time_step_rank", "linear_num_key_heads": "ssm.group_count",
            "linear_key_head_dim": "ssm.state_size", "linear_conv_kernel_dim": "ssm.conv_kernel",
        },
        undo=_qwen35,
        more=lambda c: {
            "full_attention_interval": 4, "rope.freq_base": 10_000.0, "rope.dimension_count": 12,
            "rope.dimension_sections": [2, 2, 2, 0],
            "ssm.inner_size": c.linear_num_value_heads * c.linear_value_head_dim,
        },
    ),
}  # fmt: skip


class _Names(TensorProcessor):
    """Spells the one name that gguf's own table does not have."""

    def preprocess_name(self, hf_name: str) -> str:
        return hf_name.replace(".dt_bias", ".dt_proj.bias")


def write_gguf(
    source: Path, path: Path, kinds: Mapping[str, Type], ids: Mapping[str, int] = MappingProxyType({})
) -> Path:
    """`source`, a synthesised checkpoint, as a GGUF file. `kinds`: the type of matrices whose GGUF name holds the key;
    the first that does counts, "" is in all. Vectors are F32. `ids`: settings below `tokenizer.ggml.`."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture.name)
    metadata = {name: getattr(config, key) for key, name in architecture.keys.items()} | {**architecture.more(config)}
    for name, value in metadata.items():
        add = {float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}[type(value)]
        add(f"{architecture.name}.{name}", value)
    _add_tokenizer(writer, source)
    for key, token in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", token)
    processor = TENSOR_PROCESSORS.get(architecture.name, _Names)(config=config.to_dict())
    name_map = get_gguf_hf_weights_map(model, processor, model_type=architecture.name)
    names = {theirs: name for name, theirs in name_map.items()}
    tied = set(model.all_tied_weights_keys)
    for turn, (key, tensor) in enumerate(model.state_dict().items()):
        name = names.get(processor.preprocess_name(key))
        if key in tied or name is None:
            continue
        for target, weights in architecture.undo(name, tensor.float().numpy(), config).items():
            kind = next(kind for part, kind in kinds.items() if part in target)
            kind = kind if weights.ndim > 1 else Type.F32
            writer.add_tensor(target, packed(np.ascontiguousarray(weights), kind, turn), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    vocab = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in tokenizer.all_special_tokens else 1 for t in tokens])
    writer.add_token_scores([-float(index) for index in range(len(tokens))])  # no pair is merged
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)


def write_vocabulary(path: Path, merges: Sequence[str], settings: Mapping[str, str | int | bool]) -> Path:
    """A file without tensors: a byte-level vocabulary of `<s>`, `</s>`, the bytes and what `merges` make of them, and
    settings below `tokenizer.ggml.`."""
    tokens = ["<s>", "</s>", *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    writer = gguf.GGUFWriter(path, "llama")
    for name in _LLAMA_KEYS.values():
        add = writer.add_float32 if name.endswith("epsilon") else writer.add_uint32
        add(f"llama.{name}", 8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 2))
    writer.add_token_merges(merges)
    for key, value in settings.items():
        add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool}[type(value)]
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
