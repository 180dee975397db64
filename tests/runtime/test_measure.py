"""How the machine is measured: the statistics on clocks that are set by hand, the probes at toy size."""

from collections.abc import Iterator
from itertools import chain, count, repeat
from pathlib import Path

import pytest
import torch

from runtime.config.profiles import MeasureConfig
from runtime.config.settings import DType, MachineConfig
from runtime.errors import ConfigError
from runtime.measure.attention import attention_name, prefill_name
from runtime.measure.bandwidth import SUSTAINED, disk_probes
from runtime.measure.linear import (
    DTYPES,
    Matrices,
    ProbeSeries,
    ProductKind,
    make_series,
    matmul_timer,
    product_kinds,
    product_probes,
    product_timer,
    typical_kind,
)
from runtime.measure.machine import dtype_rates, machine_probes
from runtime.measure.timing import LONG_SECONDS, READING_SECONDS, Figure, Probe, Timer, make_figure, measure
from runtime.plan.cost.machine import make_machine
from runtime.stream.device import ComputeDevice
from runtime.units import MIB

CPU = ComputeDevice("cpu")
TOY = MeasureConfig(seconds=0.01, num_rounds=2, disk_mib=1, memory_mib=1, matrix_width=256, gemm_rows=[1, 4])


class HandClock:
    """Goes on only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def take(self, seconds: float) -> None:
        self.now += seconds


def probe_of(clock: HandClock, values: Iterator[float], name: str = "it") -> Probe:
    """A reading a second."""

    def read() -> float:
        clock.take(1.0)
        return next(values)

    return Probe(name=name, unit="GB/s", read=read)


def test_a_rate_is_the_amount_by_the_seconds_it_took() -> None:
    clock = HandClock()
    timed = Timer(3e9, lambda: clock.take(2.0), clock=clock)
    assert timed() == pytest.approx(1.5)


def test_a_product_has_two_operations_for_each_weight_and_row() -> None:
    inputs, weights = [torch.zeros(3, 8), torch.zeros(5, 8)], [torch.zeros(16, 8), torch.zeros(4, 8)]
    clock = count(0.0, 2.0)
    timed = matmul_timer(inputs, [weights], ComputeDevice("cpu"), clock=lambda: next(clock))
    assert timed.rate() == (2 * 3 * 16 * 8 + 2 * 5 * 4 * 8) / 2.0


def test_short_acts_are_repeated_until_a_reading_is_long_enough_and_the_wait_for_them_counts() -> None:
    clock, num_acts = HandClock(), 0

    def act() -> None:
        nonlocal num_acts
        num_acts += 1
        clock.take(READING_SECONDS / 8)

    timed = Timer(1e9, act, lambda: clock.take(READING_SECONDS / 8), clock=clock)
    timed()
    num_acts = 0
    assert timed() == pytest.approx(4 / (5 * READING_SECONDS / 8))
    assert num_acts == 4


def test_the_slow_first_act_is_in_no_reading() -> None:
    clock, seconds = HandClock(), chain([100.0], repeat(1.0))
    timed = Timer(1e9, lambda: clock.take(next(seconds)), clock=clock)
    assert [timed(), timed()] == [1.0, 1.0]


def test_a_run_takes_the_median_of_five_acts_behind_the_first() -> None:
    clock, seconds = HandClock(), iter([9.0, 0.01, 0.05, 0.02, 0.03, 0.04])
    assert Timer(6.0, lambda: clock.take(next(seconds)), clock=clock).rate() == pytest.approx(6 / 0.03)


def test_a_run_does_what_takes_long_once_behind_the_first() -> None:
    clock, seconds = HandClock(), iter([9.0, 0.01, LONG_SECONDS * 1.5])
    assert Timer(6.0, lambda: clock.take(next(seconds)), clock=clock).rate() == pytest.approx(4 / LONG_SECONDS)


def test_a_run_reads_its_disk_once_and_that_counts() -> None:
    clock, seconds = HandClock(), iter([2.0])
    assert Timer(6.0, lambda: clock.take(next(seconds)), clock=clock).rate_once() == 3.0


def test_a_figure_is_the_median_of_rounds_whose_values_are_medians_of_readings() -> None:
    """Two rounds of two seconds each, a reading a second; the warm-up's 1000 is in none of them."""
    clock = HandClock()
    readings = iter([1000.0, 1.0, 3.0, 7.0, 9.0])
    figures = measure([probe_of(clock, readings)], num_rounds=2, seconds=4.0, clock=clock)
    assert figures.figures == {"it": Figure(value=5.0, low=2.0, high=8.0, unit="GB/s")}
    assert figures.num_rounds == 2


