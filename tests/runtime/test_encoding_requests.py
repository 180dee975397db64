"""Which prompts and checkpoints can be asked for embeddings, classes and masked tokens, and what a refusal says."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from runtime import Runtime
from runtime.config.settings import Lanes, Pooling
from runtime.errors import ConfigError
from runtime.model.families import FAMILIES
from runtime.sequences.sequence import Request
from tests.encoders import ENCODERS
from tests.runtime.encoding_support import (
    MASK,
    PROMPTS,
    TOLERANCE,
    Checkpoints,
    checkpoints,
    config_for,
    loaded,
    require_classes,
    require_embeddings,
    saved,
)
from tests.tiny_configs import tiny_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return checkpoints(tmp_path_factory)


@pytest.mark.parametrize("pad_id", [None, 9])
def test_padding_behind_a_decoders_prompt_is_none_of_it(
    pad_id: int | None, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    prompts = [[5, 6, 7, 9, 9], [9, 9], [5, 9, 6]]
    model = loaded(AutoModelForSequenceClassification, checkpoint("llama", AutoModelForSequenceClassification))
    model.config.pad_token_id = pad_id
    model.save_pretrained(tmp_path)
    require_classes(Runtime(config_for(tmp_path)).classify(prompts), model, prompts)


def test_a_single_label_is_a_reward(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **FAMILIES["llama"].overrides, num_labels=1)
    path = saved(AutoModelForSequenceClassification.from_config(config), tmp_path)
    model = loaded(AutoModelForSequenceClassification, path)
    for each, prompt in zip(Runtime(config_for(path)).classify(PROMPTS), PROMPTS, strict=True):
        with torch.no_grad():
            assert each.reward == pytest.approx(float(model(input_ids=torch.tensor([prompt])).logits), abs=TOLERANCE)
        assert each.label is None


def test_labels_have_the_names_that_the_checkpoint_gives_them(tmp_path: Path) -> None:
    names = {0: "calm", 1: "glad", 2: "sad"}
    config = AutoConfig.for_model(
        "bert", **ENCODERS["bert"].overrides, id2label=names, label2id={"calm": 0, "glad": 1, "sad": 2}
    )
    path = saved(AutoModelForSequenceClassification.from_config(config), tmp_path)
    assert Runtime(config_for(path)).classify([[5, 6]])[0].labels == ("calm", "glad", "sad")


def test_pooling_is_the_checkpoints_own_where_it_has_one(checkpoint: Checkpoints, tmp_path: Path) -> None:
    model = loaded(AutoModel, checkpoint("bert", AutoModel))
    model.save_pretrained(tmp_path)
    require_embeddings(Runtime(config_for(tmp_path)).embed(PROMPTS), model, Pooling.mean)
    folder = tmp_path / "1_Pooling"
    folder.mkdir()
    modes = {"word_embedding_dimension": 64, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "config.json").write_text(json.dumps(modes))
    require_embeddings(Runtime(config_for(tmp_path)).embed(PROMPTS), model, Pooling.cls)
    (folder / "config.json").write_text(json.dumps({**modes, "pooling_mode_max_tokens": True}))
    with pytest.raises(ConfigError, match=r"pooling_mode_max_tokens: set pooling"):
        Runtime(config_for(tmp_path)).embed(PROMPTS)


def test_texts_are_tokenised_and_masks_filled_in_place(checkpoint: Checkpoints) -> None:
    runtime = Runtime(config_for(checkpoint("bert", AutoModelForMaskedLM)))
    [found, without] = runtime.fill_masks(["here [MASK] there", "here there"])
    expected = runtime.fill_masks([[5, MASK, 6]])[0]
    assert found.token_ids == expected.token_ids
    assert len(found.token_ids[0]) == 5
    assert found.text.startswith("here")
    assert without.error is not None
    assert "'[MASK]'" in without.error


def test_a_prompt_has_as_much_room_as_the_table_of_positions(checkpoint: Checkpoints) -> None:
    runtime = Runtime(config_for(checkpoint("roberta", AutoModelForMaskedLM)))  # 130 rows, two of them of padding
    fits, too_long = runtime.embed([[5] * 128, [5] * 129], pooling="mean")
    assert fits.error is None
    assert too_long.error is not None
    assert "129 tokens; the limit is the model's context of 128" in too_long.error
    assert too_long.vector.size == 0


def test_what_a_checkpoint_has_not_is_refused_by_name(checkpoint: Checkpoints) -> None:
    masks = Runtime(config_for(checkpoint("bert", AutoModelForMaskedLM)))
    with pytest.raises(ConfigError, match=r"call Runtime\.fill_masks .*weightstream encode encode\.output=masks"):
        masks.generate(["here"])
    plain = masks.request("0", [5, 6])
    assert isinstance(plain, Request)
    with (
        pytest.raises(ConfigError, match="BertForMaskedLM generates no text"),
        masks.open_with_backoff([plain]),  # as a job does it
    ):
        pass
    with pytest.raises(ConfigError, match="BertForMaskedLM generates no text"):
        masks.score([("here", "there")])
    with pytest.raises(ConfigError, match=r"BertForMaskedLM has no classes; use a \*ForSequenceClassification"):
        masks.classify(["here"])
    with pytest.raises(ConfigError, match="LlamaForCausalLM fills no masks"):
        Runtime(config_for(checkpoint("llama", AutoModelForCausalLM))).fill_masks([[5]])
    with pytest.raises(ConfigError, match="pooling must be one of"):
        masks.embed(["here"], pooling="max")


@pytest.mark.parametrize(
    ("family", "encodes", "why"),
    [
        ("t5", False, r"open its encoder: Runtime\(encodes=True\)"),
        ("bart", True, "transformers has no class for its encoder"),
    ],
)
def test_what_reads_an_encoder_decoder_is_said(family: str, encodes: bool, why: str, tmp_path: Path) -> None:
    path = saved(AutoModelForSeq2SeqLM.from_config(tiny_config(family)), tmp_path)
    runtime = Runtime(config_for(path), encodes=encodes)
    with pytest.raises(ConfigError, match=f"is an encoder-decoder; only an encoder's states are pooled: {why}"):
        runtime.embed([[5, 6]])


def test_a_product_behind_the_pooling_is_said_not_to_be_applied(
    checkpoint: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded(AutoModel, checkpoint("bert", AutoModel)).save_pretrained(tmp_path)
    (tmp_path / "2_Dense").mkdir()
    Runtime(config_for(tmp_path)).embed([[5, 6]])
    assert "2_Dense is not applied" in caplog.text


def test_layers_that_share_weights_are_refused_by_name(tmp_path: Path) -> None:
    sizes = {**ENCODERS["bert"].overrides, "embedding_size": 32}
    path = saved(AutoModel.from_config(AutoConfig.for_model("albert", **sizes)), tmp_path)
    with pytest.raises(ConfigError, match="AlbertModel has 3 layers but 1 in"):
        Runtime(config_for(path))


def test_an_encoder_has_no_packed_lanes(checkpoint: Checkpoints) -> None:
    config = config_for(checkpoint("bert", AutoModel))
    with pytest.raises(ConfigError, match=r"model\.lanes=packed: not possible for BertModel: its attention"):
        Runtime(config, lanes=Lanes.packed)


def test_numbers_that_are_not_finite_are_an_error_of_their_row(checkpoint: Checkpoints, tmp_path: Path) -> None:
    model = loaded(AutoModel, checkpoint("bert", AutoModel))
    with torch.no_grad():
        model.get_input_embeddings().get_parameter("weight")[77] = torch.nan
    model.save_pretrained(tmp_path)
    good, bad = Runtime(config_for(tmp_path)).embed([[5, 6, 7], [5, 77, 7]])
    assert good.error is None
    assert bad.error is not None
    assert "NaN or infinite hidden states" in bad.error
    assert "word_embeddings" in bad.error
