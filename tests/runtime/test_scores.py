"""Scores of given tokens equal the log-softmax of transformers' own forward pass, in every family, tier and order."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from runtime import OffloadConfig, PolicyConfig, Runtime, SamplingConfig
from runtime.config.orders import Order
from runtime.config.settings import Admission, Attention, KVConfig, KVTier, ModelConfig, PolicyKind, RuntimeConfig, Tier
from runtime.library.scoring import Scored, Targets
from runtime.model.families import FAMILIES
from runtime.requests.joining import JoinedRequest
from tests.dealt import with_slow_others
from tests.fake_device import FakeDevice
from tests.runtime.combination_support import RATES, TIERS
from tests.runtime.long_rope import LIMIT, long_rope_reference
from tests.support import KINDS_OF_ATTENTION, Reference, short_bart

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


def config_for(reference: Reference, tier: Tier, **policy: int) -> RuntimeConfig:
    sizes = {"micro_batch_size": 3, "num_micro_batches": 2} | policy
    return RuntimeConfig(
        model=ModelConfig(name="test", path=str(reference.directory)),
        offload=OffloadConfig(tier=tier, resident_layers=0, read_chunk_mib=1),
        policy=PolicyConfig(kind=PolicyKind.fixed, **sizes),
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
    monkeypatch.setattr("runtime.planning.planner.measure_rates", lambda *_: RATES)
    cut(monkeypatch, HEAD_ROWS)


def cut(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    monkeypatch.setattr("runtime.engine.engine.head_rows", lambda vocab_size: num_rows)


@pytest.mark.dealt(most=4)
@pytest.mark.parametrize("family", with_slow_others(FAMILIES, KINDS_OF_ATTENTION))
def test_scores_equal_the_log_softmax_of_transformers_in_every_family(
    family: str, reference: References, opened: Runtimes
) -> None:
    ref = reference(family)
    pairs = pairs_of(ref)
    found = opened(config_for(ref, Tier.nvme)).score(pairs)
    require_equal(found, pairs, reference_model(ref), WIDER.get(family, TOLERANCE))


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("tier", TIERS)
def test_scores_behind_an_encoder_are_the_same_in_every_tier(tier: Tier, reference: References) -> None:
    ref = reference("flan-t5")
    pairs = pairs_of(ref)
    with Runtime(config_for(ref, tier), device=FakeDevice(seed=7)) as runtime:
        require_equal(runtime.score(pairs), pairs, reference_model(ref), WIDER["flan-t5"])


def test_behind_an_encoder_prompt_and_target_have_the_context_each(tmp_path: Path) -> None:
    """BART's decoder has a table of positions, which a longer target would look beyond."""
    model = short_bart(tmp_path, 16)
    prompt, target = list(range(20, 36)), list(range(40, 57))
    reference = Reference(directory=tmp_path, prompts=[], expected=[], sampled=[])
    with Runtime(config_for(reference, Tier.nvme)) as runtime:
        fits = Targets(prompt, [target[:16]])
        *found, long_target, long_prompt = runtime.score(
            [fits, Targets(prompt, [target]), Targets([9, *prompt], [[9]])]
        )
    require_equal(found, [fits], model)
    assert long_target.error is not None
    assert "the target 17; the limit of the model's encoder and decoder is 16 each" in long_target.error
    assert long_prompt.error is not None
    assert "the prompt has 17 tokens" in long_prompt.error


@pytest.fixture
def in_front(reference: References) -> Runtime:
    """A runtime whose streams come late."""
    return Runtime(config_for(reference("mixtral"), Tier.nvme), device=FakeDevice(seed=7))


@pytest.mark.slow("runtime/test_scores.py::test_scores_are_the_same_in_slices_of_any_size_and_prompts_in_pieces")
def test_scores_are_the_same_in_every_tier_order_and_admission(reference: References, in_front: Runtime) -> None:
    ref = reference("mixtral")
    pairs, model = pairs_of(ref), reference_model(ref)
    for number, (tier, order, admission) in enumerate(itertools.product(TIERS, Order, Admission)):
        attention = Attention.cpu if order.style.needs_cpu_attention or number % 4 == 1 else Attention.device
        kv = KVConfig(tier=KVTier.cpu) if attention is Attention.cpu else KVConfig()
        config = config_for(ref, tier, prefill_chunk_tokens=16)
        policy = replace(config.policy, schedule=order, attention=attention, admission=admission)
        in_front.config = replace(config, policy=policy, kv=kv)
        found = in_front.score(pairs)
        require_equal(found, pairs, model)
        assert {each.is_greedy for each in found} == {True, False}


@pytest.mark.dealt
@pytest.mark.parametrize("num_rows", [1, 2, 1000])
@pytest.mark.parametrize("family", ["llama", "falcon, first"])
def test_scores_are_the_same_in_slices_of_any_size_and_prompts_in_pieces(
    family: str, num_rows: int, reference: References, opened: Runtimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(monkeypatch, num_rows)
    ref = reference(family)
    pairs = pairs_of(ref)
    found = opened(config_for(ref, Tier.nvme, prefill_chunk_tokens=8)).score(pairs)
    require_equal(found, pairs, reference_model(ref))


def test_targets_are_given_the_same_whether_they_share_a_pass_or_not(
    reference: References, opened: Runtimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, pairs = opened(config_for(reference("llama"), Tier.nvme)), pairs_of(reference("llama"))
    together = runtime.score(pairs)
    monkeypatch.setattr(
        "runtime.library.scoring.join_requests",
        lambda requests: [JoinedRequest(request=r, members=[i]) for i, r in enumerate(requests)],
    )
    for one, other in zip(runtime.score(pairs), together, strict=True):
        assert one.token_logprobs == pytest.approx(other.token_logprobs, abs=TOLERANCE)
        assert replace(one, token_logprobs=()) == replace(other, token_logprobs=())


@pytest.mark.parametrize("window", [1, 3])
def test_a_stream_gives_the_same_scores_so_many_pairs_at_a_time(
    window: int, reference: References, opened: Runtimes
) -> None:
    ref = reference("llama")
    pairs, taken = pairs_of(ref), list[int]()
    with opened(config_for(ref, Tier.nvme)).score_stream(_noted(pairs, taken), window=window) as stream:
        first = next(stream)
        assert len(taken) == window
        found = [first, *stream]
    require_equal(sorted(found, key=lambda each: (each.prompt_index, each.target_index)), pairs, reference_model(ref))


def _noted(pairs: Sequence[Targets], taken: list[int]) -> Iterator[Targets]:
    for index, pair in enumerate(pairs):
        taken.append(index)
        yield pair


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("admission", Admission)
@pytest.mark.parametrize("family", ["phi-3", "llama"])
def test_long_rope_takes_the_factors_of_the_length_that_is_scored(
    family: str, admission: Admission, shared_home: Path, opened: Runtimes
) -> None:
    """Pairs below the limit, above it, and of a prompt below it whose target crosses it."""
    ref = long_rope_reference(family, shared_home)
    config = config_for(ref, Tier.nvme, prefill_chunk_tokens=8)
    pairs = pairs_of(ref)
    lengths = {len(pair.prompt) + len(target) - 1 for pair in pairs for target in pair.targets}  # pyright: ignore
    assert min(lengths) <= LIMIT < max(lengths)
    found = opened(replace(config, policy=replace(config.policy, admission=admission))).score(pairs)
    require_equal(found, pairs, reference_model(ref))
