"""A GGUF header is believed only where it agrees with its file."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from runtime.errors import CheckpointError
from runtime.store.gguf import quick_gguf_package, read_gguf

ARRAYS: dict[str, np.ndarray] = {
    "token_embd.weight": np.arange(64 * 3, dtype=np.float32).reshape(3, 64),
    "norm.weight": np.arange(7, dtype=np.float16),
    "some.weight": np.arange(3, dtype=np.float32),
    "experts.weight": np.arange(2 * 3 * 32, dtype=np.float32).reshape(2, 3, 32),
}


def write(path: Path, **more: object) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 5)
    writer.add_float32("llama.eps", 0.5)
    writer.add_bool("llama.flag", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "déjà"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    for name, value in more.items():
        writer.add_uint32(name.replace("__", "."), int(str(value)))
    for name, array in ARRAYS.items():
        writer.add_tensor(name, array)
    quantised = gguf.quants.quantize(ARRAYS["token_embd.weight"], gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("q.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_says_where_tensors_lie_and_how_long_arrays_are(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf")
    header, raw = read_gguf(path), path.read_bytes()
    expected = {
        "general.architecture": "llama", "llama.block_count": 5, "llama.eps": 0.5, "llama.flag": True,
        "tokenizer.ggml.tokens": 3, "tokenizer.ggml.scores": 2,
    }  # fmt: skip
    assert header.metadata == expected
    assert header.architecture == "llama"
    for name, array in ARRAYS.items():
        piece = header.tensors[name]
        assert piece.shape == array.shape
        assert piece.dtype == {"float32": "F32", "float16": "F16"}[array.dtype.name]
        assert raw[piece.offset : piece.offset + piece.num_bytes] == array.tobytes()
    quantised = header.tensors["q.weight"]
    assert (quantised.dtype, quantised.shape, quantised.num_bytes) == ("Q4_0", (3, 64), 3 * 2 * 18)


def test_another_alignment_is_kept(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("a", ARRAYS["norm.weight"])
    writer.add_tensor("b", ARRAYS["norm.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    pieces = read_gguf(tmp_path / "x.gguf").tensors
    assert [piece.offset % 256 for piece in pieces.values()] == [0, 0]
    assert pieces["b"].offset - pieces["a"].offset == 256


def test_a_part_of_several_says_how_to_join_them(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"one of 3 parts.*llama-gguf-split --merge"):
        read_gguf(write(tmp_path / "x.gguf", split__count=3))


DAMAGE = {
    "empty": (lambda raw: b"", "not a GGUF file"),
    "other magic": (lambda raw: b"GGML" + raw[4:], "begins with b'GGML'"),
    "version 1": (lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:], "GGUF version 1;"),
    "big-endian": (lambda raw: raw[:4] + struct.pack(">I", 3) + raw[8:], "little-endian"),
    "header cut off": (lambda raw: raw[:100], "truncated"),
    "data cut off": (lambda raw: raw[:-200], r"bytes on disk but its header describes .*truncated"),
    "too many tensors": (lambda raw: raw[:8] + struct.pack("<Q", 2**63) + raw[16:], "x.gguf"),
    "too much metadata": (lambda raw: raw[:16] + struct.pack("<Q", 2**63) + raw[24:], "x.gguf"),
    "endless string": (lambda raw: raw[:24] + struct.pack("<Q", 2**62) + raw[32:], "a string of"),
    "two of a name": (lambda raw: raw.replace(b"some.weight", b"norm.weight"), "holds the tensor 'norm.weight' twice"),
    "unknown type": (lambda raw: raw.replace(struct.pack("<QQI", 64, 3, 0), struct.pack("<QQI", 64, 3, 99), 1),
        "'token_embd.weight' has unsupported ggml type 99"),
    "no whole blocks": (lambda raw: raw.replace(struct.pack("<QQI", 64, 3, 2), struct.pack("<QQI", 63, 3, 2), 1),
        r"'q.weight' of shape \(3, 63\): rows are not whole Q4_0 blocks of 32"),
}  # fmt: skip


NORM, SOME = struct.pack("<QIQ", 7, 1, 768), struct.pack("<QIQ", 3, 0, 800)  # shape, type and offset of two tensors
ALIGNMENT = b"general.alignment"
UNTIDY = {
    "overlap": (NORM, struct.pack("<QIQ", 7, 1, 736), {}, r"'norm.weight' at 736 shares bytes with .*ends at 768"),
    "unaligned": (SOME, struct.pack("<QIQ", 3, 0, 799), {}, "'some.weight' at 799 does not directly follow"),
    "a hole": (SOME, struct.pack("<QIQ", 3, 0, 832), {}, "does not directly follow|shares bytes"),
    "no alignment": (b"", b"", {"general__alignment": 0}, "general.alignment must be a power of two .*, got 0"),
    "odd alignment": (b"", b"", {"general__alignment": 24}, "general.alignment must be a power of two .*, got 24"),
    "huge alignment": (b"", b"", {"general__alignment": 2**31}, "general.alignment must be a power of two"),
}


@pytest.mark.parametrize("name", UNTIDY)
def test_tensors_lie_one_behind_the_other(name: str, tmp_path: Path) -> None:
    was, now, more, message = UNTIDY[name]
    path = write(tmp_path / "x.gguf", **more)
    assert path.read_bytes().count(was) == 1 or not was
    path.write_bytes(path.read_bytes().replace(was, now, 1))
    with pytest.raises(CheckpointError, match=message):
        read_gguf(path)


def test_texts_without_end_are_not_counted_out(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf")
    array = struct.pack("<IQ", 8, 3)
    path.write_bytes(path.read_bytes().replace(array, struct.pack("<IQ", 8, 2**40), 1))
    with pytest.raises(CheckpointError, match=r"claims 1,099,511,627,776 strings in arrays; limit: 2,097,152"):
        read_gguf(path)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, message = DAMAGE[name]
    path = write(tmp_path / "x.gguf")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=message) as error:
        read_gguf(path)
    assert str(path) in str(error.value)


def test_a_name_without_end_is_not_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf")
    path.write_bytes(path.read_bytes().replace(struct.pack("<Q", 11) + b"norm.weight", struct.pack("<Q", 300), 1))
    with pytest.raises(CheckpointError, match=r"a name of 300 bytes at [\d,]+; limit: 256"):
        read_gguf(path)


def test_the_package_reads_the_same_quickly(tmp_path: Path) -> None:
    """Fields of all types, arrays of all types among them."""
    writer = gguf.GGUFWriter(path := tmp_path / "m.gguf", "llama")
    writer.add_array("own.strings", ["a", "", "déjà", "x" * 300])
    writer.add_array("own.flags", [True, False, True])
    for kind in ("UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "UINT64", "INT64", "FLOAT32", "FLOAT64"):
        writer.add_key_value(f"own.{kind}", [1, 0, 3], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType[kind])
    writer.add_tensor("norm.weight", ARRAYS["norm.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    usual = gguf.GGUFReader(path)
    with quick_gguf_package():
        quick = gguf.GGUFReader(path)
    assert type(quick) is not type(usual)
    assert list(quick.fields) == list(usual.fields)
    for name, field in usual.fields.items():
        assert (quick.fields[name].contents(), quick.fields[name].types) == (field.contents(), field.types), name
    assert [tensor.data.tolist() for tensor in quick.tensors] == [tensor.data.tolist() for tensor in usual.tensors]
