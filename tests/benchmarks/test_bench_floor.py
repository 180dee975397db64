"""A floor is the longer of reading and multiplying, counted as often as passes read and multiply."""

from dataclasses import replace

import pytest

from benchmarks import floor, products, suites
from benchmarks.config import BenchConfig, ProductsConfig, Suite, make_task
from benchmarks.contenders import Contender
from benchmarks.floor import Floor, ProductSeconds, compute_floors, floors_table
from benchmarks.floor import products as products_of
from benchmarks.measure import measure
from benchmarks.predictions import BlockCase
from benchmarks.products import ProductCase, ProductMeasurements, products_table
from benchmarks.suites import run_suite
from benchmarks.task import Result, random_prompts
from runtime.checkpoint_source.location import find_checkpoint
from runtime.config.settings import ModelConfig, RuntimeConfig
from runtime.errors import ConfigError
from runtime.kernels.compiler import has_compiler
from runtime.library.api import Runtime
from tests.jobs.forked_workers import ForkedWorker

CASE = BlockCase(path="somewhere/llama", contender="nvme", num_sequences=128)
SECONDS = {64: ProductSeconds(layers=1.0, head=0.5), 512: ProductSeconds(layers=4.0, head=2.0)}


def result(prefill: float, decode: float) -> Result:
    """11 passes, 4 of them decode, that read a GB each."""
    return Result(
        seconds=prefill + decode, prefill_seconds=prefill, rate=1.0, peak_bytes=0, baseline_bytes=0,
        bytes_read=11 * 10**9, num_passes=11, tokens=[[1]],
    )  # fmt: skip


def test_the_longer_of_reading_and_multiplying_is_the_floor() -> None:
    task = make_task(BenchConfig(num_new_tokens=5), Contender.nvme, "somewhere/llama", 128)
    rounds = [result(30.0, 20.0), result(28.0, 16.0), result(90.0, 17.0)]
    prefill, decode = compute_floors(CASE, task, rounds, 0.5e9, SECONDS)
    num_tokens = sum(map(len, random_prompts(128, 32000, 60)))
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
    numbers = sum(count * n * k for (_, n, k), count in products_of(layers, 7).items())
    assert 2 * numbers == sum(stage.flops_per_token for stage in layers)
    assert {m for m, _, _ in products_of(layers, 7)} == {7}


def test_products_are_timed_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "MIN_SECONDS", 0.002)
    monkeypatch.setattr(floor, "MAX_COPIES", 3)
    found = floor.measure(path=str(find_checkpoint(ModelConfig(), None)), rows=[2, 64], num_threads=1)
    assert found[64][0] > found[2][0] > 0
    assert found[2][1] > 0


def test_a_suite_measures_reading_passes_and_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", ForkedWorker)
    monkeypatch.setattr(suites, "measure_products", lambda **asked: replace(FOUND, inputs=asked["inputs"]))
    path = str(find_checkpoint(ModelConfig(), None))
    config = BenchConfig(
        suite=Suite.floor, contenders=[Contender.nvme], blocks=[4], rounds=1, num_new_tokens=3, weight_share=60.0
    )
    found = run_suite(config, [path], lambda line: None, measure)
    assert found.table.count(" nvme, 4, ") == 2
    assert "| 8000 x 2048, weights |" in found.table
    assert len(found.rounds) == 2


FOUND = ProductMeasurements(
    outputs=8000,
    inputs=1000,
    num_threads=2,
    num_lanes=8,
    flops_per_second=160e9,
    bytes_per_second=20e9,
    products=[
        ProductCase(format=name, backend=way, is_chosen=chosen, num_rows=rows, num_bytes=size, best=best, middle=middle)
        for name, way, chosen, rows, size, best, middle in (
            ("bf16", "vectors", True, 1, 16_000_000, 1e-3, 2e-3),  # 16 MFLOP, 16 MB: 0.8 ms to read
            ("bf16", "inputs_first", True, 100, 16_000_000, 12.5e-3, 20e-3),  # 1.6 GFLOP: 10 ms to multiply
            ("bf16", "onednn", False, 1, 16_000_000, 8e-3, 8e-3),
            ("bf16", "onednn", False, 100, 16_000_000, 20e-3, 20e-3),
            ("int4", "vectors", True, 1, 4_000_000, 1e-3, 1e-3),
            ("int4", "vectors", True, 100, 4_000_000, 16e-3, 16e-3),
        )
    ],
)


def test_a_product_is_a_share_of_the_longer_of_multiplying_and_reading_its_weights() -> None:
    assert [FOUND.share(product) for product in FOUND.products] == pytest.approx([0.8, 0.8, 0.1, 0.5, 0.2, 0.625])


def test_the_table_of_products_has_a_line_for_each_format_and_way_and_a_column_for_each_number_of_rows() -> None:
    lines = products_table(FOUND).splitlines()
    assert lines[0] == "| 8000 x 1000, weights | by | 1 rows | 100 rows |"
    assert lines[2:5] == [
        "| bf16 | **vectors, inputs_first** | 16 (8), 80% | 128 (80), 80% |",
        "| bf16 | onednn | 2 (2), 10% | 80 (80), 50% |",
        "| int4 | **vectors** | 16 (16), 20% | 100 (100), 62% |",
    ]
    assert "160 GFLOP/s" in lines[-1]
    assert "20.0 GB/s" in lines[-1]


@pytest.mark.slow("benchmarks/test_bench_floor.py::test_a_suite_measures_reading_passes_and_products")
@pytest.mark.skipif(not has_compiler(), reason="numba is not installed")
def test_products_are_of_every_format_by_our_kernel_and_of_bf16_by_torch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them in panels, or it would be another product that is measured."""
    monkeypatch.setattr(products, "WEIGHT_BYTES", 1)
    found = products.measure(outputs=1024, inputs=512, rows=[1, 5], num_threads=1, rounds=2, seconds=0.0)
    chosen = {(product.format, product.num_rows): product.backend for product in found.products if product.is_chosen}
    formats = ["bf16", "fp16", "fp32", "fp8, published", "window4", "int8", "int4", "GPTQ, 4 bits"]
    assert set(chosen) == {(name, rows) for name in formats for rows in (1, 5)}
    assert set(chosen.values()) <= {"tiles", "vectors"}
    assert {each.format for each in found.products if not each.is_chosen} == {"bf16"}
    assert {each.backend for each in found.products if not each.is_chosen} >= {"weights_first", "inputs_first"}
    assert all(0 < each.best <= each.middle for each in found.products)
    bits = {each.format: 8 * each.num_bytes / (1024 * 512) for each in found.products}
    assert (bits["bf16"], bits["fp16"], bits["fp32"]) == (16, 16, 32)
    assert 4 < bits["GPTQ, 4 bits"] < 4.5
    assert min(found.flops_per_second, found.bytes_per_second) > 0


def test_products_of_other_sizes_are_multiples_of_what_shares_a_factor() -> None:
    with pytest.raises(ConfigError, match=r"products\.inputs must be a multiple of 128, got 200"):
        ProductsConfig(inputs=200)
    with pytest.raises(ConfigError, match=r"products\.rows"):
        ProductsConfig(rows=[])


def test_only_weightstream_has_a_floor() -> None:
    with pytest.raises(ConfigError, match="suite=floor"):
        BenchConfig(suite=Suite.floor, contenders=[Contender.transformers])
