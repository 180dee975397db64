"""Reads and validates the header of an untrusted GGUF file: metadata, and the offset of each tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Versions 2 and 3, little-endian.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError
from ..plan.shape.shapes import TensorSlice
from ..units import round_up
from .json_object import require_regular
from .read_errors import read_error

MAGIC, VERSIONS = b"GGUF", (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
MAX_NAME_BYTES = 256  # of a metadata key or a tensor; the format allows 64 for tensors
# Limits per header: metadata entries; tensors; strings in all arrays together.
MAX_ENTRIES, MAX_TENSORS, MAX_STRINGS = 1 << 16, 1 << 17, 1 << 21
# Metadata types by number; scalars with the format letter of `struct`.
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
LENGTH = struct.Struct("<Q")  # of a string
ARRAY_HEAD = struct.Struct("<IQ")  # type and number of its elements
Value = int | float | bool | str


class GgufBlock(NamedTuple):
    """The unit of a tensor's data: `num_numbers` neighboring numbers of a row, stored in `num_bytes`."""

    num_numbers: int
    num_bytes: int


# Names and blocks of ggml's types, by type number.
TYPES: Mapping[int, tuple[str, GgufBlock]] = {
    0: ("F32", GgufBlock(1, 4)), 1: ("F16", GgufBlock(1, 2)), 30: ("BF16", GgufBlock(1, 2)),
    28: ("F64", GgufBlock(1, 8)), 24: ("I8", GgufBlock(1, 1)), 25: ("I16", GgufBlock(1, 2)),
    26: ("I32", GgufBlock(1, 4)), 27: ("I64", GgufBlock(1, 8)), 2: ("Q4_0", GgufBlock(32, 18)),
    3: ("Q4_1", GgufBlock(32, 20)), 6: ("Q5_0", GgufBlock(32, 22)), 7: ("Q5_1", GgufBlock(32, 24)),
    8: ("Q8_0", GgufBlock(32, 34)), 10: ("Q2_K", GgufBlock(256, 84)), 11: ("Q3_K", GgufBlock(256, 110)),
    12: ("Q4_K", GgufBlock(256, 144)), 13: ("Q5_K", GgufBlock(256, 176)), 14: ("Q6_K", GgufBlock(256, 210)),
    16: ("IQ2_XXS", GgufBlock(256, 66)), 17: ("IQ2_XS", GgufBlock(256, 74)), 18: ("IQ3_XXS", GgufBlock(256, 98)),
    19: ("IQ1_S", GgufBlock(256, 50)), 20: ("IQ4_NL", GgufBlock(32, 18)), 21: ("IQ3_S", GgufBlock(256, 110)),
    22: ("IQ2_S", GgufBlock(256, 82)), 23: ("IQ4_XS", GgufBlock(256, 136)), 29: ("IQ1_M", GgufBlock(256, 56)),
    34: ("TQ1_0", GgufBlock(256, 54)), 35: ("TQ2_0", GgufBlock(256, 66)), 39: ("MXFP4", GgufBlock(32, 17)),
}  # fmt: skip
BLOCKS: Mapping[str, GgufBlock] = dict(TYPES.values())  # by type name


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """A parsed header."""

    tensors: Mapping[str, TensorSlice]
    metadata: Mapping[str, Value]  # an array is replaced by its length

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))


def read_gguf(path: Path) -> GgufHeader:
    """Reads the header of a GGUF file. Raises CheckpointError or StorageError."""
    try:
        require_regular(path)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header()
    except OSError as error:
        raise read_error(path, "reading its header", error) from error
    except (struct.error, ValueError, OverflowError) as error:  # such as: end of file, invalid UTF-8, empty file
        raise CheckpointError(f"{path}: truncated, or not a GGUF file: {error}") from error


