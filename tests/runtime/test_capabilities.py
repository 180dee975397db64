"""What a cache costs is measured layer by layer, and the layers' costs add up to the model's."""

import pytest
import torch

from runtime.cache.rectangle import OffloadedLayer, rectangle_cache
from runtime.model.capabilities import CacheShape, bounded_layers, layer_types, measure_cache
from runtime.model.families import FAMILIES
from runtime.probing.meta import build_meta_model
from runtime.stream.device import ComputeDevice
from runtime.synthesize.checkpoints import make_config
from tests.tiny_configs import tiny_config


def measured(name: str, **overrides: object) -> tuple[CacheShape, list[str]]:
    family = FAMILIES[name]
    model = build_meta_model(make_config(family.model_type, {**family.overrides, **overrides}), torch.float32)
    return measure_cache(model), layer_types(model)


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2", "bloom"])
def test_every_attention_layer_costs_its_own_keys_and_values(name: str) -> None:
    cache, types = measured(name)
    assert len(cache.layer_bytes_per_token) == len(types)
    assert len(set(cache.layer_bytes_per_token)) == 1
    assert cache.bytes_per_token == len(types) * cache.layer_bytes_per_token[0] > 0
    assert set(cache.layer_bytes_per_sequence) == {0}


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("window", [1, 2, 3])
def test_layers_with_windows_however_short_cost_their_keys_and_values(window: int) -> None:
    assert measured("gemma-2", sliding_window=window) == measured("gemma-2")


def test_states_count_where_an_indexer_selects_tokens() -> None:
    """As in Qwen4, whose indexer calls `nonzero`: the meta device knows no result of it by default."""
    model = build_meta_model(tiny_config("qwen4_exp_text (n-grams)"), torch.float32)
    cache, types = measure_cache(model), layer_types(model)
    assert [size == 0 for size in cache.layer_bytes_per_token] == [kind == "linear_attention" for kind in types]
    assert [size > 0 for size in cache.layer_bytes_per_sequence] == [kind == "linear_attention" for kind in types]


def test_layers_with_states_alone_cost_nothing_per_position() -> None:
    cache, types = measured("qwen3-next")
    assert "linear_attention" in types
    assert [size == 0 for size in cache.layer_bytes_per_token] == [kind == "linear_attention" for kind in types]
    assert cache.bytes_per_sequence == sum(cache.layer_bytes_per_sequence) > 0
    assert [size > 0 for size in cache.layer_bytes_per_sequence] == [kind == "linear_attention" for kind in types]


def test_latents_cost_their_rank_and_the_rotated_keys() -> None:
    cache, _ = measured("deepseek-v3")
    config = make_config("deepseek_v3", FAMILIES["deepseek-v3"].overrides)
    assert set(cache.layer_bytes_per_token) == {4 * (config.kv_lora_rank + config.qk_rope_head_dim)}
    assert cache.is_latent


@pytest.mark.parametrize("name", ["gemma-2", "qwen3-next", "llama"])
def test_padded_lanes_bound_every_layer_that_does_not_attend_to_all_positions(name: str) -> None:
    family = FAMILIES[name]
    model = build_meta_model(make_config(family.model_type, family.overrides), torch.float32)
    windows = {index for index, kind in enumerate(layer_types(model)) if kind != "full_attention"}
    assert bounded_layers(model) == windows
    cache = rectangle_cache(model.config, 32, ComputeDevice("cpu"), frozenset(range(len(layer_types(model)))))
    travelling = {index for index, layer in enumerate(cache.layers) if isinstance(layer, OffloadedLayer)}
    assert travelling == set(range(len(layer_types(model)))) - windows
