"""Runs in front of a double whose stored weights go through Triton's kernels, in its interpreter: run by
`test_device_kernels.py` in a process of its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.config.settings import Dequantize, DType
from runtime.engine.dequantized_weights import DequantizedWeights
from runtime.linear import device_codes
from runtime.linear.stored import StoredWeight
from tests.fake_device import FakeDevice
from tests.runtime.test_dequantized_weights import on_a_device, written
from tests.runtime.test_fidelity import tokens
from tests.runtime.test_quantized_checkpoints import expected_tokens
from tests.support import Reference

References = Callable[[str], Reference]
CASES = [
    ("llama", "int4"),
    ("llama", "gptq"),
    ("mixtral", "int8"),
    ("mixtral", "lossless"),
    ("mixtral", "awq"),
    ("qwen3-moe", "fp8 blocks"),
    ("gpt-oss", "mxfp4"),
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_tokens_of_layers_that_kernels_decode_are_those_of_the_numbers(
    family: str, name: str, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, launched, decode = reference(family), list[object](), device_codes.decode

    def counted(codes: object, out: torch.Tensor) -> None:
        launched.append(out)
        decode(codes, out)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(device_codes, "decode", counted)
    stored, plain = written(ref, family, name, tmp_path)
    prompts = [prompt[:9] for prompt in ref.prompts[:2]]
    with device_codes.interpreted():
        actual = tokens(on_a_device(ref, stored, Dequantize.stage), prompts, FakeDevice((False, True)))
    assert launched, "kernels decode"
    assert actual == expected_tokens(plain, prompts)


@pytest.mark.parametrize(("family", "name"), [("llama", "int4"), ("mixtral", "fp8"), ("gpt-oss", "mxfp4")])
def test_few_rows_of_16_bits_are_multiplied_by_codes_as_they_lie(
    family: str, name: str, reference: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most tokens are those of torch's operators: sums in another order move the last bits of bfloat16."""
    ref, packed, of = reference(family), list[bool](), DequantizedWeights.get
    stored, _ = written(ref, family, name, tmp_path)
    config = on_a_device(ref, stored, Dequantize.stage)
    config = replace(config, model=replace(config.model, dtype=DType.bfloat16))

    def noted(self: DequantizedWeights, stage: int, weights: object, *, has_few_rows: bool) -> object:
        found = of(self, stage, weights, has_few_rows=has_few_rows)  # pyright: ignore[reportArgumentType]
        packed.extend(isinstance(each, StoredWeight) and each.has_kernels for each in found.values())
        return found

    monkeypatch.setattr(DequantizedWeights, "get", noted)
    prompts = [prompt[:9] for prompt in ref.prompts[:2]]
    with device_codes.interpreted():
        found = tokens(config, prompts, FakeDevice((False, True)))
    assert any(packed), "codes are multiplied as they lie"
    expected = tokens(config, prompts, FakeDevice((False, True)))
    same = sum(a == b for mine, theirs in zip(found, expected, strict=True) for a, b in zip(mine, theirs, strict=True))
    assert same >= 0.75 * sum(map(len, expected))
