"""A checkpoint directory is opened whole, or refused with the file and the disagreement."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.errors import CheckpointError
from runtime.store.checkpoint import INDEX, SINGLE, open_checkpoint

WEIGHT_MAP = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"a": torch.ones(3)}, directory / "one.safetensors")
    save_file({"b": torch.ones(2000), "c": torch.zeros(3000)}, directory / "two.safetensors")
    set_index(directory, WEIGHT_MAP)
    return directory


def set_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_and_single_files_open(sharded: Path, tmp_path: Path) -> None:
    found = open_checkpoint(sharded)
    assert {name: Path(piece.file).name for name, piece in found.tensors.items()} == WEIGHT_MAP
    assert found.files == [str(sharded / "one.safetensors"), str(sharded / "two.safetensors")]
    save_file({"a": torch.ones(3)}, tmp_path / SINGLE)
    assert list(open_checkpoint(tmp_path).tensors) == ["a"]


DISAGREEMENTS = {
    "missing shard": (WEIGHT_MAP | {"d": "three.safetensors"}, r"three\.safetensors: missing"),
    "missing tensor": (WEIGHT_MAP | {"d": "one.safetensors"}, r"one\.safetensors lacks 'd'"),
    "tensor too many": ({"a": "one.safetensors", "b": "two.safetensors"}, r"two\.safetensors holds 'c'"),
    "tensor elsewhere": (WEIGHT_MAP | {"c": "one.safetensors"}, r"one\.safetensors lacks 'c'"),
    "traversal": (WEIGHT_MAP | {"d": "../secret.safetensors"}, "only plain file names"),
    "absolute path": (WEIGHT_MAP | {"d": "/etc/passwd"}, "only plain file names"),
    "parent": (WEIGHT_MAP | {"d": ".."}, "cannot be read"),
    "empty name": (WEIGHT_MAP | {"d": ""}, "cannot be read"),
    "no map": ([], "not a safetensors index"),
    "no file name": (WEIGHT_MAP | {"d": None}, "not a safetensors index: 'd' lies in None"),
    "NUL": (WEIGHT_MAP | {"d": "one\0"}, "only plain file names"),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_an_index_that_disagrees_is_refused(name: str, sharded: Path) -> None:
    weight_map, message = DISAGREEMENTS[name]
    set_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(sharded)
    assert str(sharded) in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '"x"', "[" * 100_000, '{"weight_map": '])
def test_a_broken_index_is_named(text: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{INDEX}: (not|must hold|nested)"):
        open_checkpoint(sharded)


def test_pickled_weights_are_refused_with_a_warning_before_the_command_that_converts_them(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(
        CheckpointError, match=r"(?s)pytorch_model\.bin.*run code.*only if you trust.*python -c .*save_pretrained"
    ):
        open_checkpoint(tmp_path)


def test_an_adapter_alone_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"lora_A": torch.ones(3)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"an adapter .*merge it into its base model"):
        open_checkpoint(tmp_path)


def test_an_empty_directory_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"holds neither {SINGLE} nor {INDEX}"):
        open_checkpoint(tmp_path)


def test_the_fingerprint_follows_the_content_and_not_the_place(sharded: Path, tmp_path: Path) -> None:
    before = open_checkpoint(sharded).fingerprint()
    elsewhere = Path(shutil.copytree(sharded, tmp_path / "copy"))
    assert open_checkpoint(elsewhere).fingerprint() == before
    with (elsewhere / "two.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert open_checkpoint(elsewhere).fingerprint() != before
