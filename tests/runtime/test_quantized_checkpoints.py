"""Quantised checkpoints give the tokens that transformers gives with the same numbers unquantised."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime import Runtime
from runtime.config.settings import ExpertPaging, ModelConfig, Prefetch, PrefetchConfig, RuntimeConfig, Tier
from runtime.errors import CheckpointError
from runtime.linear.stored import StoredWeight
from runtime.model.loading import load_model
from runtime.plan.shape.model import ModelShape
from runtime.sequences.sequence import Request
from tests.quantized import Tensors, tensors_in, write_checkpoint, write_fp8, write_mxfp4
from tests.runtime.test_fidelity import config_for, tokens, tokens_of
from tests.support import NUM_NEW_TOKENS, Reference, greedy

References = Callable[[str], Reference]
LOOKAHEAD = PrefetchConfig(kind=Prefetch.lookahead)
CASES = {
    "llama": (32, 48), "llama, tied": (128, 128), "minimax-m2": (32, 50), "deepseek-v3": (128, 128),
    "qwen3-moe": (24, 64), "gpt-oss": None,
}  # fmt: skip


def write(source: Path, directory: Path, block: tuple[int, int] | None, num_shards: int = 1) -> tuple[Path, Path]:
    if block is None:
        return write_mxfp4(source, directory, num_shards=num_shards)
    return write_fp8(source, directory, block, num_shards=num_shards)


def expected_tokens(plain: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    return [greedy(model, prompt, NUM_NEW_TOKENS) for prompt in prompts]


def at(reference: Reference, directory: Path, tier: Tier = Tier.nvme) -> RuntimeConfig:
    elsewhere = Reference(directory=directory, prompts=[], expected=[], sampled=[])
    return config_for(elsewhere, tier=tier, prefetch=LOOKAHEAD)


def shape_of(directory: Path, cache: Path) -> ModelShape:
    return load_model(ModelConfig(name="test", path=str(directory)), torch.device("cpu"), str(cache)).shape


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("family", CASES)
def test_tokens_are_those_of_the_unquantised_numbers(family: str, reference: References, tmp_path: Path) -> None:
    ref = reference(family)
    quantised, plain = write(ref.directory, tmp_path, CASES[family], num_shards=3)
    prompts = ref.prompts[:4]
    expected = expected_tokens(plain, prompts)
    runtime = Runtime(at(ref, quantised))
    assert tokens_of(runtime, prompts) == expected
    runtime.config = at(ref, quantised, Tier.none)
    assert tokens_of(runtime, prompts) == expected


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("family", CASES)
def test_plans_count_numbers_for_time_and_stored_bytes_for_memory(
    family: str, reference: References, tmp_path: Path
) -> None:
    quantised, plain = write(reference(family).directory, tmp_path, CASES[family])
    stored, numbers = shape_of(quantised, tmp_path), shape_of(plain, tmp_path)
    assert [stage.flops_per_token for stage in stored.stages] == [stage.flops_per_token for stage in numbers.stages]
    assert stored.intermediate_size == numbers.intermediate_size
    assert stored.weight_bytes == sum(tensor.nbytes for tensor in tensors_in(quantised).values())
    assert stored.weight_bytes < numbers.weight_bytes / 2


@pytest.mark.parametrize(("family", "name"), [("llama", "mlp.up_proj.weight"), ("gpt-oss", "mlp.experts.down_proj")])
def test_weights_stay_as_they_are_stored(family: str, name: str, reference: References, tmp_path: Path) -> None:
    quantised, _ = write(reference(family).directory, tmp_path, CASES[family])
    config = at(reference(family), quantised)
    runtime = Runtime(replace(config, offload=replace(config.offload, expert_paging=ExpertPaging.off)))
    request = Request(id="0", prompt_ids=(5, 6, 7), max_new_tokens=2)
    with runtime.session(runtime.plan([request])) as session:
        engine = session._engine
        engine._streams.weights.read(1)
        weight = engine._weights(1)[f"model.layers.0.{name}"]
        assert isinstance(weight, StoredWeight)
        assert not any(isinstance(block, torch.Tensor) for blocks in weight.entries for block in blocks)


def test_a_factor_may_be_that_of_a_whole_tensor(reference: References, tmp_path: Path) -> None:
    ref = reference("llama")
    quantised, plain = write(ref.directory, tmp_path, (1024, 1024))
    tensors = {n: t.reshape(()) if n.endswith("_scale_inv") else t for n, t in tensors_in(quantised).items()}
    scalar = write_checkpoint(quantised, tmp_path / "scalar", tensors)
    assert tokens(at(ref, scalar), ref.prompts) == expected_tokens(plain, ref.prompts)


def test_a_conversion_that_no_map_expresses_is_carried_out_on_the_numbers(
    reference: References, tmp_path: Path
) -> None:
    ref = reference("qwen3-moe")
    quantised, plain = write(ref.directory, tmp_path, (32, 48))
    config = ModelConfig(name="test", path=str(quantised))
    loaded = load_model(config, torch.device("cpu"), str(tmp_path), use_byte_ranges=False)
    (converted,) = tmp_path.glob("*/converted.safetensors")
    expected = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict()
    found = tensors_in(converted.parent)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert any(name.endswith("experts.gate_up_proj") for name in found)
    assert loaded.shape.weight_bytes > sum(tensor.nbytes for tensor in found.values())


def broken(tensors: Tensors, part: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Tensors:
    name = next(name for name in tensors if part in name)
    return {n: change(t) if n == name and change else t for n, t in tensors.items() if n != name or change}


def test_scales_that_do_not_fit_are_refused_with_all_numbers(reference: References, tmp_path: Path) -> None:
    quantised, _ = write(reference("llama").directory, tmp_path, (32, 48))
    wrong = broken(tensors_in(quantised), "q_proj.weight_scale_inv", lambda t: t[:-1].clone())
    directory = write_checkpoint(quantised, tmp_path / "wrong", wrong)
    with pytest.raises(CheckpointError, match=r"(?s)q_proj.weight_scale_inv.*\(1, 2\).*32 x 48.*\(64, 64\).*\(2, 2\)"):
        shape_of(directory, tmp_path)


def test_missing_scales_are_named(reference: References, tmp_path: Path) -> None:
    quantised, _ = write(reference("llama").directory, tmp_path, (32, 48))
    wrong = broken(tensors_in(quantised), "up_proj.weight_scale_inv", None)
    directory = write_checkpoint(quantised, tmp_path / "wrong", wrong)
    with pytest.raises(
        CheckpointError, match=r"up_proj.weight' is F8_E4M3, but .*up_proj.weight_scale_inv' is missing"
    ):
        shape_of(directory, tmp_path)


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ({"quant_method": "hqq", "bits": 4}, "hqq"),
        ({"quant_method": "aqlm"}, "aqlm"),
    ],
)
def test_a_method_that_cannot_be_read_is_named_with_what_can(
    method: dict[str, object], named: str, reference: References, tmp_path: Path
) -> None:
    source = reference("llama").directory
    directory = write_checkpoint(source, tmp_path / "model", tensors_in(source), quantization_config=method)
    with pytest.raises(CheckpointError, match=rf"method '{named}'.*awq, .*gptq, .*mxfp4, .*GGUF .*unquantized"):
        shape_of(directory, tmp_path)


def test_fp8_without_factors_is_a_plain_dtype(reference: References, tmp_path: Path) -> None:
    ref = reference("llama")
    numbers = {n: t.to(torch.float8_e4m3fn) if "proj" in n else t for n, t in tensors_in(ref.directory).items()}
    directory = write_checkpoint(ref.directory, tmp_path / "fp8", numbers)
    plain = write_checkpoint(ref.directory, tmp_path / "plain", {n: t.float() for n, t in numbers.items()})
    assert tokens(at(ref, directory), ref.prompts) == expected_tokens(plain, ref.prompts)
