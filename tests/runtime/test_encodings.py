"""What is read off prompts equals what transformers' own classes give: embeddings, classes and masked tokens, of
encoders and decoders, in every tier and order."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
)

from runtime import Runtime
from runtime.config.orders import Order
from runtime.config.settings import Pooling, Tier
from tests.encoders import ENCODERS
from tests.runtime.encoding_support import (
    MASKED,
    PROMPTS,
    Checkpoints,
    checkpoints,
    config_for,
    loaded,
    require_classes,
    require_embeddings,
    require_filled,
)

DECODERS = ("llama", "gpt2", "mistral", "qwen3-moe", "bloom")  # packed and padded, mixtures of experts, windows


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return checkpoints(tmp_path_factory)


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_give_what_transformers_gives(family: str, checkpoint: Checkpoints) -> None:
    path = checkpoint(family, AutoModelForMaskedLM)
    runtime, model = Runtime(config_for(path)), loaded(AutoModelForMaskedLM, path)
    require_embeddings(runtime.embed(PROMPTS, pooling="mean"), model, Pooling.mean)
    require_filled(runtime.fill_masks(MASKED, num_top=4), model, 4)
    path = checkpoint(family, AutoModelForSequenceClassification)
    require_classes(
        Runtime(config_for(path)).classify(PROMPTS), loaded(AutoModelForSequenceClassification, path), PROMPTS
    )


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("family", DECODERS)
def test_decoders_give_what_transformers_gives(family: str, checkpoint: Checkpoints) -> None:
    path = checkpoint(family, AutoModelForCausalLM)
    runtime, model = Runtime(config_for(path)), loaded(AutoModelForCausalLM, path)
    for pooling in Pooling:
        require_embeddings(runtime.embed(PROMPTS, pooling=pooling), model, pooling)
    path = checkpoint(family, AutoModelForSequenceClassification)
    classifier = loaded(AutoModelForSequenceClassification, path)
    require_classes(Runtime(config_for(path)).classify(PROMPTS), classifier, PROMPTS)


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("tier", [Tier.none, Tier.nvme])
@pytest.mark.parametrize("family", ["t5", "flan-t5", "umt5"])
def test_the_encoder_of_an_encoder_decoder_gives_what_transformers_gives(
    family: str, tier: Tier, checkpoint: Checkpoints
) -> None:
    path = checkpoint(family, AutoModelForSeq2SeqLM)
    runtime, model = Runtime(config_for(path, tier), encodes=True), loaded(AutoModelForTextEncoding, path)
    for pooling in Pooling:
        require_embeddings(runtime.embed(PROMPTS, pooling=pooling), model, pooling)
    decoder = [name for name in runtime.model.staged.stage_of if "decoder" in name]
    assert not decoder, "its decoder is read too"


@pytest.mark.parametrize("encodes", [False, True])
def test_an_encoder_that_was_saved_alone_is_pooled_whatever_its_config_says_of_a_decoder(
    encodes: bool, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    model = loaded(AutoModelForTextEncoding, checkpoint("t5", AutoModelForTextEncoding))
    model.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["architectures"] == ["T5EncoderModel"]
    (tmp_path / "config.json").write_text(json.dumps({**said, "is_encoder_decoder": True}))  # as sentence-t5 has it
    require_embeddings(Runtime(config_for(tmp_path), encodes=encodes).embed(PROMPTS), model, Pooling.mean)


@pytest.mark.dealt
@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_checkpoint_without_a_head_is_embedded_in_each_way(
    family: str, pooling: Pooling, checkpoint: Checkpoints
) -> None:
    path = checkpoint(family, AutoModel)
    require_embeddings(Runtime(config_for(path)).embed(PROMPTS, pooling=pooling), loaded(AutoModel, path), pooling)


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize(
    ("tier", "order"),
    [(Tier.none, None), (Tier.cpu, None), *((Tier.nvme, order) for order in Order)],
)
@pytest.mark.parametrize("family", ["roberta", "llama"])
def test_every_tier_and_order_comes_to_the_same(
    family: str, tier: Tier, order: Order | None, checkpoint: Checkpoints
) -> None:
    path = checkpoint(family, AutoModelForSequenceClassification)
    runtime = Runtime(config_for(path, tier, order))
    require_classes(runtime.classify(PROMPTS), loaded(AutoModelForSequenceClassification, path), PROMPTS)
    require_embeddings(
        runtime.embed(PROMPTS, pooling="mean"), loaded(AutoModelForSequenceClassification, path), Pooling.mean
    )


def test_a_lane_of_many_rows_is_a_lane_of_each(checkpoint: Checkpoints) -> None:
    path = checkpoint("modernbert", AutoModelForMaskedLM)
    alone, together = (Runtime(config_for(path, num_rows=size)).embed(PROMPTS, pooling="cls") for size in (1, 7))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one.vector, other.vector, atol=1e-5)


def test_a_normalized_vector_has_length_one_and_its_direction(checkpoint: Checkpoints) -> None:
    runtime = Runtime(config_for(checkpoint("bert", AutoModel)))
    for plain, unit in zip(runtime.embed(PROMPTS), runtime.embed(PROMPTS, normalize=True), strict=True):
        np.testing.assert_allclose(unit.vector, plain.vector / np.linalg.norm(plain.vector), atol=1e-6)
