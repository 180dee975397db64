"""Compiled steps come to what the plain code does, in the engine too, and stand in for no other."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama as llama

from runtime.config.settings import ModelConfig, Tier
from runtime.errors import ConfigError
from runtime.model import fused_ops, loading
from runtime.model.fused import FusedRMSNorm, fuse
from runtime.model.fused_ops import _compile, plain_gate, plain_norm
from runtime.model.fused_ops import compiled_ops as ops_of_a_device
from tests.fake_device import FakeDevice
from tests.runtime.test_fidelity import config_for, tokens
from tests.support import Reference


@pytest.fixture(autouse=True)
def _traced_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Through all of torch.compile but the compiler, which is a device's."""
    monkeypatch.setattr(fused_ops, "BACKEND", "aot_eager")
    _compile.cache_clear()
    with torch.inference_mode():
        yield
    _compile.cache_clear()


@pytest.mark.slow("runtime/test_compiled_ops.py::test_every_step_is_as_precise_as_the_plain_one")
@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_tokens_are_those_of_transformers(
    family: str, reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "require_accelerator", lambda device: None)
    ref = reference(family)
    config = config_for(ref, tier=Tier.nvme)
    compiled = replace(config, model=replace(config.model, compile=True))
    assert tokens(compiled, ref.prompts, FakeDevice()) == ref.expected
    assert _compile.cache_info().hits, "nothing ran compiled"


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_step_is_as_precise_as_the_plain_one(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, 3, 64).to(dtype), torch.randn(64).to(dtype)
    norm = llama.LlamaRMSNorm(64, eps=1e-5).to(dtype)
    norm.weight.copy_(weight)
    gate, up = torch.randn(2, 3, 5, 64).to(dtype).unbind()
    q, k = torch.randn(1, 4, 3, 16).to(dtype), torch.randn(1, 2, 3, 16).to(dtype)
    cos, sin = torch.randn(2, 1, 3, 16).to(dtype).unbind()
    pairs = [
        (_compile(plain_norm)(x, weight, 1e-5), norm(x)),
        (_compile(plain_gate)(gate, up), nn.functional.silu(gate) * up),
        *zip(ops_of_a_device().rotate(q, k, cos, sin), llama.apply_rotary_pos_emb(q, k, cos, sin), strict=True),
    ]
    for ours, plain in pairs:
        torch.testing.assert_close(ours, plain)


def test_code_that_differs_stays() -> None:
    modules = nn.ModuleList([GemmaRMSNorm(64), llama.LlamaRMSNorm(64)])
    assert fuse(modules, ops_of_a_device()) == {"RMS norms": 1}
    assert [type(module) for module in modules] == [GemmaRMSNorm, FusedRMSNorm]


def test_a_cpu_refuses_it(reference: Callable[[str], Reference]) -> None:
    model = ModelConfig(name="test", path=str(reference("llama").directory), compile=True)
    with pytest.raises(ConfigError, match=r"model\.compile=true is for accelerators.*model\.compile=false"):
        loading.load_model(model, torch.device("cpu"), None)


def test_without_the_compilers_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_ops, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"model\.compile=true needs the package triton"):
        fused_ops.require_accelerator(torch.device("cuda"))
