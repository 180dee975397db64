"""What was measured of this host is found again, by it and by nobody else."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.config.profiles import BackendTable, DTypeRates, LinearBackend, MeasuredRates
from runtime.measure.machine_cache import Host, current_host, find_latest_rates, find_products, save_rates

ROOT = Path(__file__).resolve().parents[2]
HOST = current_host("cpu", 2)
ONE = DTypeRates(
    gemm_gflops=[5.0, 60.0], attention_gb_per_second=8.0, cpu_attention_gb_per_second=8.0, prefill_attention_gflops=50.0
)
RATES = MeasuredRates(
    host_memory_gib=20.0,
    disk_gb_per_second=0.9,
    memory_gb_per_second=10.0,
    turn_seconds=4e-4,
    pass_seconds=0.0,
    gemm_rows=[1, 16],
    float32=ONE,
)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.measure.machine_cache.cache_root", lambda: tmp_path / "weightstream")


def test_what_is_kept_is_found_and_replaced() -> None:
    assert find_latest_rates() is None
    save_rates(HOST, RATES)
    assert find_latest_rates() == RATES
    save_rates(HOST, replace(RATES, disk_gb_per_second=2.0))
    assert find_latest_rates() == replace(RATES, disk_gb_per_second=2.0)
    assert len(list(HOST.path.parent.iterdir())) == 1


def test_the_fastest_multipliers_are_found_by_exactly_this_host() -> None:
    table = BackendTable(
        rows=[1, 64], multipliers={"float16, tall": [LinearBackend.weights_first, LinearBackend.onednn]}
    )
    save_rates(HOST, RATES, table)
    assert find_products(HOST) == table
    assert find_products(replace(HOST, num_threads=7)) is None
    save_rates(HOST, RATES)
    assert find_products(HOST) is None


def test_rates_that_were_kept_before_there_were_multipliers_are_found() -> None:
    save_rates(HOST, RATES)
    values = json.loads(HOST.path.read_text())
    del values["products"]
    HOST.path.write_text(json.dumps(values))
    assert (find_latest_rates(), find_products(HOST)) == (RATES, None)


@pytest.mark.parametrize(
    "products", [3, {}, {"rows": [1], "multipliers": {"float16, tall": ["abacus"]}}, {"rows": [1]}]
)
def test_damaged_multipliers_are_named_and_passed_over(products: object, caplog: pytest.LogCaptureFixture) -> None:
    save_rates(HOST, RATES)
    HOST.path.write_text(json.dumps({**json.loads(HOST.path.read_text()), "products": products}))
    with caplog.at_level(logging.WARNING):
        assert find_products(HOST) is None
    assert str(HOST.path) in caplog.text


def test_a_table_that_knows_not_all_multipliers_is_out_of_date(caplog: pytest.LogCaptureFixture) -> None:
    save_rates(HOST, RATES, BackendTable(rows=[1], multipliers={"float16, tall": [LinearBackend.onednn]}))
    values = json.loads(HOST.path.read_text())
    values["products"]["compared"].remove("vectors")
    HOST.path.write_text(json.dumps(values))
    with caplog.at_level(logging.WARNING):
        assert find_products(HOST) is None
    assert "compares backends tiles, widened" in caplog.text
    assert "jobs.measure" in caplog.text


@pytest.mark.parametrize("other", [replace(HOST, hostname="elsewhere"), replace(HOST, cpu="another")])
def test_another_host_finds_nothing(other: Host) -> None:
    save_rates(other, RATES)
    assert find_latest_rates() is None


def test_a_kind_of_device_finds_its_own() -> None:
    save_rates(HOST, RATES)
    save_rates(replace(HOST, device="NVIDIA L4"), replace(RATES, disk_gb_per_second=2.0))
    os.utime(HOST.path, (1000, 1000))
    found = {device: find_latest_rates(device) for device in ("auto", "cpu", "cuda", "cuda:1")}
    assert {device: rates and rates.disk_gb_per_second for device, rates in found.items()} == {
        "auto": 2.0, "cpu": 0.9, "cuda": 2.0, "cuda:1": 2.0,
    }  # fmt: skip


def test_latest_is_of_this_host_whatever_its_threads() -> None:
    first, last, elsewhere = HOST, replace(HOST, num_threads=7), replace(HOST, hostname="elsewhere")
    for age, (host, disk) in enumerate([(elsewhere, 3.0), (last, 2.0), (first, 1.0)]):
        save_rates(host, replace(RATES, disk_gb_per_second=disk))
        os.utime(host.path, (1000 - age, 1000 - age))
    latest = find_latest_rates()
    assert latest is not None
    assert latest.disk_gb_per_second == 2.0


@pytest.mark.parametrize("rates", [None, 3, {"nothing": 1}, {**vars(RATES), "float32": None, "turn_seconds": -1.0}])
def test_a_damaged_file_is_named_and_passed_over(rates: object, caplog: pytest.LogCaptureFixture) -> None:
    save_rates(HOST, RATES)
    HOST.path.write_text("{" if rates is None else json.dumps({"host": vars(HOST), "rates": rates}))
    with caplog.at_level(logging.WARNING):
        assert find_latest_rates() is None
    assert str(HOST.path) in caplog.text
    assert "python -m jobs.measure" in caplog.text


def test_what_was_measured_is_read_without_torch(tmp_path: Path) -> None:
    save_rates(HOST, RATES)
    assert set(json.loads(HOST.path.read_text())["host"]) == set(vars(HOST))
    program = (
        "import sys; from runtime.measure.machine_cache import find_latest_rates; found = find_latest_rates(); "
        "print(found.disk_gb_per_second, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.split() == ["0.9", "False"], ended.stderr
