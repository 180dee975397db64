"""Rates are amounts by seconds: worked out by hand, on clocks that are set by hand."""

from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch

from runtime.config.settings import ModelConfig
from runtime.measure.calibrate import LoadedLayer, RunProbes, measure_rates
from runtime.measure.timing import Timer
from runtime.model.families import FAMILIES
from runtime.model.loading import LoadedModel, load_model
from runtime.plan.cost.calibration import TypicalLoad
from runtime.plan.cost.rates import MachineRates
from runtime.plan.shape.extents import slot_layout
from runtime.store.reader import Reader
from runtime.stream.device import ComputeDevice
from tests.fake_device import FakeDevice
from tests.support import Reference

USUAL = TypicalLoad(chunk_tokens=32, num_rows=4, num_prompt_tokens=20, num_positions=24)
NUM_LAYERS, HIDDEN, INNER, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 64, 128, 8, 2, 8
CPU = ComputeDevice("cpu")


@pytest.fixture(scope="module")
def loaded(reference: Callable[[str], Reference]) -> LoadedModel:
    sizes = FAMILIES["llama"].overrides
    assert (sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]) == (HIDDEN, INNER, NUM_LAYERS)
    path = str(reference("llama").directory)
    return load_model(ModelConfig(name="llama", path=path), torch.device("cpu"), None)


@pytest.fixture
def reader() -> Iterator[Reader]:
    with Reader(num_threads=2) as reader:
        yield reader


@pytest.fixture
def bench(loaded: LoadedModel, reader: Reader) -> RunProbes:
    return RunProbes(loaded=loaded, reader=reader, device=CPU, typical_load=USUAL, paged_stages=frozenset())


class Rate:
    """Of a probe that takes no time."""

    def __init__(self, rate: float):
        self.rate = self.rate_once = lambda: rate


def acts_take(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    """One after the other, and then again; each is done once."""
    left = (seconds[turn % len(seconds)] for turn in count())

    def timed(self: Timer) -> float:
        self.act()
        return next(left)

    monkeypatch.setattr(Timer, "seconds", timed)


def test_a_product_is_two_flops_for_each_row_and_weight(bench: RunProbes, monkeypatch: pytest.MonkeyPatch) -> None:
    acts_take(monkeypatch, 4.0)
    with torch.inference_mode():
        found = bench.matmul_rates(bench.load_layer(bench.typical_layer).weights)
    heads = (2 * NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM  # queries and what comes of them, keys, values
    num_weights = HIDDEN * heads + 3 * HIDDEN * INNER
    assert found == {rows: 2 * rows * num_weights / 4.0 for rows in (1, 4, 16, 32)}


def test_a_disk_gives_the_bytes_of_all_layers_that_were_read(bench: RunProbes, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = (2.5 * turn for turn in count())
    sizes = [slot_layout(stage).num_bytes for stage in bench.shape.layers]
    assert len(sizes) == NUM_LAYERS
    timed = bench.disk_timer(CPU.host_buffer(max(sizes)))
    monkeypatch.setattr(timed, "_clock", lambda: next(ticks))
    assert timed.rate_once() == sum(sizes) / 2.5


def test_links_are_measured_in_and_then_out(
    loaded: LoadedModel, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts_take(monkeypatch, 2.0, 5.0)  # the first copy is to the device
    bench = RunProbes(loaded=loaded, reader=reader, device=FakeDevice(), typical_load=USUAL, paged_stages=frozenset())
    assert bench.link_rates(CPU.host_buffer(10_000_000)[:10_000_000]) == (5e6, 2e6)


def test_decode_attention_reads_keys_and_values(bench: RunProbes, monkeypatch: pytest.MonkeyPatch) -> None:
    acts_take(monkeypatch, 0.5)
    position_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * bench.loaded.compute_dtype.itemsize
    assert (
        bench.decode_attention_timer(CPU).rate()
        == NUM_LAYERS * USUAL.num_rows * USUAL.num_positions * position_bytes / 0.5
    )


def test_each_rate_is_taken_for_what_it_is(
    loaded: LoadedModel, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {
        "disk_timer": Rate(1.0), "link_rates": (2.0, 3.0), "memory_timer": Rate(4.0),
        "prefill_attention_timer": Rate(5.0), "matmul_rates": {1: 8.0},
    }  # fmt: skip
    for name, rate in found.items():
        monkeypatch.setattr(RunProbes, name, lambda bench, *given, rate=rate: rate)
    rate = lambda bench, device: Rate(6.0 if device.is_accelerator else 7)  # noqa: E731
    monkeypatch.setattr(RunProbes, "decode_attention_timer", rate)
    monkeypatch.setattr(LoadedLayer, "dequantize_rate", lambda layer: 9.0)
    monkeypatch.setattr(RunProbes, "with_profile", lambda bench, rates: rates)
    assert measure_rates(loaded, reader, FakeDevice(), USUAL) == MachineRates(
        disk_bytes_per_second=1.0,
        link_in_bytes_per_second=2.0,
        link_out_bytes_per_second=3.0,
        memory_bytes_per_second=4.0,
        prefill_attention_flops_per_second=5.0,
        attention_bytes_per_second=6.0,
        cpu_attention_bytes_per_second=7.0,
        gemm_flops_per_second={1: 8.0},
        dequantize_bytes_per_second=9.0,
    )
