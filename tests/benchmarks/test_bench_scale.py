"""What grows is measured beside what it was before: sizes of a model, and rows of a run. Speed is not asserted."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import rows as rows_module
from benchmarks.rows import StartCase
from benchmarks.scale import (
    NUM_DOUBLINGS,
    NUM_NEW_TOKENS,
    QUANTITIES,
    ModelScale,
    doubled_sizes,
    measure,
    measure_sizes,
    rows_table,
    scale_table,
    synthesize,
)
from benchmarks.task import Result
from runtime.units import MIB

TOY = ModelScale(num_layers=2, vocab_size=512, prompt_tokens=8, block=2, hidden_size=64)


def result(seconds: float, prefill_seconds: float = 0.0, *, peak_bytes: int = 0) -> Result:
    return Result(
        seconds=seconds, prefill_seconds=prefill_seconds, rate=1.0, peak_bytes=peak_bytes, baseline_bytes=0,
        bytes_read=MIB, tokens=[],
    )  # fmt: skip


def test_each_quantity_is_doubled_alone_and_all_begin_alike() -> None:
    for quantity, grown in doubled_sizes(TOY).items():
        assert grown[0] == TOY
        assert [getattr(size, quantity) for size in grown] == [getattr(TOY, quantity) << n for n in range(4)]
        assert all(replace(size, **{quantity: getattr(TOY, quantity)}) == TOY for size in grown)


def test_no_layer_stays_and_each_is_read_in_every_pass(tmp_path: Path) -> None:
    size = TOY.doubled("num_layers", 1)
    synthesize(size, tmp_path / "model")
    found = measure(size, tmp_path / "model", 1)
    assert 0 < found.prefill_seconds < found.seconds
    layer_bytes = 2 * 64 * (2 * 64 + 2 * 64 + 3 * 176)  # q and o, k and v, gate, up and down in bfloat16
    assert found.bytes_read >= size.num_layers * NUM_NEW_TOKENS * layer_bytes


def test_a_size_is_measured_once_a_round_though_every_quantity_begins_with_it() -> None:
    asked: list[ModelScale] = []

    def count(size: ModelScale, path: Path, num_threads: int) -> Result:
        assert (path / "config.json").exists()
        asked.append(size)
        return result(1.0)

    rounds = measure_sizes(TOY, 2, 1, lambda line: None, count)
    assert len(rounds) == 1 + NUM_DOUBLINGS * len(QUANTITIES)
    assert asked == [*rounds, *rounds]


def test_the_table_has_costs_per_token_beside_those_of_half_as_much() -> None:
    rounds = {size: [result(1.0, 0.2)] for grown in doubled_sizes(TOY).values() for size in grown}
    for turn, size in enumerate(doubled_sizes(TOY)["num_layers"]):
        rounds[size] = [result(2.0**turn, 0.2, peak_bytes=3 * MIB + size.kv_bytes)]
    table = scale_table(TOY, rounds, {})
    assert "| num_layers | 2 | 12.500 ms | - | 50.000 ms | - | 1.00 s | - | 3 MiB | 0 MiB | 1 MiB |" in table
    assert "| num_layers | 4 | 12.500 ms | 1.00 | 112.500 ms | 2.25 | 2.00 s | 2.00 |" in table
    assert "takes 2.00, 2.00, 2.00 times as long and 1.00, 1.00, 1.00 times the memory without" in table


@pytest.mark.parametrize("policy", ["auto", "hrm"])
def test_rows_are_planned_on_the_real_road_and_nothing_is_generated(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []
    write = rows_module._write_rows

    def remember(path: Path, count: int) -> None:
        seen.append(path)
        write(path, count)
        assert len(path.read_text().splitlines()) == count

    monkeypatch.setattr(rows_module, "_write_rows", remember)
    found = rows_module.measure(StartCase(num_rows=20, policy=policy), start_time=0.0)
    assert found.seconds > 0
    assert found.peak_bytes > 0
    assert found.tokens == []
    assert not seen[0].exists()


def test_rows_stand_beside_the_fewest_of_their_policy() -> None:
    table = rows_table(
        {
            StartCase(num_rows=10, policy="auto"): result(2.0, peak_bytes=500 * MIB),
            StartCase(num_rows=1010, policy="auto"): result(3.0, peak_bytes=501 * MIB),
        }
    )
    assert "| 10 | auto | 2.0 s | - | 500 MiB | - |" in table
    assert "| 1,010 | auto | 3.0 s | 1.000 ms | 501 MiB | 1.02 KiB |" in table
