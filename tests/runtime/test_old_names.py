"""Checkpoints whose keys are not the model's own, in one file or several, give the tokens of those whose keys are."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertConfig

from runtime.config.settings import Prefetch, PrefetchConfig
from runtime.plan.shape.shapes import TensorSlice
from runtime.probing.meta import build_meta_model
from runtime.weights.layout import map_weights
from tests.quantized import Tensors, renamed, tensors_in, write_checkpoint
from tests.runtime.test_fidelity import config_for, tokens
from tests.support import Reference

References = Callable[[str], Reference]


def without_prefix(tensors: Tensors, prefix: str) -> Tensors:
    """As the class without a head saves them; the head keeps its name."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def stacked(tensors: Tensors) -> Tensors:
    """As the model itself holds Mixtral's experts."""
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    result = renamed(result, {"block_sparse_moe": "mlp"})
    for layer in range(4):
        gate, up, down = (
            torch.stack([tensors[f"model.layers.{layer}.block_sparse_moe.experts.{e}.{part}.weight"] for e in range(4)])
            for part in ("w1", "w3", "w2")
        )
        result[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        result[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    return result


OLD: dict[str, tuple[str, Callable[[Tensors], Tensors], str]] = {
    "no prefix": ("gpt2", lambda t: without_prefix(t, "transformer."), "h.0.attn.c_attn.weight"),
    "no prefix, head": ("llama", lambda t: without_prefix(t, "model."), "layers.0.self_attn.q_proj.weight"),
    "as Mixtral was published": ("mixtral", lambda t: t, "model.layers.0.block_sparse_moe.experts.0.w1.weight"),
    "as GPT-NeoX was published": ("gpt-neox", lambda t: t, "embed_out.weight"),
    "experts in one tensor": ("mixtral", stacked, "model.layers.0.mlp.experts.gate_up_proj"),
}


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("name", OLD)
def test_old_names_are_read(name: str, num_shards: int, reference: References, tmp_path: Path) -> None:
    family, change, example = OLD[name]
    ref = reference(family)
    tensors = change(tensors_in(ref.directory))
    assert example in tensors
    directory = write_checkpoint(ref.directory, tmp_path / "model", tensors, num_shards=num_shards)
    old = Reference(directory=directory, prompts=ref.prompts, expected=ref.expected, sampled=ref.sampled)
    assert tokens(config_for(old, prefetch=PrefetchConfig(kind=Prefetch.lookahead)), ref.prompts) == ref.expected


def test_gamma_and_beta_are_weight_and_bias() -> None:
    """Of modules called LayerNorm, which no family of the table has."""
    model = build_meta_model(BertConfig(num_hidden_layers=1, is_decoder=True), torch.float32)
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): TensorSlice(
            name=name, file="model", offset=0, num_bytes=tensor.nbytes, dtype="F32", shape=tuple(tensor.shape)
        )
        for name, tensor in model.state_dict().items()
    }
    assert sum(name.endswith((".gamma", ".beta")) for name in tensors) == 8
    found, _ = map_weights(model, tensors)
    tied = set(model.all_tied_weights_keys)
    assert {name: p.slices[0].name for name, p in found.items() if name not in tied} == {
        name: name for name in found if name not in tied
    }
