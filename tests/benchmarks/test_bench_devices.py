"""Ranks beside one process, from a disk that gives each of them so much."""

import time
from pathlib import Path

import pytest

from benchmarks.config import BenchConfig, RanksConfig, Suite
from benchmarks.devices import RanksCase, ThrottledReader, devices_table
from benchmarks.suites import run_suite
from benchmarks.task import Result
from runtime.checkpoint_source.location import find_checkpoint
from runtime.config.settings import Gather, ModelConfig
from runtime.errors import ConfigError
from runtime.plan.shape.extents import Extent
from tests.jobs.forked_workers import ForkedWorker


def result(rate: float, num_bytes: int, num_passes: int) -> Result:
    return Result(
        seconds=1.0, prefill_seconds=0.5, rate=rate, peak_bytes=0, baseline_bytes=0, bytes_read=num_bytes,
        num_passes=num_passes, tokens=[[1], [2]],
    )  # fmt: skip


def test_the_table_has_ratios_to_the_first_and_shares_of_a_pass() -> None:
    one, two = (RanksCase(num_ranks=count, bytes_per_second=8e6) for count in (1, 2))
    text = devices_table({one: [result(10.0, 4096, 2)], two: [result(18.0, 3072, 3), result(20.0, 3072, 3)]})
    assert "| 1 rank | 10.0 (10.0-10.0) | 1.00 | 2 KiB | 1.000 | 2 of 2 |" in text
    assert "| 2 ranks, memory | 19.0 (18.0-20.0) | 1.90 | 1 KiB | 0.500 | 2 of 2 |" in text
    assert "at most 8 MB/s" in text


def test_a_throttled_reader_gives_no_more_than_it_may_and_the_bytes_of_the_file(tmp_path: Path) -> None:
    file, target = tmp_path / "file", bytearray(64 * 4096)
    file.write_bytes(bytes(range(256)) * 1024)
    extent = Extent(file=str(file), offset=0, num_bytes=len(target), used_bytes=len(target), slot_offset=0)
    begin = time.monotonic()
    with ThrottledReader(2e6, num_threads=4, chunk_bytes=4096, direct=False) as reader:
        reader.submit([extent], memoryview(target)).wait()
    assert time.monotonic() - begin >= len(target) / 2e6
    assert target == file.read_bytes()


def test_ranks_give_the_tokens_of_one_process_and_read_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", ForkedWorker)
    config = BenchConfig(
        suite=Suite.devices,
        num_prompts=4,
        num_new_tokens=3,
        rounds=1,
        ranks=RanksConfig(sizes=[1, 2], gathers=[Gather.collective], read_mb_per_second=500.0),
    )
    done = run_suite(config, [str(find_checkpoint(ModelConfig(), None))], lambda line: None)
    one, two = (results[0] for results in done.rounds.values())
    assert one.tokens == two.tokens
    assert two.bytes_read / two.num_passes == pytest.approx(one.bytes_read / one.num_passes / 2, rel=0.02)


def test_how_many_ranks_read_how_fast_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"ranks\.sizes"):
        RanksConfig(sizes=[])
    with pytest.raises(ConfigError, match=r"ranks\.gathers"):
        RanksConfig(gathers=[Gather.auto])
    with pytest.raises(ConfigError, match=r"ranks\.read_mb_per_second"):
        RanksConfig(read_mb_per_second=0.0)
