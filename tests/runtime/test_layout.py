"""The map from checkpoint bytes to parameters gives what transformers' own loading gives, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from runtime.config.settings import DType, ModelConfig
from runtime.errors import CheckpointError
from runtime.library import api
from runtime.linear.stored import StoredWeight
from runtime.model import loading
from runtime.plan.shape.extents import slot_layout
from runtime.probing.meta import build_meta_model
from runtime.store.checkpoint import open_checkpoint
from runtime.store.reader import Reader
from runtime.stream.device import ComputeDevice
from runtime.weights.layout import map_weights
from runtime.weights.stage_weights import TORCH_DTYPES, stage_weights
from tests.runtime.test_fidelity import config_for, tokens
from tests.support import Reference

References = Callable[[str], Reference]
CPU = torch.device("cpu")


def load(reference: Reference, cache: Path, *, use_byte_ranges: bool = True) -> loading.LoadedModel:
    config = ModelConfig(name="test", path=str(reference.directory), dtype=DType.bfloat16)
    return loading.load_model(config, CPU, str(cache), use_byte_ranges=use_byte_ranges)


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("use_byte_ranges", [True, False], ids=["direct", "converted"])
@pytest.mark.parametrize("family", ["llama, tied", "gpt2", "mixtral", "qwen3-moe"])
def test_every_parameter_equals_from_pretrained(
    family: str, use_byte_ranges: bool, reference: References, tmp_path: Path
) -> None:
    ref = reference(family)
    loaded = load(ref, tmp_path, use_byte_ranges=use_byte_ranges)
    expected = AutoModelForCausalLM.from_pretrained(ref.directory, dtype=torch.bfloat16).state_dict()
    device, seen = ComputeDevice("cpu"), set()
    with Reader(num_threads=2) as reader:
        for stage in loaded.shape.stages:
            layout = slot_layout(stage)
            buffer = device.host_buffer(layout.num_bytes)
            reader.submit(layout.extents, memoryview(buffer.numpy())).wait()
            for name, weight in stage_weights(stage, buffer, layout.tensor_offsets, loaded.dtypes).items():
                plain = weight.dequantized() if isinstance(weight, StoredWeight) else weight
                assert torch.equal(plain, expected[name]), name
                seen.add(name)
    assert seen == expected.keys()


def test_matrices_on_any_accelerator_are_handed_on_as_they_are_stored(reference: References, tmp_path: Path) -> None:
    """Its own products are the fastest: there is no panel to widen. `meta` stands for a device that is not CUDA's."""
    loaded = load(reference("llama"), tmp_path)
    stage = loaded.shape.layers[0]
    layout = slot_layout(stage)
    dtypes = {p.name: TORCH_DTYPES[p.pieces[0][0].dtype] for p in stage.parameters}
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, device="meta")
    weights = stage_weights(stage, buffer, layout.tensor_offsets, dtypes)
    assert not any(isinstance(weight, StoredWeight) for weight in weights.values())


def test_converted_experts_give_the_tokens_of_the_direct_layout(
    reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = reference("mixtral")
    config = config_for(ref)
    config = replace(config, offload=replace(config.offload, cache_dir=str(tmp_path)))
    monkeypatch.setattr(
        api,
        "load_model",
        lambda config, device, cache, **options: loading.load_model(
            config, device, cache, use_byte_ranges=False, **options
        ),
    )
    assert tokens(config, ref.prompts) == ref.expected
    (converted,) = tmp_path.glob("*/converted.safetensors")
    before = converted.stat().st_mtime_ns
    assert tokens(config, ref.prompts) == ref.expected
    assert converted.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("family", "lost", "named"),
    [
        ("llama", "model.layers.2.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight"),
        ("llama", "lm_head.weight", "lm_head.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w1.weight", "model.layers.1.mlp.experts.gate_up_proj"),
    ],
)
def test_a_missing_tensor_is_named(family: str, lost: str, named: str, reference: References) -> None:
    model, tensors = meta_and_tensors(reference(family))
    assert lost in tensors
    del tensors[lost]
    with pytest.raises(CheckpointError) as error:
        map_weights(model, tensors)
    assert named in str(error.value)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(name: str, reference: References) -> None:
    model, tensors = meta_and_tensors(reference("llama"))
    wrong = (tensors[name].shape[0] + 1, *tensors[name].shape[1:])
    tensors[name] = replace(tensors[name], shape=wrong)
    with pytest.raises(CheckpointError) as error:
        map_weights(model, tensors)
    assert all(str(part) in str(error.value) for part in (name, wrong, tuple(model.state_dict()[name].shape)))


def test_an_expert_missing_everywhere_is_a_wrong_shape(reference: References) -> None:
    model, tensors = meta_and_tensors(reference("mixtral"))
    kept = {name: piece for name, piece in tensors.items() if ".experts.3." not in name}
    assert len(kept) < len(tensors)
    with pytest.raises(CheckpointError, match=r"\(3, "):
        map_weights(model, kept)


def meta_and_tensors(reference: Reference):
    model = build_meta_model(AutoConfig.from_pretrained(reference.directory), torch.float32)
    return model, dict(open_checkpoint(reference.directory).tensors)
