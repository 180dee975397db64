"""Sampled tokens are those of transformers' own `generate` for each prompt alone, wherever a request lands."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from runtime import Rejected, SamplingConfig, SamplingOverrides
from runtime.config.settings import PolicyKind
from runtime.errors import ConfigError
from runtime.sequences import sampler as sampling_module
from runtime.sequences.sampler import Sampler
from runtime.sequences.sequence import Completion, FinishReason, Request
from tests.runtime.sampling_support import (
    References,
    complete,
    logits_for,
    request_of,
    running,
    runtime_for,
    step,
    transformers_answer,
)
from tests.support import Reference

SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "seed": 3},
    {"temperature": 1.5, "top_k": 20},
    {"temperature": 0.9, "top_p": 0.7},
    {"temperature": 1.2, "min_p": 0.1, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1, "seed": 11},
]


@pytest.fixture(scope="module")
def model(reference: References) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(reference("llama").directory, dtype=torch.float32).eval()


def run(reference: Reference, sampling: SamplingConfig, kind: PolicyKind) -> list[list[int]]:
    results = runtime_for(reference, sampling, kind=kind).generate(reference.prompts)
    return [list(result.token_ids) for result in results if isinstance(result, Completion)]


def alone(model: PreTrainedModel, prompt: list[int], id: str, sampling: SamplingConfig, sample: int = 0) -> list[int]:
    request = Request(id=id, prompt_ids=tuple(prompt), max_new_tokens=sampling.max_new_tokens, sample_index=sample)
    return transformers_answer(model, prompt, request.seed(sampling.seed), sampling)


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_equal_transformers_for_each_prompt_alone(
    settings: dict[str, float], reference: References, model: PreTrainedModel
) -> None:
    ref, sampling = reference("llama"), SamplingConfig(max_new_tokens=6, ignore_eos=True, **settings)
    expected = [alone(model, prompt, str(n), sampling) for n, prompt in enumerate(ref.prompts)]
    assert run(ref, sampling, PolicyKind.fixed) == expected


def test_samples_come_prompt_by_prompt_and_each_equals_transformers_with_its_own_seed(
    reference: References, model: PreTrainedModel
) -> None:
    ref, sampling = reference("llama"), SamplingConfig(n=3, temperature=1.0, max_new_tokens=4, ignore_eos=True)
    results = runtime_for(ref, sampling).generate([*ref.prompts[:2], [], ref.prompts[2]])
    assert [item.sample_index if isinstance(item, Rejected) else item.request.sample_index for item in results] == (
        [0, 1, 2] * 4
    )
    assert all(isinstance(result, Rejected) and result.id == "2" for result in results[6:9])
    for place, prompt in ((0, ref.prompts[0]), (1, ref.prompts[1]), (3, ref.prompts[2])):
        samples = [list(r.token_ids) for r in results[3 * place : 3 * place + 3] if isinstance(r, Completion)]
        assert samples == [alone(model, prompt, str(place), sampling, sample) for sample in range(3)]
        assert len(set(map(tuple, samples))) > 1


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_rows_of_any_temperature_and_cuts_side_by_side_get_what_they_would_get_alone(
    family: str, reference: References
) -> None:
    """Three sequences share a lane: greedy, the run's own temperature, and others."""
    ref = reference(family)
    model = AutoModelForCausalLM.from_pretrained(ref.directory, dtype=torch.float32).eval()
    default = SamplingConfig(max_new_tokens=5, temperature=0.8, top_p=0.95, ignore_eos=True)
    runtime = runtime_for(ref, default)
    temperatures = [0.0, 1.3, None, 0.0, 0.8, 2.0, None]
    own = [{"temperature": temperature} for temperature in temperatures]
    for row, top_p in ((1, 0.2), (2, 0.3), (3, 0.1), (6, 1.0)):
        own[row]["top_p"] = top_p
    own[1]["top_k"], own[2]["min_p"], own[3]["repetition_penalty"], own[5]["repetition_penalty"] = 3, 0.3, 3.0, 0.5
    asked = list(enumerate(zip(ref.prompts, own, strict=True)))
    requests = [request_of(runtime, str(n), prompt, **given) for n, (prompt, given) in asked]
    expected = [
        alone(model, prompt, str(n), default.with_overrides(SamplingOverrides(**given))) for n, (prompt, given) in asked
    ]
    assert [list(completion.token_ids) for completion in complete(runtime, requests)] == expected


