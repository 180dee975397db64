"""What tiny configs are made of: sizes by the names that configs give them, and what single types need beside."""

from collections.abc import Mapping

SIZES: Mapping[str, object] = {
    "vocab_size": 640, "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embed_dim": 64, "emb_dim": 64,
    "intermediate_size": 128, "ffn_dim": 128, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "d_ff": 128,
    "ffn_hidden_size": 128, "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 3, "encoder_layers": 3,
    "decoder_layers": 3, "num_decoder_layers": 3, "num_encoder_layers": 3, "num_attention_heads": 4, "n_head": 4,
    "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "n_positions": 512, "sliding_window": 9, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "expert_ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 48, "moe_num_experts": 4, "moe_k": 2, "moe_topk": 2, "top_k_experts": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 32,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "word_embed_proj_dim": 64,
    "d_kv": 16, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 640, "max_target_positions": 512,
}  # fmt: skip

VISION_SIZES: Mapping[str, object] = {
    "hidden_size": 64, "embed_dim": 64, "intermediate_size": 128, "num_hidden_layers": 2, "depth": 2, "num_heads": 4,
    "num_attention_heads": 4, "image_size": 32, "patch_size": 8, "out_hidden_size": 64, "num_key_value_heads": 4,
    "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128, "text_hidden_size": 64,
}  # fmt: skip

_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16,
}  # fmt: skip
_TWO_KINDS = ["sliding_attention", "full_attention"] * 2
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}}
_TWO_ROPES = {
    kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("sliding_attention", "full_attention")
}
_SPARSE = {"index_topk": 512, "index_head_dim": 16, "index_n_heads": 4}

OVERRIDES: Mapping[str, Mapping[str, object]] = {
    "codegen": {"rotary_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "gemma4_text": {"global_head_dim": 32, "layer_types": _TWO_KINDS},
    "olmo_hybrid": {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mamba"], "mamba_num_heads": 4, "mamba_head_dim": 32,
        "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16, "num_hidden_layers": None,
        "moe_shared_expert_intermediate_size": 48, "use_mamba_kernels": False,
    },
    **dict.fromkeys(
        (
            "qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm4v_moe_text", "glm46v_text", "glm_ocr_text",
            "glmga_text", "qwen2_5_omni_text", "cosmos3_edge_text",
        ),
        _SECTIONS,
    ),
    "mixtral": {"sliding_window": 9},
    "phimoe": {"sliding_window": 9},
    "qwen2_moe": {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2},
    "bamba": {"attn_layer_indices": [1, 3], **_MAMBA},
    "zamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "n_mamba_heads": 2,
        "use_mamba_kernels": False, "num_key_value_heads": 4, "attention_hidden_size": 128, "attention_head_dim": 32,
        "head_dim": None, "mamba_dt_rank": 4,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 16,
        "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 16, "chunk_size": 16, "num_mem_blocks": 2,
        "num_key_value_heads": 4, "use_mamba_kernels": False, "adapter_rank": 8, "head_dim": None,
    },
    "mamba": {"state_size": 8, "use_mambapy": False, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon_h1": {"mamba_d_ssm": 128, **_MAMBA},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 48, "position_embedding_type": "rope",
        **_MAMBA,
    },
    "granitemoeshared": {"shared_intermediate_size": 48},
    "rwkv": {"attention_hidden_size": 64, "context_length": 512, "num_hidden_layers": 3, "intermediate_size": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "jetmoe": {"kv_channels": 16, "num_attention_heads": 4, "activation_function": "silu"},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 16},
    "gemma3n_text": {
        "num_kv_shared_layers": 0, "laurel_rank": 8, "layer_types": _TWO_KINDS, "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "intermediate_size": [128] * 4,
    },
    "ctrl": {"dff": 128},
    "marian": {"decoder_start_token_id": 0},
    "ministral": {"head_dim": 16},
    "hunyuan_vl_text": {"head_dim": 16},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "xlstm": {
        "num_heads": 4, "num_blocks": 3, "num_hidden_layers": 3, "chunk_size": 16, "embedding_dim": 64,
        "head_dim": None, "v_head_dim": None, "mode": "inference",
    },
    "gemma4_assistant_text": {"hidden_size_per_layer_input": 0},
    "reformer": {
        "is_decoder": True, "attention_head_size": 16, "attn_layers": ["local", "lsh"] * 2, "axial_pos_shape": [8, 64],
        "axial_pos_embds_dim": [32, 32], "feed_forward_size": 128, "num_hidden_layers": None,
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
        "indexer_compress_ratio": 4, "hc_lowrank": 16,
    },
    "recurrent_gemma": {
        "num_hidden_layers": 6, "lru_width": 64, "attention_window_size": 9, "num_key_value_heads": 1,
    },
    "cohere_compass_text": {"layer_types": _TWO_KINDS, "rope_parameters": _TWO_ROPES},
    "paddleocr_vl_text": _SECTIONS,
    "cpmant": {"dim_head": 16, "dim_ff": 128, "prompt_length": 4},
    "led": {
        "attention_window": [8] * 3, "max_encoder_position_embeddings": 512, "max_decoder_position_embeddings": 512,
    },
    "afmoe": {"num_dense_layers": 1, "global_attn_every_n_layers": 2},
    "pegasus_x": {"num_global_tokens": 4, "block_size": 8},
    "mt5": {"feed_forward_proj": "gated-gelu"},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 64},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 64},
}  # fmt: skip

_DECODER: Mapping[str, object] = {"is_decoder": True}
_DECODER_ALONE: Mapping[str, object] = {"is_decoder": True, "is_encoder_decoder": False}
VARIANTS: Mapping[str, Mapping[str, object]] = {
    **{
        f"{name} (is_decoder)": _DECODER
        for name in (
            "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
            "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
            "xmod",
        )
    },
    **{
        f"{name} (decoder alone)": _DECODER_ALONE
        for name in (
            "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
            "prophetnet",
        )
    },
    "deepseek_v4 (sliding)": {
        "layer_types": [
            "sliding_attention", "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        ],
    },
    "minimax_m3_vl_text (sparse)": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "index_block_size": 4, "index_topk_blocks": 2,
    },
    "qwen4_exp_text (n-grams)": {"ple_layer_ids": [1, 3], "ngram_vocab_size_base": 1000, "split_ngram_parts": 1},
}  # fmt: skip
