"""Predictions stand beside measurements, with the median deviation and the worst; how good they are is not asserted."""

from pathlib import Path

import pytest

from benchmarks.config import BenchConfig, Suite, make_task
from benchmarks.contenders import Contender
from benchmarks.measure import measure
from benchmarks.predictions import BlockCase, PredictionResult, median_predictions, predictions_table
from benchmarks.task import Result
from runtime.checkpoint_source.location import find_checkpoint
from runtime.config.settings import ModelConfig
from runtime.errors import ConfigError


def result(prefill: float, decode: float, *, predicted_prefill: float, predicted_decode: float) -> Result:
    return Result(
        seconds=prefill + decode, prefill_seconds=prefill, rate=1.0, peak_bytes=0, baseline_bytes=0, bytes_read=0,
        tokens=[[1]], predicted_prefill_seconds=predicted_prefill, predicted_decode_seconds=predicted_decode,
    )  # fmt: skip


def outcome(predicted: float, measured: float, num_sequences: int = 8) -> PredictionResult:
    case = BlockCase(path="somewhere/llama", contender="nvme", num_sequences=num_sequences)
    return PredictionResult(case=case, phase="decode", predicted_seconds=predicted, measured_seconds=measured)


@pytest.mark.parametrize("contender", [Contender.nvme, Contender.none, Contender.none_continuous])
def test_what_was_predicted_comes_with_what_was_measured(contender: Contender) -> None:
    path = str(find_checkpoint(ModelConfig(), None))
    config = BenchConfig(num_new_tokens=3, micro_batch_size=2, weight_share=60.0)
    found = measure(make_task(config, contender, path, 4))
    assert found.predicted_prefill_seconds > 0
    assert found.predicted_decode_seconds > 0


def test_of_several_rounds_the_one_with_the_middle_ratio_counts() -> None:
    rounds = [result(1.0, 2.0, predicted_prefill=p, predicted_decode=2.0) for p in (3.0, 1.1, 0.5)]
    prefill, decode = median_predictions(BlockCase(path="x", contender="nvme", num_sequences=8), rounds)
    assert (prefill.phase, prefill.ratio) == ("prefill", 1.1)
    assert (decode.phase, decode.ratio) == ("decode", 1.0)


def test_the_table_says_how_far_off_in_the_median_and_at_worst() -> None:
    table = predictions_table([outcome(0.9, 1.0), outcome(2.4, 2.0, 64), outcome(3.0, 2.0, 256)])
    assert "| llama | nvme | 64 | decode | 2.40 s | 2.00 s | 1.20 |" in table
    assert "20.0% in the median, by 50.0% at worst (llama, nvme, block 256, decode)" in table
    assert "somewhere" not in table


def test_checkpoints_and_contenders_are_those_that_can_be_predicted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="suite=predictions"):
        BenchConfig(suite=Suite.predictions, contenders=[Contender.transformers])
    with pytest.raises(ConfigError, match="checkpoints"):
        BenchConfig(checkpoints=[str(tmp_path)])
    with pytest.raises(ConfigError, match="num_new_tokens"):
        BenchConfig(suite=Suite.predictions, num_new_tokens=1)
    with pytest.raises(ConfigError, match="blocks"):
        BenchConfig(blocks=[0])
