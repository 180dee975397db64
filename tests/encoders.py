"""A tiny shape of each encoder that is proven, number for number."""

from runtime.model.families import Family, make_family

_ENCODER = {
    "vocab_size": 640, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 130,
}  # fmt: skip
_LETTERS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
ENCODERS: dict[str, Family] = {
    each.name: each
    for each in (
        make_family("bert", "bert", _ENCODER),
        make_family("roberta", "roberta", _ENCODER),
        make_family("xlm-roberta", "xlm-roberta", _ENCODER),
        make_family(
            "distilbert",
            "distilbert",
            vocab_size=640,
            dim=64,
            n_layers=3,
            n_heads=4,
            hidden_dim=128,
            max_position_embeddings=130,
        ),
        make_family("electra", "electra", _ENCODER, embedding_size=32),
        make_family("modernbert", "modernbert", _ENCODER, _LETTERS, local_attention=8),
        make_family("mpnet", "mpnet", _ENCODER),
        make_family("nomic-bert", "nomic_bert", _ENCODER),
    )
}
