"""A packed store is the original: its tokens, its numbers, however often packing was killed; and nothing else is
deleted."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.files.publishing import TEMP_SUFFIX
from jobs.packing import packing as packing_module
from jobs.packing.config import PackConfig, SourceConfig
from jobs.packing.packing import Packing, pack
from jobs.packing.shard import compare
from jobs.run.tasks.generate import generate
from runtime import Runtime
from runtime.config.settings import ExpertPaging, ModelConfig, Tier, Verify
from runtime.errors import BudgetError, CheckpointError, ConfigError, RunMismatchError
from runtime.model.loading import load_model
from runtime.store.checkpoint import INDEX, SINGLE
from runtime.store.file_digests import METADATA, check_packed, read_packing_record
from runtime.store.header import read_header
from tests.jobs.test_identity import Place, begun
from tests.packed import adversaries, tensor_of
from tests.quantized import tensors_in, write_checkpoint
from tests.runtime.test_fidelity import config_for, tokens, tokens_of
from tests.runtime.test_weight_files import LAYOUTS
from tests.support import Reference

References = Callable[[str], Reference]
FAMILIES = (
    *(
        "llama, tied",
        "mixtral",
        "gpt2",
        "falcon, first",
        "qwen3-moe",
        "gpt-oss",
        "gemma-2",
        "deepseek-v3",
        "phi-3",
        "t5",
    ),
)
__all__ = ["begun"]


def packed(source: Path, out: Path, **settings: bool) -> Packing:
    return pack(PackConfig(model=SourceConfig(path=str(source)), out=str(out), **settings), lambda done, total: None)


@pytest.fixture
def model(reference: References, tmp_path: Path) -> Path:
    """Of three shards, one of whose tensors does not pack."""
    source = reference("llama").directory
    tensors = tensors_in(source)
    odd = next(name for name in tensors if name.endswith("0.mlp.up_proj.weight"))
    tensors[odd] = tensor_of(adversaries((tensors[odd].shape[0], tensors[odd].shape[1]))["shuffled"])
    return write_checkpoint(source, tmp_path / "model", tensors, num_shards=3)


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith(".")}


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("family", ["llama, tied", "mixtral"])
def test_tokens_are_those_of_the_original_in_every_tier(family: str, reference: References, tmp_path: Path) -> None:
    ref = reference(family)
    packed(ref.directory, tmp_path / "packed")
    runtime = Runtime(config_for(Reference(directory=tmp_path / "packed", prompts=[], expected=[], sampled=[])))
    for tier in Tier:
        for paging in (ExpertPaging.off, ExpertPaging.auto)[: 1 + runtime.model.shape.has_experts]:
            offload = replace(runtime.config.offload, tier=tier, resident_layers=1, expert_paging=paging)
            runtime.config = replace(runtime.config, offload=offload)
            assert tokens_of(runtime, ref.prompts) == ref.expected, (tier, paging)


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_numbers_of_a_family_are_the_original_s(family: str, reference: References, tmp_path: Path) -> None:
    """Read back by the comparison, which would say otherwise, and counted in the bytes that plans count."""
    source = reference(family).directory
    packing = packed(source, tmp_path / "packed")
    assert any(each.raw_reason is None for each in packing.tensors), packing.lines
    original, stored = (
        load_model(ModelConfig(name="test", path=str(path)), torch.device("cpu"), str(tmp_path)).shape
        for path in (source, tmp_path / "packed")
    )
    assert [stage.flops_per_token for stage in stored.stages] == [stage.flops_per_token for stage in original.stages]
    assert stored.weight_bytes < original.weight_bytes


@pytest.mark.dealt(most=2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_those_weights_are_packed_that_a_run_reads(layout: str, reference: References, tmp_path: Path) -> None:
    """The store has one form of them alone, under its usual name."""
    ref, right = reference("llama"), tensors_in(reference("llama").directory)
    source = tmp_path / "source"
    shutil.copytree(ref.directory, source, ignore=shutil.ignore_patterns("*safetensors*"))
    write, _ = LAYOUTS[layout]
    write(source, right, {name: tensor.flip(0).contiguous() for name, tensor in right.items()})
    for _ in range(2):  # the second goes on
        packed(source, tmp_path / "packed")
    elsewhere = Reference(directory=tmp_path / "packed", prompts=[], expected=[], sampled=[])
    assert tokens(config_for(elsewhere), ref.prompts[:2]) == ref.expected[:2]
    assert len({SINGLE, INDEX} & files_in(tmp_path / "packed").keys()) == 1


def test_of_two_tensors_of_one_name_that_of_the_index_is_packed(model: Path, tmp_path: Path) -> None:
    weight_map = json.loads((model / INDEX).read_text())["weight_map"]
    name, file = next(iter(weight_map.items()))
    (other, *_) = sorted(set(weight_map.values()) - {file})
    save_file(load_file(model / other) | {name: load_file(model / file)[name] + 1}, model / other, {"format": "pt"})
    packed(model, tmp_path / "packed")
    first = tmp_path / "packed" / file
    assert name in read_packing_record(first)[0]["tensors"]
    compare(read_header(model / file), first, file)
    assert name not in read_packing_record(tmp_path / "packed" / other)[0]["tensors"]
    (model / INDEX).write_text(json.dumps({"weight_map": weight_map | {name: other}}))
    with pytest.raises(CheckpointError, match=r"packed from another file than .* older version"):
        packed(model, tmp_path / "packed")


def test_a_directory_with_two_forms_of_its_weights_is_not_replaced(
    model: Path, reference: References, tmp_path: Path
) -> None:
    """With the one deleted, the next start would read the other."""
    save_file(tensors_in(reference("llama").directory), model / SINGLE, {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"replace=true: .* has both {SINGLE} .* move {INDEX} away first"):
        packed(model, tmp_path / "packed", replace=True)
    packed(model, tmp_path / "packed")
    (model / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=rf"{SINGLE}: packed from other files than shard-0.*set out"):
        packed(model, tmp_path / "packed")
    (tmp_path / "packed" / SINGLE).unlink()
    packed(model, tmp_path / "packed")
    save_file(tensors_in(reference("llama").directory), model / SINGLE, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{INDEX}: packed from other files than {SINGLE}"):
        packed(model, tmp_path / "packed")


def test_the_comparison_finds_one_bit(model: Path, tmp_path: Path) -> None:
    packed(model, tmp_path / "packed")
    (name, *_) = sorted(path.name for path in model.glob("*.safetensors"))
    target = tmp_path / "packed" / name
    compare(read_header(model / name), target, name)
    _flip(target)
    with pytest.raises(CheckpointError, match=r"does not decode to the original"):
        compare(read_header(model / name), target, name)


def _flip(path: Path) -> None:
    """One bit of its first tensor."""
    _, begin = read_packing_record(path)
    data = bytearray(path.read_bytes())
    data[begin + 5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("verify", Verify)
def test_damage_is_found_as_the_model_is_opened(verify: Verify, model: Path, tmp_path: Path) -> None:
    """The sampled pieces are all there are of small files."""
    packed(model, tmp_path / "packed")
    _flip(sorted((tmp_path / "packed").glob("*.safetensors"))[0])
    config = ModelConfig(name="test", path=str(tmp_path / "packed"), verify=verify)
    with pytest.raises(CheckpointError, match=r"CRC-32.*pack the original again"):
        load_model(config, torch.device("cpu"), str(tmp_path))


class Killed(BaseException):
    pass


UNUSED = ("consolidated.00.pth", "model.fp16.safetensors", "pytorch_model.bin", "training_args.bin")


@pytest.mark.parametrize("told", ["5", "[]", "{}", "[" * 10**5, '{"crc32": 5}', '{"crc32": ""}', '{"crc32": "0123"}'])
def test_a_shard_that_lacks_a_sum_of_a_piece_is_refused(told: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(8)}, tmp_path / SINGLE, metadata={METADATA: told})
    with pytest.raises(CheckpointError, match="not a shard that `weightstream pack` wrote"):
        check_packed([str(tmp_path / SINGLE)], is_full=False)


def test_a_store_whose_config_does_not_say_that_it_is_one_is_refused(model: Path, tmp_path: Path) -> None:
    """Its sums would be compared with nothing."""
    packed(model, tmp_path / "packed")
    config = tmp_path / "packed" / "config.json"
    values = json.loads(config.read_text())
    del values["quantization_config"]
    config.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"config\.json lacks its quantization_config"):
        load_model(ModelConfig(name="hf", path=str(tmp_path / "packed")), torch.device("cpu"), None)


def test_other_files_are_copied_but_for_weights_and_pickles_that_no_run_reads(model: Path, tmp_path: Path) -> None:
    for name in (
        *UNUSED,
        "pytorch_model.bin.index.json",
        "original/consolidated.00.pth",
        "checkpoint-5/model.safetensors",
    ):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(b"no weights of this model")
    wanted = {"LICENSE": b"a licence", "additional_chat_templates/tool_use.jinja": b"{{ messages }}"}
    for name, text in wanted.items():
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_bytes(text)
    packing = packed(model, tmp_path / "packed")
    found = {path.relative_to(tmp_path / "packed").as_posix() for path in (tmp_path / "packed").rglob("*")}
    own = {path.name for path in model.iterdir() if path.is_file()} - {*UNUSED, "pytorch_model.bin.index.json"}
    assert found - {".pack.lock"} == own | wanted.keys() | {"additional_chat_templates"}
    assert all((tmp_path / "packed" / name).read_bytes() == text for name, text in wanted.items())
    assert [line for line in packing.lines if line.startswith("not copied")] == [
        "not copied checkpoint-5/, consolidated.00.pth, model.fp16.safetensors, original/, pytorch_model.bin, "
        "training_args.bin: no run reads them"
    ]


def test_a_file_is_copied_in_pieces_and_seen_whole_or_not_at_all(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_module, "COPY_BYTES", 1000)
    (model / "vocabulary.txt").write_bytes(bytes(range(256)) * 10)
    out = tmp_path / "packed"
    pieces = list[int]()
    real = packing_module.with_retries

    def dying(read: Callable[[], int], *told: object) -> int:
        if len(pieces) == 2:
            raise Killed
        count = real(read, *told) if "vocabulary" in str(told[0]) else read()
        pieces.extend([count] * ("vocabulary" in str(told[0])))
        return count

    with monkeypatch.context() as patch:
        patch.setattr(packing_module, "with_retries", dying)
        with pytest.raises(Killed):
            packed(model, out)
    assert pieces == [1000, 1000]
    assert "vocabulary.txt" not in files_in(out)
    assert "config.json" not in files_in(out), "which makes a model of it"
    packed(model, out)
    assert files_in(out)["vocabulary.txt"] == bytes(range(256)) * 10


@pytest.mark.parametrize("error", [MemoryError("no"), OSError(errno.ENOMEM, "Cannot allocate memory")])
@pytest.mark.parametrize(("name", "call"), [("shard-0.safetensors", "pack_shard"), ("tokenizer.json", "with_retries")])
def test_memory_that_runs_out_is_said_of_the_file(
    name: str, call: str, error: Exception, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(first: object, second: object, *args: object, **kwargs: object) -> None:
        if name in (Path(str(first)).name, Path(str(second)).name):
            raise error
        real(first, second, *args, **kwargs)

    (model / "tokenizer.json").write_text("{}")
    real = getattr(packing_module, call)
    monkeypatch.setattr(packing_module, call, fail)
    with pytest.raises(BudgetError, match=rf"{name} \(.*out of memory.*start the same command again") as raised:
        packed(model, tmp_path / "packed")
    assert "offload" not in str(raised.value), "which packing does not have"


@pytest.mark.dealt(most=1)
@pytest.mark.parametrize("is_replaced", [False, True], ids=["kept", "replaced"])
def test_a_packing_that_is_killed_at_any_step_goes_on(
    is_replaced: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(model, tmp_path / "right")
    for step in range(100):
        source, out = tmp_path / f"source-{step}", tmp_path / f"out-{step}"
        shutil.copytree(model, source)
        with monkeypatch.context() as patch:
            _kill_at(patch, step)
            try:
                packed(source, out, replace=is_replaced)
                was_killed = False
            except Killed:
                was_killed = True
        if out.exists():
            (out / f".model.safetensors.0.{TEMP_SUFFIX}").write_bytes(b"half")
        packing = packed(source, out, replace=is_replaced)
        assert files_in(out) == files_in(tmp_path / "right")
        assert not list(out.glob(f"*{TEMP_SUFFIX}"))
        assert len(list(source.glob("*.safetensors"))) == (0 if is_replaced else 3)
        shutil.rmtree(source), shutil.rmtree(out)
        if not was_killed:
            assert step > 10
            assert packing.num_kept == 3
            return
    pytest.fail("it takes more steps than that")


def _kill_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Whatever changes a file system, the step-th time."""
    count = iter(range(step + 1))

    def dying(act: Callable[..., object]) -> Callable[..., object]:
        def acts(*args: object, **kwargs: object) -> object:
            if next(count, None) == step:
                raise Killed
            return act(*args, **kwargs)

        return acts

    patch.setattr(os, "fsync", dying(os.fsync))
    patch.setattr(Path, "replace", dying(Path.replace))
    patch.setattr(Path, "unlink", dying(Path.unlink))


