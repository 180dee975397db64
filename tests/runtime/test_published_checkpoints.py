"""Checkpoints that others have quantised give the tokens that transformers gives with the numbers they stand for."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from runtime import Runtime
from runtime.config.settings import Tier
from runtime.errors import CheckpointError
from tests.dealt import with_slow_others
from tests.fake_device import FakeDevice
from tests.published_formats import PUBLISHED, write_published
from tests.quantized import tensors_in, write_checkpoint
from tests.runtime.test_fidelity import tokens, tokens_of
from tests.runtime.test_quantized_checkpoints import at, expected_tokens, shape_of
from tests.support import Reference

References = Callable[[str], Reference]
CASES = [
    ("llama", "gptq"),
    ("llama", "nvfp4-pack-quantized"),
    ("qwen2", "awq"),
    ("qwen3", "bitsandbytes nf4"),
    ("gpt2", "gptq, desc_act, 8 bits"),
    ("gpt2", "bitsandbytes int8"),
    ("phi-3", "pack-quantized, zero points"),
    ("mixtral", "awq"),
    ("mixtral", "gptq_v2, zero points"),
    ("mixtral", "pack-quantized"),
    ("mixtral", "bitsandbytes fp4"),
    ("mixtral", "float-quantized, rows"),
]


def write(ref: Reference, family: str, name: str, directory: Path, num_shards: int = 1) -> tuple[Path, Path]:
    is_transposed = family == "gpt2"
    return write_published(ref.directory, directory, PUBLISHED[name], num_shards=num_shards, transposes=is_transposed)


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize(("family", "name"), with_slow_others(CASES, [CASES[i] for i in (0, 2, 5, 8, 9, 11)]))
def test_tokens_are_those_of_the_numbers(family: str, name: str, reference: References, tmp_path: Path) -> None:
    ref = reference(family)
    quantised, plain = write(ref, family, name, tmp_path, num_shards=3)
    prompts = ref.prompts[:4]
    expected = expected_tokens(plain, prompts)
    runtime = Runtime(at(ref, quantised))
    assert tokens_of(runtime, prompts) == expected
    runtime.config = at(ref, quantised, Tier.none)
    assert tokens_of(runtime, prompts) == expected


@pytest.mark.slow("runtime/test_gpu_formats.py::test_stored_weights_give_the_tokens_of_their_numbers")
def test_tokens_are_those_of_the_numbers_in_front_of_a_device(reference: References, tmp_path: Path) -> None:
    """Experts are brought one by one, with all that their numbers are made of."""
    ref = reference("mixtral")
    quantised, plain = write(ref, "mixtral", "bitsandbytes nf4", tmp_path)
    assert tokens(at(ref, quantised), ref.prompts, FakeDevice((False, True))) == expected_tokens(plain, ref.prompts)


UNUSED = ("weight_shape", "input_scale", "g_idx", "weight_format", "quant_state.bitsandbytes__nf4")
COUNTED = ("gptq", "awq", "pack-quantized, zero points", "bitsandbytes nf4", "bitsandbytes int8", "modelopt nvfp4")


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("name", COUNTED)
def test_plans_count_stored_bytes(name: str, reference: References, tmp_path: Path) -> None:
    quantised, plain = write(reference("mixtral"), "mixtral", name, tmp_path)
    stored, numbers = shape_of(quantised, tmp_path), shape_of(plain, tmp_path)
    read = [tensor.nbytes for leaf, tensor in tensors_in(quantised).items() if not leaf.endswith(UNUSED)]
    assert stored.weight_bytes == sum(read)
    assert [stage.flops_per_token for stage in stored.stages] == [stage.flops_per_token for stage in numbers.stages]
    assert all(stage.experts for stage in stored.stages[1:-1]), "experts are read one by one"


def test_modules_that_are_left_out_stay_as_they_are(reference: References, tmp_path: Path) -> None:
    ref = reference("llama")
    quantised, plain = write(ref, "llama", "pack-quantized", tmp_path)
    original, layer = tensors_in(ref.directory), "model.layers.1.mlp."
    mixed = {n: t for n, t in tensors_in(quantised).items() if not n.startswith(layer)}
    mixed |= {n: t for n, t in original.items() if n.startswith(layer)}
    numbers = tensors_in(plain) | {n: t for n, t in original.items() if n.startswith(layer)}
    directory = write_checkpoint(quantised, tmp_path / "mixed", mixed)
    expected = expected_tokens(write_checkpoint(plain, tmp_path / "numbers", numbers), ref.prompts)
    assert tokens_of(Runtime(at(ref, directory)), ref.prompts) == expected


def test_weights_that_a_shard_holds_beside_their_quantised_form_are_not_read(
    reference: References, tmp_path: Path
) -> None:
    """As AWQ checkpoints have them that take shards over from the original: the index does not list them."""
    ref = reference("qwen2")
    quantised, plain = write(ref, "qwen2", "awq", tmp_path, num_shards=3)
    shard = quantised / "shard-0.safetensors"
    strays = {n: t + 1 for n, t in tensors_in(ref.directory).items() if n.endswith("up_proj.weight")}
    save_file(load_file(shard) | strays, shard, metadata={"format": "pt"})
    assert tokens_of(Runtime(at(ref, quantised)), ref.prompts[:4]) == expected_tokens(plain, ref.prompts[:4])


@pytest.mark.parametrize("change", [{"kv_cache_scheme": {"num_bits": 8}}, {}])
def test_what_is_not_done_is_named(
    change: dict[str, object], reference: References, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ref = reference("llama")
    quantised, _ = write(ref, "llama", "int-quantized", tmp_path)
    config = dict(PUBLISHED["int-quantized"].config) | change
    changed = write_checkpoint(quantised, tmp_path / "a", tensors_in(quantised), quantization_config=config)
    with caplog.at_level(logging.WARNING):
        shape_of(changed, tmp_path)
    assert "quantizes activations (int8, dynamic)" in caplog.text
    assert ("quantizes keys and values" in caplog.text) == bool(change)


def test_weights_without_a_config_are_refused(reference: References, tmp_path: Path) -> None:
    ref = reference("llama")
    quantised, _ = write(ref, "llama", "gptq", tmp_path)
    bare = write_checkpoint(quantised, tmp_path / "bare", tensors_in(quantised), quantization_config=None)
    with pytest.raises(CheckpointError, match=r"qweight' is GPTQ's or AWQ's, .*quantization_config"):
        shape_of(bare, tmp_path)
