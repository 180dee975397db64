"""Contenders get the same prompts and give the same tokens; the table has a row for each. Speed is not asserted."""

import pytest

from jobs.io.bench.config import BenchConfig, Contender
from jobs.io.bench.measure import Result, Task, measure, prompts
from jobs.io.bench.report import markdown
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from runtime.model.origin import find_checkpoint

GENERATING = [Contender.nvme, Contender.cpu, Contender.none, Contender.transformers, Contender.accelerate]
READING = [Contender.read, Contender.plain_read]


def measured(contender: Contender) -> Result:
    task = Task(
        contender=contender.value,
        path=str(find_checkpoint(ModelConfig(), None)),
        num_prompts=5,
        num_new_tokens=4,
        batch_size=2,
        micro_batch_size=3,
        weight_share=60.0,
        num_threads=2,
    )
    return measure(task)


def test_every_contender_generates_the_same_tokens_and_has_its_row() -> None:
    pytest.importorskip("accelerate")
    rounds = {contender.value: [measured(contender)] for contender in GENERATING}
    expected = rounds["transformers"][0].tokens
    assert [len(tokens) for tokens in expected] == [4] * 5
    assert all(results[0].tokens == expected for results in rounds.values())
    table = markdown(rounds, "test")
    assert all(f"| {name} |" in table for name in rounds)
    assert table.count("5 of 5") == len(rounds)


@pytest.mark.parametrize("contender", READING)
def test_reading_contenders_read_the_streamed_layers_in_every_pass(contender: Contender) -> None:
    result = measured(contender)
    assert result.bytes_read > 0
    assert result.tokens == []


def test_prompts_are_the_same_every_time_and_within_the_vocabulary() -> None:
    ids = prompts(64, 32_000)
    assert ids == prompts(64, 32_000)
    assert sum(map(len, ids)) == 4_606
    assert all(10 <= token < 31_990 for prompt in ids for token in prompt)


def test_impossible_settings_name_the_key() -> None:
    with pytest.raises(ConfigError, match="rounds"):
        BenchConfig(rounds=0)