def test_slices_of_a_big_batch_do_not_change_tokens(reference: References, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = reference("llama")
    sampling = SamplingConfig(max_new_tokens=4, temperature=0.9, top_p=0.9, repetition_penalty=1.2, logprobs=2)
    whole = runtime_for(ref, sampling).generate(ref.prompts)
    monkeypatch.setattr(sampling_module, "SLICE_BYTES", 2 * 640 * 4)
    assert runtime_for(ref, sampling).generate(ref.prompts) == whole


@pytest.mark.slow("runtime/test_sampling.py::test_tokens_equal_transformers_for_each_prompt_alone")
def test_what_a_trial_pass_drew_is_not_missing_from_the_run(reference: References) -> None:
    """`auto` and `hrm` try the first pass before the run begins."""
    sampling = SamplingConfig(max_new_tokens=6, ignore_eos=True, temperature=1.0)
    fixed, *chosen = (run(reference("llama"), sampling, kind) for kind in PolicyKind)
    assert chosen == [fixed] * 2


@pytest.mark.parametrize("vocab_size", [2, 37, 32003])
def test_a_draw_is_that_of_torch_multinomial_and_leaves_its_generator_where_that_does(vocab_size: int) -> None:
    """Which a device would have to wait for, three times a row."""
    sampler = Sampler(SamplingConfig(temperature=1.0), vocab_size=vocab_size)
    rows = [running(id=str(n), temperature=1.0) for n in range(3)]
    for turn in range(8):
        logits = 4 * torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(turn))
        before = [None if row.generator is None else row.generator.get_state() for row in rows]
        step(sampler, rows, logits, turn)
        for row, state, row_logits in zip(rows, before, logits, strict=True):
            generator = torch.Generator().manual_seed(row.request.seed(0))
            if state is not None:
                generator.set_state(state)
            assert row.generated[-1] == int(torch.multinomial(torch.softmax(row_logits, -1), 1, generator=generator))
            assert row.generator is not None
            assert torch.equal(row.generator.get_state(), generator.get_state())


def test_a_request_may_have_its_own_limit(reference: References) -> None:
    ref = reference("llama")
    runtime = runtime_for(ref, SamplingConfig(max_new_tokens=4, ignore_eos=True))
    limits = [0, 1, 7, None, 6, 2, 3]
    requests = [
        request_of(runtime, str(n), prompt, max_new_tokens=limit)
        for n, (prompt, limit) in enumerate(zip(ref.prompts, limits, strict=True))
    ]
    for completion, full, limit in zip(complete(runtime, requests), ref.expected, limits, strict=True):
        assert list(completion.token_ids) == full[: 4 if limit is None else limit]
        assert completion.finish is FinishReason.length


@pytest.mark.parametrize(
    ("settings", "overrides", "message"),
    [
        ({"n": 2, "temperature": 1.0}, {"temperature": 0.0}, "sampling.n=2 needs sampling.temperature above 0"),
        ({"min_new_tokens": 5}, {"max_new_tokens": 4}, "sampling.min_new_tokens=5 is above sampling.max_new_tokens=4"),
    ],
)
def test_what_cannot_go_together_for_one_request_rejects_that_request(
    settings: dict[str, float], overrides: dict[str, float], message: str, reference: References
) -> None:
    runtime = runtime_for(reference("llama"), SamplingConfig(**settings))  # pyright: ignore[reportArgumentType]
    made = runtime.request("a", [5, 6], overrides=SamplingOverrides(**overrides))  # pyright: ignore[reportArgumentType]
    assert isinstance(made, Rejected)
    assert message in made.error
    assert isinstance(runtime.request("a", [5, 6]), Request)


