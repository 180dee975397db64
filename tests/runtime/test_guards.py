"""A class that does what lanes would not notice gets other lanes by itself, or is refused with the reason."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from runtime import Runtime
from runtime.config import Lanes
from runtime.errors import ConfigError
from runtime.model import traits
from runtime.model.families import Family
from runtime.model.meta import build_meta_model
from runtime.model.synthesize import config_for
from runtime.model.traits import choose_lanes
from tests.runtime.guard_support import NOT_PACKED, SIZES
from tests.runtime.test_families import config_for as runtime_config
from tests.runtime.test_families import tokens
from tests.support import Reference

References = Callable[[Family], Reference]


@pytest.fixture
def made(shared_home: Path) -> References:
    """`made(family)`: as `reference`, of any model type."""

    def get(family: Family) -> Reference:
        return Reference.shared(family, shared_home / "guards" / family.name)

    return get


def built(family: Family) -> PreTrainedModel:
    return build_meta_model(config_for(family.model_type, family.overrides), torch.float32)


@pytest.mark.parametrize("name", NOT_PACKED)
def test_what_packed_lanes_would_not_notice_runs_in_padded_ones_and_says_why(name: str, made: References) -> None:
    family, why = NOT_PACKED[name]
    ref = made(family)
    runtime = Runtime(runtime_config(ref))
    assert not runtime.model.shape.is_packed
    assert tokens(runtime, ref.prompts) == ref.expected
    assert why in choose_lanes(built(family), Lanes.auto)[1]


@pytest.mark.parametrize("name", NOT_PACKED)
def test_packed_lanes_that_are_asked_for_are_refused_with_the_reason(name: str) -> None:
    family, why = NOT_PACKED[name]
    with pytest.raises(ConfigError, match=f"model.lanes=packed: .*{why}"):
        choose_lanes(built(family), Lanes.packed)


@pytest.mark.parametrize("name", NOT_PACKED)
def test_attention_in_a_packed_lane_refuses_what_was_not_seen_at_load(
    name: str, made: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, why = NOT_PACKED[name]
    monkeypatch.setattr(traits, "why_not_packed", lambda model: "")
    ref = made(family)
    with pytest.raises(ConfigError, match=f"{why}.*model.lanes=padded"):
        Runtime(runtime_config(ref)).generate(ref.prompts)


@pytest.mark.parametrize("window", [None, 512, 4096])
def test_a_window_that_no_context_outgrows_hides_nothing(window: int | None) -> None:
    family = NOT_PACKED["phimoe"][0]
    overrides = {**family.overrides, "sliding_window": window}
    assert choose_lanes(built(Family(name="", model_type="phimoe", overrides=overrides)), Lanes.auto) == (True, "")


def test_a_class_whose_code_wants_values_is_looked_at_in_two_of_its_layers() -> None:
    """JetMoE chooses its experts of attention by values, which the meta device has not."""
    family, why = NOT_PACKED["jetmoe"]
    deep = Family(name="", model_type="jetmoe", overrides={**family.overrides, "num_hidden_layers": 9})
    assert why in choose_lanes(built(deep), Lanes.auto)[1]


def test_an_encoder_is_refused_as_no_decoder() -> None:
    overrides = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    with pytest.raises(ConfigError, match=r"model.path: BertLMHeadModel .*later tokens"):
        choose_lanes(built(Family(name="", model_type="bert", overrides=overrides)), Lanes.auto)
    choose_lanes(built(Family(name="", model_type="bert", overrides={**overrides, "is_decoder": True})), Lanes.auto)


def test_a_config_that_wants_a_padding_token_can_be_looked_at() -> None:
    """ModernBERT's config refuses None, and the look takes padding tokens away."""
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    assert choose_lanes(built(Family(name="", model_type="modernbert-decoder", overrides=sizes)), Lanes.auto)[1] == ""
