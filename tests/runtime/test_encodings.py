"""What is read off prompts equals what transformers' own classes give: embeddings, classes and masked tokens, of
encoders and decoders, in every tier and order."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from runtime import OffloadConfig, PolicyConfig, Runtime
from runtime.config import Attention, Lanes, ModelConfig, PolicyKind, Pooling, RuntimeConfig, Tier
from runtime.encoding import Classified, Embedded, Filled
from runtime.errors import ConfigError
from runtime.model.families import ENCODERS, FAMILIES
from runtime.orders import Order
from tests.tiny_checkpoints import TEMPERS, randomize

TOLERANCE = 1e-4
MASK = 3
NUM_LABELS = 3
PROMPTS = [
    torch.randint(5, 600, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 17, 3, 30, 11, 1, 24)
]
MASKED = [[7, MASK, 9], [MASK], [11, 12, MASK, 14, MASK, 16, 17, 18, 19, 20]]
Checkpoints = Callable[[str, type], Path]
DECODERS = ("llama", "gpt2", "mistral", "qwen3-moe", "bloom")  # packed and padded, mixtures of experts, windows


def saved(model: PreTrainedModel, directory: Path) -> Path:
    with torch.no_grad():
        randomize(model, torch.Generator().manual_seed(1), TEMPERS[0])
    model.save_pretrained(directory)
    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 4, "[MASK]": MASK, "here": 5, "there": 6}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, mask_token="[MASK]", pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoint(family, auto)`: a directory with random weights of the class that `auto` has for the family."""

    def make(name: str, auto: type) -> Path:
        family = ENCODERS.get(name) or FAMILIES[name]
        config = AutoConfig.for_model(family.model_type, **family.overrides)
        if auto is AutoModelForSequenceClassification:
            config.num_labels = NUM_LABELS
        torch.manual_seed(0)
        return saved(auto.from_config(config), tmp_path_factory.mktemp("encoder") / name)

    return cache(make)


def config_for(path: Path, tier: Tier = Tier.nvme, order: Order | None = None, num_rows: int = 3) -> RuntimeConfig:
    return RuntimeConfig(
        model=ModelConfig(name="test", path=str(path)),
        offload=OffloadConfig(tier=tier, resident_layers=0, read_chunk_mib=1),
        policy=PolicyConfig(
            kind=PolicyKind.fixed,
            schedule=order,
            attention=Attention.cpu if order is Order.cgopipe else Attention.device,
            micro_batch_size=num_rows,
            num_micro_batches=2,
            prefill_chunk_tokens=16,
        ),
    )


@torch.no_grad()
def hidden_states(model: PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
    return model.base_model(input_ids=torch.tensor([prompt]))[0][0]


def require_embeddings(found: Sequence[Embedded], model: PreTrainedModel, pooling: Pooling) -> None:
    assert [each.prompt_index for each in found] == list(range(len(PROMPTS)))
    for each, prompt in zip(found, PROMPTS, strict=True):
        assert each.error is None, each
        states = hidden_states(model, prompt)
        expected = {Pooling.last: states[-1], Pooling.mean: states.mean(0), Pooling.cls: states[0]}[pooling]
        assert each.vector.dtype == np.float32
        np.testing.assert_allclose(each.vector, expected.numpy(), atol=TOLERANCE)


@torch.no_grad()
def require_classes(found: Sequence[Classified], model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> None:
    for each, prompt in zip(found, prompts, strict=True):
        assert each.error is None, each
        logits = model(input_ids=torch.tensor([prompt])).logits[0]
        assert each.logits == pytest.approx(logits.tolist(), abs=TOLERANCE)
        assert each.probabilities == pytest.approx(logits.softmax(-1).tolist(), abs=TOLERANCE)
        assert each.label == f"LABEL_{int(logits.argmax())}"


@torch.no_grad()
def require_filled(found: Sequence[Filled], model: PreTrainedModel, num_top: int) -> None:
    for each, prompt in zip(found, MASKED, strict=True):
        assert each.error is None, each
        logprobs = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
        places = [place for place, token in enumerate(prompt) if token == MASK]
        assert len(each.token_ids) == len(each.logprobs) == len(places)
        for place, ids, values in zip(places, each.token_ids, each.logprobs, strict=True):
            top = logprobs[place].topk(num_top)
            assert list(ids) == top.indices.tolist()
            assert values == pytest.approx(top.values.tolist(), abs=TOLERANCE)


def loaded(auto: type, path: Path) -> PreTrainedModel:
    return auto.from_pretrained(path, dtype=torch.float32).eval()


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


@pytest.mark.parametrize("family", DECODERS)
def test_decoders_give_what_transformers_gives(family: str, checkpoint: Checkpoints) -> None:
    path = checkpoint(family, AutoModelForCausalLM)
    runtime, model = Runtime(config_for(path)), loaded(AutoModelForCausalLM, path)
    for pooling in Pooling:
        require_embeddings(runtime.embed(PROMPTS, pooling=pooling), model, pooling)
    path = checkpoint(family, AutoModelForSequenceClassification)
    classifier = loaded(AutoModelForSequenceClassification, path)
    require_classes(Runtime(config_for(path)).classify(PROMPTS), classifier, PROMPTS)


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_checkpoint_without_a_head_is_embedded_in_each_way(
    family: str, pooling: Pooling, checkpoint: Checkpoints
) -> None:
    path = checkpoint(family, AutoModel)
    require_embeddings(Runtime(config_for(path)).embed(PROMPTS, pooling=pooling), loaded(AutoModel, path), pooling)


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
    with pytest.raises(ConfigError, match=r"pooling_mode_max_tokens: set encode\.pooling"):
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
    assert "129 tokens; the model's context has room for 128" in too_long.error
    assert too_long.vector.size == 0


def test_what_a_checkpoint_has_not_is_refused_by_name(checkpoint: Checkpoints) -> None:
    masks = Runtime(config_for(checkpoint("bert", AutoModelForMaskedLM)))
    with pytest.raises(ConfigError, match=r"BertForMaskedLM generates no text: .*jobs\.encode encode\.output=masks"):
        masks.generate(["here"])
    with pytest.raises(ConfigError, match="BertForMaskedLM generates no text"):
        masks.score([("here", "there")])
    with pytest.raises(ConfigError, match=r"BertForMaskedLM has no classes; a \*ForSequenceClassification has"):
        masks.classify(["here"])
    with pytest.raises(ConfigError, match="LlamaForCausalLM fills no masks"):
        Runtime(config_for(checkpoint("llama", AutoModelForCausalLM))).fill_masks([[5]])
    with pytest.raises(ConfigError, match="pooling is one of"):
        masks.embed(["here"], pooling="max")


def test_layers_that_share_weights_are_refused_by_name(tmp_path: Path) -> None:
    sizes = {**ENCODERS["bert"].overrides, "embedding_size": 32}
    path = saved(AutoModel.from_config(AutoConfig.for_model("albert", **sizes)), tmp_path)
    with pytest.raises(ConfigError, match="AlbertModel has 3 layers and 1 of them"):
        Runtime(config_for(path))


def test_an_encoder_has_no_packed_lanes(checkpoint: Checkpoints) -> None:
    config = config_for(checkpoint("bert", AutoModel))
    with pytest.raises(ConfigError, match=r"model\.lanes=packed: BertModel cannot: its attention looks at later"):
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
