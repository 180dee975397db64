"""`sampling=model`: tokens are those of transformers' `generate` for each prompt alone, with nothing said to it but how
many; what cannot be followed is refused, and what another `sampling` leaves out is named."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from runtime import Runtime, SamplingConfig
from runtime.checkpoint_source.generation_config import (
    UNSUPPORTED_KEYS,
    GenerationDefaults,
    read_generation,
    resolve_generation_defaults,
    resolve_sampling,
)
from runtime.config.sampling import FOLLOW_MODEL
from runtime.errors import CheckpointError, ConfigError
from runtime.sequences.sequence import Completion, Request
from tests.runtime.sampling_support import References, complete, request_of, runtime_for
from tests.support import Reference, transformers_model

NUM_NEW = 7
Says = dict[str, object]
Make = Callable[[Says], Reference]


def says(ref: Reference) -> list[Says]:
    """One generation_config.json for each thing that it may say, with tokens that plain greedy decoding gives."""
    first, second, *_ = (tokens for tokens in ref.expected)
    eos = {"eos_token_id": [first[3], second[4]]}
    sampled: Says = {"do_sample": True, "top_k": 0}
    return [
        eos,
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 1},
        {**eos, "min_new_tokens": 6},
        {**eos, "min_length": 20},
        {**eos, "min_length": 20, "min_new_tokens": 1},
        {"forced_bos_token_id": 7},
        {"forced_eos_token_id": 9},
        {"forced_eos_token_id": [9, 11], **eos},
        {"suppress_tokens": [first[1], second[2], 10**6]},
        {"begin_suppress_tokens": [first[0], second[0]]},
        {"bad_words_ids": [[first[1]], second[2:4]]},
        {"bad_words_ids": [[first[3]], [second[0]]], **eos},
        {"sequence_bias": [[[first[1]], -50.0], [second[1:3], -9.5], [[17], 3.0]]},
        {**eos, "exponential_decay_length_penalty": [2, 1.5]},
        {"renormalize_logits": True, "repetition_penalty": 1.2},
        {**eos, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "sequence_bias": [[[first[0]], -8.0]],
         "bad_words_ids": [[second[0]]], "min_length": 8, "forced_eos_token_id": 4, "suppress_tokens": [first[2]],
         "begin_suppress_tokens": [second[1]], "exponential_decay_length_penalty": [1, 1.2], "temperature": 0.3},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_p": 0.8},
        {**sampled, "top_h": 0.6},
        {**sampled, "typical_p": 0.5, "temperature": 1.4},
        {**sampled, "epsilon_cutoff": 0.004},
        {**sampled, "eta_cutoff": 0.01, "min_p": 0.01, "renormalize_logits": True},
        {"do_sample": True, "temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2,
         "typical_p": 0.9, "suppress_tokens": [first[0]], **eos},
    ]  # fmt: skip


@pytest.fixture(scope="module")
def llama(reference: References) -> Reference:
    return reference("llama")


@pytest.fixture(scope="module")
def model(llama: Reference) -> PreTrainedModel:
    return transformers_model(llama.directory)


@pytest.fixture(scope="module")
def plain(llama: Reference, model: PreTrainedModel) -> list[list[int]]:
    return theirs(model, llama, eos_token_id=None)


@pytest.fixture(scope="module")
def runtime(llama: Reference) -> Runtime:
    return runtime_for(llama, SamplingConfig())


@pytest.fixture
def saying(llama: Reference, tmp_path: Path) -> Make:
    return lambda said: with_generation(llama, tmp_path, said)


def with_generation(ref: Reference, directory: Path, said: Says) -> Reference:
    """A directory that says so, without weights."""
    shutil.copy(ref.directory / "config.json", directory)
    (directory / "generation_config.json").write_text(json.dumps(said))
    return replace(ref, directory=directory)


def prompts_of(ref: Reference) -> list[list[int]]:
    """The last has one token: what is forced behind one token is forced there."""
    return [*ref.prompts[:4], [17]]


def follow(runtime: Runtime, ref: Reference, sampling: SamplingConfig) -> Runtime:
    """The same, as if it had been made with these settings and that file."""
    generation = read_generation(ref.directory, runtime.model.staged.model.config)
    object.__setattr__(runtime.model, "generation", generation)
    object.__setattr__(runtime.model, "eos_token_ids", generation.eos_token_ids)
    config, model = replace(runtime.config, sampling=sampling), runtime.model
    runtime.config = resolve_generation_defaults(config, model.generation, model.shape.vocab_size)
    return runtime


def ours(runtime: Runtime, ref: Reference, sampling: SamplingConfig) -> list[list[int]]:
    results = follow(runtime, ref, sampling).generate(prompts_of(ref))
    return [list(result.token_ids) for result in results if isinstance(result, Completion)]


def theirs(model: PreTrainedModel, ref: Reference, seed: int = 0, **settings: object) -> list[list[int]]:
    model.generation_config = GenerationConfig.from_pretrained(ref.directory)
    model.generation_config.pad_token_id = 0
    answers: list[list[int]] = []
    for index, prompt in enumerate(prompts_of(ref)):
        torch.manual_seed(Request(id=str(index), prompt_ids=(1,), max_new_tokens=1).seed(seed))
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, **settings)
        answers.append(out[0].tolist()[1 if model.config.is_encoder_decoder else len(prompt) :])
    return answers


@pytest.mark.dealt(most=4)
@pytest.mark.parametrize("index", range(24))
def test_tokens_are_those_of_generate_with_the_models_own_settings(
    index: int, llama: Reference, model: PreTrainedModel, runtime: Runtime, saying: Make, plain: list[list[int]]
) -> None:
    ref = saying(says(llama)[index])
    got = ours(runtime, ref, replace(FOLLOW_MODEL, max_new_tokens=NUM_NEW))
    assert got == theirs(model, ref)
    assert got != plain, "it says nothing that matters here"


@pytest.mark.parametrize(
    "said", [{"forced_bos_token_id": 7, "begin_suppress_tokens": [7, 8], "forced_eos_token_id": 2}, {"min_length": 5}]
)
def test_a_decoder_behind_an_encoder_counts_from_its_start_token(
    said: Says, reference: References, tmp_path: Path
) -> None:
    plain = reference("t5")
    start = {"decoder_start_token_id": 0, "eos_token_id": plain.expected[0][1]}
    ref = with_generation(plain, tmp_path, start | said)
    got = ours(runtime_for(plain, SamplingConfig()), ref, replace(FOLLOW_MODEL, max_new_tokens=NUM_NEW))
    assert got == theirs(transformers_model(plain.directory), ref)
    assert got[:4] != [tokens[:NUM_NEW] for tokens in plain.expected[:4]]


def test_what_is_set_wins_over_the_model(model: PreTrainedModel, runtime: Runtime, saying: Make) -> None:
    ref = saying({"do_sample": True, "temperature": 0.5, "repetition_penalty": 1.7, "forced_eos_token_id": 9})
    greedy = replace(FOLLOW_MODEL, max_new_tokens=NUM_NEW, temperature=0.0, repetition_penalty=1.1)
    assert ours(runtime, ref, greedy) == theirs(model, ref, do_sample=False, repetition_penalty=1.1)
    warm = replace(FOLLOW_MODEL, max_new_tokens=NUM_NEW, temperature=1.2, top_k=0, seed=5)
    assert ours(runtime, ref, warm) == theirs(model, ref, seed=5, temperature=1.2, top_k=0)


def test_rows_of_their_own_length_are_forced_to_end_there(
    llama: Reference, model: PreTrainedModel, runtime: Runtime, saying: Make
) -> None:
    """Each row's last token is its own, so all lie in one lane at different steps."""
    said: Says = {"forced_eos_token_id": 9, "exponential_decay_length_penalty": [1, 1.3], "min_new_tokens": 3}
    ref = saying(said | {"eos_token_id": llama.expected[0][2]})
    follow(runtime, ref, FOLLOW_MODEL)
    lengths = [4, 6, 3, 5]
    requests = [request_of(runtime, str(n), ref.prompts[n], max_new_tokens=length) for n, length in enumerate(lengths)]
    model.generation_config = GenerationConfig.from_pretrained(ref.directory)
    for completion, length in zip(complete(runtime, requests), lengths, strict=True):
        ids = torch.tensor([completion.request.prompt_ids])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length)
        assert list(completion.token_ids) == out[0, ids.shape[1] :].tolist()


