"""Of composite models the text decoder alone is read; what a class computes itself need be in no checkpoint."""

import pytest
import torch

from runtime.errors import ConfigError
from runtime.model.truncated_model import UnusedModule, drop_unused_modules
from runtime.probing.meta import build_meta_model
from runtime.weights.layout import init_computed_parameters
from tests.tiny_configs import tiny_config


def test_of_a_model_that_sees_no_weight_beside_the_decoder_and_its_head_is_asked_for() -> None:
    model = build_meta_model(tiny_config("llava"), torch.float32)
    decoder = {name for name, _ in model.named_parameters() if "language_model" in name or name.startswith("lm_head")}
    assert len(decoder) < len(dict(model.named_parameters()))
    drop_unused_modules(model)
    assert set(dict(model.named_parameters())) == decoder


def test_a_tower_that_is_asked_for_says_which_and_why_not() -> None:
    model = build_meta_model(tiny_config("llava"), torch.float32)
    drop_unused_modules(model)
    tower = model.get_submodule("model.vision_tower")
    assert isinstance(tower, UnusedModule)
    with pytest.raises(ConfigError, match=r"model\.vision_tower .*all prompts are text"):
        tower(torch.zeros(1))


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_model_of_text_alone_is_left_as_it_is(name: str) -> None:
    model = build_meta_model(tiny_config(name), torch.float32)
    before = set(dict(model.named_parameters()))
    drop_unused_modules(model)
    assert set(dict(model.named_parameters())) == before


def test_sinusoids_that_no_checkpoint_holds_are_those_of_the_class() -> None:
    model = build_meta_model(tiny_config("marian"), torch.float32)
    names = {name for name, _ in model.named_parameters()}
    places = {f"model.{part}.embed_positions.weight" for part in ("encoder", "decoder")}
    assert places <= names
    init_computed_parameters(model, names - places)
    table = model.get_submodule("model.encoder.embed_positions")
    weight = dict(table.named_buffers())["weight"]
    assert weight.equal(table.create_weight())
    assert places.isdisjoint(dict(model.named_parameters()))


def test_what_the_checkpoint_holds_is_read_and_not_computed() -> None:
    model = build_meta_model(tiny_config("marian"), torch.float32)
    names = {name for name, _ in model.named_parameters()}
    init_computed_parameters(model, names)
    assert {name for name, _ in model.named_parameters()} == names
