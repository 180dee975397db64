"""A class that does what lanes would not notice gets other lanes by itself, or is refused with the reason."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from runtime import Runtime
from runtime.config.settings import Lanes
from runtime.errors import ConfigError
from runtime.model import capabilities as traits
from runtime.model.capabilities import choose_lanes
from runtime.model.families import FAMILIES, Family
from runtime.probing.meta import build_meta_model
from runtime.probing.padded_probe import SEPARATE_ROWS as ROWS_APART
from runtime.probing.padded_probe import WHOLE_PROMPTS as PROMPTS_WHOLE
from runtime.probing.padded_probe import PaddingBehavior, probe_padding
from runtime.synthesize.checkpoints import make_config
from tests.dealt import with_slow_others
from tests.runtime.guard_support import NOT_PACKED, REFUSED, SIZES, TROCR, WHOLE
from tests.runtime.test_families import config_for as runtime_config
from tests.runtime.test_families import tokens
from tests.support import Reference, clear_answer

References = Callable[[Family], Reference]


@pytest.fixture
def made(shared_home: Path) -> References:
    """`made(family)`: as `reference`, of any model type."""

    def get(family: Family) -> Reference:
        return Reference.shared(family, shared_home / "guards" / family.name)

    return get


def built(family: Family) -> PreTrainedModel:
    return build_meta_model(make_config(family.model_type, family.overrides), torch.float32)


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("name", with_slow_others(NOT_PACKED, [*NOT_PACKED][:2]))
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


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("name", NOT_PACKED)
def test_attention_in_a_packed_lane_refuses_what_was_not_seen_at_load(
    name: str, made: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, why = NOT_PACKED[name]
    monkeypatch.setattr(traits, "packed_lanes_obstacle", lambda model: "")
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
    sizes = {**SIZES, "num_key_value_heads": 4, "pad_token_id": 0}
    del sizes["num_key_value_heads"]
    assert choose_lanes(built(Family(name="", model_type="modernbert-decoder", overrides=sizes)), Lanes.auto)[1] == ""


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("name", WHOLE)
def test_prompts_are_not_cut_where_a_class_cannot_go_on(name: str, made: References) -> None:
    """Chunks would have two columns."""
    ref = made(WHOLE[name])
    runtime = Runtime(runtime_config(ref, prefill_chunk_tokens=6))
    assert tokens(runtime, ref.prompts) == ref.expected
    assert runtime.model.padding == PaddingBehavior(whole_prompts_reason=PROMPTS_WHOLE)


def test_rows_pass_one_by_one_where_padding_would_move_their_positions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(make_config(TROCR.model_type, TROCR.overrides)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.3 if parameter.ndim > 1 else 0.1)
    theirs.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    clear = [clear_answer(theirs, length, generator) for length in (5, 17, 3, 9, 2)]
    ref = Reference(directory=tmp_path, prompts=[p for p, _ in clear], expected=[t for _, t in clear], sampled=[])
    runtime = Runtime(runtime_config(ref, prefill_chunk_tokens=6))
    assert tokens(runtime, ref.prompts) == ref.expected
    assert runtime.model.padding == PaddingBehavior(separate_rows_reason=ROWS_APART)


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_whose_state_no_lane_can_keep_is_refused(name: str) -> None:
    overrides, why = REFUSED[name]
    with pytest.raises(ConfigError, match=why):
        probe_padding(built(Family(name=name, model_type=name, overrides=overrides)))


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("name", ["bloom", "qwen3-next", "mamba-2", "gpt-neo", "falcon, alibi", "kimi-linear", "lfm-2"])
def test_what_padding_and_chunks_do_not_change_has_both(name: str) -> None:
    padding = probe_padding(built(FAMILIES[name]))
    assert (padding.separate_rows_reason, padding.whole_prompts_reason) == ("", "")
