"""A header is believed only where it agrees with its file."""

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

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
    "offsets backwards": (entry(data_offsets=[24, 0]), bytes(24), None, "does not match its bytes 24..0"),
    "offset below zero": (entry(data_offsets=[-24, 0]), bytes(24), None, "does not match its bytes -24..0"),
    "offsets too wide": (entry(data_offsets=[0, 28]), bytes(28), None, r"F32 \(2, 3\) does not match its bytes 0..28"),
    "negative sizes": (entry(shape=[-2, -3]), bytes(24), None, "does not match"),
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


def second(begin: int, end: int) -> dict[str, object]:
    return {"b": {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}} | SOUND


UNTIDY = {
    "overlap": (second(16, 32), bytes(32), r"tensor 'b' shares bytes with tensor 'a'"),
    "the same bytes": (second(0, 24), bytes(24), "shares bytes with"),
    "one inside another": (second(4, 12), bytes(24), "tensor 'b' shares bytes with tensor 'a'"),
    "a hole": (second(32, 40), bytes(40), "tensor 'b' leaves a gap after tensor 'a'"),
    "a hole at the front": ({"a": SOUND["a"] | {"data_offsets": [8, 32]}}, bytes(32), "a gap after the header"),
    "numbers in the metadata": (
        {"__metadata__": {"a": 3}} | SOUND,
        bytes(24),
        "must be an object of strings",
    ),
    "metadata is no object": ({"__metadata__": 3} | SOUND, bytes(24), "must be an object of strings"),
}


@pytest.mark.parametrize("name", UNTIDY)
def test_it_is_as_strict_as_the_library_of_the_format(name: str, tmp_path: Path) -> None:
    header, data, message = UNTIDY[name]
    path = write(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(SafetensorError):
        load_file(path)
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


def test_many_dimensions_take_no_time(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.safetensors", entry(shape=[10**9] * 200_000))
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=r"tensor 'a' claims 200,000 dimensions; limit: 64$"):
        read_header(path)
    assert time.monotonic() - started < 5


def test_a_long_value_is_cut_in_the_message(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.safetensors", entry(dtype="F" * 10_000))
    with pytest.raises(CheckpointError) as error:
        read_header(path)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("size", [0, 1, 7, 8, 20])
def test_a_file_cut_inside_its_header_is_refused(size: int, tmp_path: Path) -> None:
    path = write(tmp_path / "cut.safetensors", SOUND)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"header|JSON"):
        read_header(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match=r"cannot be read|reading its header failed") as error:
            read_header(path)
        assert str(path) in str(error.value)
