"""A floor is the longer of reading and multiplying, counted as often as passes read and multiply."""

import pytest

from jobs.benchmarks import floor
from jobs.benchmarks.config import BenchConfig, Suite, task_of
from jobs.benchmarks.contenders import Contender
from jobs.benchmarks.floor import Floor, ProductSeconds, floors_of, floors_table, products
from jobs.benchmarks.measure import measure
from jobs.benchmarks.predictions import Case
from jobs.benchmarks.suites import run_suite
from jobs.benchmarks.task import Result, prompts
from runtime.api import Runtime
from runtime.config import ModelConfig, RuntimeConfig
from runtime.errors import ConfigError
from runtime.origin.location import find_checkpoint
from tests.jobs.forked_workers import ForkedWorker

CASE = Case(path="somewhere/llama", contender="nvme", num_sequences=128)
SECONDS = {64: ProductSeconds(layers=1.0, head=0.5), 512: ProductSeconds(layers=4.0, head=2.0)}


def result(prefill: float, decode: float) -> Result:
    """11 passes, 4 of them decode, that read a GB each."""
    return Result(
        seconds=prefill + decode, prefill_seconds=prefill, rate=1.0, peak_bytes=0, baseline_bytes=0,
        bytes_read=11 * 10**9, num_passes=11, tokens=[[1]],
    )  # fmt: skip


def test_the_longer_of_reading_and_multiplying_is_the_floor() -> None:
    task = task_of(BenchConfig(num_new_tokens=5), Contender.nvme, "somewhere/llama", 128)
    rounds = [result(30.0, 20.0), result(28.0, 16.0), result(90.0, 17.0)]
    prefill, decode = floors_of(CASE, task, rounds, 0.5e9, SECONDS)
    num_tokens = sum(map(len, prompts(128, 32000, 60)))
    assert prefill.reading == pytest.approx(7 * 2.0)
    assert prefill.multiplying == pytest.approx(num_tokens / 512 * 4.0 + 2 * 0.5)
    assert prefill.measured == 30.0
    assert decode.reading == pytest.approx(4 * 2.0)
    assert decode.multiplying == pytest.approx(4 * 128 / 512 * 6.0)
    assert decode.share == pytest.approx(8.0 / decode.measured)


def test_the_table_names_no_directory() -> None:
    near = Floor(case=CASE, phase="decode", reading=8.0, multiplying=6.0, measured=16.0)
    assert "| llama, nvme, 128, decode | 8.0 s | 6.0 s | 16.0 s | 50% |" in floors_table([near])


def test_each_matrix_of_layers_and_head_is_multiplied_once() -> None:
    shape = Runtime(RuntimeConfig()).model.shape
    layers = [stage for stage in shape.stages if stage.kind.is_layer]
    numbers = sum(count * n * k for (_, n, k), count in products(layers, 7).items())
    assert 2 * numbers == sum(stage.flops_per_token for stage in layers)
    assert {m for m, _, _ in products(layers, 7)} == {7}


def test_products_are_timed_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "LEAST_SECONDS", 0.002)
    monkeypatch.setattr(floor, "MOST_COPIES", 3)
    found = floor.measure(path=str(find_checkpoint(ModelConfig(), None)), rows=[2, 64], num_threads=1)
    assert found[64][0] > found[2][0] > 0
    assert found[2][1] > 0


def test_a_suite_measures_reading_passes_and_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", ForkedWorker)
    path = str(find_checkpoint(ModelConfig(), None))
    config = BenchConfig(
        suite=Suite.floor, contenders=[Contender.nvme], blocks=[4], rounds=1, num_new_tokens=3, weight_share=60.0
    )
    found = run_suite(config, [path], lambda line: None, measure)
    assert found.table.count(" nvme, 4, ") == 2
    assert len(found.rounds) == 2


def test_only_millrace_has_a_floor() -> None:
    with pytest.raises(ConfigError, match="suite=floor"):
        BenchConfig(suite=Suite.floor, contenders=[Contender.transformers])
