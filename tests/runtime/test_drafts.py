"""Guessed tokens change nothing but the number of passes, whether they are right or wrong."""

from collections.abc import Callable
from collections.abc import Sequence as Rows  # `Sequence` is a running request
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runtime import KVConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import Admission, Attention, KVDType, KVTier, PolicyKind, Tier
from runtime.engine import engine
from runtime.engine.records import PassCounts, PassRecord
from runtime.sequences.drafts import MAX_FINISHED, MAX_MATCH, TRIAL_DRAFTS, Draft, Drafts, find_continuation
from runtime.sequences.sequence import Completion, FinishReason, Request, Sequence
from runtime.stream.device import ComputeDevice
from tests.dealt import with_slow_others
from tests.fake_device import FakeDevice
from tests.runtime.sharing_support import Alike
from tests.runtime.test_fidelity import config_for
from tests.runtime.test_lossy_kv import LOSSY, Answers, answers
from tests.runtime.test_lossy_kv import config_for as lossy_config_for
from tests.runtime.test_resumption import GREEDY, SAMPLED, made
from tests.support import KINDS_OF_ATTENTION, NUM_SAMPLED, Reference

__all__ = ["answers"]  # a fixture

References = Callable[[str], Reference]
POLICY = PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=3, num_micro_batches=3, draft_tokens=3)
PADDED = {"qwen3-next", "phi-3", "jamba", "mamba-2", "lfm-2", "kimi-linear", "t5"}  # or lengths change embeddings


class Prophet(Drafts):
    """Knows the outputs, and gets every third token wrong."""

    outputs: dict[tuple[int, ...], list[int]]  # by prompt

    def guess(self, sequence: Sequence, max_tokens: int) -> Draft:
        num_known = len(sequence.generated)
        following = self.outputs[sequence.request.prompt_ids][num_known : num_known + min(max_tokens, self.max_tokens)]
        return Draft([int(token == 0) if (num_known + i) % 3 == 2 else token for i, token in enumerate(following)], 1)


@pytest.fixture
def foretold(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[list[int]], list[list[int]]], None]:
    """Makes drafts come from these outputs of these prompts."""

    def tell(prompts: list[list[int]], outputs: list[list[int]]) -> None:
        pairs = zip(map(tuple, prompts), outputs, strict=True)
        monkeypatch.setattr(Prophet, "outputs", dict(pairs), raising=False)
        monkeypatch.setattr(engine, "Drafts", Prophet)

    return tell


Foretold = Callable[[list[list[int]], list[list[int]]], None]


def run(
    config: RuntimeConfig, prompts: list[list[int]], device: ComputeDevice | None = None
) -> tuple[list[list[int]], PassCounts]:
    """The tokens of each prompt, and the counts of all passes, of which at least one guesses if any can."""
    with Runtime(config, device=device) as runtime:
        requests = [runtime.request(str(i), prompt) for i, prompt in enumerate(prompts)]
        assert all(isinstance(request, Request) for request in requests), requests
        known = [request for request in requests if isinstance(request, Request)]
        passes, found = list[PassRecord](), dict[int, Completion]()
        with runtime.open_with_backoff(known) as (_, session):
            found |= dict(session.generate(known, passes.append))
            pool = session._engine.lanes.pages.pool
            assert pool.num_free == pool.num_pages, "all pages are free again"
        is_packed = runtime.model.shape.is_packed and runtime.model.rope_lengths is None
    counts = PassCounts.total([record.counts for record in passes])
    assert counts.issued_tokens == counts.useful_tokens
    assert counts.padded_tokens - counts.real_tokens == counts.drafted_tokens - counts.accepted_tokens or not is_packed
    return [list(found[i].token_ids) for i in range(len(prompts))], counts


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("admission", Admission)
@pytest.mark.parametrize("family", with_slow_others(KINDS_OF_ATTENTION, ("llama", "deepseek-v3", "gpt-oss", "opt")))
def test_tokens_are_those_of_transformers(
    family: str, admission: Admission, reference: References, foretold: Foretold
) -> None:
    ref = reference(family)
    foretold(ref.prompts, ref.expected)
    found, counts = run(config_for(ref, policy=replace(POLICY, admission=admission)), ref.prompts)
    assert found == ref.expected
    if counts.drafted_tokens:
        assert 0 < counts.accepted_tokens < counts.drafted_tokens
    else:
        assert family in PADDED


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("tier", KVTier)
@pytest.mark.parametrize("dtype", [KVDType.auto, *LOSSY])
def test_kept_elsewhere_or_in_fewer_bits_they_change_nothing(
    dtype: KVDType, tier: KVTier, answers: Answers, reference: References, foretold: Foretold
) -> None:
    """On a CPU, and in front of an accelerator whose copies come as late as they may."""
    ref = reference("llama")
    prompts, expected = ref.prompts, ref.expected
    if dtype is not KVDType.auto:
        ref, prompts, expected = answers("llama", dtype)
    foretold(prompts, expected)
    config = lossy_config_for(ref, dtype, tier, draft_tokens=5)
    for device in (FakeDevice((False, True)), *([None] if tier is not KVTier.cpu else [])):
        found, counts = run(config, prompts, device)
        assert [tokens[: len(known)] for tokens, known in zip(found, expected, strict=True)] == expected
        assert counts.accepted_tokens


