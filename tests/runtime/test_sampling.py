"""Sampled tokens are those of transformers' own `generate` for each prompt alone, wherever a request lands."""

from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from runtime import ModelConfig, OffloadConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config import DType, PolicyKind, Tier
from runtime.engine.sampling import Sampler
from runtime.engine.sequence import Completion, FinishReason, Request
from runtime.engine.sequence import Sequence as Running
from runtime.model.tokenizer import byte_level_tokenizer
from tests.support import Reference

References = Callable[[str], Reference]
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "seed": 3},
    {"temperature": 1.5, "top_k": 20},
    {"temperature": 0.9, "top_p": 0.7},
    {"temperature": 1.2, "min_p": 0.1, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1, "seed": 11},
    {"repetition_penalty": 1.4},
]


@pytest.fixture(scope="module")
def model(reference: References) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(reference("llama").directory, dtype=torch.float32).eval()


def run(reference: Reference, sampling: SamplingConfig, kind: PolicyKind) -> list[list[int]]:
    config = RuntimeConfig(
        model=ModelConfig(name="test", path=str(reference.directory), dtype=DType.float32),
        offload=OffloadConfig(tier=Tier.nvme, resident_layers=2, host_memory_gib=1),
        policy=PolicyConfig(kind=kind, micro_batch_size=3, num_micro_batches=2),
        sampling=sampling,
    )
    results = Runtime(config).generate(reference.prompts)
    return [list(result.token_ids) for result in results if isinstance(result, Completion)]


def expected(model: PreTrainedModel, prompt: list[int], seed: int, sampling: SamplingConfig) -> list[int]:
    torch.manual_seed(seed)
    ids = torch.tensor([prompt])
    warping = {} if sampling.is_greedy else {
        "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
    }  # fmt: skip
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=not sampling.is_greedy,
        repetition_penalty=sampling.repetition_penalty,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        **warping,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_equal_transformers_for_each_prompt_alone(
    settings: dict[str, float], reference: References, model: PreTrainedModel
) -> None:
    ref, sampling = reference("llama"), SamplingConfig(max_new_tokens=6, ignore_eos=True, **settings)
    requests = [Request(id=str(n), prompt_ids=tuple(prompt), max_new_tokens=6) for n, prompt in enumerate(ref.prompts)]
    alone = [
        expected(model, prompt, r.seed(sampling.seed), sampling)
        for prompt, r in zip(ref.prompts, requests, strict=True)
    ]
    assert run(ref, sampling, PolicyKind.fixed) == alone


def test_what_a_trial_pass_drew_is_not_missing_from_the_run(reference: References) -> None:
    """`auto` tries the first pass before the run begins."""
    sampling = SamplingConfig(max_new_tokens=6, ignore_eos=True, temperature=1.0)
    fixed, auto = (run(reference("llama"), sampling, kind) for kind in (PolicyKind.fixed, PolicyKind.auto))
    assert fixed == auto


def running(
    prompt: Sequence[int] = (1, 2), *, max_new_tokens: int = 50, id: str = "0", sample_index: int = 0
) -> Running:
    return Running(
        request=Request(id=id, prompt_ids=tuple(prompt), max_new_tokens=max_new_tokens, sample_index=sample_index)
    )


def logits_for(*tokens: int, size: int = 300) -> torch.Tensor:
    return torch.stack([torch.zeros(size).index_fill_(0, torch.tensor(token), 9.0) for token in tokens])


def test_seeds_differ_by_request_sample_and_run() -> None:
    a, b, c = running(id="a").request, running(id="b").request, running(id="a", sample_index=1).request
    seeds = [a.seed(0), b.seed(0), c.seed(0), a.seed(1)]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_of_broken_logits_becomes_an_error_row_and_the_others_go_on(value: float, temperature: float) -> None:
    config = SamplingConfig(temperature=temperature, top_k=5, top_p=0.9, repetition_penalty=1.2)
    sampler, rows = Sampler(config, frozenset(), None), [running(id=str(n)) for n in range(3)]
    logits = logits_for(7, 8, 9) * 10
    logits[1, 4] = value
    sampler.step(rows, logits, 5)
    assert [row.finish for row in rows] == [None, FinishReason.error, None]
    assert [row.generated for row in rows] == [[7], [], [9]]
    assert rows[1].error == "the model gave NaN or infinite logits at new token 0 (pass 5)"


@pytest.mark.parametrize(
    ("ignore_eos", "limit", "finish"),
    [(False, 50, FinishReason.eos), (False, 1, FinishReason.eos), (True, 50, None), (True, 1, FinishReason.length)],
)
def test_eos_ends_a_sequence_unless_ignored(ignore_eos: bool, limit: int, finish: FinishReason | None) -> None:
    sampler = Sampler(SamplingConfig(ignore_eos=ignore_eos), frozenset([3, 4]), None)
    row = running(max_new_tokens=limit)
    sampler.step([row], logits_for(4), 0)
    assert (row.generated, row.finish) == ([4], finish)


TEXT = "one two END of it — ÄÖ."


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["END"], "one two "), ([" of", "END"], "one two "), (["two END of"], "one "),
        (["Ö."], "one two END of it — Ä"), (["one"], ""), (["absent"], None),
        (["—"], "one two END of it "),
    ],
)  # fmt: skip
def test_a_stop_string_that_straddles_tokens_ends_the_text_before_it(stop: list[str], text: str | None) -> None:
    """The tokenizer has one token per byte, so every stop string straddles several, umlauts in themselves."""
    tokenizer = byte_level_tokenizer(300)
    sampler, row = Sampler(SamplingConfig(stop=stop), frozenset(), tokenizer), running()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    for token in ids:
        if row.finish is None:
            sampler.step([row], logits_for(token, size=512), 0)
    if text is None:
        assert (row.finish, row.text_end, row.generated) == (None, None, ids)
    else:
        assert row.finish is FinishReason.stop
        assert tokenizer.decode(row.generated)[: row.text_end] == text
        assert not any(s in tokenizer.decode(row.generated[:-1]) for s in stop), "it stopped later than it could"
