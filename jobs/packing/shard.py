"""Packs one shard: streams tensors through memory a few rows at a time, compares them with the original and publishes
the file."""

import hashlib
import json
from collections.abc import Callable, Mapping
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
    pack_pieces,
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
from runtime.plan.shape.shapes import TensorSlice
from runtime.store.file_digests import METADATA, PIECE_BYTES, crc32_sums, read_packing_record
from runtime.store.header import read_header
from runtime.store.writer import atomic_write
from runtime.units import round_up
from runtime.weights.stage_weights import TORCH_DTYPES

PAGE_BYTES, COPY_BYTES = 4096, 16 << 20
PANEL_NUMBERS = 4 << 20  # decoded at once
MOST_ENTRY_BYTES = 640  # of a tensor in a header, beside twice its name, its shape and what is said of it


def map_numbers(tensor: TensorSlice) -> torch.Tensor:
    """A memory-mapped view of the file, in the tensor's dtype and shape."""
    return torch.from_numpy(map_bytes(tensor)).view(TORCH_DTYPES[tensor.dtype]).view(tensor.shape)


def map_bytes(piece: TensorSlice) -> np.ndarray:
    """A memory-mapped view of the file. Mapped copy-on-write because torch requires writable memory; nothing writes
    to it."""
    if not piece.num_bytes:
        return np.zeros(0, np.uint8)
    return np.memmap(piece.file, np.uint8, "c", piece.offset, (piece.num_bytes,))


@dataclass(frozen=True, kw_only=True)
class PackedTensor:
    """A tensor's bytes before and after, and the reason if it was copied unchanged. `squares`: sums of squared errors
    and of squared numbers of a rounded tensor."""

    name: str
    num_bytes: int
    packed_bytes: int
    raw_reason: str | None
    squares: Squares | None = None


class _Shard:
    """A shard that is being written. Its header is written last, into space reserved at the start."""

    def __init__(self, file: BinaryIO, header_bytes: int, rounding: Rounding | None, progress: Callable[[int], None]):
        self._file, self._begin, self._rounding, self._progress = file, header_bytes, rounding, progress
        self.entries: dict[str, object] = {}
        self.record: dict[str, object] = {}
        file.seek(header_bytes)

    def add(self, tensor: TensorSlice) -> PackedTensor:
        """Rounds the tensor, packs it losslessly, or copies it if packing does not save bytes."""
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
        self._file.seek(begin)
        self._file.truncate()

    def _round(self, tensor: TensorSlice) -> Squares | None:
        """Returns the sums of squares; None if the tensor is not to be rounded or holds values without a code. Bytes
        written until then must be discarded."""
        if self._rounding is None or self._rounding.skip_reason(tensor.name, tensor.dtype, tensor.shape) is not None:
            return None
        begin, scales, error, size = self._file.tell(), list[bytes](), 0.0, 0.0
        numbers = map_numbers(tensor)
        for piece in self._rounding.round_rows(numbers.flatten(0, -2)):
            if piece is None:
                return None
            self._file.write(piece.codes_RB.numpy().data)
            scales.append(piece.scales_RG.view(torch.int16).numpy().tobytes())
            error, size = error + piece.error, size + piece.size
        *rows, num_columns = tensor.shape
        codes_shape = (*rows, self._rounding.packed_columns(num_columns))
        self._add_entry(part_name(tensor.name, self._rounding.format), "U8", codes_shape, begin)
        begin = self._file.tell()
        self._file.write(b"".join(scales))
        scales_shape = (*rows, self._rounding.num_groups(num_columns))
        self._add_entry(part_name(tensor.name, SCALES), "BF16", scales_shape, begin)
        return error, size

    def _pack(self, tensor: TensorSlice, words: np.ndarray) -> str | None:
        """Returns the reason if packing does not pay; bytes written until then must be discarded."""
        begin, matrices, most = self._file.tell(), list[list[Window4]](), MAX_ESCAPES * words.size
        num_escapes = 0
        for matrix in words if words.ndim == 3 else words[None]:
            matrices.append([])
            for piece in pack_pieces(matrix):
                self._file.write(piece.body.data)
                matrices[-1].append(piece.without_body())
                num_escapes += len(piece.columns)
                if num_escapes > most:
                    return f"more than {MAX_ESCAPES:.1%} of its exponents lie outside of 15"
        beside = stack_escapes(matrices)
        if beside.nbytes > tensor.num_bytes // 8:
            return "its escapes would take more than it saves"
        beside = beside if words.ndim == 3 else beside[0]
        shape = (*tensor.shape[:-1], packed_columns(tensor.shape[-1]))
        self._add_entry(part_name(tensor.name, WINDOW4), "U8", shape, begin)
        begin = self._file.tell()
        self._file.write(beside.data)
        self._add_entry(part_name(tensor.name, ESCAPES), "I32", beside.shape, begin)
        return None

    def _add_entry(self, name: str, dtype: str, shape: tuple[int, ...], begin: int) -> None:
        offsets = [begin - self._begin, self._file.tell() - self._begin]
        self.entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}

    def finish(self, stamp: str) -> None:
        """Writes the header into its reserved space."""
        self._file.flush()
        record = {"source": stamp, "crc32": crc32_sums(Path(self._file.name), self._begin), "tensors": self.record}
        metadata = {"format": "pt", METADATA: json.dumps(record, separators=(",", ":"))}
        text = json.dumps({"__metadata__": metadata, **self.entries}, separators=(",", ":")).encode()
        assert len(text) <= self._begin - 8, f"a header of {len(text)} bytes in room for {self._begin}"
        self._file.seek(0)
        self._file.write((self._begin - 8).to_bytes(8, "little") + text.ljust(self._begin - 8))
        self._file.flush()


