"""A header is believed only where it agrees with its file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime.errors import CheckpointError
from runtime.store.header import read_header

SOUND = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def write(path: Path, header: object, data: bytes = bytes(24), *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(**changes: object) -> dict[str, object]:
    return {"a": SOUND["a"] | changes}


def test_it_says_where_safetensors_own_tensors_lie(tmp_path: Path) -> None:
    tensors = {
        "x": torch.arange(6, dtype=torch.float32).view(2, 3),
        "y": torch.tensor([1, 2], dtype=torch.int64),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0, dtype=torch.float16),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    found, raw = read_header(path), path.read_bytes()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        piece = found[name]
        assert piece.shape == tuple(tensor.shape)
        stored = raw[piece.offset : piece.offset + piece.num_bytes]
        assert stored == bytes(tensor.reshape(-1).view(torch.uint8).tolist())


BROKEN: dict[str, tuple[object, bytes, int | None, str]] = {
    "truncated data": (SOUND, bytes(23), None, r"describes .*truncated"),
    "trailing bytes": (SOUND, bytes(25), None, r"trailing bytes"),
    "overlong header": (SOUND, bytes(24), 10**6, r"header claims 977 KiB but the file has \d+ B"),
    "absurd header": (SOUND, bytes(24), 2**63, r"header claims .*not a safetensors file"),
    "not JSON": (b"{'a': 1}", bytes(24), None, "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', bytes(24), None, "not valid JSON"),
    "deep JSON": (b"[" * 100_000, b"", None, "not valid JSON"),
    "a list": ([], b"", None, "not a JSON object"),
    "duplicate name": (b'{"a": {}, "a": {}}', b"", None, "the same key twice"),
    "duplicate field": (b'{"a": {"dtype": "F32", "dtype": "F16"}}', b"", None, "the same key twice"),
    "entry is no object": ({"a": 3}, bytes(24), None, "tensor 'a' has a malformed header entry: 3"),
    "no dtype": ({"a": {"shape": [], "data_offsets": [0, 4]}}, bytes(24), None, "tensor 'a' has a malformed"),
    "unknown dtype": (entry(dtype="F4"), bytes(24), None, "tensor 'a' has a malformed"),
    "unhashable dtype": (entry(dtype=["F32"]), bytes(24), None, "tensor 'a' has a malformed"),
    "three offsets": (entry(data_offsets=[0, 1, 2]), bytes(24), None, "tensor 'a' has a malformed"),
    "offsets backwards": (entry(data_offsets=[24, 0]), bytes(24), None, "does not fill its bytes 24..0"),
    "offset below zero": (entry(data_offsets=[-24, 0]), bytes(24), None, "does not fill its bytes -24..0"),
    "offsets too wide": (entry(data_offsets=[0, 28]), bytes(28), None, r"F32 \(2, 3\) does not fill its bytes 0..28"),
    "negative sizes": (entry(shape=[-2, -3]), bytes(24), None, "does not fill"),
    "fractional shape": (entry(shape=[2.0, 3]), bytes(24), None, "tensor 'a' has a malformed"),
    "fractional offsets": (entry(data_offsets=[0.0, 24.0]), bytes(24), None, "tensor 'a' has a malformed"),
    "shape of strings": (entry(shape=["2", "3"]), bytes(24), None, "tensor 'a' has a malformed"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_named_with_the_file(name: str, tmp_path: Path) -> None:
    header, data, length, message = BROKEN[name]
    path = write(tmp_path / "bad.safetensors", header, data, length=length)
    with pytest.raises(CheckpointError, match=message) as error:
        read_header(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 20])
def test_a_file_cut_inside_its_header_is_refused(size: int, tmp_path: Path) -> None:
    path = write(tmp_path / "cut.safetensors", SOUND)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"header|JSON"):
        read_header(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="cannot be read") as error:
            read_header(path)
        assert str(path) in str(error.value)