ASKS = {
    "num_beam_groups": 2, "diversity_penalty": 0.5, "constraints": ["a"], "force_words_ids": [[5]],
    "penalty_alpha": 0.6, "dola_layers": "high", "guidance_scale": 1.5, "watermarking_config": {"bias": 2.0},
    "token_healing": True, "encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 3,
    "remove_invalid_values": True, "max_time": 1.0, "num_return_sequences": 3, "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1, "use_mtp": True, "is_assistant": True,
}  # fmt: skip


def said_by(**given: object) -> GenerationDefaults:
    return GenerationDefaults(source=Path("generation_config.json"), values=given)


def test_every_other_way_to_generate_is_refused_by_name_and_named_where_the_model_is_not_followed() -> None:
    assert ASKS.keys() == UNSUPPORTED_KEYS.keys()
    for key, value in ASKS.items():
        with pytest.raises(ConfigError, match=rf"sampling=model: generation_config.json sets {key}="):
            resolve_sampling(FOLLOW_MODEL, said_by(**{key: value}), 100)
        found = resolve_sampling(SamplingConfig(), said_by(**{key: value}), 100)
        assert found.sampling == SamplingConfig()
        assert found.is_warning
        assert found.sentence is not None
        assert f"{key}=" in found.sentence
        for neutral in UNSUPPORTED_KEYS[key]:
            assert not resolve_sampling(SamplingConfig(), said_by(**{key: neutral}), 100).is_warning


