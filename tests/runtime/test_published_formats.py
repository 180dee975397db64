"""Weights as others have quantised them become the numbers that their format's definition says."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.errors import CheckpointError
from runtime.formats.registry import FORMATS, pair_companions, require_readable
from runtime.linear.rows import Rows
from runtime.linear.stored import StoredWeight
from runtime.plan.shape.shapes import Parameter, Stage, StageKind, TensorSlice
from runtime.store.header import read_header
from runtime.weights.stage_weights import load_tensor, stage_weights
from tests import published_formats
from tests.published_formats import PUBLISHED, Published, four_bits

N, K = 48, 96
CHOICES = [slice(None), slice(0, 1), slice(13, 41), slice(5, 5), torch.tensor([47, 0, 33, 33])]
NAME = "model.layers.0.up_proj."


def written(format_: Published, directory: Path, shape: tuple[int, int] = (N, K)) -> tuple[TensorSlice, torch.Tensor]:
    """The weight as it is found in a file, and its numbers."""
    matrix = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    tensors, numbers = format_.quantise(matrix)
    save_file({NAME + leaf: tensor.contiguous() for leaf, tensor in tensors.items()}, directory / "one.safetensors")
    found = pair_companions(read_header(directory / "one.safetensors"), dict(format_.config))
    assert [*found] == [f"{NAME}weight"]
    return found[f"{NAME}weight"], numbers


def rows_of(piece: TensorSlice) -> Rows:
    buffer = torch.frombuffer(bytearray(Path(piece.file).read_bytes()), dtype=torch.uint8)
    offsets = {part.name: part.offset for part in piece.with_companions()}
    parameter = Parameter(name="w", shape=piece.shape, pieces=((piece,),))
    stage = Stage(index=0, name="", kind=StageKind.layer, parameters=(parameter,))
    weight = stage_weights(stage, buffer, offsets, {"w": torch.float32})["w"]
    assert isinstance(weight, StoredWeight)
    rows = weight.entries[0][0]
    assert not isinstance(rows, torch.Tensor)
    return rows


def dequantized(rows: Rows, choice: slice | torch.Tensor) -> torch.Tensor:
    out = torch.full((len(torch.arange(rows.shape[0])[choice]), rows.shape[1]), float("nan"))
    rows.dequantize(choice, out)
    return out


@pytest.mark.parametrize("name", PUBLISHED)
def test_numbers_are_those_of_the_definition_bit_by_bit(name: str, tmp_path: Path) -> None:
    piece, expected = written(PUBLISHED[name], tmp_path)
    rows = rows_of(piece)
    assert rows.shape == expected.shape
    for choice in CHOICES:
        assert torch.equal(dequantized(rows, choice), expected[choice])
    assert torch.equal(load_tensor(piece), expected)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_made_on_the_way_is_made_where_the_weight_lies(name: str, tmp_path: Path) -> None:
    """What is made without a device goes to one that has no numbers; tables are there already."""
    piece, expected = written(PUBLISHED[name], tmp_path)
    choices = [slice(13, 41), torch.tensor([47, 0, 33, 33])]
    assert torch.equal(dequantized(rows_of(piece), choices[0]), expected[choices[0]])
    outs = [torch.full_like(expected[choice], float("nan")) for choice in choices]
    with torch.device("meta"):
        for choice, out in zip(choices, outs, strict=True):
            rows_of(piece).dequantize(choice, out)
    assert all(torch.equal(out, expected[choice]) for choice, out in zip(choices, outs, strict=True))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_run_of_rows_is_cut_out_or_none_at_all(name: str, tmp_path: Path) -> None:
    piece, expected = written(PUBLISHED[name], tmp_path)
    for turn in range(3):
        part = piece.row_part(turn, 3)
        assert part is not None
        assert torch.equal(dequantized(rows_of(part), slice(2, 9)), expected[16 * turn :][2:9])


ALL_BYTES = (
    "gptq, desc_act, 8 bits", "gptq_v2, zero points", "awq", "pack-quantized, zero points",
    "pack-quantized, 8 bits of rows", "naive-quantized, zero point", "bitsandbytes nf4",
)  # fmt: skip


@pytest.mark.parametrize("name", ALL_BYTES)
def test_every_byte_of_codes_becomes_its_numbers(name: str, tmp_path: Path) -> None:
    """Those of FP8 and FP4: test_rows.py."""
    piece, expected = written(PUBLISHED[name], tmp_path, (512, 96))
    with Path(piece.file).open("rb") as file:
        file.seek(piece.offset)
        assert len({*file.read(piece.num_bytes)}) == 256
    assert torch.equal(dequantized(rows_of(piece), slice(None)), expected)


@pytest.mark.parametrize("shape", [(6, 90), (3, 50), (1, 64)], ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_blocks_of_four_bits_run_on_over_the_ends_of_rows(nested: bool, shape: tuple[int, int], tmp_path: Path) -> None:
    format_ = Published(lambda matrix: four_bits(matrix, nested=nested), {"load_in_4bit": True})
    piece, expected = written(format_, tmp_path, shape)
    assert torch.equal(dequantized(rows_of(piece), slice(None)), expected)
    assert torch.equal(dequantized(rows_of(piece), slice(0, 2)), expected[:2])


def test_a_block_of_four_bits_may_be_larger_than_what_it_holds(tmp_path: Path) -> None:
    def quantise(matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tensors, numbers = four_bits(matrix)
        leaf = "weight.quant_state.bitsandbytes__nf4"
        state = json.loads(bytes(tensors[leaf].tolist())) | {"nested_blocksize": 10**30}
        return tensors | {leaf: torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)}, numbers

    piece, expected = written(Published(quantise, {"load_in_4bit": True}), tmp_path)
    assert torch.equal(dequantized(rows_of(piece), slice(None)), expected)


OF_OTHER_FACTORS = {"mxfp8-quantized", "fbgemm_fp8", "bitsandbytes fp4"}  # than are usual in their storage format


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() - OF_OTHER_FACTORS))
def test_a_row_takes_the_bytes_that_its_format_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_formats, "WIDTH", 128)
    piece, _ = written(PUBLISHED[name], tmp_path, (4096, 128))
    stored = sum(part.num_bytes for part in piece.with_companions())
    assert stored / 4096 == pytest.approx(FORMATS[piece.format].row_bytes(128), rel=0.03)


MISSING = {"gptq": "qzeros", "awq": "scales", "pack-quantized": "weight_shape", "bitsandbytes nf4": "weight.absmax"}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_companion_is_named(name: str, tmp_path: Path) -> None:
    tensors, _ = PUBLISHED[name].quantise(torch.ones(N, K))
    save_file(
        {NAME + leaf: t.contiguous() for leaf, t in tensors.items() if leaf != MISSING[name]},
        tmp_path / "a.safetensors",
    )
    with pytest.raises(CheckpointError, match=rf"a.safetensors: '{NAME}{MISSING[name]}' is missing"):
        pair_companions(read_header(tmp_path / "a.safetensors"), PUBLISHED[name].config)


WRONG = {"gptq": "qzeros", "awq": "qzeros", "pack-quantized": "weight_scale", "bitsandbytes int8": "SCB"}


@pytest.mark.parametrize("name", WRONG)
def test_companions_that_do_not_fit_are_refused_with_their_shape(name: str, tmp_path: Path) -> None:
    tensors, _ = PUBLISHED[name].quantise(torch.rand(N, K))
    tensors[WRONG[name]] = tensors[WRONG[name]][:-1].clone()
    save_file({NAME + leaf: t.contiguous() for leaf, t in tensors.items()}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=rf"a.safetensors: '{NAME}{WRONG[name]}' has shape \("):
        pair_companions(read_header(tmp_path / "a.safetensors"), PUBLISHED[name].config)


CHANGES: dict[str, tuple[str, str, torch.Tensor, str]] = {
    "a group that is not there": ("gptq, desc_act, 8 bits", "g_idx", torch.full((K,), 3).int(), "must be 0 to 2"),
    "a group that is not there, unordered": ("gptq", "g_idx", torch.full((K,), 10**6).int(), "1000000; must be 0 to 2"),
    "a column too few": ("gptq", "g_idx", (torch.arange(K - 1) // 32).int(), "has shape \\(95,\\)"),
    "a negative group": ("pack-quantized, ordered", "weight_g_idx", torch.full((K,), -1).int(), "groups -1 to -1"),
    "words of floats": ("awq", "qweight", torch.zeros(K, N // 8), "is F32; must be I32"),
    "factors of integers": ("pack-quantized", "weight_scale", torch.zeros(N, 3).int(), "must be F16 or BF16 or F32"),
    "factors in U16": ("fbgemm_fp8", "weight_scale", torch.ones(N, 1).to(torch.uint16), "is U16, .* expected a matrix"),
    "two factors for all": ("nvfp4-pack-quantized", "weight_global_scale", torch.ones(2), "must be one number"),
    "another shape": ("pack-quantized", "weight_shape", torch.tensor([N, 8 * K]), "no packing of 4 or 8 bits"),
    "no shape": ("pack-quantized", "weight_shape", torch.tensor([], dtype=torch.int64), "no packing of 4 or 8 bits"),
    "no state": (
        "bitsandbytes nf4", "weight.quant_state.bitsandbytes__nf4", torch.zeros(3, dtype=torch.uint8),
        "a 4-bit matrix",
    ),
    "endless rows": (
        "bitsandbytes nf4", "weight.quant_state.bitsandbytes__nf4",
        torch.tensor([*b'{"shape": [Infinity, 1], "blocksize": 64}'], dtype=torch.uint8), "a 4-bit matrix",
    ),
    "brackets": (
        "bitsandbytes nf4", "weight.quant_state.bitsandbytes__nf4", torch.tensor([*b"[" * 10**5], dtype=torch.uint8),
        "a 4-bit matrix",
    ),
    "nothing nested": ("bitsandbytes nf4", "weight.absmax", torch.zeros(72), "is F32; must be U8"),
    "laid out for a kernel": ("bitsandbytes int8", "weight_format", torch.ones((), dtype=torch.uint8), "of a kernel"),
    "FP8 of one dimension": ("fbgemm_fp8", "weight", torch.zeros(N).to(torch.float8_e4m3fn), "has shape \\(48,\\)"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_tensor_that_cannot_be_right_is_named(what: str, tmp_path: Path) -> None:
    name, leaf, other, named = CHANGES[what]
    tensors, _ = PUBLISHED[name].quantise(torch.rand(N, K))
    assert leaf in tensors
    tensors[leaf] = other
    save_file({NAME + each: t.contiguous() for each, t in tensors.items()}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=named):
        pair_companions(read_header(tmp_path / "a.safetensors"), PUBLISHED[name].config)


def test_blocks_of_experts_that_are_no_bytes_are_refused(tmp_path: Path) -> None:
    tensors = {"w_blocks": torch.zeros(2, N, 3, 16), "w_scales": torch.zeros(2, N, 3, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors: 'w_blocks' is F32; must be U8"):
        pair_companions(read_header(tmp_path / "a.safetensors"), {"quant_method": "mxfp4"})


def test_factors_may_be_those_of_columns_and_of_a_stack(tmp_path: Path) -> None:
    numbers = torch.rand(3, N, K).to(torch.float8_e4m3fn)
    for shape in ((3, 1, K), (3, N, 1), (3, N)):
        scales = torch.rand(shape)
        save_file({"w": numbers, "w_scale": scales}, tmp_path / "a.safetensors")
        found = pair_companions(read_header(tmp_path / "a.safetensors"), {"quant_method": "fbgemm_fp8"})["w"]
        expected = numbers.float() * (scales[..., None] if len(shape) == 2 else scales)
        assert torch.equal(load_tensor(found), expected)


def test_modules_of_one_checkpoint_may_have_several_formats(tmp_path: Path) -> None:
    names = ("pack-quantized", "float-quantized, rows", "nvfp4-pack-quantized", "pack-quantized, 8 bits of rows")
    groups = {name: PUBLISHED[name].config["config_groups"]["group_0"] for name in names}
    made = {name: PUBLISHED[name].quantise(torch.rand(N, K)) for name in names}
    tensors = {f"{name}.{leaf}": t.contiguous() for name in names for leaf, t in made[name][0].items()}
    save_file(tensors, tmp_path / "a.safetensors")
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    found = pair_companions(read_header(tmp_path / "a.safetensors"), config)
    assert all(torch.equal(load_tensor(found[f"{name}.weight"]), made[name][1]) for name in names)


GROUP = {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": GROUP}
REFUSED: dict[str, tuple[str, Mapping[str, object], str]] = {
    "GPTQ's Marlin": ("gptq", {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
    "GPTQ of 3 bits": ("gptq", {"quant_method": "gptq", "bits": 3}, "gptq or gptq_v2"),
    "AWQ's gemv": ("awq", {"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
    "AWQ's exllama": ("awq", {"quant_method": "awq", "bits": 4, "version": "exllama"}, "version 'exllama'"),
    "AWQ of 3 bits": ("awq", {"quant_method": "awq", "bits": 3}, "with 3 bits"),
    "sparse": ("pack-quantized", COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
    "marlin-24": ("pack-quantized", COMPRESSED | {"format": "marlin-24"}, "'marlin-24'"),
    "rotated": ("pack-quantized", COMPRESSED | {"transform_config": {"config_groups": {"u": {}}}}, "it rotates"),
    "5 bits": (
        "pack-quantized", COMPRESSED | {"config_groups": {"a": {"weights": {"num_bits": 5, "type": "int"}}}},
        "12 words in each of 48 rows",
    ),
    "ModelOpt's int8": ("int-quantized", {"quant_method": "modelopt"}, "weight' is I8, in a format of ModelOpt"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_variant_that_cannot_be_read_is_named(what: str, tmp_path: Path) -> None:
    name, config, named = REFUSED[what]
    tensors, _ = PUBLISHED[name].quantise(torch.rand(N, K))
    if what == "GPTQ of 3 bits":
        tensors = {leaf: tensor for leaf, tensor in tensors.items() if leaf != "g_idx"}
    save_file({NAME + leaf: t.contiguous() for leaf, t in tensors.items()}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=named):
        pair_companions(read_header(tmp_path / "a.safetensors"), config)


UNSET = {"gptq": PUBLISHED["gptq"].config, "packed_integers": COMPRESSED}  # none says that columns are ordered


@pytest.mark.parametrize("name", UNSET)
def test_columns_are_in_the_groups_that_their_tensor_says_where_the_config_says_nothing(
    name: str, tmp_path: Path
) -> None:
    """Of a module between two whose columns lie in turn: recipes give some modules settings of their own."""
    tensors, numbers = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for module, is_ordered in (("a.", False), ("b.", True), ("c.", False)):
        matrix = torch.rand(N, K, generator=torch.Generator().manual_seed(ord(module[0])))
        made, numbers[module] = getattr(published_formats, name)(matrix, ordered=is_ordered)
        tensors |= {module + leaf: tensor.contiguous() for leaf, tensor in made.items()}
    save_file(tensors, tmp_path / "a.safetensors")
    found = pair_companions(read_header(tmp_path / "a.safetensors"), UNSET[name])
    for module, right in numbers.items():
        assert torch.equal(load_tensor(found[f"{module}weight"]), right), module


@pytest.mark.parametrize(
    "config", [{"quant_method": "gptq", "checkpoint_format": "x" * 10**4}, {"quant_method": "y" * 10**4}]
)
def test_what_a_config_says_is_not_told_whole(config: Mapping[str, object]) -> None:
    def read() -> None:
        require_readable(str(config["quant_method"]))
        pair_companions({}, config)

    with pytest.raises(CheckpointError, match=r"is not supported\. Supported: ") as caught:
        read()
    assert len(str(caught.value)) < 1000
