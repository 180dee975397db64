"""Throughput against block size: what is measured stands beside what was predicted, and the knee is where gains end."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import suites
from benchmarks.blocks import block_rates, block_sizes, blocks_table, knee, measure_operating_point
from benchmarks.config import BenchConfig, Suite, make_task
from benchmarks.contenders import Contender
from benchmarks.measure import measure
from benchmarks.suites import run_suite
from benchmarks.task import Result
from runtime.checkpoint_source.location import find_checkpoint
from runtime.config.settings import ModelConfig
from runtime.errors import ConfigError


def result(decode: float, predicted: float) -> Result:
    return Result(
        seconds=1 + decode, prefill_seconds=1.0, rate=1.0, peak_bytes=0, baseline_bytes=0, bytes_read=0, tokens=[[1]],
        predicted_decode_seconds=predicted,
    )  # fmt: skip


def test_blocks_are_powers_of_two_and_the_largest() -> None:
    assert block_sizes(1) == [1]
    assert block_sizes(8) == [1, 2, 4, 8]
    assert block_sizes(12) == [1, 2, 4, 8, 12]


def test_the_knee_is_the_first_block_whose_doubling_gains_little() -> None:
    assert knee({1: 1.0, 2: 2.0, 4: 4.0, 8: 4.5, 16: 9.0}) == 4
    assert knee({1: 1.0, 2: 2.0}) is None


def test_rates_are_those_of_decode_passes_with_their_spread() -> None:
    (found,) = block_rates({4: [result(2.0, 1.0), result(1.0, 1.0), result(4.0, 1.0)]}, num_new_tokens=5)
    assert (found.measured, found.predicted, found.spread) == (8.0, 16.0, (4.0, 16.0))


def test_the_table_has_both_knees_and_the_roofline() -> None:
    rounds = {1: [result(1.0, 1.0)], 2: [result(1.0, 1.0)], 4: [result(2.0, 1.0)]}
    table = blocks_table("llama", block_rates(rounds, 5), 37.2)
    assert "| 2 | 8.00 tok/s (8.00-8.00) | 2.00 | 8.00 tok/s | 1.00 |" in table
    assert "measured 2, predicted none. Roofline (P2): with 37 sequences" in table


def test_the_roofline_says_from_how_many_sequences_the_disk_no_longer_bounds_decode() -> None:
    path = str(find_checkpoint(ModelConfig(), None))
    config = BenchConfig(prompt_tokens=16, num_new_tokens=3, micro_batch_size=2, num_micro_batches=2, num_threads=1)
    found = measure_operating_point(make_task(config, Contender.nvme, path, 4))
    assert found.needed_sequences > 0
    assert found.p1 is None  # nothing but the disk is below compute memory


def test_the_suite_measures_each_block_draws_them_and_names_the_knee(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "needed_sequences", lambda task: 2.5)
    path = str(find_checkpoint(ModelConfig(), None))
    config = BenchConfig(suite=Suite.blocks, num_prompts=2, num_new_tokens=3, rounds=1, weight_share=60.0)
    found = run_suite(config, [path], lambda line: None, measure)
    assert len(found.rounds) == 2
    assert "Roofline (P2): with 2 sequences" in found.table or "with 3 sequences" in found.table
    assert found.draw is not None
    found.draw(tmp_path)
    assert (tmp_path / "blocks.png").read_bytes().startswith(b"\x89PNG")


def test_one_new_token_has_no_decode_pass() -> None:
    with pytest.raises(ConfigError, match=r"num_new_tokens.*suite=blocks"):
        BenchConfig(suite=Suite.blocks, num_new_tokens=1)
    assert replace(BenchConfig(), suite=Suite.scale).suite is Suite.scale
