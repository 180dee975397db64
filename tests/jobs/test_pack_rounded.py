"""A store whose layers are rounded gives the tokens of the numbers that it holds, and says how far they are off."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs.packing.config import Format, PackConfig, SourceConfig
from jobs.packing.packing import Packing, pack
from jobs.packing.shard import compare
from runtime import Runtime
from runtime.config.settings import ExpertPaging, Tier
from runtime.errors import CheckpointError, ConfigError
from runtime.formats.kinds.rounded import Rounding
from runtime.formats.module_tensors import METHOD
from runtime.formats.registry import FORMATS, pair_companions
from runtime.linear.packed_rows import ROUNDED_ENCODINGS
from runtime.store.header import read_header
from runtime.weights.stage_weights import load_tensor
from tests.dealt import with_slow_others
from tests.quantized import Tensors, tensors_in, write_checkpoint
from tests.runtime.test_fidelity import config_for, tokens_of
from tests.runtime.test_quantized_checkpoints import expected_tokens, shape_of
from tests.support import Reference

References = Callable[[str], Reference]
CASES = [
    ("llama, tied", Format.int8, 64),
    ("llama, tied", Format.fp8, 64),
    ("mixtral", Format.int4, 32),
    ("mixtral", Format.int8, 64),
    ("gpt-oss", Format.int4, 64),
    ("gpt2", Format.int4, 64),
]


def packed(source: Path, out: Path, kind: Format, group_size: int = 64, **settings: bool) -> Packing:
    model = SourceConfig(path=str(source))
    config = PackConfig(model=model, out=str(out), format=kind, group_size=group_size, **settings)
    return pack(config, lambda done, total: None)


def decoded(directory: Path) -> Tensors:
    """All tensors of a store as float32."""
    found = Tensors()
    for path in directory.glob("*.safetensors"):
        for name, tensor in pair_companions(read_header(path), {"quant_method": METHOD}).items():
            found[name] = load_tensor(tensor).float()
    return found


@pytest.mark.parametrize(("family", "kind", "group_size"), with_slow_others(CASES, [CASES[0], CASES[2]]), ids=str)
def test_tokens_are_those_of_the_stored_numbers_in_every_tier(
    family: str, kind: Format, group_size: int, reference: References, tmp_path: Path
) -> None:
    ref = reference(family)
    packing = packed(ref.directory, tmp_path / "packed", kind, group_size)
    assert any(each.squares for each in packing.tensors), packing.lines
    plain = write_checkpoint(ref.directory, tmp_path / "plain", decoded(tmp_path / "packed"), dtype="float32")
    prompts = ref.prompts[:4]
    expected = expected_tokens(plain, prompts)
    runtime = Runtime(config_for(Reference(directory=tmp_path / "packed", prompts=[], expected=[], sampled=[])))
    for tier in Tier:
        for paging in (ExpertPaging.off, ExpertPaging.auto)[: 1 + runtime.model.shape.has_experts]:
            offload = replace(runtime.config.offload, tier=tier, resident_layers=1, expert_paging=paging)
            runtime.config = replace(runtime.config, offload=offload)
            assert tokens_of(runtime, prompts) == expected, (tier, paging)


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize(("kind", "most_bytes"), [(Format.int8, 0.51), (Format.fp8, 0.51), (Format.int4, 0.29)])
def test_layers_and_experts_are_rounded_and_what_chooses_them_is_not(
    kind: Format, most_bytes: float, reference: References, tmp_path: Path
) -> None:
    source = reference("mixtral").directory
    packing = packed(source, tmp_path / "packed", kind)
    original, found = tensors_in(source), decoded(tmp_path / "packed")
    rounded = {each.name for each in packing.tensors if each.squares}
    assert rounded == {name for name in original if ".layers." in name and ("proj" in name or ".experts." in name)}
    for name, tensor in original.items():
        assert torch.equal(found[name], tensor.float()) == (name not in rounded), name
    assert FORMATS[Rounding(kind.value).format].row_bytes(4096) <= most_bytes * 2 * 4096
    shape = shape_of(tmp_path / "packed", tmp_path)
    assert shape.weight_bytes == sum(each.packed_bytes for each in packing.tensors)


def test_the_store_says_how_far_its_weights_are_off(reference: References, tmp_path: Path) -> None:
    """Those that were rounded; also where the command that wrote them was killed before the end."""
    source, out = reference("llama").directory, tmp_path / "packed"
    packing = packed(source, out, Format.int4, 32)
    original, found = tensors_in(source), decoded(out)
    rounded = [each.name for each in packing.tensors if each.squares]
    error, size = (
        sum(float(each.double().square().sum()) for each in parts)
        for parts in ([found[name] - original[name].float() for name in rounded], [original[n] for n in rounded])
    )
    about = json.loads((out / "config.json").read_text())["quantization_config"]
    assert about["relative_rms_error"] == pytest.approx((error / size) ** 0.5, rel=1e-6)
    assert about["format"] == "int4, groups of 32"
    before = (out / "config.json").read_bytes()
    (out / "config.json").unlink()
    again = packed(source, out, Format.int4, 32)
    assert (again.num_kept, (out / "config.json").read_bytes()) == (again.num_shards, before)
    assert again.lines[1:] == packing.lines[1:]


def test_a_store_is_not_gone_on_with_in_another_format(reference: References, tmp_path: Path) -> None:
    source, out = reference("llama").directory, tmp_path / "packed"
    packed(source, out, Format.int4)
    for kind, group_size in ((Format.int8, 64), (Format.int4, 32), (Format.lossless, 64)):
        with pytest.raises(CheckpointError, match=r"in another format: .*set out"):
            packed(source, out, kind, group_size)
    with pytest.raises(ConfigError, match="group_size must be one of 32, 64, 128, got 48"):
        packed(source, out, Format.int4, 48)


def test_the_comparison_finds_a_code_that_is_not_the_nearest(reference: References, tmp_path: Path) -> None:
    source, out = reference("llama").directory, tmp_path / "packed"
    packed(source, out, Format.int8)
    target = next(out.glob("*.safetensors"))
    tensors = read_header(source / target.name)
    compare(tensors, target, "it", Rounding("int8"))
    stored = next(
        t
        for t in pair_companions(read_header(target), {"quant_method": METHOD}).values()
        if t.format in ROUNDED_ENCODINGS
    )
    data = bytearray(target.read_bytes())
    data[stored.offset + 9] ^= 1
    target.write_bytes(data)
    with pytest.raises(CheckpointError, match="does not decode to the original"):
        compare(tensors, target, "it", Rounding("int8"))


def test_it_is_said_that_the_original_s_numbers_will_be_gone(
    reference: References, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, settings in (("kept", {}), ("replaced", {"replace": True})):
        caplog.clear()
        source = shutil.copytree(reference("llama").directory, tmp_path / name)
        packed(source, tmp_path / f"{name} packed", Format.int8, **settings)
        assert ("keeps only rounded ones" in caplog.text) is bool(settings)
        assert bool(list(source.glob("*.safetensors"))) is not bool(settings)


def test_what_is_not_finite_is_not_rounded(reference: References, tmp_path: Path) -> None:
    tensors = tensors_in(reference("llama").directory)
    name = next(name for name in tensors if name.endswith("0.mlp.up_proj.weight"))
    tensors[name][3, 5] = torch.inf
    source = write_checkpoint(reference("llama").directory, tmp_path / "model", tensors)
    packing = packed(source, tmp_path / "packed", Format.int8)
    assert not next(each for each in packing.tensors if each.name == name).squares
    assert torch.equal(decoded(tmp_path / "packed")[name], tensors[name].float())