def test_shards_of_another_model_are_not_gone_on_with(model: Path, tmp_path: Path) -> None:
    packed(model, tmp_path / "packed")
    path = sorted(model.glob("*.safetensors"))[0]
    save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"packed from another file than .*set out"):
        packed(model, tmp_path / "packed")
    with pytest.raises(CheckpointError, match="not a shard that `weightstream pack` wrote"):
        packed(model, shutil.copytree(model, tmp_path / "plain"))


def test_nothing_is_deleted_that_was_not_compared(model: Path, tmp_path: Path) -> None:
    packed(model, tmp_path / "packed", verify=False)
    _flip(sorted((tmp_path / "packed").glob("*.safetensors"))[0])
    with pytest.raises(CheckpointError, match="does not decode"):
        packed(model, tmp_path / "packed", replace=True)
    assert len(list(model.glob("*.safetensors"))) == 3
    with pytest.raises(ConfigError, match="verify=true"):
        packed(model, tmp_path / "packed", verify=False, replace=True)


def test_what_cannot_be_packed_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    packed(model, tmp_path / "packed")
    with pytest.raises(CheckpointError, match="is already packed"):
        packed(tmp_path / "packed", tmp_path / "twice")
    fp8 = write_checkpoint(model, tmp_path / "fp8", tensors_in(model), quantization_config={"quant_method": "fp8"})
    with pytest.raises(CheckpointError, match="already quantized by 'fp8'"):
        packed(fp8, tmp_path / "out")
    wide = write_checkpoint(model, tmp_path / "wide", {n: t.float() for n, t in tensors_in(model).items()})
    with pytest.raises(CheckpointError, match=r"format=lossless needs bfloat16 matrices, these are F32"):
        packed(wide, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"is the same directory as model\.path"):
        packed(model, model)
    link = tmp_path / "linked"
    shutil.copytree(model, link)
    first = sorted(link.glob("*.safetensors"))[0]
    first.unlink()
    first.symlink_to(model / first.name)
    with pytest.raises(ConfigError, match="is a link"):
        packed(link, tmp_path / "out", replace=True)


