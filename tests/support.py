"""Shared by the tests: tiny shapes of real architectures, and transformers' own answers to compare with."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from runtime.model.synthesize import synthesize_checkpoint

SHARED_DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
PROMPT_LENGTHS = (5, 17, 3, 30, 11, 8, 9)
NUM_NEW_TOKENS = 12


@dataclass(frozen=True, kw_only=True)
class Family:
    model_type: str
    overrides: Mapping[str, object]
    is_packed: bool


LLAMA_SIZES = {
    "vocab_size": 640, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
GPT_SIZES = {"vocab_size": 640, "n_embd": 64, "n_layer": 4, "n_head": 4}
NEOX_SIZES = {"vocab_size": 640, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
LINEAR_SIZES = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

FAMILIES: dict[str, Family] = {
    "llama": Family(model_type="llama", overrides=LLAMA_SIZES, is_packed=True),
    "llama_tied": Family(model_type="llama", overrides=LLAMA_SIZES | {"tie_word_embeddings": True}, is_packed=True),
    "mixtral": Family(
        model_type="mixtral",
        overrides=LLAMA_SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        is_packed=True,
    ),
    "qwen3_moe": Family(model_type="qwen3_moe", overrides=LLAMA_SIZES | EXPERTS | {"head_dim": 16}, is_packed=True),
    "gpt2": Family(model_type="gpt2", overrides=GPT_SIZES | {"n_positions": 256}, is_packed=True),
    "opt": Family(model_type="opt", overrides=NEOX_SIZES | {"ffn_dim": 128, "word_embed_proj_dim": 32}, is_packed=True),
    "gpt_neox": Family(model_type="gpt_neox", overrides=NEOX_SIZES | {"intermediate_size": 128}, is_packed=True),
    "falcon": Family(model_type="falcon", overrides=NEOX_SIZES, is_packed=False),
    "bloom": Family(
        model_type="bloom", overrides={"vocab_size": 640, "hidden_size": 64, "n_layer": 4, "n_head": 4}, is_packed=False
    ),
    "qwen3_next": Family(
        model_type="qwen3_next",
        overrides=LLAMA_SIZES | EXPERTS | LINEAR_SIZES | {"head_dim": 16, "shared_expert_intermediate_size": 48},
        is_packed=False,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """`expected[i]` are the greedy fp32 tokens that `transformers.generate` gives for `prompts[i]` alone, EOS
    ignored."""

    directory: Path
    prompts: list[list[int]]
    expected: list[list[int]]

    @staticmethod
    def make(family: Family, directory: Path) -> "Reference":
        synthesize_checkpoint(
            model=family.model_type,
            overrides=family.overrides,
            directory=directory,
            seed=1,
            dtype=torch.bfloat16,
            max_shard_bytes=200_000,
        )
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(5, 600, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        expected = [greedy(model, prompt, NUM_NEW_TOKENS) for prompt in prompts]
        return Reference(directory=directory, prompts=prompts, expected=expected)


def greedy(model: torch.nn.Module, prompt: list[int], num_new_tokens: int) -> list[int]:
    """`min_new_tokens` keeps EOS away without changing what else is chosen."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