def test_with_attention_on_the_cpu_beside_an_accelerator_nothing_is_guessed(reference: References) -> None:
    ref = reference("llama")
    config = config_for(ref, tier=Tier.cpu, policy=replace(POLICY, attention=Attention.cpu))
    found, counts = run(replace(config, kv=KVConfig(tier=KVTier.cpu)), ref.prompts, FakeDevice((False, True)))
    assert found == ref.expected
    assert not counts.drafted_tokens


@pytest.mark.parametrize("admission", Admission)
def test_prompts_that_share_prefixes(
    admission: Admission, reference: References, shared_home: Path, foretold: Foretold
) -> None:
    alike = Alike.shared(reference("llama").directory, shared_home / "alike" / "llama")
    foretold(alike.prompts, alike.expected)
    config = config_for(reference("llama"), policy=replace(POLICY, admission=admission))
    found, counts = run(config, alike.prompts)
    assert found == alike.expected
    assert counts.accepted_tokens
    assert counts.spared_tokens


@pytest.mark.parametrize("is_sampled", [False, True])
def test_a_block_that_is_stopped_again_and_again_goes_on_where_it_was(
    is_sampled: bool, reference: References, foretold: Foretold
) -> None:
    ref = reference("llama")
    expected = [*ref.sampled, *ref.expected[NUM_SAMPLED:]] if is_sampled else ref.expected
    foretold(ref.prompts, expected)
    stops = made(ref, SAMPLED if is_sampled else GREEDY)
    stops.plan = replace(stops.plan, policy=replace(stops.plan.policy, draft_tokens=2))
    for num_passes in (4, 2, 1, None):
        stops.start(num_passes)
    num_compared = NUM_SAMPLED if is_sampled else len(expected)
    assert stops.in_order()[:num_compared] == expected[:num_compared]
    counts = PassCounts.total([record.counts for record in stops.passes])
    assert 0 < counts.accepted_tokens < counts.drafted_tokens
    assert counts.useful_tokens == sum(map(len, stops.in_order()))


TALK = ["one two three one two three one", "a list: a, b, a, b, a", "Once upon a time there was"]
ENDS = {
    "sampled": SamplingConfig(max_new_tokens=30, temperature=0.6, top_p=0.9, n=3, seed=4),
    "processed": SamplingConfig(max_new_tokens=30, repetition_penalty=1.1, no_repeat_ngram_size=4, min_new_tokens=9),
    "stopped": SamplingConfig(max_new_tokens=30, stop=["e"], logprobs=3),
    "masked": SamplingConfig(max_new_tokens=30, regex="(one|two|a, b|, )*"),
}


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("how", ENDS)
def test_each_token_is_chosen_as_if_it_came_alone(how: str) -> None:
    """Of the tiny model that comes along: what the sampler keeps of a row moves on with accepted tokens only."""
    found = dict[int, list[Completion]]()
    for drafted in (0, 6):
        config = RuntimeConfig(model="tiny", policy=replace(POLICY, draft_tokens=drafted), sampling=ENDS[how])
        results = Runtime(config).generate(TALK)
        found[drafted] = [replace(each, logprobs=()) for each in results if isinstance(each, Completion)]
        kept = [len(each.logprobs) == len(each.token_ids) for each in results if isinstance(each, Completion)]
        assert all(kept) or not ENDS[how].logprobs
    assert len(found[0]) == len(TALK) * ENDS[how].n
    assert found[6] == found[0]
    assert {each.finish for each in found[0]} <= {FinishReason.eos, FinishReason.stop, FinishReason.length}