def test_a_run_that_does_not_follow_the_model_says_what_it_leaves_out(
    runtime: Runtime, saying: Make, caplog: pytest.LogCaptureFixture
) -> None:
    ref = saying({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "forced_eos_token_id": 2, "min_length": 0})
    with caplog.at_level(logging.INFO):
        follow(runtime, ref, SamplingConfig(top_p=0.95))
    (line,) = [record for record in caplog.records if "generation_config.json" in record.message]
    assert line.levelno == logging.WARNING
    assert "sets do_sample=True, temperature=0.6, forced_eos_token_id=2: ignored" in line.message
    caplog.clear()
    with caplog.at_level(logging.INFO):
        follow(runtime, ref, FOLLOW_MODEL)
    (line,) = [record for record in caplog.records if "generation_config.json" in record.message]
    assert line.levelno == logging.INFO
    assert "sampling=model: temperature=0.6, top_k=50, top_p=0.95, forced_eos_token_id=2; from" in line.message


@pytest.mark.parametrize(
    "said",
    [
        {}, {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "num_beams": 1, "max_length": 20, "typical_p": 1.0},
        {"eos_token_id": [2, 3], "bos_token_id": 1, "use_cache": False, "cache_implementation": "hybrid"},
    ],
)  # fmt: skip
def test_settings_without_effect_on_greedy_tokens_are_not_named(said: Says) -> None:
    assert resolve_sampling(SamplingConfig(), said_by(**said), 100).sentence is None


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"do_sample": True, "temperature": "hot"}, CheckpointError, "invalid temperature='hot'"),
        ({"bad_words_ids": [5]}, CheckpointError, r"invalid bad_words_ids=\[5\]"),
        ({"sequence_bias": [[[5]]]}, CheckpointError, "sequence_bias="),
        ({"top_p": 1.5}, ConfigError, r"with the settings of generation_config.json: sampling.top_p must be in"),
        ({"do_sample": True, "temperature": 0.0}, ConfigError, "do_sample=True and temperature=0"),
    ],
)
def test_what_generate_would_not_take_is_refused_where_it_is_followed_and_only_named_elsewhere(
    said: Says, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve_sampling(FOLLOW_MODEL, said_by(**said), 100)
    assert resolve_sampling(SamplingConfig(), said_by(**said), 100).sampling == SamplingConfig()


@pytest.mark.parametrize(
    "settings",
    [
        {"forced_bos_token_id": 640}, {"forced_eos_token_id": [2, 640]}, {"suppress_tokens": [-1]},
        {"begin_suppress_tokens": [9999]}, {"bad_words_ids": [[5, 640]]}, {"sequence_bias": [[[640], 1.0]]},
    ],
    ids=str,
)  # fmt: skip
def test_a_token_that_the_model_does_not_have_is_refused_by_its_setting(settings: Says, llama: Reference) -> None:
    with pytest.raises(ConfigError, match=rf"sampling\.{next(iter(settings))}: token id .* is outside the model's"):
        runtime_for(llama, SamplingConfig(**settings))  # pyright: ignore[reportArgumentType]
