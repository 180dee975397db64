"""Penalties and bans give the tokens that transformers gives with the same settings, for each prompt alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from runtime import SamplingConfig
from runtime.errors import ConfigError
from runtime.sequences.sampler import bad_word_ids
from runtime.sequences.sequence import Completion, Request
from tests.runtime.sampling_support import References, runtime_for, transformers_answer
from tests.support import NUM_NEW_TOKENS, Reference

NUM_PROMPTS = 4
EOS_PLACE = 3  # an EOS that greedy decoding of the second prompt meets there
SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 0.6},
    {"no_repeat_ngram_size": 20},
    {"min_new_tokens": 6},
    {"min_new_tokens": NUM_NEW_TOKENS, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    {"temperature": 0.7, "top_k": 30, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 5},
]


@pytest.fixture(scope="module")
def model(reference: References) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(reference("llama").directory, dtype=torch.float32).eval()


def ours(reference: Reference, sampling: SamplingConfig, eos: int) -> list[list[int]]:
    results = runtime_for(reference, sampling, eos=eos).generate(reference.prompts[:NUM_PROMPTS])
    return [list(result.token_ids) for result in results if isinstance(result, Completion)]


def theirs(
    model: PreTrainedModel, reference: Reference, sampling: SamplingConfig, eos: int, **settings: object
) -> list[list[int]]:
    if sampling.min_new_tokens:
        settings["min_new_tokens"] = sampling.min_new_tokens
    answers = []
    for n, prompt in enumerate(reference.prompts[:NUM_PROMPTS]):
        seed = Request(id=str(n), prompt_ids=(1,), max_new_tokens=1).seed(sampling.seed)
        answers.append(transformers_answer(model, prompt, seed, sampling, eos_token_id=eos, **settings))
    return answers


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_equal_transformers(settings: dict[str, Any], reference: References, model: PreTrainedModel) -> None:
    ref = reference("llama")
    eos, sampling = ref.expected[1][EOS_PLACE], SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, **settings)
    assert ours(ref, sampling, eos) == theirs(model, ref, sampling, eos)


def test_eos_comes_at_once_when_enough_tokens_are_there(reference: References) -> None:
    """So that the law above is not kept by an EOS that never came."""
    ref = reference("llama")
    eos = ref.expected[1][EOS_PLACE]
    few, many = (
        ours(ref, SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, min_new_tokens=n), eos) for n in (0, EOS_PLACE + 2)
    )
    assert len(few[1]) <= EOS_PLACE + 1 < len(many[1])
    assert few[1][-1] == eos


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("temperature", [0.0, 1.1])
def test_bad_words_are_banned_as_transformers_bans_their_ids(
    temperature: float, reference: References, model: PreTrainedModel
) -> None:
    """The words are the letters that are generated while nothing is banned."""
    ref, no_eos = reference("llama"), 0
    free = SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, temperature=temperature)
    tokenizer = runtime_for(ref, free).model.tokenizer
    assert tokenizer is not None
    generated = {tokenizer.decode([token]) for row in ours(ref, free, no_eos) for token in row}
    words = [text for text in sorted(generated) if len(text) == 1 and text.isascii() and text.isprintable()]
    assert words
    ids = [tokenizer(text, add_special_tokens=False).input_ids for word in words for text in (word, f" {word}")]
    got = ours(ref, replace(free, bad_words=words), no_eos)
    assert got == theirs(model, ref, free, no_eos, bad_words_ids=ids)
    assert not {tokenizer.decode([token]) for row in got for token in row} & {*words}


def test_a_word_of_several_tokens_is_banned_only_as_a_whole(reference: References, model: PreTrainedModel) -> None:
    """The second of two tokens that greedy decoding gives in a row may still come elsewhere."""
    ref = reference("llama")
    sampling = SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    pair = ref.expected[3][4:6]
    runtime = runtime_for(ref, sampling)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.sequences.sampler.bad_word_ids", lambda *_: [pair])
        got = [list(r.token_ids) for r in runtime.generate(ref.prompts) if isinstance(r, Completion)]
    expected = [transformers_answer(model, prompt, 0, sampling, bad_words_ids=[pair]) for prompt in ref.prompts]
    assert got == expected
    assert got != ref.expected


# --- how a word is spelled in tokens


def bpe(*words: str) -> PreTrainedTokenizerFast:
    """Byte-level, with `words` (Ġ for a space before) as tokens beside their letters."""
    letters = sorted({letter for word in words for letter in word} | {"Ġ", "!"})
    merges, vocab = [], dict.fromkeys(["<end>", *letters])
    for word in words:
        for cut in range(1, len(word)):
            merges.append((word[:cut], word[cut]))
            vocab[word[: cut + 1]] = None
    made = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocab)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def spelled(tokenizer: PreTrainedTokenizerFast, ids: Sequence[Sequence[int]]) -> list[list[str]]:
    return [tokenizer.convert_ids_to_tokens(list(word)) for word in ids]


def test_a_bad_word_is_banned_at_the_beginning_and_after_a_space() -> None:
    tokenizer = bpe("Ġbad", "bad")
    assert spelled(tokenizer, bad_word_ids(["bad", "b", "bad!"], tokenizer, frozenset(), 100)) == [
        ["bad"], ["Ġbad"], ["b"], ["Ġb"], ["bad", "!"], ["Ġbad", "!"]
    ]  # fmt: skip


def test_the_ids_are_those_of_transformers_own_advice() -> None:
    """Its documentation asks for a tokenizer with `add_prefix_space=True`; that is the second of our two spellings."""
    tokenizer, prefixing = bpe("Ġbad", "bad"), bpe("Ġbad", "bad")
    prefixing.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    advised = prefixing(["bad", "b"], add_special_tokens=False).input_ids
    assert bad_word_ids(["bad", "b"], tokenizer, frozenset(), 100)[1::2] == advised


@pytest.mark.parametrize(
    ("word", "message"),
    [("bad", "outside the model's vocabulary"), ("<end>", "is an EOS token"), ("☃", "has no tokens")],
)
def test_a_word_that_cannot_be_banned_is_refused(word: str, message: str) -> None:
    tokenizer = bpe("bad")
    with pytest.raises(ConfigError, match=rf"sampling\.bad_words: '{word}' .*{message}"):
        bad_word_ids([word], tokenizer, frozenset([tokenizer.eos_token_id]), len(tokenizer) - 1)
