"""Of all the files in a directory those are read that transformers reads; where there are none, one line says what is
there and what to do."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.errors import CheckpointError
from runtime.store.checkpoint import INDEX, SINGLE, WEIGHTS_KEY, open_checkpoint
from tests.quantized import Tensors, tensors_in
from tests.runtime.test_fidelity import tokens
from tests.runtime.test_quantized_checkpoints import at, expected_tokens
from tests.support import Reference

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
Write = Callable[[Path, Tensors, Tensors], None]


def save(tensors: Tensors, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt"})


def save_shards(directory: Path, first: Tensors, second: Tensors, *unlisted: str, index: str = INDEX) -> None:
    save(first, directory / ONE)
    save(second, directory / TWO)
    weight_map = {name: file for file, shard in ((ONE, first), (TWO, second)) for name in shard if name not in unlisted}
    (directory / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    names = sorted(tensors)
    first, second = names[: len(names) // 2], names[len(names) // 2 :]
    return {name: tensors[name] for name in first}, {name: tensors[name] for name in second}


def set_config(directory: Path, **values: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | values))


def write_single_beside_shards(directory: Path, right: Tensors, wrong: Tensors) -> None:
    save(right, directory / SINGLE)
    save_shards(directory, *halves(wrong))


def write_one_more_than_listed(directory: Path, right: Tensors, wrong: Tensors) -> None:
    """One that the model wants, and one that nobody asks for."""
    first, second = halves(right)
    save_shards(directory, first, second | {"stray.weight": wrong[NORM]}, NORM, "stray.weight")


def write_unlisted_twice(directory: Path, right: Tensors, wrong: Tensors) -> None:
    """The later file's is read."""
    first, second = halves(right)
    save_shards(directory, first | {NORM: 3 * wrong[NORM]}, second | {NORM: right[NORM]}, NORM)


def write_named_file(directory: Path, right: Tensors, wrong: Tensors) -> None:
    save(wrong, directory / SINGLE)
    save(right, directory / "mine.safetensors")
    set_config(directory, **{WEIGHTS_KEY: "mine.safetensors"})


def write_named_index(directory: Path, right: Tensors, wrong: Tensors) -> None:
    save(wrong, directory / SINGLE)
    save_shards(directory, *halves(right), index="mine.safetensors.index.json")
    set_config(directory, **{WEIGHTS_KEY: "mine.safetensors.index.json"})


def write_other_forms_beside(directory: Path, right: Tensors, wrong: Tensors) -> None:
    save_shards(directory, *halves(right))
    for name in ("model.fp16.safetensors", "consolidated.safetensors", f"original/{SINGLE}", f"checkpoint-5/{SINGLE}"):
        save(wrong, directory / name)
    torch.save(wrong, directory / "pytorch_model.bin")


LAYOUTS: Mapping[str, tuple[Write, str]] = {  # and what of it is said
    "single beside shards": (write_single_beside_shards, rf"{SINGLE} is read, as in transformers; {INDEX} and its 2"),
    "one more than listed": (write_one_more_than_listed, ""),
    "unlisted twice": (write_unlisted_twice, f"'{NORM}' is also in {ONE}; read from {TWO}"),
    "config names a file": (write_named_file, ""),
    "config names an index": (write_named_index, ""),
    "other forms beside": (write_other_forms_beside, ""),
}


