"""Packs one shard (a safetensors file): a few rows at a time, compared with the original before the file appears.

Letters of shapes: codes are (R, B) for R rows of B bytes, scales (R, G) for G groups of columns, words (N, K) for a
matrix of 16-bit words. An escape is a number that is stored separately, because its exponent has no code.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from runtime.errors import CheckpointError
from runtime.formats.kinds.rounded import Rounding, Squares
from runtime.formats.kinds.window4 import (
    ESCAPES,
    MAX_ESCAPES,
    Window4,
    pack_chunks,
    packed_columns,
    skip_reason,
    stack_escapes,
)
from runtime.formats.module_tensors import METHOD, part_name
from runtime.formats.registry import FORMATS, pair_companions
from runtime.formats.scaled_rows import SCALES
from runtime.formats.storage_format import StoredMatrix
from runtime.linear.packed_rows import ROUNDED_ENCODINGS
from runtime.linear.window4_rows import WINDOW4
from runtime.plan.shape.shapes import Stripes, TensorSlice
from runtime.store.checkpoint import read_bytes
from runtime.store.file_digests import METADATA, PIECE_BYTES, crc32_sums, read_packing_record
from runtime.store.header import read_header
from runtime.store.writer import atomic_write
from runtime.units import round_up
from runtime.weights.stage_weights import TORCH_DTYPES

from .striping import StripeWriter, write_stripes

PAGE_BYTES, COPY_BYTES = 4096, 16 << 20
PANEL_NUMBERS = 4 << 20  # numbers that are decoded at a time
MAX_ENTRY_BYTES = 640  # of a tensor in the header, without its names, shape and checksums


def map_numbers(tensor: TensorSlice) -> torch.Tensor:
    """Returns the tensor as a memory-mapped view of its file."""
    return torch.from_numpy(map_bytes(tensor)).view(TORCH_DTYPES[tensor.dtype]).view(tensor.shape)


def map_bytes(piece: TensorSlice) -> np.ndarray:
    """Returns the bytes of a tensor as a memory-mapped view of its file; those of a divided file in memory. Do not
    write to it."""
    if not piece.num_bytes:
        return np.zeros(0, np.uint8)
    if piece.stripes is not None:
        return np.frombuffer(bytearray(read_bytes(piece)), np.uint8)
    return np.memmap(piece.file, np.uint8, "c", piece.offset, (piece.num_bytes,))  # "c": torch needs writable memory


@dataclass(frozen=True, kw_only=True)
class PackedTensor:
    """The bytes of a tensor before and after packing. `raw_reason`: why it was copied unchanged; None if it was not.
    `squares`: of a rounded tensor, the sum of squared errors and the sum of squared numbers."""

    name: str
    num_bytes: int
    packed_bytes: int
    raw_reason: str | None
    squares: Squares | None = None


class _Shard:
    """Writes a packed shard. The first `header_bytes` are reserved for the header, which is written last. `entries`:
    the tensors of the header. `record`: digests and more of the original tensors, for the metadata."""

    def __init__(
        self,
        file: BinaryIO | StripeWriter,
        header_bytes: int,
        rounding: Rounding | None,
        progress: Callable[[int], None],
    ):
        self._file, self._begin, self._rounding, self._progress = file, header_bytes, rounding, progress
        self.entries: dict[str, object] = {}
        self.record: dict[str, object] = {}
        file.seek(header_bytes)

    def add(self, tensor: TensorSlice) -> PackedTensor:
        """Writes a tensor rounded if possible, else packed losslessly, or unchanged if that saves no bytes."""
        # Each attempt writes to the file. If it fails, its bytes are discarded before the next attempt.
        data, begin = map_bytes(tensor), self._file.tell()
        squares, reason = self._round(tensor), None
        if squares is None:
            self._rewind(begin)
            reason = skip_reason(tensor.dtype, tensor.shape)
            if reason is None:
                reason = self._pack(tensor, data.view(np.uint16).reshape(tensor.shape))
        if reason is not None:
            self._rewind(begin)
            for first in range(0, tensor.num_bytes, COPY_BYTES):
                self._file.write(data[first : first + COPY_BYTES].data)
            self._add_entry(tensor.name, tensor.dtype, tensor.shape, begin)
        self.record[tensor.name] = {
            "sha256": hashlib.sha256(data.data).hexdigest(),
            **({"raw": reason} if reason else {}),
            **({"squares": squares} if squares else {}),
        }
        self._progress(tensor.num_bytes)
        num_bytes = self._file.tell() - begin
        return PackedTensor(
            name=tensor.name, num_bytes=tensor.num_bytes, packed_bytes=num_bytes, raw_reason=reason, squares=squares
        )

    def _rewind(self, begin: int) -> None:
        """Discards what was written from the offset `begin` on."""
        self._file.seek(begin)
        self._file.truncate()

    def _round(self, tensor: TensorSlice) -> Squares | None:
        """Writes the rounded tensor. Returns its sums of squares, as in `PackedTensor`. Returns None if it must not be
        rounded, or if a number cannot be; the caller must then discard the bytes written."""
        if self._rounding is None or self._rounding.skip_reason(tensor.name, tensor.dtype, tensor.shape) is not None:
            return None
        begin, scales, squared_error, squared_norm = self._file.tell(), list[bytes](), 0.0, 0.0
        numbers = map_numbers(tensor)
        for piece in self._rounding.round_rows(numbers.flatten(0, -2)):
            if piece is None:
                return None
            self._file.write(piece.codes_RB.numpy().data)
            scales.append(piece.scales_RG.view(torch.int16).numpy().tobytes())
            squared_error += piece.squared_error
            squared_norm += piece.squared_norm
        *rows, num_columns = tensor.shape
        codes_shape = (*rows, self._rounding.packed_columns(num_columns))
        self._add_entry(part_name(tensor.name, self._rounding.format), "U8", codes_shape, begin)
        begin = self._file.tell()
        self._file.write(b"".join(scales))
        scales_shape = (*rows, self._rounding.num_groups(num_columns))
        self._add_entry(part_name(tensor.name, SCALES), "BF16", scales_shape, begin)
        return squared_error, squared_norm

    def _pack(self, tensor: TensorSlice, words: np.ndarray) -> str | None:
        """Writes the losslessly packed tensor. If that saves no bytes, returns the reason; the caller must then discard
        the bytes written. `words`: the 16-bit words of a matrix, or of the matrices of experts."""
        begin, matrices, max_escapes = self._file.tell(), list[list[Window4]](), MAX_ESCAPES * words.size
        num_escapes = 0
        for matrix in words if words.ndim == 3 else words[None]:
            matrices.append([])
            for chunk in pack_chunks(matrix):
                self._file.write(chunk.body.data)
                matrices[-1].append(chunk.without_body())
                num_escapes += len(chunk.columns)
                if num_escapes > max_escapes:
                    return f"more than {MAX_ESCAPES:.1%} of its exponents are outside of a window of 15"
        escapes = stack_escapes(matrices)
        if escapes.nbytes > tensor.num_bytes // 8:
            return "its escapes would take more bytes than packing saves"
        escapes = escapes if words.ndim == 3 else escapes[0]
        shape = (*tensor.shape[:-1], packed_columns(tensor.shape[-1]))
        self._add_entry(part_name(tensor.name, WINDOW4), "U8", shape, begin)
        begin = self._file.tell()
        self._file.write(escapes.data)
        self._add_entry(part_name(tensor.name, ESCAPES), "I32", escapes.shape, begin)
        return None

    def _add_entry(self, name: str, dtype: str, shape: tuple[int, ...], begin: int) -> None:
        offsets = [begin - self._begin, self._file.tell() - self._begin]
        self.entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}

    def finish(self, stamp: str) -> None:
        """Writes the header into its reserved space."""
        self._file.flush()  # crc32_sums opens the file by name
        sums = crc32_sums(Path(self._file.name), self._begin, stripes_of(self._file))
        record = {"source": stamp, "crc32": sums, "tensors": self.record}
        metadata = {"format": "pt", METADATA: json.dumps(record, separators=(",", ":"))}
        text = json.dumps({"__metadata__": metadata, **self.entries}, separators=(",", ":")).encode()
        assert len(text) <= self._begin - 8, f"header of {len(text)} bytes, {self._begin} reserved"
        # As safetensors requires: the length of the header in 8 bytes, then JSON, padded with spaces.
        self._file.seek(0)
        self._file.write((self._begin - 8).to_bytes(8, "little") + text.ljust(self._begin - 8))
        self._file.flush()


def stripes_of(file: BinaryIO | StripeWriter) -> Stripes | None:
    return file.stripes if isinstance(file, StripeWriter) else None


def pack_shard(
    source: Path,
    target: Path,
    stamp: str,
    *,
    directories: Sequence[Path] = (),
    tensors: Mapping[str, TensorSlice] | None = None,
    rounding: Rounding | None = None,
    verify: bool,
    progress: Callable[[int], None],
) -> list[PackedTensor]:
    """Packs `tensors` of `source` (None: all) into `target`, which appears when it is complete. `stamp`: identifies the
    source and the format. `directories`: if there are several, the target is divided among them. `verify`: decodes and
    compares with `source` before. Raises CheckpointError if a tensor differs, OutputError if writing fails."""
    tensors = read_header(source) if tensors is None else tensors
    size = source.stat().st_size

    def order(tensor: TensorSlice) -> int:
        """Sorts tensors: losslessly packed, rounded, unchanged. The last may have an odd number of bytes, which would
        misalign a tensor after them."""
        if rounding is not None and rounding.skip_reason(tensor.name, tensor.dtype, tensor.shape) is None:
            return 1
        return 0 if skip_reason(tensor.dtype, tensor.shape) is None else 2

    # An upper limit of the header: its entries, and 12 bytes for each checksum.
    entry_bytes = sum(6 * len(json.dumps(name)) + MAX_ENTRY_BYTES + 40 * len(t.shape) for name, t in tensors.items())
    header_bytes = round_up(4096 + entry_bytes + 12 * (size // PIECE_BYTES + 2), PAGE_BYTES)
    if len(directories) > 1:
        writing = write_stripes(directories, target.name, size + header_bytes, stamp)
    else:
        writing = atomic_write(target, size)
    with writing as file:
        shard = _Shard(file, header_bytes, rounding, progress)
        packed = [shard.add(tensor) for tensor in sorted(tensors.values(), key=order)]
        shard.finish(stamp)
        if verify:
            compare(tensors, Path(file.name), str(target), rounding, stripes_of(file))
    return packed


def compare(
    tensors: Mapping[str, TensorSlice],
    packed: Path,
    name: str,
    rounding: Rounding | None = None,
    stripes: Stripes | None = None,
) -> None:
    """Decodes all tensors of `packed` and compares them with the original `tensors`. Rounded tensors must equal the
    original, rounded with the stored scales. `name`: the final name of the file, for errors. `stripes`: of `packed`, if
    it is divided. Raises CheckpointError with the first tensor that differs."""
    stored = pair_companions(read_header(packed, stripes), {"quant_method": METHOD})
    if stored.keys() != tensors.keys():
        others = ", ".join(sorted(stored.keys() ^ tensors.keys())[:3])
        raise CheckpointError(f"{name}: its tensors are not those of the original: {others}")
    for key, tensor in tensors.items():
        if not _is_same(tensor, stored[key], rounding):
            raise CheckpointError(
                f"{name}: {key!r} does not decode to the original in {tensor.file}: faulty memory or disk. Nothing was "
                "published or deleted; start the same command again"
            )


def _is_same(tensor: TensorSlice, packed: TensorSlice, rounding: Rounding | None) -> bool:
    """True if `packed` decodes to `tensor`, or has its rounded numbers. Compares a panel of rows at a time."""
    if not packed.format:
        return (tensor.dtype, tensor.shape) == (packed.dtype, packed.shape) and np.array_equal(
            map_bytes(tensor), map_bytes(packed)
        )
    if tensor.shape != packed.shape:
        return False
    if len(tensor.shape) == 3:
        return all(_is_same(tensor.expert(e), packed.expert(e), rounding) for e in range(tensor.shape[0]))
    companions = {companion.role: map_numbers(companion.tensor) for companion in packed.companions}
    raw, height = torch.from_numpy(map_bytes(packed)), max(1, PANEL_NUMBERS // tensor.shape[1])
    if packed.format in ROUNDED_ENCODINGS:
        parts = (map_numbers(tensor), raw.view(tensor.shape[0], -1), companions[SCALES])
        panels = zip(*(part.split(height) for part in parts), strict=True)
        return rounding is not None and all(
            torch.equal(rounding.encode(stored.float(), scales), codes) for stored, codes, scales in panels
        )
    rows = FORMATS[packed.format].rows(StoredMatrix(packed, raw, companions))
    words_NK = map_bytes(tensor).view(np.uint16).reshape(tensor.shape)
    for first in range(0, len(words_NK), height):
        original = words_NK[first : first + height]
        out = torch.empty(original.shape)
        rows.dequantize(slice(first, first + len(original)), out)
        if not np.array_equal(out.numpy().view(np.uint32), original.astype(np.uint32) << 16):  # bfloat16 as float32
            return False
    return True


def read_packed_sizes(
    path: Path, original_bytes: Mapping[str, int], stripes: Stripes | None = None
) -> list[PackedTensor]:
    """Reads the sizes of the tensors in a packed shard. `original_bytes`: sizes before packing by tensor name. A packed
    tensor without one is assumed to have had 16 bits per number. `stripes`: of a shard that is divided."""
    record = read_packing_record(path, stripes)[0]["tensors"]
    header = pair_companions(read_header(path, stripes), {"quant_method": METHOD})
    assert isinstance(record, Mapping), "our own header"
    packed = list[PackedTensor]()
    for name, entry in record.items():
        tensor = header[name]
        after = sum(part.num_bytes for part in tensor.with_companions())
        before = original_bytes.get(name, 2 * prod(tensor.shape) if tensor.format else after)
        squares = tuple(entry["squares"]) if entry.get("squares") else None
        reason = entry.get("raw")
        packed.append(PackedTensor(name=name, num_bytes=before, packed_bytes=after, raw_reason=reason, squares=squares))
    return packed
