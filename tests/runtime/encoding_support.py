"""Tiny checkpoints of classes that are asked for embeddings, classes and masked tokens, and what transformers gives."""

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
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from runtime import OffloadConfig, PolicyConfig
from runtime.config.orders import Order
from runtime.config.settings import Attention, ModelConfig, PolicyKind, Pooling, RuntimeConfig, Tier
from runtime.library.encoding import Classified, Embedded, Filled
from runtime.model.families import FAMILIES
from tests.encoders import ENCODERS
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


def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """What makes a directory with random weights of the class that an auto class has for a family, once for each."""

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


def require_embeddings(actual: Sequence[Embedded], model: PreTrainedModel, pooling: Pooling) -> None:
    assert [each.prompt_index for each in actual] == list(range(len(PROMPTS)))
    for each, prompt in zip(actual, PROMPTS, strict=True):
        assert each.error is None, each
        states = hidden_states(model, prompt)
        expected = {Pooling.last: states[-1], Pooling.mean: states.mean(0), Pooling.cls: states[0]}[pooling]
        assert each.vector.dtype == np.float32
        np.testing.assert_allclose(each.vector, expected.numpy(), atol=TOLERANCE)


@torch.no_grad()
def require_classes(actual: Sequence[Classified], model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> None:
    for each, prompt in zip(actual, prompts, strict=True):
        assert each.error is None, each
        logits = model(input_ids=torch.tensor([prompt])).logits[0]
        assert each.logits == pytest.approx(logits.tolist(), abs=TOLERANCE)
        assert each.probabilities == pytest.approx(logits.softmax(-1).tolist(), abs=TOLERANCE)
        assert each.label == f"LABEL_{int(logits.argmax())}"


@torch.no_grad()
def require_filled(actual: Sequence[Filled], model: PreTrainedModel, num_top: int) -> None:
    for each, prompt in zip(actual, MASKED, strict=True):
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
