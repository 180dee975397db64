"""A meta model has no weights, and the very buffers, dtypes and ties of a model that transformers builds."""

import copy

import pytest
import torch
from transformers import MixtralConfig, PreTrainedConfig, PreTrainedModel

from runtime.model.families import FAMILIES
from runtime.probing.meta import auto_class, build_meta_model
from runtime.synthesize.checkpoints import make_config

LLAMA_SIZES = FAMILIES["llama"].overrides
CONFIGS = {name: (family.model_type, dict(family.overrides)) for name, family in FAMILIES.items()}


def real_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    return auto_class(config).from_config(copy.deepcopy(config), dtype=dtype)


@pytest.mark.dealt(most=16)
@pytest.mark.parametrize("name", CONFIGS)
def test_buffers_are_those_of_a_real_model(name: str) -> None:
    config = make_config(*CONFIGS[name])
    meta, real = build_meta_model(config, torch.float32), real_model(config, torch.float32)
    expected = dict(real.named_buffers())
    found = dict(meta.named_buffers())
    assert found.keys() == expected.keys()
    for key, buffer in expected.items():
        assert found[key].dtype == buffer.dtype, key
        assert torch.equal(found[key], buffer), key
    assert meta.state_dict().keys() == real.state_dict().keys()


@pytest.mark.dealt(most=16)
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_on_meta_with_the_real_shapes_and_ties(name: str) -> None:
    config = make_config(*CONFIGS[name])
    meta, real = build_meta_model(config, torch.bfloat16), real_model(config, torch.bfloat16)
    found = dict(meta.named_parameters(remove_duplicate=False))
    expected = dict(real.named_parameters(remove_duplicate=False))
    assert {key: tuple(p.shape) for key, p in found.items()} == {key: tuple(p.shape) for key, p in expected.items()}
    assert all(p.is_meta and not p.requires_grad for p in found.values())
    assert dict(meta.named_parameters()).keys() == dict(real.named_parameters()).keys()
    assert not meta.training


def test_what_a_class_keeps_in_float32_is_float32() -> None:
    meta = build_meta_model(make_config(*CONFIGS["deepseek-v3"]), torch.bfloat16)
    dtypes = {key: tensor.dtype for key, tensor in meta.state_dict().items()}
    kept = {key for key, dtype in dtypes.items() if dtype == torch.float32}
    assert kept == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}


def test_the_config_is_not_changed() -> None:
    config = make_config("llama", LLAMA_SIZES)
    before = config.to_dict()
    build_meta_model(config, torch.bfloat16)
    assert config.to_dict() == before


def test_the_global_generator_is_not_advanced() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    build_meta_model(make_config("llama", LLAMA_SIZES), torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_huge_model_takes_no_memory() -> None:
    meta = build_meta_model(MixtralConfig(), torch.bfloat16)
    assert sum(p.numel() for p in meta.parameters()) > 46e9
    assert sum(b.nbytes for b in meta.buffers()) < 1e6


def test_large_zero_filled_weights_and_large_masks_end_where_they_belong() -> None:
    """Llama-4 makes its experts by `zeros`; GPT-Neo's causal mask is computed from a large `ones`."""
    sizes = LLAMA_SIZES | {"intermediate_size": 4096, "num_local_experts": 4}
    experts = build_meta_model(make_config("llama4_text", sizes), torch.float32)
    assert all(parameter.is_meta for parameter in experts.parameters())
    masks = build_meta_model(
        make_config("gpt_neo", {**FAMILIES["gpt-neo"].overrides, "max_position_embeddings": 1024}), torch.float32
    )
    mask = next(buffer for key, buffer in masks.named_buffers() if key.endswith("attention.bias"))
    assert torch.equal(mask[0, 0], torch.ones(1024, 1024).tril().bool())
