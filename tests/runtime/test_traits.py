"""What a cache costs is measured layer by layer, and the layers' costs add up to the model's."""

import pytest
import torch

from runtime.model.families import FAMILIES
from runtime.model.meta import build_meta_model
from runtime.model.synthesize import config_for
from runtime.model.traits import CacheShape, layer_types, measure_cache


def measured(name: str) -> tuple[CacheShape, list[str]]:
    family = FAMILIES[name]
    model = build_meta_model(config_for(family.model_type, family.overrides), torch.float32)
    return measure_cache(model), layer_types(model)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2", "bloom"])
def test_every_attention_layer_costs_its_own_keys_and_values(name: str) -> None:
    cache, types = measured(name)
    assert len(cache.layer_bytes_per_token) == len(types)
    assert len(set(cache.layer_bytes_per_token)) == 1
    assert cache.bytes_per_token == len(types) * cache.layer_bytes_per_token[0] > 0


def test_layers_with_states_alone_cost_nothing_per_position() -> None:
    cache, types = measured("qwen3-next")
    assert "linear_attention" in types
    assert [size == 0 for size in cache.layer_bytes_per_token] == [kind == "linear_attention" for kind in types]
    assert cache.bytes_per_sequence > 0


def test_latents_cost_their_rank_and_the_rotated_keys() -> None:
    cache, _ = measured("deepseek-v3")
    config = config_for("deepseek_v3", FAMILIES["deepseek-v3"].overrides)
    assert set(cache.layer_bytes_per_token) == {4 * (config.kv_lora_rank + config.qk_rope_head_dim)}
    assert cache.is_latent
