"""The first DeepSeek-MoE: our class against a forward pass of bare tensor operations, and the published layout."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from runtime import ModelConfig, OffloadConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import DType, Tier
from runtime.foreign import deepseek_moe
from runtime.model import experts
from runtime.model.capabilities import ExpertKind, expert_kind
from runtime.model.families import FAMILIES
from runtime.probing.meta import build_meta_model
from runtime.sequences.sequence import Completion
from runtime.synthesize.checkpoints import make_config, synthesize_checkpoint
from runtime.synthesize.random_weights import RandomWeights
from tests.processes import alone
from tests.support import Reference

Weights = Mapping[str, torch.Tensor]
Layers = list[tuple[list[torch.Tensor], list[torch.Tensor]]]

FAMILY = FAMILIES["deepseek-moe 16b"]
PUBLISHED = {
    "architectures": ["DeepseekForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekConfig", "AutoModel": "modeling_deepseek.DeepseekModel",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM",
    },
    "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944,
    "max_position_embeddings": 4096, "model_type": "deepseek", "moe_intermediate_size": 1408, "moe_layer_freq": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 28, "num_key_value_heads": 16, "pretraining_tp": 1,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 102400,
}  # fmt: skip


class Plain:
    """One token at a time, one head at a time, one expert at a time, from the checkpoint's own tensors."""

    def __init__(self, directory: Path):
        self.config = json.loads((directory / "config.json").read_text())
        self.weights: Weights = {
            name: tensor.float() for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()
        }

    def logits(self, ids: list[int]) -> torch.Tensor:
        """(T, V)"""
        cache: Layers = [([], []) for _ in range(self.config["num_hidden_layers"])]
        return torch.stack([self._token(token, place, cache) for place, token in enumerate(ids)])

    def _token(self, token: int, place: int, cache: Layers) -> torch.Tensor:
        x = self.weights["model.embed_tokens.weight"][token]
        for index, (keys, values) in enumerate(cache):
            name = f"model.layers.{index}"
            x = x + self._attention(name, self._norm(x, f"{name}.input_layernorm"), place, keys, values)
            x = x + self._feed_forward(f"{name}.mlp", self._norm(x, f"{name}.post_attention_layernorm"))
        return self.weights["lm_head.weight"] @ self._norm(x, "model.norm")

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.weights[f"{name}.weight"] * x / (x.pow(2).mean() + self.config["rms_norm_eps"]).sqrt()

    def _attention(
        self, name: str, x: torch.Tensor, place: int, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        num_heads = self.config["num_attention_heads"]
        q, k, v = (
            (self.weights[f"{name}.self_attn.{kind}_proj.weight"] @ x).view(num_heads, -1) for kind in ("q", "k", "v")
        )
        keys.append(turned(k, place))
        values.append(v)
        heads = []
        for head, query in enumerate(turned(q, place)):
            scores = torch.stack([key[head] @ query for key in keys]) / query.numel() ** 0.5
            heads.append(sum(w * value[head] for w, value in zip(scores.softmax(0), values, strict=True)))
        return self.weights[f"{name}.self_attn.o_proj.weight"] @ torch.cat(heads)

    def _feed_forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if f"{name}.gate_proj.weight" in self.weights:
            return self._mlp(name, x)
        scores = (self.weights[f"{name}.gate.weight"] @ x).softmax(0)
        chosen = scores.argsort(descending=True)[: self.config["num_experts_per_tok"]].tolist()
        total = scores[chosen].sum() if self.config["norm_topk_prob"] else 1.0
        out = self._mlp(f"{name}.shared_experts", x)
        for expert in chosen:
            out = out + scores[expert] / total * self._mlp(f"{name}.experts.{expert}", x)
        return out

    def _mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))


