"""Scores of given tokens equal the log-softmax of transformers' own forward pass, in every family, tier and order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from runtime import OffloadConfig, PolicyConfig, Runtime, SamplingConfig
from runtime.config import ModelConfig, PolicyKind, RuntimeConfig, Tier
from runtime.model.families import FAMILIES
from runtime.orders import Order
from runtime.scoring import Scored, Targets
from tests.support import Reference

References = Callable[[str], Reference]
Runtimes = Callable[[RuntimeConfig], Runtime]
TOLERANCE = 1e-4
WIDER = {"flan-t5": 2e-4}  # with its unscaled attention either float32 is up to 1e-4 from float64, on its own side
HEAD_ROWS = 3  # so that nearly every pass has several slices, the last one shorter


@dataclass(frozen=True, kw_only=True)
class Expected:
    logprobs: list[float]
    is_greedy: bool


def expected(model: PreTrainedModel, prompt: Sequence[int], target: Sequence[int]) -> Expected:
    """By one forward of the class itself over prompt and target."""
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            start = model.generation_config.decoder_start_token_id
            decoder_ids = torch.tensor([[start, *target[:-1]]])
            logits = model(input_ids=torch.tensor([list(prompt)]), decoder_input_ids=decoder_ids).logits[0]
        else:
            logits = model(input_ids=torch.tensor([[*prompt, *target[:-1]]])).logits[0, len(prompt) - 1 :]
    logprobs = torch.log_softmax(logits.float(), -1)
    return Expected(
        logprobs=[float(row[token]) for row, token in zip(logprobs, target, strict=True)],
        is_greedy=logprobs.argmax(-1).tolist() == list(target),
    )


def config_for(reference: Reference, tier: Tier, order: Order | None = None, **policy: int) -> RuntimeConfig:
    sizes = {"micro_batch_size": 3, "num_micro_batches": 2} | policy
    return RuntimeConfig(
        model=ModelConfig(name="test", path=str(reference.directory)),
        offload=OffloadConfig(tier=tier, resident_layers=0, read_chunk_mib=1),
        policy=PolicyConfig(kind=PolicyKind.fixed, schedule=order, **sizes),
        sampling=SamplingConfig(),
    )


def pairs_of(reference: Reference) -> list[Targets]:
    """What the model says itself, other tokens, targets of one token that share a pass, and a single one."""
    first, second, third, *_ = zip(reference.prompts, reference.expected, strict=True)
    return [
        Targets(first[0], [first[1], first[1][::-1]]),
        Targets(second[0], [[token] for token in (second[1][0], 7, 9, 7)]),
        Targets(third[0], [third[1][:1]]),
        Targets(second[0] + first[0], [[11, 12, *third[1]]]),
    ]


def reference_model(reference: Reference) -> PreTrainedModel:
    is_seq2seq = '"is_encoder_decoder": true' in (reference.directory / "config.json").read_text()
    loader = AutoModelForSeq2SeqLM if is_seq2seq else AutoModelForCausalLM
    return loader.from_pretrained(reference.directory, dtype=torch.float32).eval()


def require_equal(
    found: Sequence[Scored], pairs: Sequence[Targets], model: PreTrainedModel, tolerance: float = TOLERANCE
) -> None:
    want = [
        (i, n, expected(model, list(p.prompt), list(t))) for i, p in enumerate(pairs) for n, t in enumerate(p.targets)
    ]
    assert [(each.prompt_index, each.target_index) for each in found] == [(i, n) for i, n, _ in want]
    for scored, (_, _, one) in zip(found, want, strict=True):
        assert scored.error is None, scored
        assert scored.token_logprobs == pytest.approx(one.logprobs, abs=tolerance)
        assert scored.logprob == pytest.approx(sum(one.logprobs), abs=tolerance * len(one.logprobs))
        assert scored.is_greedy == one.is_greedy


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.engine.engine.head_rows", lambda vocab_size: HEAD_ROWS)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_the_log_softmax_of_transformers_in_every_family(
    family: str, reference: References, opened: Runtimes
) -> None:
    ref = reference(family)
    pairs = pairs_of(ref)
    found = opened(config_for(ref, Tier.nvme)).score(pairs)
    require_equal(found, pairs, reference_model(ref), WIDER.get(family, TOLERANCE))
