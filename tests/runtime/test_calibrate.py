"""A run's own layers, experts and lanes are measured, of every kind of lane; how fast: test_calibrate_numbers.py."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from runtime.config.settings import ModelConfig
from runtime.measure import calibrate
from runtime.measure.calibrate import RunProbes, measure_rates
from runtime.measure.layers import HOST_ROWS
from runtime.measure.timing import Timer
from runtime.model.loading import load_model
from runtime.plan.cost.calibration import TypicalLoad
from runtime.plan.cost.rates import UNLIMITED
from runtime.plan.placement.experts import pageable_stages
from runtime.plan.shape.extents import slot_layout
from runtime.store.reader import Reader
from runtime.stream.device import ComputeDevice
from runtime.units import MIB
from tests.fake_device import FakeDevice
from tests.support import synthesize
from tests.toy import sizes_of, toy_shape

USUAL = TypicalLoad(chunk_tokens=32, num_rows=4, num_prompt_tokens=20, num_positions=24)
DEVICE = ComputeDevice("cpu")


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("family", ["llama", "bloom", "mixtral", "deepseek-v3", "t5", "qwen3-next", "gpt-oss"])
def test_every_rate_that_a_plan_asks_for_is_measured(family: str, is_paged: bool, tmp_path: Path) -> None:
    loaded = load_model(ModelConfig(name=family, path=str(synthesize(family, tmp_path))), torch.device("cpu"), None)
    paged = pageable_stages(loaded.shape) if is_paged else frozenset[int]()
    with Reader(num_threads=2) as reader:
        rates = measure_rates(loaded, reader, DEVICE, USUAL, paged)
    assert set(rates.gemm_flops_per_second) == {1, 4, 16, 32}
    assert bool(rates.expert_flops_per_second) == bool(pageable_stages(loaded.shape))
    assert rates.link_in_bytes_per_second == UNLIMITED
    assert all(
        rate > 0
        for rates_of in (rates.gemm_flops_per_second, rates.expert_flops_per_second)
        for rate in rates_of.values()
    )
    assert 0 < rates.disk_bytes_per_second < UNLIMITED
    assert 0 < rates.memory_bytes_per_second < UNLIMITED
    assert 0 < rates.attention_bytes_per_second < UNLIMITED
    assert 0 < rates.pass_seconds < 1
    assert 0 <= rates.turn_seconds < 1
    assert 0 <= rates.hit_seconds < 1


@pytest.mark.parametrize(("is_paged", "expert_bytes"), [(True, 64 * MIB), (True, 1), (False, 64 * MIB)])
def test_an_expert_by_itself_is_compared_with_the_same_among_others(
    is_paged: bool, expert_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(
        ModelConfig(name="deepseek-v3", path=str(synthesize("deepseek-v3", tmp_path))), torch.device("cpu"), None
    )
    paged = pageable_stages(loaded.shape) if is_paged else frozenset[int]()
    taken: list[torch.Tensor] = []

    def timed(self: Timer) -> float:
        act = self.act()
        taken.append(act[0] if isinstance(act, list) else act)
        return 4.5 if len(taken) == 3 else 4.0  # in order: 1 token, 4, 4 one by one, 16, 32

    monkeypatch.setattr(Timer, "seconds", timed)
    monkeypatch.setattr(calibrate, "EXPERT_BYTES", expert_bytes)
    with Reader(num_threads=2) as reader, torch.inference_mode():
        run = RunProbes(loaded=loaded, reader=reader, device=DEVICE, typical_load=USUAL, paged_stages=paged)
        layer = run.load_layer(run.typical_layer)
        found = layer.time_experts()
    num_experts, num_chosen = run.typical_layer.num_experts, run.typical_layer.num_experts_per_token
    assert len(taken) == 5
    torch.testing.assert_close(taken[1], taken[2])
    if is_paged:
        num_timed = num_experts if expert_bytes > 1 else 1
        assert found.hit_seconds == pytest.approx(0.5 / num_timed)
        num_weights = sum(prod(parameter.shape) for parameter in run.typical_layer.expert(0).parameters)
        assert found.rates[1] == pytest.approx(2 * num_timed * num_weights / 4.0)
    else:
        assert 0.5 / num_experts <= found.hit_seconds <= 0.5 / num_chosen


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize(
    ("family", "is_shared"), [("mixtral", True), ("deepseek-v3", True), ("gpt-oss", False), ("llama", False)]
)
def test_products_on_the_cpu_are_measured_where_it_may_multiply_experts_beside_a_device(
    family: str, is_shared: bool, tmp_path: Path
) -> None:
    """gpt-oss has experts with biases."""
    loaded = load_model(ModelConfig(name=family, path=str(synthesize(family, tmp_path))), torch.device("cpu"), None)
    with Reader(num_threads=2) as reader:
        beside, alone = (
            RunProbes(
                loaded=loaded, reader=reader, device=device, typical_load=USUAL, paged_stages=frozenset()
            ).cpu_expert_rate()
            for device in (FakeDevice(), DEVICE)
        )
    assert alone is None
    assert (beside is not None) is is_shared
    assert beside is None or 0 < beside < UNLIMITED


def test_products_on_the_cpu_are_two_flops_for_each_row_and_weight_of_an_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(synthesize("mixtral", tmp_path))
    loaded = load_model(ModelConfig(name="mixtral", path=path), torch.device("cpu"), None)
    taken: list[torch.Tensor] = []
    monkeypatch.setattr(Timer, "seconds", lambda self: taken.append(self.act()) or 0.5)
    with Reader(num_threads=2) as reader:
        run = RunProbes(loaded=loaded, reader=reader, device=FakeDevice(), typical_load=USUAL, paged_stages=frozenset())
        found = run.cpu_expert_rate()
    num_weights = sum(prod(parameter.shape) for parameter in run.typical_layer.expert(0).parameters)
    assert found == 2 * HOST_ROWS * num_weights / 0.5
    assert {(each.shape, each.dtype) for each in taken} == {((HOST_ROWS, loaded.shape.hidden_size), torch.float32)}


def test_layers_that_take_a_block_more_than_the_middle_one_are_no_damage(tmp_path: Path) -> None:
    """Layers of one size, of which those that the disk would be measured with begin elsewhere in their first block."""
    config = LlamaConfig(
        vocab_size=1000, hidden_size=80, intermediate_size=500, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    loaded = load_model(ModelConfig(name="llama", path=str(tmp_path)), torch.device("cpu"), None)
    sizes = [slot_layout(stage).num_bytes for stage in loaded.shape.layers]
    assert sizes[3] < min(sizes[::2]), sizes
    with Reader(num_threads=2) as reader:
        assert 0 < measure_rates(loaded, reader, DEVICE, USUAL).disk_bytes_per_second < UNLIMITED


def test_prompts_of_any_length_are_measured_in_a_bounded_piece_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(ModelConfig(name="llama", path=str(synthesize("llama", tmp_path))), torch.device("cpu"), None)
    taken: list[int] = []
    zeros = ComputeDevice.zeros
    monkeypatch.setattr(ComputeDevice, "zeros", lambda self, size: taken.append(size) or zeros(self, size))
    monkeypatch.setattr(calibrate, "KV_BYTES", 1 << 16)
    with Reader(num_threads=2) as reader:
        measure_rates(loaded, reader, DEVICE, replace(USUAL, num_positions=100_000))
    assert taken
    assert max(taken) <= 1 << 17


def test_products_are_measured_at_the_sizes_of_the_run() -> None:
    lanes = [sizes_of([100] * 3, max_new_tokens=20), sizes_of([40] * 5, max_new_tokens=20)]
    usual = TypicalLoad.from_lanes(toy_shape(), lanes, 256)
    assert (usual.chunk_tokens, usual.num_rows, usual.num_prompt_tokens, usual.num_positions) == (256, 5, 62, 72)
    assert usual.product_rows == [1, 5, 16, 64, 128, 256]