def turned(heads: torch.Tensor, place: int) -> torch.Tensor:
    """Rotary positions: element i of a head turns with element i + half of it. heads: (H, D)"""
    half = heads.shape[-1] // 2
    angles = place * 10000.0 ** (-torch.arange(half) / half)
    first, second = heads[:, :half], heads[:, half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def published(directory: Path, **changes: object) -> Path:
    (directory / "config.json").write_text(json.dumps(PUBLISHED | changes))
    return directory


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize(
    "overrides",
    [{}, {"norm_topk_prob": True}, {"first_k_dense_replace": 0}, {"moe_layer_freq": 2}, {"n_shared_experts": 1}],
    ids=str,
)
def test_logits_equal_a_forward_pass_of_bare_tensor_operations(overrides: dict[str, object], tmp_path: Path) -> None:
    synthesize_checkpoint(
        model=FAMILY.model_type, overrides={**FAMILY.overrides, **overrides}, directory=tmp_path, seed=3
    )
    ids = torch.randint(5, 600, (13,), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    torch.testing.assert_close(logits, Plain(tmp_path).logits(ids.tolist()), rtol=0, atol=1e-4)


@pytest.mark.slow("runtime/test_deepseek_moe.py::test_logits_equal_a_forward_pass_of_bare_tensor_operations")
def test_lanes_are_packed_and_experts_sorted_and_tokens_those_of_bare_operations(
    reference: Callable[[str], Reference],
) -> None:
    ref = reference("deepseek-moe 16b")
    runtime = Runtime(
        RuntimeConfig(
            model=ModelConfig(name="test", path=str(ref.directory), dtype=DType.float32),
            offload=OffloadConfig(tier=Tier.nvme, resident_layers=0),
            sampling=SamplingConfig(max_new_tokens=4, ignore_eos=True),
        )
    )
    assert runtime.model.shape.is_packed
    assert expert_kind(runtime.model.staged.model) is ExpertKind.sorted
    plain, prompts = Plain(ref.directory), [ref.prompts[0], ref.prompts[2]]
    for prompt, result in zip(prompts, runtime.generate(prompts), strict=True):
        assert isinstance(result, Completion)
        ids = [*prompt, *result.token_ids]
        assert plain.logits(ids)[len(prompt) - 1 : -1].argmax(-1).tolist() == list(result.token_ids)


def test_the_published_config_makes_the_published_tensors(tmp_path: Path) -> None:
    deepseek_moe.register()
    config = AutoConfig.from_pretrained(published(tmp_path))
    assert isinstance(config, deepseek_moe.DeepseekConfig)
    specs = {spec.name: spec for spec in RandomWeights(build_meta_model(config, torch.bfloat16), seed=0).specs}
    layer = ["input_layernorm", "post_attention_layernorm", *(f"self_attn.{part}_proj" for part in "qkvo")]
    mlp = ("gate_proj", "up_proj", "down_proj")
    sparse = ["gate", *(f"shared_experts.{m}" for m in mlp), *(f"experts.{e}.{m}" for e in range(64) for m in mlp)]
    names = {"model.embed_tokens", "model.norm", "lm_head"}
    names |= {f"model.layers.{i}.{part}" for i in range(28) for part in layer}
    names |= {f"model.layers.{i}.mlp.{part}" for i in range(28) for part in (sparse if i else mlp)}
    assert specs.keys() == {f"{name}.weight" for name in names}
    assert specs["model.layers.27.mlp.shared_experts.up_proj.weight"].shape == (2 * 1408, 2048)
    assert sum(spec.num_elements for spec in specs.values()) == pytest.approx(16.4e9, rel=0.005)


def test_a_routing_that_nobody_published_is_refused(tmp_path: Path) -> None:
    deepseek_moe.register()
    with pytest.raises(ValueError, match="sigmoid"):
        AutoConfig.from_pretrained(published(tmp_path, scoring_func="sigmoid"))


def is_registered() -> bool:
    return "deepseek" in CONFIG_MAPPING


def test_importing_the_runtime_registers_nothing() -> None:
    assert not alone(is_registered)


def test_experts_take_our_function_whatever_was_asked_of_a_llama_before(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "_can_set_experts_implementation_cached_value"  # inherited, where transformers keeps it on the class
    monkeypatch.setattr(deepseek_moe.DeepseekForCausalLM, answer, False, raising=False)
    model = build_meta_model(make_config(FAMILY.model_type, FAMILY.overrides), torch.float32)
    experts.register()
    model.set_experts_implementation(experts.NAME)
    assert model.config._experts_implementation == experts.NAME