def test_the_table_says_what_stayed_raw_and_why(model: Path, tmp_path: Path) -> None:
    packing = packed(model, tmp_path / "packed")
    text = "\n".join(packing.lines)
    assert "1 (" in text
    assert "of its exponents are outside of a window of 15, e.g. model.layers.0.mlp.up_proj.weight" in text
    shards = sorted((tmp_path / "packed").glob("*.safetensors"))
    stored = sum(tensor.num_bytes for path in shards for tensor in read_header(path).values())
    assert sum(each.packed_bytes for each in packing.tensors) == stored
    told, _ = read_packing_record(shards[0])
    assert set(told) == {"source", "crc32", "tensors"}


def test_a_run_begun_on_the_original_is_not_gone_on_with_by_the_packed(begun: Place, tmp_path: Path) -> None:
    """Although its tokens would be equal: the files are others, and nothing but their digests says what they hold."""
    place = Place(root=tmp_path / "place")
    shutil.copytree(begun.root, place.root)
    packed(place.model, tmp_path / "packed")
    config = replace(place.config, model=replace(place.config.model, path=str(tmp_path / "packed")))
    with pytest.raises(RunMismatchError, match="weights"):
        generate(config, lambda: False)


def test_stacked_experts_have_room_for_the_escapes_of_the_one_with_the_most(tmp_path: Path) -> None:
    from jobs.packing.shard import pack_shard

    shape = (64, 512)
    experts = np.stack([adversaries(shape)[name] for name in ("normal", "rows of mixed scales", "one")])
    stack = torch.from_numpy(experts.view(np.int16)).view(torch.bfloat16)
    save_file({"experts": stack, "odd": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "source.safetensors")
    found = pack_shard(
        tmp_path / "source.safetensors", tmp_path / "packed.safetensors", "", verify=True, progress=lambda done: None
    )
    assert {each.name: each.raw_reason for each in found} == {"experts": None, "odd": "not a matrix"}