def sequence(prompt: list[int], generated: list[int], sample: int = 0, name: str = "a") -> Sequence:
    request = Request(id=name, prompt_ids=tuple(prompt), max_new_tokens=50, sample_index=sample)
    return Sequence(request=request, generated=generated)


def test_the_longest_and_then_the_latest_match_is_continued() -> None:
    text = np.array([1, 2, 3, 4, 9, 2, 3, 5, 3, 6, 2, 3], np.int32)
    assert find_continuation(text, text) == (7, 2)
    assert find_continuation(text, np.array([1, 2, 3], np.int32)) == (3, 3)
    assert find_continuation(text, np.array([8, 3], np.int32)) == (9, 1)
    assert find_continuation(text, np.array([7], np.int32)) == (0, 0)
    same = np.full(3 * MAX_MATCH, 5, np.int32)
    assert find_continuation(same, same) == (len(same) - 1, MAX_MATCH)


def guess(drafts: Drafts, sequence: Sequence, max_tokens: int = 9) -> Rows[int]:
    return drafts.guess(sequence, max_tokens).tokens


def test_guesses_come_from_the_row_from_its_siblings_and_from_finished_rows() -> None:
    drafts = Drafts(4)
    first = sequence([1, 2, 3], [4, 5, 6, 7, 8])
    assert guess(drafts, first) == ()
    assert guess(drafts, sequence([1, 2, 3], [4], sample=1)) == [5, 6, 7, 8]
    assert guess(drafts, sequence([1, 2, 3], [4], sample=2), 2) == [5, 6]
    assert drafts.guess(sequence([9, 5, 6], [5], name="b"), 9) == ([6, 5], 1)
    other = sequence([30, 31], [6], name="c")
    assert guess(drafts, other) == ()
    first.finish = FinishReason.length
    drafts.leave(first)
    assert guess(drafts, other) == [7, 8]
    other.generated.append(8)
    assert guess(drafts, other) == (), "nothing follows the end of an output"


def test_what_finished_rows_said_is_kept_within_bounds() -> None:
    drafts = Drafts(4)
    for number in range(8):
        long = sequence([number], [*range(MAX_FINISHED // 5)], name=str(number))
        guess(drafts, long)
        long.finish = FinishReason.length
        drafts.leave(long)
    assert len(drafts._finished.tokens) == MAX_FINISHED
    assert not drafts._running


def test_what_is_rarely_right_is_seldom_guessed() -> None:
    """A token after a match of one is right once in ten times; after longer matches always."""
    drafts = Drafts(4, token_cost=0.2)
    short, long = sequence([7, 8, 9, 7], [], name="a"), sequence([1, 2, 3, 4, 5, 6, 1, 2, 3], [], name="b")
    counts = list[int]()
    for number in range(300):
        draft = drafts.guess(short, 4)
        drafts.learn(draft, int(number % 10 == 0))
        counts.append(len(draft.tokens))
        draft = drafts.guess(long, 4)
        assert len(draft.tokens) == 4 or number < 2 * TRIAL_DRAFTS
        drafts.learn(draft, 4)
    assert counts[0] > 0
    assert {*counts[-TRIAL_DRAFTS:]} == {0, 3}, "once in a while, to learn whether that has changed"
    assert sum(map(bool, counts[-TRIAL_DRAFTS:])) == 1


def test_free_tokens_are_always_guessed() -> None:
    drafts = Drafts(3)
    wrong = sequence([7, 8, 9, 1, 7], [])
    for _ in range(100):
        draft = drafts.guess(wrong, 3)
        assert len(draft.tokens) == 3
        drafts.learn(draft, 0)
