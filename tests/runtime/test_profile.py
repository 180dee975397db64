"""What a profile of the `machine` group becomes: one rule for every data sheet, and measured rates as they are."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from jobs.config.typed import build
from runtime.config.profiles import LANES, DataSheet, DTypeRates, MeasuredRates
from runtime.config.settings import DType, MachineConfig
from runtime.errors import ConfigError
from runtime.plan.cost.machine import COMPUTE_SHARE, MEMORY_SHARE, make_machine
from runtime.resources import Resource
from runtime.units import GIB

CONF = Path(__file__).resolve().parents[2] / "conf" / "machine"
SHEETS = (
    *("t4", "2xt4", "4xt4", "l4", "a10", "a100-40", "a100-80", "8xa100-80", "2n-a100-80", "h100", "h200"),
    *("rtx3060", "rtx3090", "rtx4060", "rtx4060ti-16", "rtx4090", "rtx5090"),
)
RATES = MeasuredRates(
    host_memory_gib=20.0,
    disk_gb_per_second=0.9,
    memory_gb_per_second=10.0,
    turn_seconds=4e-4,
    pass_seconds=2e-3,
    gemm_rows=[1, 16, 64],
    float32=DTypeRates(
        gemm_gflops=[5.0, 60.0, 110.0],
        attention_gb_per_second=8.0,
        cpu_attention_gb_per_second=8.0,
        prefill_attention_gflops=50.0,
    ),
)


def profile(option: str) -> MachineConfig:
    return build(MachineConfig, yaml.safe_load((CONF / f"{option}.yaml").read_text()), "machine.")


def sheet_of(option: str) -> DataSheet:
    sheet = profile(option).sheet
    assert sheet is not None
    return sheet


@pytest.mark.parametrize("option", SHEETS)
def test_every_profile_is_a_machine(option: str) -> None:
    machine, sheet = make_machine(profile(option)), sheet_of(option)
    assert machine.name == option
    assert machine.device_bytes is not None
    assert 0 < machine.device_bytes < sheet.memory_gib * GIB
    assert 0 < machine.host_bytes < sheet.host_memory_gib * GIB


def test_memories_are_printed_in_gib_of_which_nine_tenths_are_used_and_three_quarters_of_what_is_pinned() -> None:
    machine = make_machine(profile("4xt4"))
    assert machine.device_bytes == pytest.approx(16 * 2**30 * 0.9, abs=4)
    assert machine.host_bytes == pytest.approx(sheet_of("4xt4").host_memory_gib * 2**30 * 0.75, abs=1)
    measured = make_machine(MachineConfig(name="here", rates=replace(RATES, device_memory_gib=8.0)), DType.float32)
    assert (measured.host_bytes, measured.device_bytes) == (20 * 2**30, 8 * 2**30)


@pytest.mark.parametrize("option", SHEETS)
@pytest.mark.parametrize("num_rows", [1, 8, 60, 100_000])
def test_a_product_is_bound_by_its_flops_or_by_the_bytes_of_its_weights(option: str, num_rows: int) -> None:
    sheet = sheet_of(option)
    under_load = sheet.base_clock_mhz / sheet.boost_clock_mhz
    assert 0.3 < under_load < 1
    compute = sheet.float16_tflops * 1e12 * under_load * COMPUTE_SHARE
    memory = sheet.memory_gb_per_second * 1e9 * MEMORY_SHARE
    rate = make_machine(profile(option), DType.float16).rates.gemm_rate(num_rows)
    assert rate == pytest.approx(min(compute, num_rows * 2 * memory / 2), rel=0.02)


def test_a_machine_is_one_device_beside_all_of_its_host_however_many_there_are() -> None:
    one, four = (make_machine(profile(option)) for option in ("2xt4", "4xt4"))
    assert replace(one, name="", fabric=four.fabric) == replace(four, name="")
    assert (one.fabric.num_devices, four.fabric.num_devices) == (2, 4)


def test_a_link_is_no_faster_than_the_memory_that_feeds_it() -> None:
    sheet = replace(sheet_of("4xt4"), host_memory_gb_per_second=10.0)
    rates = make_machine(MachineConfig(sheet=sheet)).rates
    assert rates.link_in_bytes_per_second == rates.host_memory_bytes_per_second == 10e9 * MEMORY_SHARE
    assert rates.host_shares[Resource.host_to_device] == 1


def test_a_slot_of_fewer_lanes_makes_the_link_as_much_slower_and_nothing_else() -> None:
    card = profile("rtx4090")
    in_slot = {
        lanes: make_machine(replace(card, sheet=replace(sheet_of("rtx4090"), link_lanes=lanes))) for lanes in LANES
    }
    whole = make_machine(card)
    for lanes, machine in in_slot.items():
        rate = whole.rates.link_in_bytes_per_second * lanes / 16
        assert machine.rates.link_in_bytes_per_second == machine.rates.link_out_bytes_per_second == pytest.approx(rate)
        assert machine.fabric.device_bytes_per_second == pytest.approx(rate)
        same = {"link_in_bytes_per_second": rate, "link_out_bytes_per_second": rate}
        assert replace(machine.rates, **same) == replace(whole.rates, **same)
    x8 = {option for option in SHEETS if sheet_of(option).link_lanes == 8}
    assert x8 == {"rtx4060", "rtx4060ti-16"}
    with pytest.raises(ConfigError, match=r"machine\.sheet\.link_lanes must be one of 1, 2, 4, 8, 16, got 12"):
        replace(sheet_of("rtx4090"), link_lanes=12)


def test_tensor_cores_of_gaming_cards_count_dense_and_summed_in_float32_at_twice_the_rate_of_float32() -> None:
    sheets = [sheet_of(option) for option in SHEETS if option.startswith("rtx")]
    assert len(sheets) == 6
    for sheet in sheets:
        assert sheet.float16_tflops == sheet.bfloat16_tflops == pytest.approx(2 * sheet.float32_tflops, rel=0.01)


def test_a_device_without_units_for_bfloat16_computes_it_as_float32_and_takes_float16_by_itself() -> None:
    t4 = profile("t4")
    assert make_machine(t4, DType.bfloat16).rates.gemm_rate(1e6) == make_machine(t4, DType.float32).rates.gemm_rate(1e6)
    assert make_machine(t4) == make_machine(t4, DType.float16)
    assert make_machine(profile("l4")) == make_machine(profile("l4"), DType.bfloat16)


def test_measured_rates_are_taken_as_they_are() -> None:
    machine = make_machine(MachineConfig(name="here", rates=RATES))
    assert (machine.name, machine.device_bytes, machine.host_bytes) == ("here", None, 20 * GIB)
    assert machine.rates.disk_bytes_per_second == 0.9e9
    assert machine.rates.gemm_flops_per_second == {1: 5e9, 16: 60e9, 64: 110e9}
    assert machine.rates.link_in_bytes_per_second == machine.rates.host_memory_bytes_per_second == float("inf")
    assert machine.rates.turn_seconds == 4e-4


@pytest.mark.parametrize(
    ("config", "dtype", "message"),
    [
        (MachineConfig(), DType.auto, r"machine=auto has no rates.* python -m jobs.measure"),
        (
            MachineConfig(name="here", rates=RATES),
            DType.float16,
            "model.dtype=float16; measured: float32",
        ),
    ],
)
def test_what_is_not_known_is_refused_with_what_to_do(config: MachineConfig, dtype: DType, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_machine(config, dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gemm_rows": [8, 1]}, r"gemm_rows must be ascending whole numbers from 1, got \[8, 1\]"),
        ({"gemm_rows": [1]}, r"float32.gemm_gflops has 3 rates for 1 gemm_rows"),
        ({"disk_gb_per_second": 0.0}, "disk_gb_per_second must be above 0"),
    ],
)
def test_rates_that_cannot_be_are_refused_by_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(MeasuredRates, {**vars(RATES), "float32": vars(RATES.float32), **changes}, "machine.rates.")


def test_sheet_and_rates_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        MachineConfig(sheet=sheet_of("t4"), rates=RATES)
