"""The batch size of a peer is the one after which its rate falls, and the table names it."""

from collections.abc import Callable, Mapping

import pytest

from benchmarks.config import BenchConfig, make_task
from benchmarks.contenders import Contender
from benchmarks.suites import choose_batch_size, run_suite
from benchmarks.task import BenchmarkTask, Result
from runtime.errors import ConfigError, WeightstreamError


def result(task: BenchmarkTask, rate: float) -> Result:
    return Result(
        seconds=1.0, prefill_seconds=0.0, rate=rate, peak_bytes=2, baseline_bytes=1, bytes_read=0, tokens=[[1]],
        batch_size=task.batch_size,
    )  # fmt: skip


def measuring(rates: Mapping[int, float], asked: list[BenchmarkTask]) -> Callable[[BenchmarkTask], Result]:
    def measure(task: BenchmarkTask) -> Result:
        asked.append(task)
        if task.batch_size is not None and task.batch_size not in rates:
            raise WeightstreamError("out of memory")
        return result(task, 1.0 if task.batch_size is None else rates[task.batch_size])

    return measure


def chosen(
    config: BenchConfig, contender: Contender, rates: Mapping[int, float], asked: list[BenchmarkTask]
) -> int | None:
    task = make_task(config, contender, "somewhere", config.num_prompts)
    return choose_batch_size(task, measuring(rates, asked), lambda line: None).batch_size


@pytest.mark.parametrize(
    ("rates", "expected", "tried"),
    [
        ({16: 1.0, 32: 2.0, 64: 1.5, 128: 9.0}, 32, [16, 32, 64]),
        ({16: 1.0, 32: 2.0, 64: 3.0, 128: 4.0}, 128, [16, 32, 64, 128]),
        ({16: 1.0, 32: 2.0}, 32, [16, 32, 64]),
    ],
)
def test_sizes_are_tried_until_the_rate_falls_or_the_peer_fails(
    rates: Mapping[int, float], expected: int, tried: list[int]
) -> None:
    asked: list[BenchmarkTask] = []
    assert chosen(BenchConfig(num_prompts=256), Contender.transformers, rates, asked) == expected
    assert [task.batch_size for task in asked] == tried
    assert {(task.num_prompts, task.num_new_tokens) for task in asked} == {(128, 8)}


def test_a_peer_may_have_a_size_of_its_own() -> None:
    config = BenchConfig(batch_size=16, batch_sizes={Contender.llama_cpp_f16: 64})
    sizes = {each: make_task(config, each, "somewhere", 256).batch_size for each in Contender}
    assert sizes[Contender.llama_cpp_f16] == 64
    assert sizes[Contender.transformers] == 16
    assert sizes[Contender.vllm] is None
    with pytest.raises(ConfigError, match=r"batch_sizes must be 1 or more each, for peers only.*nvme: 4"):
        BenchConfig(batch_sizes={Contender.nvme: 4})


def test_no_size_is_above_the_number_of_prompts_and_a_single_one_is_not_tried() -> None:
    asked: list[BenchmarkTask] = []
    assert chosen(BenchConfig(num_prompts=40), Contender.accelerate_cpu, {16: 1.0, 32: 2.0}, asked) == 32
    assert [task.num_new_tokens for task in asked] == [8, 8]
    asked.clear()
    assert chosen(BenchConfig(num_prompts=9), Contender.transformers, {}, asked) == 9
    assert not asked


def test_a_given_size_is_taken_as_it_is() -> None:
    asked: list[BenchmarkTask] = []
    assert chosen(BenchConfig(batch_size=7), Contender.transformers, {}, asked) == 7
    assert not asked


def test_a_peer_that_fails_with_the_smallest_size_fails() -> None:
    with pytest.raises(WeightstreamError, match="out of memory"):
        chosen(BenchConfig(num_prompts=64), Contender.transformers, {}, [])


def test_the_search_is_made_once_and_the_table_names_its_outcome() -> None:
    asked: list[BenchmarkTask] = []
    contenders = [Contender.nvme, Contender.transformers, Contender.vllm, Contender.accelerate_disk]
    config = BenchConfig(contenders=contenders, num_prompts=64, rounds=2)
    rates = {16: 3.0, 32: 2.0}

    def measure(task: BenchmarkTask) -> Result:
        if task.contender == "accelerate_disk":
            raise WeightstreamError("no space")
        return measuring(rates, asked)(task)

    found = run_suite(config, ["somewhere"], lambda line: None, measure)
    asked = [task for task in asked if not task.is_check]
    assert [task.batch_size for task in asked] == [16, 32, *[None, 16, None] * 2]
    assert "| transformers | 16 |" in found.table
    assert "| nvme | - |" in found.table
    assert "accelerate_disk is left out: no space" in found.table
    assert found.peers == ["somewhere transformers 64", "somewhere vllm 64"]


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        BenchConfig(batch_size=0)
    with pytest.raises(ConfigError, match="peer_minutes"):
        BenchConfig(peer_minutes=0)