def test_rounds_end_with_the_time_that_they_were_given_but_there_is_one() -> None:
    """A reading takes 1 s however little its share is."""
    for seconds, num_rounds in ((0.1, 1), (2.0, 2), (3.1, 3), (100.0, 5)):
        clock = HandClock()
        found = measure([probe_of(clock, repeat(1.0))], num_rounds=5, seconds=seconds, clock=clock)
        assert found.num_rounds == num_rounds, seconds


def test_a_first_act_that_compiles_says_nothing_of_how_often_the_others_are_repeated() -> None:
    """Otherwise a reading were one act of a microsecond: as long as what starts and stops the clock."""
    clock, seconds = HandClock(), chain([0.5], repeat(READING_SECONDS / 4))
    timed = Timer(1e9, lambda: clock.take(next(seconds)), clock=clock)
    timed()
    before = clock.now
    timed()
    assert clock.now - before == pytest.approx(READING_SECONDS)


def series(clock: HandClock, seconds: dict[int, list[float]]) -> ProbeSeries:
    """Of products whose acts take these seconds, the last for good."""

    def probe(num_rows: int) -> tuple[Probe, Timer]:
        each = chain(seconds[num_rows], repeat(seconds[num_rows][-1]))
        timed = Timer(1.0, lambda: clock.take(next(each)), clock=clock)
        return Probe(name=f"M={num_rows}", unit="GFLOP/s", read=timed), timed

    return make_series("product", list(seconds), probe, longest_seconds=0.4)


def test_a_cold_first_call_ends_no_row() -> None:
    found = series(HandClock(), {1: [3.0, 1e-6], 8: [0.5, 1e-6], 16: [0.3]})
    assert list(found.probes) == [1, 8, 16]
    assert found.end_reason is None


def test_a_row_ends_behind_the_first_product_that_is_slow_when_warm_and_says_so() -> None:
    found = series(HandClock(), {4: [0.5], 1: [0.1], 16: [0.6], 64: [0.7]})
    assert list(found.probes) == [1, 4]
    assert found.end_reason == (
        "product: M=4 takes 0.5 s, limit 0.4 s: M=16, 64 not measured, assumed as fast as M=4; "
        "raise measure.seconds to measure it"
    )
    assert [found.nearest(num_rows).name for num_rows in (1, 4, 16, 64)] == ["M=1", "M=4", "M=4", "M=4"]
    assert series(HandClock(), {1: [0.1], 4: [0.5]}).end_reason is None, "nothing is missing"


def test_rounds_go_over_all_probes_so_that_a_slow_minute_is_in_every_spread() -> None:
    clock, order = HandClock(), list[str]()
    probes = [probe_of(clock, repeat(1.0), name) for name in ("a", "b")]
    measure(probes, num_rounds=2, seconds=8.0, clock=clock, advance=order.append)
    assert order == ["a", "b"] * 3


def test_spread_is_the_farthest_round_from_the_median() -> None:
    assert make_figure([8.0, 10.0, 11.0], "s").spread == pytest.approx(0.2)
    assert make_figure([0.0, 0.0], "s").spread == 0.0


@pytest.mark.parametrize(
    ("other", "agrees"), [((9.0, 8.0, 9.5), True), ((8.0, 7.0, 9.0), True), ((7.0, 6.0, 8.9), False)]
)
def test_measurements_agree_where_their_rounds_overlap(other: tuple[float, float, float], agrees: bool) -> None:
    one = Figure(value=10.0, low=9.0, high=11.0, unit="s")
    two = Figure(value=other[0], low=other[1], high=other[2], unit="s")
    assert one.agrees_with(two) == two.agrees_with(one) == agrees


def test_disk_is_read_from_a_file_that_has_no_name(tmp_path: Path) -> None:
    with disk_probes(str(tmp_path), CPU, file_bytes=2 * MIB, piece_bytes=MIB) as probes:
        assert list(tmp_path.iterdir()) == []
        assert all(probe.read() > 0 for probe in probes)
    assert [probe.name for probe in probes][:2] == [SUSTAINED, "disk, burst"]
    assert len(probes) == 2 + 9


