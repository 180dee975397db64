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


MISMATCHES = {
    "missing shard": (WEIGHT_MAP | {"d": "three.safetensors"}, r"three\.safetensors: missing"),
    "missing tensor": (WEIGHT_MAP | {"d": "one.safetensors"}, r"one\.safetensors lacks 'd'"),
    "tensor elsewhere": (WEIGHT_MAP | {"c": "one.safetensors"}, r"one\.safetensors lacks 'c'"),
    "traversal": (WEIGHT_MAP | {"d": "../secret.safetensors"}, "only plain file names"),
    "absolute path": (WEIGHT_MAP | {"d": "/etc/passwd"}, "only plain file names"),
    "parent": (WEIGHT_MAP | {"d": ".."}, "cannot be read"),
    "empty name": (WEIGHT_MAP | {"d": ""}, "cannot be read"),
    "no map": ([], "not a safetensors index"),
    "no file name": (WEIGHT_MAP | {"d": None}, r"weight_map\['d'\] is None"),
    "NUL": (WEIGHT_MAP | {"d": "one\0"}, "only plain file names"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_an_index_that_disagrees_is_refused(name: str, sharded: Path) -> None:
    weight_map, message = MISMATCHES[name]
    set_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(sharded)
    assert str(sharded) in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '"x"', "[" * 100_000, '{"weight_map": '])
def test_a_broken_index_is_named(text: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{INDEX}: (not|must hold|nested)"):
        open_checkpoint(sharded)


def test_a_tensor_that_the_index_does_not_list_is_one_more(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    set_index(sharded, {"a": "one.safetensors", "b": "two.safetensors"})
    assert sorted(open_checkpoint(sharded).tensors) == ["a", "b", "c"]
    assert not caplog.records


@pytest.mark.parametrize("chosen", ["one.safetensors", "two.safetensors"])
def test_of_two_tensors_of_one_name_the_index_says_which_is_read(
    chosen: str, sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({"a": torch.ones(3), "c": torch.ones(3000)}, sharded / "one.safetensors")
    set_index(sharded, WEIGHT_MAP | {"c": chosen})
    found = open_checkpoint(sharded)
    assert found.tensors["c"].file == str(sharded / chosen)
    (other,) = {"one.safetensors", "two.safetensors"} - {chosen}
    assert f"'c' is also in {other}; read from {chosen}, as {INDEX} says" in caplog.text
    set_index(sharded, WEIGHT_MAP | {"c": other})
    assert open_checkpoint(sharded).fingerprint() != found.fingerprint(), "no byte of a shard tells which is read"


def test_of_two_that_the_index_does_not_list_the_last_is_read(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"a": torch.ones(3), "c": torch.ones(3000)}, sharded / "one.safetensors")
    set_index(sharded, {"a": "one.safetensors", "b": "two.safetensors"})
    assert open_checkpoint(sharded).tensors["c"].file == str(sharded / "two.safetensors")
    assert "'c' is also in one.safetensors; read from two.safetensors, the last" in caplog.text


def test_the_fingerprint_of_a_shard_takes_its_header_and_samples_alone(tmp_path: Path) -> None:
    """However far from the header the first tensor lies that is read."""
    wide = torch.zeros(1 << 20)
    save_file({"a": wide, "b": torch.ones(3)}, tmp_path / "one.safetensors")
    save_file({"a": wide}, tmp_path / "two.safetensors")
    set_index(tmp_path, {"a": "two.safetensors", "b": "one.safetensors"})
    before = open_checkpoint(tmp_path).fingerprint()
    with (tmp_path / "one.safetensors").open("r+b") as file:
        file.seek(1 << 18)  # between two samples
        file.write(b"\x01" * 64)
    assert open_checkpoint(tmp_path).fingerprint() == before


def test_the_fingerprint_follows_the_content_and_not_the_place(sharded: Path, tmp_path: Path) -> None:
    before = open_checkpoint(sharded).fingerprint()
    elsewhere = Path(shutil.copytree(sharded, tmp_path / "copy"))
    assert open_checkpoint(elsewhere).fingerprint() == before
    with (elsewhere / "two.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert open_checkpoint(elsewhere).fingerprint() != before
