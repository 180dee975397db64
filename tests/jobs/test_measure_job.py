"""From a measurement to the table and to an option of the machine group."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from jobs import measure
from jobs.config.cli import run_job
from jobs.config.typed import build
from jobs.measuring.config import MeasureJobConfig
from jobs.measuring.report import (
    Measurement,
    find_suspicious_rates,
    format_agreement,
    format_table,
    format_value,
    matches_device,
)
from runtime.config.profiles import DTypeRates, MeasuredRates
from runtime.config.settings import MachineConfig
from runtime.measure.machine_cache import current_host, find_latest_rates
from runtime.measure.timing import Figure

FIGURES = {
    "disk, sustained": Figure(value=0.9, low=0.81, high=0.95, unit="GB/s"),
    "a turn": Figure(value=0.000412, low=0.0004, high=0.00042, unit="s"),
}
SLOWER = {**FIGURES, "disk, sustained": Figure(value=0.5, low=0.4, high=0.8, unit="GB/s")}
RATES = MeasuredRates(
    host_memory_gib=20.25,
    disk_gb_per_second=0.9,
    memory_gb_per_second=1234.5,
    turn_seconds=0.000412,
    pass_seconds=0.0,
    gemm_rows=[1, 8],
    float32=DTypeRates(
        gemm_gflops=[5.0, 6.0e5],
        attention_gb_per_second=8.0,
        cpu_attention_gb_per_second=8.0,
        prefill_attention_gflops=50.0,
    ),
)
FOUND = Measurement(
    host=replace(current_host("cpu", 2), hostname="here", cpu="A CPU"),
    rates=RATES,
    figures=FIGURES,
    products=None,
    seconds=41.2,
    notes=["M=512 is not measured"],
)
TOY = ["seconds=0.01", "num_rounds=1", "disk_mib=1", "memory_mib=1", "matrix_width=256", "gemm_rows=[1,4]"]


def yaml_of_it() -> str:
    return FOUND.to_yaml(
        "mine",
        command="python -m jobs.measure",
        date="2026-11-21",
        versions={"torch": "2.13"},
        device_choice="cpu",
    )


def test_table_has_a_spread_beside_each_figure() -> None:
    assert format_table([FIGURES]).splitlines() == [
        "                 measured  spread  unit",
        "disk, sustained       0.9     10%  GB/s",
        "a turn           0.000412      3%  s",
    ]


def test_measurements_side_by_side_say_which_figures_agree() -> None:
    table = format_table([FIGURES, SLOWER]).splitlines()
    assert table[0].split() == ["measured", "spread", "measured", "spread", "unit", "agree"]
    assert [line.split()[-1] for line in table[1:]] == ["no", "yes"]
    assert format_agreement([FIGURES, SLOWER]) == "1 of 2 figures agree within their spreads"
    assert format_agreement([FIGURES, FIGURES]) == "2 of 2 figures agree within their spreads"


def test_a_figure_that_was_not_measured_each_time_has_a_place_and_is_not_compared() -> None:
    shorter = {name: figure for name, figure in FIGURES.items() if name != "a turn"}
    for times in ([FIGURES, shorter], [shorter, FIGURES]):
        rows = {line.split("  ")[0]: line.split() for line in format_table(times).splitlines()[1:]}
        assert rows["disk, sustained"][-2:] == ["GB/s", "yes"]
        assert rows["a turn"].count("-") == 3
        assert format_agreement(times) == "1 of 1 figures agree within their spreads"


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (0.00041234, "0.000412"), (99.95, "100"), (1234.5, "1234")])
def test_values_have_three_digits(value: float, text: str) -> None:
    assert format_value(value) == text


def test_yaml_is_an_option_of_the_machine_group_with_the_rates_that_were_measured() -> None:
    text = yaml_of_it()
    config = build(MachineConfig, yaml.safe_load(text), "machine.")
    assert (config.name, config.device, config.num_threads) == ("mine", "cpu", 2)
    assert config.rates == RATES


def test_yaml_says_where_it_comes_from() -> None:
    comments = [line for line in yaml_of_it().splitlines() if line.startswith("#")]
    assert comments[:3] == [
        "# Measured by: python -m jobs.measure",
        "# 2026-11-21, in 41 s, on here: A CPU, 2 threads; device: cpu",
        "# torch 2.13",
    ]
    assert comments[-3].split() == ["#", "disk,", "sustained", "0.9", "GB/s", "spread", "10%"]
    assert comments[-1] == "# Note: M=512 is not measured"


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # run_job sets it; this puts it back
    monkeypatch.setattr(sys, "argv", ["measure", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_job(measure.main, MeasureJobConfig)
    return ended.value.code


@pytest.mark.slow("runtime/test_measure.py::test_toy_measurement_is_a_machine")
def test_program_prints_keeps_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "new" / "mine.yaml"
    settings = [f"measure.{setting}" for setting in (*TOY, f"directory={tmp_path}", f"out={out}", "times=2")]
    assert command(monkeypatch, "machine=cpu", "machine.num_threads=1", *settings) == 0
    printed = capsys.readouterr().out
    assert "disk, sustained" in printed
    assert "figures agree within their spreads" in printed
    written = build(MachineConfig, yaml.safe_load(out.read_text()), "machine.")
    kept = find_latest_rates("cpu")
    assert written.name == "mine"
    assert written.rates is not None
    assert kept is not None
    assert written.rates.disk_gb_per_second == pytest.approx(kept.disk_gb_per_second, rel=1e-3)
    assert all(len(found.gemm_gflops) == 2 for found in written.rates.dtypes.values())


def test_rates_far_from_those_that_were_kept_before_are_named_with_both() -> None:
    rates = replace(RATES, disk_gb_per_second=0.25, memory_gb_per_second=3000.0)
    assert find_suspicious_rates(rates, RATES, FOUND.host) == [
        "machine.rates.disk_gb_per_second is 0.25 GB/s, but 0.9 GB/s in the stored measurement: a factor of 3.6. "
        "Measure again on an idle machine before planning with it: python -m jobs.measure"
    ]
    assert find_suspicious_rates(rates, None, FOUND.host) == []


def test_of_products_the_rows_that_are_farthest_are_named() -> None:
    assert RATES.float32 is not None
    slow = replace(RATES, float32=replace(RATES.float32, gemm_gflops=[0.5, 1.0]))
    (doubt,) = find_suspicious_rates(slow, RATES, FOUND.host)
    assert doubt.startswith("machine.rates.float32.gemm_gflops (M=8) is 1 GFLOP/s, but 600000 GFLOP/s in the")


def test_rates_far_from_the_devices_data_sheet_are_named_with_both() -> None:
    """By the name that the device has of itself; the host around it is another one."""
    slow = replace(RATES, memory_gb_per_second=290.0, link_in_gb_per_second=1.5, link_out_gb_per_second=12.0)
    (products, link) = find_suspicious_rates(slow, None, replace(FOUND.host, device="Tesla T4"))
    assert products.startswith("machine.rates.float32.gemm_gflops (M=8) is 600000 GFLOP/s, but 8100 GFLOP/s on the")
    assert link.startswith(
        "machine.rates.link_in_gb_per_second is 1.5 GB/s, but 16 GB/s on the data sheet, machine=t4: a factor of 10.7"
    )


@pytest.mark.parametrize(
    ("profile", "device", "is_it"),
    [
        ("t4", "Tesla T4", True),
        ("l4", "NVIDIA L4", True),
        ("l4", "NVIDIA L40S", False),
        ("a10", "NVIDIA A10", True),
        ("a10", "NVIDIA A100-SXM4-40GB", False),
        ("a100-40", "NVIDIA A100-SXM4-40GB", True),
        ("a100-80", "NVIDIA A100-SXM4-40GB", False),
        ("a100-80", "NVIDIA A100 80GB PCIe", True),
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("rtx3060", "NVIDIA GeForce RTX 3060", True),
        ("rtx3060", "NVIDIA GeForce RTX 3060 Ti", False),
        ("rtx4060", "NVIDIA GeForce RTX 4060 Laptop GPU", False),
        ("t4", "cpu", False),
    ],
)
def test_a_profile_is_of_the_device_that_has_its_name(profile: str, device: str, is_it: bool) -> None:
    assert matches_device(profile, device) == is_it


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("machine=l4", "machine=l4 is a profile of another machine: set machine=auto, cpu or cuda"),
        ("measure.out=mine.txt", "measure.out must end in .yaml, got mine.txt"),
        ("measure.times=0", "measure.times must be 1 or more, got 0"),
        ("measure.matrix_width=300", "measure.matrix_width must be a multiple of 256, got 300"),
        ("measure.gemm_rows=[8,1]", "measure.gemm_rows must be ascending whole numbers from 1, got [8, 1]"),
        ("measure.second=1", "unknown key measure.second: did you mean measure.seconds?"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_line(
    argument: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, argument) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_defaults_of_yaml_and_code_are_the_same() -> None:
    from hydra import compose, initialize_config_dir

    from jobs.config.settings import load

    with initialize_config_dir(str(Path(__file__).resolve().parents[2] / "conf"), version_base=None):
        assert load(MeasureJobConfig, compose("measure")) == MeasureJobConfig()
