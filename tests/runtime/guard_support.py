"""Tiny models of classes that do what lanes would not notice; none is in the table of proven families for that."""

from collections.abc import Mapping

from runtime.model.families import FAMILIES, Family

SIZES = {
    "vocab_size": 640, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MASK, KEYS, WINDOW = "attention masks of its own", "keys or values behind its cache", "its window of 9 tokens"


def _family(model_type: str, *parts: Mapping[str, object], without: tuple[str, ...] = (), **more: object) -> Family:
    overrides: dict[str, object] = {}
    for part in (*parts, more):
        overrides |= part
    return Family(
        name=model_type, model_type=model_type, overrides={k: v for k, v in overrides.items() if k not in without}
    )


# What packed lanes would not notice, and why not.
NOT_PACKED: dict[str, tuple[Family, str]] = {
    family.name: (family, why)
    for family, why in (
        (_family("doge", SIZES), MASK),
        (_family("diffllama", SIZES), KEYS),
        (_family("jetmoe", SIZES, EXPERTS, kv_channels=16, activation_function="silu"), KEYS),
        (_family("moshi", SIZES, without=("intermediate_size",), ffn_dim=128, head_dim=16, sliding_window=9), WINDOW),
        (_family("phimoe", SIZES, EXPERTS, sliding_window=9), WINDOW),
        (
            _family(
                "qwen2_moe",
                SIZES,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=48,
                shared_expert_intermediate_size=48,
                use_sliding_window=True,
                sliding_window=9,
                max_window_layers=1,
            ),
            WINDOW,
        ),
    )
}


# What a prompt in chunks would change.
WHOLE: dict[str, Family] = {
    family.name: family
    for family in (
        _family("mamba", vocab_size=640, hidden_size=64, num_hidden_layers=3, state_size=8),
        NOT_PACKED["moshi"][0],
        FAMILIES["jamba"],
    )
}
TROCR = _family(
    "trocr",
    vocab_size=640,
    d_model=64,
    decoder_layers=3,
    decoder_attention_heads=4,
    decoder_ffn_dim=128,
    max_position_embeddings=512,
)
REFUSED = {
    "rwkv": (
        {"vocab_size": 640, "hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 3},
        "takes no cache",
    ),
    "recurrent_gemma": (
        {
            "vocab_size": 640, "hidden_size": 64, "lru_width": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 1, "intermediate_size": 128, "attention_window_size": 9,
        },
        "in its modules",
    ),
}  # fmt: skip