@pytest.mark.dealt(most=3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_those_files_are_read_that_transformers_reads(
    name: str, reference: Callable[[str], Reference], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ref = reference("llama")
    directory = tmp_path / "model"
    shutil.copytree(ref.directory, directory, ignore=shutil.ignore_patterns("*safetensors*"))
    right = tensors_in(ref.directory)
    write, said = LAYOUTS[name]
    write(directory, right, {name: tensor.flip(0).contiguous() for name, tensor in right.items()})
    prompts = ref.prompts[:2]
    assert tokens(at(ref, directory), prompts) == expected_tokens(directory, prompts) == ref.expected[:2]
    lines = [each.getMessage() for each in caplog.records if each.name.startswith("runtime.store")]
    assert len(lines) == bool(said)
    assert all(str(directory) in line and re.search(said, line) for line in lines), lines


def test_a_run_is_known_by_the_files_that_are_read(tmp_path: Path) -> None:
    ones, zeros = torch.ones(3), torch.zeros(3)
    write_single_beside_shards(tmp_path, {"a": ones, "b": ones.clone()}, {"a": zeros, "b": zeros.clone()})
    assert open_checkpoint(tmp_path).files == [str(tmp_path / SINGLE)], "whose digests model.verify=full takes"
    before = open_checkpoint(tmp_path).fingerprint()
    save({"a": torch.full((3,), 2.0)}, tmp_path / ONE)
    assert open_checkpoint(tmp_path).fingerprint() == before
    save({"a": torch.full((3,), 2.0), "b": torch.ones(3)}, tmp_path / SINGLE)
    assert open_checkpoint(tmp_path).fingerprint() != before


def test_an_index_of_the_single_file_itself_is_no_second_form(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save({"a": torch.ones(3)}, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": SINGLE}}))
    assert list(open_checkpoint(tmp_path).tensors) == ["a"]
    assert not caplog.records


@pytest.mark.parametrize("named", ["../mine.safetensors", "/mine.safetensors", "mine.bin", 7, "gone.safetensors"])
def test_a_file_that_config_names_is_one_of_the_directory(named: object, tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text(json.dumps({WEIGHTS_KEY: named}))
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS_KEY}"):
        open_checkpoint(tmp_path)


NONE_OF_THEM = f"holds neither {SINGLE} nor {INDEX}"
THERE = {
    "nothing": ([], NONE_OF_THEM),
    "an adapter": (["adapter_config.json", "adapter_model.safetensors"], "an adapter .*merge it into its base model"),
    "shards": ([ONE, TWO], rf"2 shards \({ONE} \.\.\.\) and no index.*or write it once:\n  cd .*python -c"),
    "some of the shards": (
        ["model-00002-of-00003.safetensors"],
        r"1 of 3 shards .* and no index .*: download the missing shards and the index",
    ),
    "Mistral's": (["consolidated.safetensors"], rf"{NONE_OF_THEM}, but consolidated\.safetensors, in the format of"),
    "Mistral's in shards": (
        ["consolidated-00001-of-00002.safetensors", "consolidated-00002-of-00002.safetensors"],
        r"but consolidated-00001-of-00002\.safetensors, in the format of",
    ),
    "Meta's": (["consolidated.00.pth", "params.json"], r"but consolidated\.00\.pth, in the format of"),
    "Meta's in a folder": (["original/consolidated.00.pth"], r"but original/consolidated\.00\.pth, in the format of"),
    "gpt-oss' own": ([f"original/{SINGLE}"], rf"but original/{SINGLE}, in the format of"),
    "a variant": (["model.fp16.safetensors"], rf"but model\.fp16\.safetensors, .*ln -s model.fp16.saf.*/{SINGLE}"),
    "a checkpoint inside": ([f"checkpoint-5/{SINGLE}"], "its folder checkpoint-5 does: set model.path to that folder"),
    "GGUF": (["small.gguf"], "a directory of GGUF files; set model.path=.*small.gguf"),
}  # fmt: skip


@pytest.mark.parametrize("name", THERE)
def test_a_directory_without_weights_that_can_be_read_says_what_is_there(name: str, tmp_path: Path) -> None:
    files, said = THERE[name]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=said) as error:
        open_checkpoint(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}: ")


def test_pickled_weights_are_refused_with_a_warning_before_the_command_that_converts_them(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(
        CheckpointError, match=r"(?s)pytorch_model\.bin.*run code.*only if you trust.*python -c .*save_pretrained"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.slow("runtime/test_weight_files.py::test_those_files_are_read_that_transformers_reads")
def test_the_command_that_writes_an_index_does(reference: Callable[[str], Reference], tmp_path: Path) -> None:
    directory = tmp_path / "it's a model"
    directory.mkdir()
    tensors = tensors_in(reference("llama").directory)
    save_shards(directory, *halves(tensors))
    (directory / INDEX).unlink()
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(directory)
    command = str(error.value).partition("\n")[2].strip().replace("python ", f"{sys.executable} ")
    subprocess.run(command, shell=True, check=True, timeout=60)
    assert open_checkpoint(directory).tensors.keys() == tensors.keys()