class _Parser:
    """Parses the header of one memory-mapped file. Methods read at offset `_at` and advance it."""

    def __init__(self, path: Path, data: mmap.mmap):
        self._path, self._data, self._at, self._num_strings = path, data, 0, 0

    def header(self) -> GgufHeader:
        """Parses the whole header; may be called once."""
        if self._data[:4] != MAGIC:
            raise CheckpointError(f"{self._path}: not a GGUF file: begins with {self._data[:4]!r}")
        self._at = 4
        version = self._number("I")
        if version not in VERSIONS:
            raise CheckpointError(f"{self._path}: GGUF version {version}; supported: 2 and 3, little-endian")
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        if num_tensors > MAX_TENSORS or num_entries > MAX_ENTRIES:
            raise CheckpointError(
                f"{self._path}: claims {num_tensors:,} tensors and {num_entries:,} metadata entries; limits: "
                f"{MAX_TENSORS:,} and {MAX_ENTRIES:,}"
            )
        metadata: dict[str, Value] = {}
        for _ in range(num_entries):
            key = self._string(MAX_NAME_BYTES)
            if key in metadata:
                raise CheckpointError(f"{self._path}: holds the metadata key {key!r} twice")
            kind = self._number("I")
            if kind not in (STRING, ARRAY, *SCALARS):
                raise CheckpointError(f"{self._path}: metadata key {key!r} has unknown type {kind}")
            if kind in SCALARS:
                metadata[key] = self._scalar(SCALARS[kind])
            else:
                metadata[key] = self._string() if kind == STRING else self._skip_array()
        if int(metadata.get("split.count", 1)) > 1:
            raise CheckpointError(
                f"{self._path}: one of {metadata['split.count']} parts; merge them once: "
                f"llama-gguf-split --merge {self._path} WHOLE.gguf"
            )
        return GgufHeader(tensors=self._tensors(num_tensors, metadata), metadata=metadata)

    def _tensors(self, num_tensors: int, metadata: Mapping[str, Value]) -> dict[str, TensorSlice]:
        """Parses all tensor entries, and checks that their bytes are in the file and do not overlap."""
        entries: dict[str, TensorSlice] = {}
        for _ in range(num_tensors):
            entry = self._tensor()
            if entry.name in entries:
                raise CheckpointError(f"{self._path}: holds the tensor {entry.name!r} twice")
            entries[entry.name] = entry
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self._path}: general.alignment must be a power of two from 8 to {MAX_ALIGNMENT:,}, "
                f"got {alignment!r:.40}"
            )
        # Each tensor must begin at the end of the previous one, rounded up: no byte is shared or unused.
        end, previous = 0, "the header"
        for tensor in sorted(entries.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
            if tensor.offset != round_up(end, alignment):
                problem = "shares bytes with" if tensor.offset < end else "does not directly follow"
                raise CheckpointError(
                    f"{self._path}: tensor {tensor.name!r} at {tensor.offset:,} {problem} {previous}, which ends at "
                    f"{end:,} (general.alignment={alignment})"
                )
            end, previous = tensor.offset + tensor.num_bytes, f"tensor {tensor.name!r}"
        start = round_up(self._at, alignment)
        tensors = {name: replace(entry, offset=start + entry.offset) for name, entry in entries.items()}
        needed = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=0)
        if needed > len(self._data):
            raise CheckpointError(
                f"{self._path}: {len(self._data):,} bytes on disk but its header describes {needed:,}: truncated; "
                "download the file again"
            )
        return tensors

    def _tensor(self) -> TensorSlice:
        """Parses one tensor entry. Its offset is relative to the start of the data."""
        name, num_dimensions = self._string(MAX_NAME_BYTES), self._number("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} claims {num_dimensions} dimensions; at most {MAX_DIMENSIONS}"
            )
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]  # the file lists the number of rows last
        kind, offset = self._number("I"), self._number("Q")
        if kind not in TYPES:
            raise CheckpointError(f"{self._path}: tensor {name!r} has unsupported ggml type {kind}")
        dtype, block = TYPES[kind]
        if not shape or shape[-1] % block.num_numbers:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} of shape {shape}: rows are not whole {dtype} blocks of "
                f"{block.num_numbers}"
            )
        num_bytes = prod(shape) // block.num_numbers * block.num_bytes
        return TensorSlice(
            name=name,
            file=str(self._path),
            offset=offset,
            num_bytes=num_bytes,
            dtype=dtype,
            shape=shape,
            format=dtype if block.num_numbers > 1 else "",
        )

    def _skip_array(self) -> int:
        """Advances to the end of an array. Returns its length."""
        kind, length = self._number("I"), self._number("Q")
        if kind in SCALARS:
            self._at += length * struct.calcsize(SCALARS[kind])
        elif kind == STRING:
            self._num_strings += length
            if self._num_strings > MAX_STRINGS:
                raise CheckpointError(
                    f"{self._path}: claims {self._num_strings:,} strings in arrays; limit: {MAX_STRINGS:,}"
                )
            position, data = self._at, self._data
            for _ in range(length):  # up to a million strings: no call of a method for each
                position += 8 + LENGTH.unpack_from(data, position)[0]
            self._at = position
        else:
            raise CheckpointError(f"{self._path}: metadata holds an array of unsupported type {kind}")
        return length

    def _scalar(self, letter: str) -> int | float | bool:
        """Reads a number. `letter`: its format in `struct`."""
        (value,) = struct.unpack_from(f"<{letter}", self._data, self._at)
        self._at += struct.calcsize(letter)
        return value

    def _number(self, letter: str) -> int:
        return int(self._scalar(letter))

    def _string(self, max_bytes: int | None = None) -> str:
        length = self._number("Q")
        if max_bytes is not None and max_bytes < length <= len(self._data):
            raise CheckpointError(f"{self._path}: a name of {length:,} bytes at {self._at:,}; limit: {max_bytes}")
        if self._at + length > len(self._data):
            raise CheckpointError(f"{self._path}: truncated: a string of {length:,} bytes at {self._at:,}")
        self._at += length
        return self._data[self._at - length : self._at].decode()


@contextmanager
def quick_gguf_package() -> Iterator[None]:
    """Context manager: the `gguf` package, which transformers calls, reads a vocabulary in a tenth of the time, and
    makes a model's table of tensor names once instead of once per module."""
    import gguf  # an optional dependency

    reader, make_names = gguf.GGUFReader, gguf.get_tensor_name_map

    class PlainReader(reader):
        """Slices a plain array, as slicing a memory map costs several times as much."""

        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._data = np.asarray(mapped)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            """Parses an array at once. The package makes several arrays for each of its elements."""
            kind, data = gguf.GGUFValueType(raw_type), self._data.data
            if kind != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            item, length = ARRAY_HEAD.unpack_from(data, orig_offs)
            begin = at = orig_offs + ARRAY_HEAD.size
            if item == STRING:
                parts = list[Any]()
                for _ in range(length):
                    (size,) = LENGTH.unpack_from(data, at)
                    parts.append(self._data[at + LENGTH.size : (at := at + LENGTH.size + size)])
            elif item in SCALARS:
                numbers = np.frombuffer(data, f"<{SCALARS[item]}", length, at)
                parts, at = [*numbers[:, None]], at + numbers.nbytes
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            types = [kind, gguf.GGUFValueType(item)] if length else [kind]
            return at - orig_offs, [self._data[orig_offs:begin], *parts], [*range(1, 1 + len(parts))], types

    gguf.GGUFReader, gguf.get_tensor_name_map = PlainReader, cache(make_names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, make_names
