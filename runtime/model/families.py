"""Tiny configs of the model families whose tokens are compared with transformers, for `jobs.models` and the tests. The
engine does not use this list: it may run other families too."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Family:
    """A tiny config with each kind of layer that the family has: transformers' defaults for `model_type`, with
    `overrides`."""

    name: str
    model_type: str
    overrides: Mapping[str, object] = field(default_factory=dict)


_SIZES = {
    "vocab_size": 640, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
_GPT = {"vocab_size": 640, "n_embd": 64, "n_layer": 4, "n_head": 4}
_NEOX = {"vocab_size": 640, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED_EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 48, "n_group": 2,
    "topk_group": 1,
}  # fmt: skip
_DENSE_FIRST = {"first_k_dense_replace": 1}
_LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}  # fmt: skip
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_T5 = {
    "vocab_size": 640, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 4, "num_decoder_layers": 3, "num_heads": 4,
}  # fmt: skip
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def make_family(name: str, model_type: str, *overrides: Mapping[str, object], **more: object) -> Family:
    merged: dict[str, object] = {}
    for part in (*overrides, more):
        merged |= part
    return Family(name=name, model_type=model_type, overrides=merged)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        make_family("gpt2", "gpt2", _GPT, n_positions=256),
        make_family("llama", "llama", _SIZES),
        make_family("llama, tied", "llama", _SIZES, tie_word_embeddings=True),
        make_family("mistral", "mistral", _SIZES, sliding_window=9),
        make_family("qwen2", "qwen2", _SIZES),
        make_family("qwen3", "qwen3", _SIZES, head_dim=16),
        make_family("qwen2-moe", "qwen2_moe", _SIZES, _EXPERTS, shared_expert_intermediate_size=48),
        make_family("qwen3-moe", "qwen3_moe", _SIZES, _EXPERTS, head_dim=16),
        make_family(
            "qwen3-next", "qwen3_next", _SIZES, _EXPERTS, _LINEAR, head_dim=16, shared_expert_intermediate_size=48
        ),
        make_family("glm-4", "glm4", _SIZES, head_dim=16, pad_token_id=0),
        make_family("glm-4-moe", "glm4_moe", _SIZES, _ROUTED_EXPERTS, _DENSE_FIRST, head_dim=16, use_qk_norm=True),
        make_family("mixtral", "mixtral", _SIZES, _LOCAL_EXPERTS, sliding_window=None),
        make_family(
            "dbrx",
            "dbrx",
            vocab_size=640,
            d_model=64,
            n_heads=4,
            n_layers=4,
            max_seq_len=512,
            attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
            ffn_config={"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        ),
        make_family(
            "deepseek-v2",
            "deepseek_v2",
            _SIZES,
            _ROUTED_EXPERTS,
            _DENSE_FIRST,
            _LATENT,
            topk_method="group_limited_greedy",
        ),
        make_family(
            "deepseek-moe 16b",
            "deepseek",
            _SIZES,
            num_key_value_heads=8,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=48,
        ),
        make_family("deepseek-v3", "deepseek_v3", _SIZES, _ROUTED_EXPERTS, _DENSE_FIRST, _LATENT),
        make_family("olmoe", "olmoe", _SIZES, num_experts=8, num_experts_per_tok=2),
        make_family("opt", "opt", _NEOX, ffn_dim=128, word_embed_proj_dim=32),
        make_family("bloom", "bloom", vocab_size=640, hidden_size=64, n_layer=4, n_head=4),
        make_family("falcon, first", "falcon", _NEOX, multi_query=True, new_decoder_architecture=False),
        make_family("falcon, alibi", "falcon", _NEOX, multi_query=False, alibi=True, parallel_attn=False, bias=True),
        make_family("falcon, new", "falcon", _NEOX, new_decoder_architecture=True, num_kv_heads=2),
        make_family("gpt-j", "gptj", _GPT, n_positions=256, rotary_dim=8),
        make_family(
            "gpt-neo",
            "gpt_neo",
            vocab_size=640,
            hidden_size=64,
            num_layers=4,
            num_heads=4,
            window_size=9,
            max_position_embeddings=512,
            attention_types=[[["global", "local"], 2]],
        ),
        make_family("gpt-neox", "gpt_neox", _NEOX, intermediate_size=128),
        make_family("phi", "phi", _SIZES, num_key_value_heads=8),
        make_family("phi-3", "phi3", _SIZES, pad_token_id=0),
        make_family("phi-moe", "phimoe", _SIZES, _LOCAL_EXPERTS, sliding_window=None),
        make_family("gemma-2", "gemma2", _SIZES, head_dim=16, sliding_window=9, layer_types=_MIXED),
        make_family("gemma-3", "gemma3_text", _SIZES, head_dim=16, sliding_window=9, layer_types=_MIXED),
        make_family("gpt-oss", "gpt_oss", _SIZES, _LOCAL_EXPERTS, head_dim=16, sliding_window=9, layer_types=_MIXED),
        make_family("granite-moe", "granitemoe", _SIZES, _LOCAL_EXPERTS),
        make_family("minimax-m2", "minimax_m2", _SIZES, _LOCAL_EXPERTS, head_dim=16),
        make_family(
            "llama-4",
            "llama4_text",
            _SIZES,
            num_local_experts=4,
            num_experts_per_tok=1,
            intermediate_size_mlp=128,
            head_dim=16,
            attention_chunk_size=8,
            floor_scale=4,
            interleave_moe_layer_step=2,
        ),
        make_family(
            "mamba-2",
            "mamba2",
            vocab_size=640,
            hidden_size=64,
            num_hidden_layers=4,
            num_heads=8,
            head_dim=16,
            state_size=16,
            n_groups=2,
            chunk_size=16,
        ),
        make_family(
            "jamba",
            "jamba",
            _SIZES,
            num_experts=4,
            num_experts_per_tok=2,
            mamba_d_state=8,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            use_mamba_kernels=False,
        ),
        make_family("olmo-2", "olmo2", _SIZES),
        make_family("starcoder-2", "starcoder2", _SIZES),
        make_family("cohere-2", "cohere2", _SIZES, sliding_window=9, layer_types=_MIXED),
        make_family("smollm-3", "smollm3", _SIZES, pad_token_id=0),
        make_family("granite", "granite", _SIZES),
        make_family("ernie-4.5-moe", "ernie4_5_moe", _SIZES, moe_num_experts=8, moe_k=2, moe_intermediate_size=48),
        make_family("hunyuan-moe", "hunyuan_v1_moe", _SIZES, num_experts=4, moe_topk=2, head_dim=16),
        make_family("dots-1", "dots1", _SIZES, _ROUTED_EXPERTS, _DENSE_FIRST, head_dim=16),
        make_family("lfm-2", "lfm2", _SIZES, layer_types=["conv", "full_attention", "conv", "conv"]),
        make_family(
            "kimi-linear",
            "kimi_linear",
            _SIZES,
            _LATENT,
            q_lora_rank=None,
            num_experts=8,
            num_experts_per_token=2,
            moe_intermediate_size=48,
            layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            linear_head_dim=16,
            linear_num_heads=4,
            pad_token_id=0,
        ),
        make_family("mpt", "mpt", vocab_size=640, d_model=64, n_heads=4, n_layers=4, max_seq_len=512),
        make_family("stablelm", "stablelm", _SIZES),
        make_family("nemotron", "nemotron", _SIZES),
        make_family("gpt-bigcode", "gpt_bigcode", _GPT, n_positions=256, multi_query=True),
        make_family("exaone-4", "exaone4", _SIZES, sliding_window=9, layer_types=_MIXED, head_dim=16),
        make_family(
            "glm-4-moe-lite",
            "glm4_moe_lite",
            _SIZES,
            _LATENT,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        ),
        make_family("t5", "t5", _T5),
        make_family("flan-t5", "t5", _T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        make_family("umt5", "umt5", _T5, tie_word_embeddings=False),
        make_family(
            "longcat-flash",
            "longcat_flash",
            _SIZES,
            _LATENT,
            head_dim=8,
            ffn_hidden_size=128,
            expert_ffn_hidden_size=48,
            n_routed_experts=4,
            zero_expert_num=2,
            moe_topk=2,
        ),
    )
}
