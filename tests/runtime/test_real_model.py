"""A trained model gives transformers' tokens and scores from GGUF and from safetensors, in every tier: `make real`."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from runtime import Prompt, Runtime
from runtime.sequences.sequence import Completion, FinishReason
from scripts import trained_model
from tests import real_model
from tests.support import CLEAR_MARGIN

pytestmark = pytest.mark.real

NUM_NEW_TOKENS = 24
NUM_SCORED = 6  # documents
TIERS: dict[str, dict[str, object]] = {
    "none": {"offload": "none"},
    "cpu": {"offload": "cpu"},
    "nvme": {"offload": "nvme", "resident_layers": 0},
    "mixed": {"offload": "nvme", "resident_layers": 10},
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """transformers' greedy tokens, as far as each is a clear choice: where two tie to the last bits, so does what is
    right. `is_whole`: to the end."""

    tokens: list[int]
    is_whole: bool


@dataclass(frozen=True, kw_only=True)
class Real:
    """The model in both forms, and what transformers makes of it in float32."""

    paths: dict[str, Path]
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    prompts: list[Prompt]
    answers: list[Answer]

    def runtime(self, form: str, tier: str, **more: object) -> Runtime:
        return Runtime(model=str(self.paths[form]), dtype="float32", **TIERS[tier], **more)  # pyright: ignore


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    try:
        file = trained_model.fetch()
    except trained_model.UnavailableError as error:
        pytest.skip(str(error))
    directory = real_model.write_dequantized(file, tmp_path_factory.mktemp("real") / "float32", torch.float32)
    tokenizer, model = AutoTokenizer.from_pretrained(directory), real_model.dequantized(file, torch.float32)
    said = [[{"role": "user", "content": text}] for text in real_model.chats()]
    rendered = [tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False) for each in said]
    texts = real_model.beginnings()
    ids = [*rendered, *(tokenizer(text)["input_ids"] for text in texts)]
    yield Real(
        paths={"gguf": file, "safetensors": directory},
        tokenizer=tokenizer,
        model=model,
        prompts=[*(Prompt(messages=each) for each in said), *map(Prompt, texts)],
        answers=[answer(model, each) for each in ids],
    )
    for each in directory.glob("*.safetensors"):
        each.unlink()  # half a gigabyte, which pytest would keep


def answer(model: PreTrainedModel, ids: list[int]) -> Answer:
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2).values
    unclear = (best[:, 0] - best[:, 1] <= CLEAR_MARGIN).nonzero()
    tokens = out.sequences[0, len(ids) :].tolist()
    return Answer(tokens=tokens[: int(unclear[0])] if len(unclear) else tokens, is_whole=not len(unclear))


def test_text_is_cut_as_the_model_was_trained(real: Real) -> None:
    """Digits first, by a tokenizer that is put together here of the file's vocabulary."""
    model = json.loads(real.tokenizer.backend_tokenizer.to_str())["model"]
    by_hand = Tokenizer(models.BPE(model["vocab"], [tuple(merge) for merge in model["merges"]]))
    by_hand.decoder = decoders.ByteLevel()
    by_hand.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    texts = [*real_model.documents(), *real_model.beginnings()]
    assert [real.tokenizer(text)["input_ids"] for text in texts] == [by_hand.encode(text).ids for text in texts]
    assert [by_hand.decode(by_hand.encode(text).ids) for text in texts] == texts


def test_its_answers_are_clear_and_some_end_by_themselves(real: Real) -> None:
    """Otherwise the tests below would show little."""
    assert len(real.answers) >= 10
    assert sum(each.is_whole for each in real.answers) >= 8
    assert {each.tokens[-1] == real.tokenizer.eos_token_id for each in real.answers} == {True, False}


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
@pytest.mark.parametrize("tier", TIERS)
def test_tokens_are_those_of_transformers(tier: str, form: str, real: Real) -> None:
    runtime = real.runtime(form, tier, max_new_tokens=NUM_NEW_TOKENS)
    for found, right in zip(runtime.generate(real.prompts), real.answers, strict=True):
        assert isinstance(found, Completion)
        assert list(found.token_ids)[: len(right.tokens)] == right.tokens
        if right.is_whole:
            ended = right.tokens[-1] == real.tokenizer.eos_token_id
            assert found.finish is (FinishReason.eos if ended else FinishReason.length)
            assert found.text == real.tokenizer.decode(right.tokens, skip_special_tokens=True)


@pytest.mark.parametrize(("form", "tier"), [("gguf", "none"), ("gguf", "nvme"), ("safetensors", "mixed")])
def test_scores_and_perplexity_are_those_of_transformers(form: str, tier: str, real: Real) -> None:
    ids = [real.tokenizer(text)["input_ids"] for text in real_model.documents()[:: 24 // NUM_SCORED]]
    expected = [log_probabilities(real.model, each) for each in ids]
    found = real.runtime(form, tier).score([(each[:1], each[1:]) for each in ids])
    for scored, right in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(scored.token_logprobs), right, rtol=0, atol=1e-4)
    ours = [number for scored in found for number in scored.token_logprobs]
    assert math.exp(-sum(ours) / len(ours)) == pytest.approx(float(torch.cat(expected).mean().neg().exp()), rel=1e-5)


@torch.inference_mode()
def log_probabilities(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    said = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return said.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_a_completion_ends_at_the_first_stop_string(real: Real) -> None:
    stop = " the"
    runtime = real.runtime("gguf", "none", max_new_tokens=NUM_NEW_TOKENS, stop=[stop])
    num_stopped = 0
    for found, right in zip(runtime.generate(real.prompts), real.answers, strict=True):
        assert isinstance(found, Completion)
        texts = [real.tokenizer.decode(right.tokens[: place + 1]) for place in range(len(right.tokens))]
        place = next((place for place, text in enumerate(texts) if stop in text), None)
        if place is not None:
            num_stopped += 1
            assert (list(found.token_ids), found.finish) == (right.tokens[: place + 1], FinishReason.stop)
    assert num_stopped > 1