def pack_shard(
    source: Path,
    target: Path,
    stamp: str,
    *,
    tensors: Mapping[str, TensorSlice] | None = None,
    rounding: Rounding | None = None,
    verify: bool,
    progress: Callable[[int], None],
) -> list[PackedTensor]:
    """Writes `target` and renames it into place once it is complete, on disk and, with `verify`, equal to `source`.
    `tensors`: those of the source to pack; None: all. Raises CheckpointError if they differ, OutputError."""
    tensors = read_header(source) if tensors is None else tensors
    size = source.stat().st_size

    def turn(tensor: TensorSlice) -> int:
        """Sort key: losslessly packed tensors first, then rounded ones. A tensor of odd length would misalign those
        after it."""
        if rounding is not None and rounding.skip_reason(tensor.name, tensor.dtype, tensor.shape) is None:
            return 1
        return 0 if skip_reason(tensor.dtype, tensor.shape) is None else 2

    names = sum(6 * len(json.dumps(name)) + MOST_ENTRY_BYTES + 40 * len(t.shape) for name, t in tensors.items())
    most_header_bytes = round_up(4096 + names + 12 * (size // PIECE_BYTES + 2), PAGE_BYTES)
    with atomic_write(target, size) as file:
        shard = _Shard(file, most_header_bytes, rounding, progress)
        found = [shard.add(tensor) for tensor in sorted(tensors.values(), key=turn)]
        shard.finish(stamp)
        if verify:
            compare(tensors, Path(file.name), str(target), rounding)
    return found


def compare(tensors: Mapping[str, TensorSlice], packed: Path, name: str, rounding: Rounding | None = None) -> None:
    """Decodes all of `packed`; `name` is its final name for errors. Rounded tensors must equal the original rounded
    to the stored scales. Raises CheckpointError that names the first tensor that differs."""
    found = pair_companions(read_header(packed), {"quant_method": METHOD})
    if found.keys() != tensors.keys():
        others = ", ".join(sorted(found.keys() ^ tensors.keys())[:3])
        raise CheckpointError(f"{name}: has other tensors than its original: {others}")
    for each, tensor in tensors.items():
        if not _is_same(tensor, found[each], rounding):
            raise CheckpointError(
                f"{name}: {each!r} does not decode to the original in {tensor.file}: memory or disk is at fault. "
                "It was not published, and nothing was deleted; start the same command again"
            )


def _is_same(tensor: TensorSlice, packed: TensorSlice, rounding: Rounding | None) -> bool:
    if not packed.format:
        return (tensor.dtype, tensor.shape) == (packed.dtype, packed.shape) and np.array_equal(
            map_bytes(tensor), map_bytes(packed)
        )
    if tensor.shape != packed.shape:
        return False
    if len(tensor.shape) == 3:
        return all(_is_same(tensor.expert(e), packed.expert(e), rounding) for e in range(tensor.shape[0]))
    companions = {each.role: map_numbers(each.tensor) for each in packed.companions}
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
        right = words_NK[first : first + height]
        out = torch.empty(right.shape)
        rows.dequantize(slice(first, first + len(right)), out)
        if not np.array_equal(out.numpy().view(np.uint32), right.astype(np.uint32) << 16):
            return False
    return True


def read_packed_sizes(path: Path, tensors: Mapping[str, int]) -> list[PackedTensor]:
    """Sizes of the tensors of a shard that was packed before. `tensors`: their original bytes; if the original is
    gone, 16 bits per number are assumed."""
    record, header = (
        read_packing_record(path)[0]["tensors"],
        pair_companions(read_header(path), {"quant_method": METHOD}),
    )
    assert isinstance(record, Mapping), "our own header"
    found = list[PackedTensor]()
    for name, about in record.items():
        tensor = header[name]
        after = sum(part.num_bytes for part in tensor.with_companions())
        before = tensors.get(name, 2 * prod(tensor.shape) if tensor.format else after)
        squares = about.get("squares")
        found.append(
            PackedTensor(
                name=name,
                num_bytes=before,
                packed_bytes=after,
                raw_reason=about.get("raw"),
                squares=tuple(squares) if squares else None,
            )
        )
    return found
