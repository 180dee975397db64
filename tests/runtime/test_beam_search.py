"""Beam search says what transformers' `generate(num_beams=...)` says, in every kind of lane and wherever weights, keys
and values are.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from jobs.record.run_checkpoint import parse_search, serialize_search
from runtime import PolicyConfig, PrefetchConfig, Runtime, SamplingConfig
from runtime.checkpoint_source.generation_config import GenerationDefaults, resolve_sampling
from runtime.config.sampling import FOLLOW_MODEL
from runtime.config.settings import (
    Admission,
    Attention,
    KVConfig,
    KVDType,
    KVTier,
    Order,
    PolicyKind,
    Prefetch,
    SharePrefixes,
    Tier,
)
from runtime.engine.records import PassRecord
from runtime.errors import ConfigError
from runtime.sequences.sequence import FinishReason, SequenceState
from runtime.synthesize.checkpoints import make_config as tiny_config
from tests.dealt import with_slow_others
from tests.fake_device import FakeDevice
from tests.runtime.beam_support import (
    GRID,
    NUM_NEW,
    Found,
    References,
    Searched,
    clear_search,
    require_equal,
    searched,
    searched_requests,
)
from tests.runtime.guard_support import TROCR
from tests.runtime.test_fidelity import config_for
from tests.runtime.test_resumption import Stops
from tests.support import Reference, transformers_model

FAMILIES = ("llama", "mixtral", "qwen3", "gemma-3", "gpt2", "deepseek-v3", "bloom", "qwen3-next", "t5")
WIDEST = len(GRID) - 2  # four beams, of which long ones are liked
# Both numbers of beams, each penalty and each way to stop: what other families have of their own are their lanes.
ELSEWHERE = (1, 3, 8, 12, WIDEST)


@pytest.fixture(scope="session")
def beams(reference: References, shared_home: Path) -> Callable[[str], Searched]:
    def get(family: str) -> Searched:
        return Searched.shared(reference(family), shared_home / "beams" / family, places_of(family))

    return cache(get)


def places_of(family: str) -> Sequence[int]:
    return range(len(GRID)) if family in ("llama", "deepseek-v3") else ELSEWHERE


def policy(**settings: object) -> PolicyConfig:
    usual = {"micro_batch_size": 4, "num_micro_batches": 3}
    return PolicyConfig(kind=PolicyKind.fixed, **{**usual, **settings})


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("family", with_slow_others(FAMILIES, ["llama", "qwen3-next", "t5"]))
def test_beams_are_those_of_transformers_by_every_length_penalty_and_way_to_stop(
    family: str, beams: Callable[[str], Searched], reference: References
) -> None:
    of = beams(family)
    lengths = {len(tokens) for found in of.answers for each in found for tokens in each.tokens}
    assert len(lengths) > 1, "no completion ends early"
    runtime = Runtime(replace(config_for(reference(family), tier=Tier.none), policy=policy(micro_batch_size=8)))
    require_equal(runtime, of, places_of(family))


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("kind", Prefetch)
def test_tier_and_prefetch_do_not_change_beams(
    kind: Prefetch, tier: Tier, beams: Callable[[str], Searched], reference: References
) -> None:
    prefetch = PrefetchConfig(kind=kind, depth=2, block_layers=2)
    config = config_for(reference("llama"), tier=tier, prefetch=prefetch, resident_layers=1, policy=policy())
    require_equal(Runtime(config), beams("llama"), [WIDEST])


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("size", [4, 9])
def test_beams_take_each_step_together_whatever_the_chunks_and_lanes(
    size: int, chunk: int, beams: Callable[[str], Searched], reference: References
) -> None:
    pieces = policy(micro_batch_size=size, prefill_chunk_tokens=chunk)
    for sharing in (pieces, replace(pieces, share_prefixes=SharePrefixes.off)):
        runtime = Runtime(replace(config_for(reference("llama"), tier=Tier.none), policy=sharing))
        require_equal(runtime, beams("llama"), [0, WIDEST])


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("kv", [KVConfig(tier=tier, device_fraction=0.5) for tier in (KVTier.cpu, KVTier.nvme)])
@pytest.mark.parametrize("order", Order)
def test_beams_part_and_share_pages_wherever_keys_and_values_are(
    order: Order, kv: KVConfig, beams: Callable[[str], Searched], reference: References
) -> None:
    attention = Attention.cpu if order.style.needs_cpu_attention else Attention.device
    tier = KVConfig() if attention is Attention.cpu else kv
    config = replace(config_for(reference("llama")), kv=tier, policy=policy(schedule=order, attention=attention))
    for device in (FakeDevice(), None):
        if device is None and attention is Attention.device and kv.tier is KVTier.cpu:
            continue  # host memory is no other tier there
        require_equal(Runtime(config, device=device), beams("llama"), [WIDEST])


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("family", ["bloom", "t5", "deepseek-v3"])
def test_beams_of_every_kind_of_lane_find_keys_and_values_on_disk(
    family: str, beams: Callable[[str], Searched], reference: References
) -> None:
    kv = KVConfig(tier=KVTier.nvme, device_fraction=0.0)
    runtime = Runtime(replace(config_for(reference(family), tier=Tier.none), kv=kv, policy=policy()))
    require_equal(runtime, beams(family), [1, WIDEST])


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("family", ["llama", "qwen3-next", "t5"])
def test_stopped_inside_a_block_searches_go_on_to_the_same_completions(
    family: str, beams: Callable[[str], Searched], reference: References
) -> None:
    of, search = beams(family), GRID[WIDEST]
    runtime = Runtime(config_for(reference(family), sampling=search.sampling, policy=policy()))
    object.__setattr__(runtime.model, "eos_token_ids", frozenset(of.ends))
    requests = [each.request for each in searched_requests(runtime, of.prompts)]
    stops = Stops(runtime=runtime, plan=runtime.plan(requests), requests=requests)
    for num_passes in (3, 2, None):
        stops.start(num_passes)
        stops.unfinished = {i: saved(state) for i, state in stops.unfinished.items()}
    expected = [tokens for found in of.answers[WIDEST] for tokens in found.tokens]
    assert stops.in_order() == expected
    assert len(stops.passes) < 3 + 2 * NUM_NEW, "all was generated again"


def saved(state: SequenceState) -> SequenceState:
    """What another process reads of it."""
    return replace(state, search=parse_search(serialize_search(state.search)))


def test_of_the_beams_as_many_come_back_as_are_asked_for(
    beams: Callable[[str], Searched], reference: References
) -> None:
    of = beams("llama")
    runtime = Runtime(replace(config_for(reference("llama"), tier=Tier.none), policy=policy()))
    for num_asked in (1, 3):
        sampling = replace(GRID[WIDEST].sampling, n=num_asked)
        for found, expected in zip(searched(runtime, of, sampling), of.answers[WIDEST], strict=True):
            assert [list(each.token_ids) for each in found] == expected.tokens[:num_asked]
            assert [each.sample_index for each in found] == [*range(num_asked)]


def test_log_probabilities_are_those_of_the_way_that_came_back(
    beams: Callable[[str], Searched], reference: References
) -> None:
    of, search = beams("llama"), GRID[WIDEST]
    runtime = Runtime(replace(config_for(reference("llama"), tier=Tier.none), policy=policy()))
    for found in searched(runtime, of, replace(search.sampling, logprobs=2)):
        for each in found:
            assert len(each.logprobs) == len(each.token_ids)
            total = sum(token.own for token in each.logprobs)
            assert total / len(each.token_ids) ** search.length_penalty == pytest.approx(each.beam_score, abs=1e-4)
            assert all(token.own <= token.top[0] + 1e-6 and len(token.top) == 2 for token in each.logprobs)


PROCESSED = {
    "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 5, "renormalize_logits": True,
    "forced_eos_token_id": 9,
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_processors_see_what_they_see_in_transformers(
    family: str, beams: Callable[[str], Searched], reference: References
) -> None:
    of = beams(family)
    model = transformers_model(reference(family).directory)
    runtime = Runtime(replace(config_for(reference(family), tier=Tier.none), policy=policy()))
    sampling = replace(GRID[WIDEST].sampling, **PROCESSED)  # pyright: ignore[reportArgumentType]
    for prompt, found in zip(of.prompts, searched(runtime, of, sampling), strict=True):
        expected = clear_search(
            model, prompt, of.ends, num_beams=4, length_penalty=2.0, early_stopping=False, **PROCESSED
        )
        assert expected is not None, "no clear choice: take another prompt"
        assert [list(each.token_ids) for each in found] == expected.tokens


def test_pages_and_prompts_of_beams_are_counted_once_and_given_back(
    beams: Callable[[str], Searched], reference: References
) -> None:
    of = beams("llama")
    sharing, sampling = policy(share_prefixes=SharePrefixes.auto), GRID[WIDEST].sampling
    runtime = Runtime(config_for(reference("llama"), tier=Tier.none, sampling=sampling, policy=sharing))
    requests = [each.request for each in searched_requests(runtime, of.prompts)]
    passes = list[PassRecord]()
    with runtime.open_with_backoff(requests) as (plan, session):
        for block in plan.blocks:
            session.run(block, requests, passes.append)
        assert session._engine.lanes.num_free_pages == plan.placement.kv.num_pages
    # Pages of the long prompt, those that each beam has behind it, and those of the short one, which has none to share.
    assert plan.placement.kv.num_pages == 2 + 4 * 1 + 4 * 2
    assert sum(record.counts.spared_tokens for record in passes) == 3 * (len(of.prompts[0]) - 1)


def test_what_a_search_cannot_follow_is_refused_by_name(reference: References) -> None:
    refused = {
        "temperature": (0.7, "is a deterministic search, sampling.temperature=0.7 samples"),
        "n": (5, "sampling.n=5 is above sampling.num_beams=4"),
        "regex": ("a+", "does not support sampling.regex"),
        "reasoning": ("auto", "does not support sampling.reasoning"),
        "early_stopping": ("soon", "early_stopping must be true, false or never, got soon"),
        "num_beams": (0, "num_beams must be 1"),
    }
    for key, (value, message) in refused.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            SamplingConfig(**{"num_beams": 4, key: value})  # pyright: ignore[reportArgumentType]
    search = SamplingConfig(num_beams=4)
    with pytest.raises(ConfigError, match=r"policy\.micro_batch_size=3 is below"):
        Runtime(config_for(reference("llama"), sampling=search, policy=policy(micro_batch_size=3)))
    with pytest.raises(ConfigError, match=r"policy\.admission=continuous"):
        Runtime(config_for(reference("llama"), sampling=search, policy=policy(admission=Admission.continuous)))


def test_a_model_that_asks_for_beams_is_followed(beams: Callable[[str], Searched], reference: References) -> None:
    said = {"num_beams": 4, "length_penalty": 2.0, "early_stopping": False}
    source = GenerationDefaults(source=Path("generation_config.json"), values=said)
    asked = replace(FOLLOW_MODEL, n=4, max_new_tokens=NUM_NEW)
    found = resolve_sampling(asked, source, vocab_size=640)
    assert found.sentence is not None
    assert "num_beams=4, length_penalty=2.0; from" in found.sentence
    of = beams("llama")
    runtime = Runtime(replace(config_for(reference("llama"), tier=Tier.none), policy=policy()))
    for each, expected in zip(searched(runtime, of, found.sampling), of.answers[WIDEST], strict=True):
        assert [list(one.token_ids) for one in each] == expected.tokens
    left_out = resolve_sampling(SamplingConfig(), source, vocab_size=640)
    assert left_out.is_warning
    assert "num_beams=4, length_penalty=2.0: ignored" in (left_out.sentence or "")


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("tier", [KVTier.device, KVTier.nvme])
@pytest.mark.parametrize("dtype", [KVDType.float8, KVDType.int8, KVDType.int4])
def test_beams_part_in_pages_of_fewer_bytes(
    dtype: KVDType, tier: KVTier, beams: Callable[[str], Searched], reference: References
) -> None:
    of, search = beams("llama"), GRID[WIDEST]
    fraction = None if tier is KVTier.device else 0.5
    config = replace(
        config_for(reference("llama"), tier=Tier.none), kv=KVConfig(tier=tier, dtype=dtype, device_fraction=fraction)
    )
    runtime = Runtime(replace(config, policy=policy()))
    found = [each for beams in searched(runtime, of, replace(search.sampling, logprobs=1)) for each in beams]
    scored = runtime.score([(list(each.request.prompt_ids), list(each.token_ids)) for each in found])
    for each, score in zip(found, scored, strict=True):
        assert [token.own for token in each.logprobs] == pytest.approx(score.token_logprobs, abs=1e-4)


def test_ways_end_at_stop_strings_where_they_end_in_transformers(
    beams: Callable[[str], Searched], reference: References
) -> None:
    of, model = beams("llama"), transformers_model(reference("llama").directory)
    runtime = Runtime(replace(config_for(reference("llama"), tier=Tier.none), policy=policy()))
    own = runtime.model.tokenizer
    assert own is not None
    said = [own.decode([token]) for found in of.answers[WIDEST] for token in found.tokens[0][1:5]]
    stop = [text for text in said if re.fullmatch("[a-z ]+", text)][:2]
    num_stopped = 0
    for prompt, found in zip(of.prompts, searched(runtime, of, replace(GRID[WIDEST].sampling, stop=stop)), strict=True):
        settings = {"num_beams": 4, "length_penalty": 2.0, "early_stopping": False}
        expected = clear_search(model, prompt, of.ends, stop_strings=stop, tokenizer=own, **settings)
        assert expected is not None, "no clear choice: take another prompt"
        for each, theirs in zip(found, expected.tokens, strict=True):
            is_stopped = each.finish is FinishReason.stop
            assert [*each.token_ids, *of.ends[: int(is_stopped and len(each.token_ids) < len(theirs))]] == theirs
            assert not any(text in each.text for text in stop)
            num_stopped += is_stopped
    assert num_stopped > 0


def test_beams_share_a_rectangle_where_rows_pass_one_by_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(tiny_config(TROCR.model_type, TROCR.overrides)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.3 if parameter.ndim > 1 else 0.1)
    theirs.save_pretrained(tmp_path)
    generator, prompts, answers = torch.Generator().manual_seed(0), list[list[int]](), list[Found]()
    for length in (5, 17, 3):
        answer = None
        while answer is None:
            prompt = torch.randint(5, 600, (length,), generator=generator).tolist()
            answer = clear_search(theirs, prompt, (), num_beams=3)
        prompts.append(prompt)
        answers.append(answer)
    of = Searched(prompts=prompts, ends=[], answers=[])
    tiny = Reference(directory=tmp_path, prompts=[], expected=[], sampled=[])
    runtime = Runtime(config_for(tiny, policy=policy(micro_batch_size=9)))
    assert runtime.model.padding.separate_rows_reason
    sampling = SamplingConfig(num_beams=3, n=3, max_new_tokens=NUM_NEW)
    for found, expected in zip(searched(runtime, of, sampling), answers, strict=True):
        assert [list(each.token_ids) for each in found] == expected.tokens
