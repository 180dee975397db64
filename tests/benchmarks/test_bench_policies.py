"""What is searched stands beside a grid of twenty; how fast either is is not asserted."""

from dataclasses import replace

import pytest

from benchmarks import weightstream
from benchmarks.config import BenchConfig, Suite
from benchmarks.measure import measure
from benchmarks.policies import NUM_REPEATED, policy_attempts
from benchmarks.suites import run_suite
from benchmarks.task import BenchmarkTask, Result
from runtime.checkpoint_source.location import find_checkpoint
from runtime.config.settings import ModelConfig
from runtime.engine.records import PassRecord
from runtime.errors import ConfigError

CONFIG = BenchConfig(suite=Suite.policies, num_prompts=16, num_new_tokens=3, rounds=3, weight_share=60.0)


def test_the_grid_has_twenty_policies_with_the_budget_of_the_largest_block() -> None:
    searched, *grid = policy_attempts(CONFIG, "somewhere/llama")
    assert searched.is_searched
    assert len({attempt.name for attempt in grid}) == len(grid) == 20
    assert {attempt.task.num_kv_slots for attempt in (searched, *grid)} == {16}
    assert max(attempt.task.micro_batch_size * attempt.task.num_micro_batches for attempt in grid) == 16


def test_the_fastest_and_the_search_are_measured_again_and_compared() -> None:
    asked: list[BenchmarkTask] = []
    said: list[str] = []

    def fake(task: BenchmarkTask) -> Result:
        asked.append(task)
        rate = 90.0 if task.policy == "hrm" else 1.0 * task.micro_batch_size * task.num_micro_batches
        rate *= 10 if (task.schedule, task.attention, task.micro_batch_size) == ("flexgen", "device", 16) else 1
        return Result(
            seconds=1.0, prefill_seconds=0.5, rate=rate, peak_bytes=0, baseline_bytes=0, bytes_read=0,
            tokens=[[1] * 48], predicted_prefill_seconds=1.0, predicted_decode_seconds=1.0, policy="4 x 4 sequences",
        )  # fmt: skip

    found = run_suite(CONFIG, ["somewhere/llama"], said.append, fake)
    assert len(asked) == len(said) == 21 + 2 * (1 + NUM_REPEATED)
    assert "llama: hrm at 0.56 of the best of 20 policies (1 x 16, flexgen)" in found.table
    assert "| hrm: 4 x 4 sequences | 90.0 (90.0-90.0) | 3 | 24.0 |" in found.table
    assert "somewhere" not in found.table


@pytest.mark.parametrize("index", [0, 2])
def test_an_attempt_generates(index: int) -> None:
    attempt = list(policy_attempts(CONFIG, str(find_checkpoint(ModelConfig(), None))))[index]
    result = measure(replace(attempt.task, num_prompts=4, num_kv_slots=4))
    assert [len(tokens) for tokens in result.tokens] == [3] * 4
    assert bool(result.policy) == attempt.is_searched


def test_a_rate_counts_the_seconds_of_every_pass_prefill_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PassRecord] = []
    prefill_seconds = weightstream.prefill_seconds
    monkeypatch.setattr(weightstream, "prefill_seconds", lambda passes: seen.extend(passes) or prefill_seconds(passes))
    attempt = list(policy_attempts(CONFIG, str(find_checkpoint(ModelConfig(), None))))[2]
    result = measure(replace(attempt.task, num_prompts=4, num_kv_slots=4))
    assert 0 < result.prefill_seconds < sum(record.seconds for record in seen) <= result.seconds
    assert result.rate == pytest.approx(sum(map(len, result.tokens)) / result.seconds)


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_prompts"):
        BenchConfig(suite=Suite.policies, num_prompts=3)