def test_directory_that_cannot_be_written_is_refused_by_its_key(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"measure\.directory=.*nowhere: cannot create a file there"),
        disk_probes(str(tmp_path / "nowhere"), CPU, file_bytes=MIB, piece_bytes=MIB),
    ):
        pass


def test_disk_without_room_is_refused_with_the_bytes(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"needs 1048576 GiB, .* lower measure\.disk_mib"),
        disk_probes(str(tmp_path), CPU, file_bytes=2**50, piece_bytes=MIB),
    ):
        pass


def test_products_end_behind_the_first_that_takes_too_long() -> None:
    matrices, kind = Matrices(CPU, width=256, num_bytes=MIB), ProductKind(compute="float32", stored="float32")
    short, long = (product_probes(kind, [4, 2], matrices, CPU, longest_seconds=seconds) for seconds in (0.0, 60.0))
    assert (list(short.probes), list(long.probes)) == ([2], [2, 4])
    assert [probe.name for probe in long.probes.values()] == [kind.name(2), kind.name(4)]


def test_no_list_of_rates_is_shorter_than_its_rows() -> None:
    figures = {f"M={rows}": Figure(value=float(rows), low=1.0, high=1.0, unit="") for rows in (1, 4)}
    others = (attention_name("float32", is_on_cpu=True), prefill_name("float32"))
    figures |= {name: Figure(value=1.0, low=1.0, high=1.0, unit="") for name in others}
    cut = series(HandClock(), {1: [0.1], 4: [0.5], 16: [0.6], 64: [0.7]})
    assert dtype_rates("float32", cut, [1, 4, 16, 64], figures, CPU).gemm_gflops == [1.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize("kind", product_kinds(CPU), ids=lambda kind: kind.name(2))
def test_a_product_is_the_one_that_a_model_would_compute(kind: ProductKind) -> None:
    """With the engine's own weights, in the orientation that the kind says, in the dtype that it computes in."""
    matrices = Matrices(CPU, width=256, num_bytes=1)
    x_MK = torch.randn(2, 256).to(DTYPES[kind.compute])
    with torch.inference_mode():
        out_MN = product_timer(kind, x_MK, matrices, CPU).act()
    weight = matrices.get(kind.stored)[0].float()
    expected = x_MK.float() @ (weight if kind.is_flipped else weight.T)
    assert out_MN.dtype == DTYPES[kind.compute]
    torch.testing.assert_close(out_MN.float(), expected, rtol=0.02, atol=0.2)


def test_float32_on_a_cpu_means_weights_as_checkpoints_have_them() -> None:
    assert typical_kind("float32", CPU) == ProductKind(compute="float32", stored="bfloat16")
    assert typical_kind("float16", CPU) == ProductKind(compute="float16", stored="float16")


def test_every_rate_of_a_plan_has_its_figure(tmp_path: Path) -> None:
    """And each figure of a dtype ends up in that dtype's rates."""
    with (
        torch.inference_mode(),
        machine_probes(MeasureConfig(**{**vars(TOY), "directory": str(tmp_path)}), CPU) as (probes, products, _),
    ):
        names = [probe.name for probe in probes]
        assert len(set(names)) == len(names)
        figures = {name: Figure(value=1.0 + place, low=1.0, high=2.0, unit="") for place, name in enumerate(names)}
        rates = {dtype: dtype_rates(dtype, rows, [1, 4], figures, CPU) for dtype, rows in products.items()}
        assert all(probe.read() > 0 for probe in probes)
    assert set(rates) == {"float32", "bfloat16", "float16"}
    assert all(len(found.gemm_gflops) == 2 for found in rates.values())
    assert len({rate.attention_gb_per_second for rate in rates.values()}) == 3


def test_toy_measurement_is_a_machine(tmp_path: Path) -> None:
    from jobs.measuring.measurement import PASS, TURN, measure_machine

    steps: list[tuple[str, int]] = []
    config = MeasureConfig(**{**vars(TOY), "directory": str(tmp_path), "num_rounds": 1})
    found = measure_machine(MachineConfig(device="cpu"), config, lambda name, total: steps.append((name, total)))
    assert steps[-1] == (PASS, len(steps))
    assert {TURN, PASS} < set(found.figures)
    assert found.products is not None
    assert found.products.rows == [1, 4]
    assert len(found.products.multipliers) == 10
    planned = make_machine(MachineConfig(name="here", rates=found.rates), DType.float32)
    assert planned.device_bytes is None
    assert set(planned.rates.gemm_flops_per_second) == {1, 4}
    assert planned.rates.turn_seconds > 0