def test_seeds_differ_by_request_sample_and_run() -> None:
    a, b, c = running(id="a").request, running(id="b").request, running(id="a", sample_index=1).request
    seeds = [a.seed(0), b.seed(0), c.seed(0), a.seed(1)]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_of_broken_logits_becomes_an_error_row_and_the_others_go_on(value: float, temperature: float) -> None:
    config = SamplingConfig(top_k=5, top_p=0.9, repetition_penalty=1.2, logprobs=1)
    sampler = Sampler(config, vocab_size=300)
    rows = [running(id=str(n), temperature=temperature) for n in range(3)]
    logits = logits_for(7, 8, 9) * 10
    logits[1, 4] = value
    step(sampler, rows, logits, 5)
    assert [row.finish for row in rows] == [None, FinishReason.error, None]
    assert [row.generated for row in rows] == [[7], [], [9]]
    assert [len(row.logprobs) for row in rows] == [1, 0, 1]
    assert rows[1].error == "the model gave NaN or infinite logits at new token 0 (pass 5)"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_banned_becomes_an_error_row(temperature: float) -> None:
    sampler = Sampler(SamplingConfig(no_repeat_ngram_size=1), vocab_size=4)
    rows = [running((0, 1, 2, 3), temperature=temperature), running((0, 1, 2), temperature=temperature)]
    step(sampler, rows, torch.zeros(2, 4), 0)
    assert (rows[0].finish, rows[1].generated) == (FinishReason.error, [3])
    assert rows[0].error is not None
    assert "no_repeat_ngram_size" in rows[0].error


@pytest.mark.parametrize(
    ("ignore_eos", "limit", "finish"),
    [(False, 50, FinishReason.eos), (False, 1, FinishReason.eos), (True, 50, None), (True, 1, FinishReason.length)],
)
def test_eos_ends_a_sequence_unless_ignored(ignore_eos: bool, limit: int, finish: FinishReason | None) -> None:
    sampler = Sampler(SamplingConfig(ignore_eos=ignore_eos), vocab_size=300, eos_token_ids=frozenset([3, 4]))
    row = running(max_new_tokens=limit)
    step(sampler, [row], logits_for(4), 0)
    assert (row.generated, row.finish) == ([4], finish)


def test_a_row_ends_by_its_own_least_length_and_may_ignore_the_end() -> None:
    """The run's own least length is 1; transformers bans the end until a row has as many tokens."""
    sampler = Sampler(SamplingConfig(min_new_tokens=1), vocab_size=300, eos_token_ids=frozenset([4]))
    own: list[dict[str, object]] = [{}, {"min_new_tokens": 0}, {"min_new_tokens": 2}, {"ignore_eos": True}]
    rows = [running(id=str(n)) for n in range(len(own))]
    for row, given in zip(rows, own, strict=True):
        row.request = replace(row.request, **given)  # pyright: ignore[reportArgumentType]
    logits = logits_for(4, 4, 4, 4)
    logits[:, 5] = 0.5
    for turn in range(3):
        left = [row for row in rows if row.finish is None]
        step(sampler, left, logits[: len(left)], turn)
    assert [row.generated for row in rows] == [[5, 4], [4], [5, 5, 4], [4, 4, 4]]
    assert [row.finish for row in rows] == [FinishReason.eos] * 3 + [None]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bad_words": ["a"]}, r"sampling\.bad_words needs a tokenizer"),
        ({"logprobs": 301}, r"sampling\.logprobs=301 is above the vocabulary's 300"),
    ],
)
def test_what_model_or_tokenizer_cannot_give_is_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampler(SamplingConfig(**settings), vocab_size=300)  # pyright: ignore[reportArgumentType]
