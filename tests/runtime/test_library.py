"""Streams of completions, and what ends them; failing calls; and the end of a runtime."""

import gc
import threading
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from runtime import PolicyConfig, Runtime
from runtime.config.settings import Tier
from runtime.errors import BudgetError, ClosedError, ConfigError, Interrupted
from runtime.sequences.sequence import Request
from runtime.units import GIB
from tests.runtime.library_support import (
    Reads,
    References,
    Remembering,
    host_bytes_for,
    rates_of_any_load,
    reads,
    small_config,
)
from tests.runtime.test_fidelity import config_for, tokens_of

__all__ = ["rates_of_any_load", "reads"]


def test_an_end_is_an_end_for_every_call(reference: References) -> None:
    ref = reference("llama")
    runtime = Runtime(config_for(ref)).open()
    request = runtime.request("0", ref.prompts[0])
    assert isinstance(request, Request)
    plan, stream = runtime.plan([request]), runtime.stream(ref.prompts)
    next(stream)
    runtime.close()
    runtime.close()
    calls: list[Callable[[], object]] = [
        lambda: runtime.generate(ref.prompts),
        lambda: runtime.stream(ref.prompts),
        lambda: runtime.plan([request]),
        lambda: runtime.session(plan).__enter__(),
        runtime.open,
        lambda: next(stream),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


@pytest.mark.parametrize("admission", ["wave", "continuous"])
def test_completions_come_as_they_finish_and_know_their_prompts(admission: str, reference: References) -> None:
    ref = reference("llama")
    policy = PolicyConfig(kind="fixed", micro_batch_size=2, num_micro_batches=1, admission=admission)
    num_passes = 0

    def counts() -> bool:
        nonlocal num_passes
        num_passes += 1
        return False

    with Runtime(config_for(ref, policy=policy), should_stop=counts) as runtime:
        seen = [(num_passes, result) for result in runtime.stream(ref.prompts)]
        assert runtime.generate(ref.prompts) == sorted((each for _, each in seen), key=lambda each: each.prompt_index)
    assert {result.prompt_index: list(result.token_ids) for _, result in seen} == dict(enumerate(ref.expected))
    assert len({when for when, _ in seen}) > 1, "the first is there before the last is made"


@pytest.mark.parametrize("is_open", [True, False])
def test_whoever_breaks_off_ends_the_work_and_its_memory(is_open: bool, reference: References) -> None:
    ref, device, num_asked = reference("llama"), Remembering(), 0
    policy = PolicyConfig(kind="fixed", micro_batch_size=1, num_micro_batches=1)

    def counts() -> bool:
        nonlocal num_asked
        num_asked += 1
        return False

    runtime = Runtime(config_for(ref, policy=policy, resident_layers=1), device=device, should_stop=counts)
    if is_open:
        runtime.open()
    for result in runtime.stream(ref.prompts):
        assert result.is_ok
        break
    gc.collect()
    done, kept = num_asked, runtime._cache.weights.compute_bytes if runtime._cache is not None else 0
    assert device.held_bytes == kept
    assert (kept > 0) is is_open
    assert num_asked == done
    assert tokens_of(runtime, ref.prompts) == ref.expected
    assert num_asked - done > done, "all of them take more passes than one"
    runtime.close()


def test_a_later_call_ends_a_stream_which_says_so_instead_of_ending_early(reference: References) -> None:
    ref = reference("llama")
    with Runtime(config_for(ref)) as runtime:
        stream, exhausted = runtime.stream(ref.prompts), runtime.stream(ref.prompts[:1])
        with pytest.raises(ClosedError, match="ended by a later call"):
            next(stream)
        assert len(list(exhausted)) == 1
        assert tokens_of(runtime, ref.prompts) == ref.expected
        assert list(exhausted) == []


def test_an_input_without_an_end_is_read_in_windows(reference: References, reads: Reads) -> None:
    ref, given = reference("llama"), 0

    def prompts() -> Iterator[list[int]]:
        nonlocal given
        for index in count():
            given += 1
            yield ref.prompts[index % len(ref.prompts)]

    runtime = Runtime(config_for(ref, tier=Tier.none))
    found: dict[int, list[int]] = {}
    for result in runtime.stream(prompts(), window=3):
        found[result.prompt_index] = list(result.token_ids)
        if len(found) == 3:
            assert given == 3
            reads.take()
        if len(found) == 7:
            break
    assert (given, reads.take()) == (9, 0)
    assert runtime._cache is None
    assert all(tokens == ref.expected[index % len(ref.prompts)] for index, tokens in found.items())


def test_a_call_that_fails_leaves_the_runtime_usable(reference: References) -> None:
    ref, stops = reference("llama"), [False]
    budget = host_bytes_for(ref, 100, resident_layers=0)
    with Runtime(small_config(ref, host_memory_gib=budget / GIB), should_stop=lambda: stops[0]) as runtime:
        expected = [tokens[:3] for tokens in ref.expected[:1]]
        assert tokens_of(runtime, ref.prompts[:1]) == expected
        with pytest.raises(BudgetError, match=r"offload\.host_memory_gib"):
            runtime.generate([[5] * 250])
        with pytest.raises(ConfigError, match="prompt 1 must be"):
            runtime.generate([ref.prompts[0], 3.5])  # pyright: ignore
        stops[0] = True
        with pytest.raises(Interrupted):
            runtime.generate(ref.prompts[:1])
        assert not [each for each in threading.enumerate() if each.name.startswith("reader")], "no read is left behind"
        stops[0] = False
        assert tokens_of(runtime, ref.prompts[:1]) == expected


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ("abc", "prompts must be an iterable of prompts, got one str: put it in a list"),
        (b"abc", "got one bytes"),
        ({"role": "user", "content": "x"}, "got one dict"),
        (7, "got one int"),
    ],
)
def test_one_prompt_where_many_are_expected_is_refused_before_anything_runs(prompts: object, said: str) -> None:
    runtime = Runtime()
    for call in (runtime.generate, runtime.stream):
        with pytest.raises(ConfigError) as caught:
            call(prompts)  # pyright: ignore
        assert said in str(caught.value)
    with pytest.raises(ConfigError, match="window must be 1 or more"):
        runtime.stream(["a"], window=0)
