"""A packed shard against its original, number by number, as a run would read it."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from runtime.errors import CheckpointError
from runtime.formats.own_store import METHOD
from runtime.formats.registry import FORMATS, pair_companions
from runtime.formats.rounding import Rounding
from runtime.formats.storage_format import Stored
from runtime.linear.packed_rows import ROUNDED
from runtime.plan.shape.shapes import TensorSlice
from runtime.store.header import read_header
from runtime.weights.stage_weights import TORCH_DTYPES

PANEL_NUMBERS = 4 << 20
WORDS = {"BF16": np.uint16}


def compare(tensors: Mapping[str, TensorSlice], packed: Path, name: str, rounding: Rounding | None = None) -> None:
    """Decodes all of `packed`, which will be called `name`; what was rounded must be the original's numbers rounded to
    the scales that are there. Raises CheckpointError that names a tensor that differs."""
    found = pair_companions(read_header(packed), {"quant_method": METHOD})
    if found.keys() != tensors.keys():
        others = ", ".join(sorted(found.keys() ^ tensors.keys())[:3])
        raise CheckpointError(f"{name}: has other tensors than its original: {others}")
    for each, tensor in tensors.items():
        is_same = _is_same(tensor, found[each], rounding)
        if not is_same:
            raise CheckpointError(
                f"{name}: {each!r} does not decode to the original in {tensor.file}: memory or disk is at fault. "
                "It was not published, and nothing was deleted; start the same command again"
            )


def _is_same(tensor: TensorSlice, packed: TensorSlice, rounding: Rounding | None) -> bool:
    if not packed.format:
        return (tensor.dtype, tensor.shape) == (packed.dtype, packed.shape) and np.array_equal(
            bytes_of(tensor), bytes_of(packed)
        )
    if tensor.shape != packed.shape:
        return False
    if packed.format in ROUNDED:
        numbers = numbers_of(tensor)
        stack = [(numbers[e], packed.expert(e)) for e in range(len(numbers))] if numbers.dim() == 3 else None
        return rounding is not None and all(_is_rounded(rounding, *pair) for pair in stack or [(numbers, packed)])
    words = bytes_of(tensor).view(WORDS[tensor.dtype]).reshape(tensor.shape)
    matrices = [(words[e], packed.expert(e)) for e in range(len(words))] if words.ndim == 3 else [(words, packed)]
    return all(_is_same_matrix(*pair) for pair in matrices)


def _is_same_matrix(words_NK: np.ndarray, packed: TensorSlice) -> bool:
    companions = {each.role: numbers_of(each.tensor) for each in packed.companions}
    rows = FORMATS[packed.format].rows(Stored(packed, torch.from_numpy(bytes_of(packed)), companions))
    height = max(1, PANEL_NUMBERS // words_NK.shape[1])
    for first in range(0, len(words_NK), height):
        right = words_NK[first : first + height]
        out = torch.empty(right.shape)
        rows.dequantize(slice(first, first + len(right)), out)
        if not np.array_equal(out.numpy().view(np.uint32), right.astype(np.uint32) << 16):
            return False
    return True


def _is_rounded(rounding: Rounding, stored_NK: torch.Tensor, packed: TensorSlice) -> bool:
    codes_NB = torch.from_numpy(bytes_of(packed)).view(len(stored_NK), -1)
    scales_NG = numbers_of(packed.companions[0].tensor)
    height = max(1, PANEL_NUMBERS // stored_NK.shape[1])
    runs = zip(stored_NK.split(height), codes_NB.split(height), scales_NG.split(height), strict=True)
    return all(torch.equal(rounding.codes(stored.float(), scales), codes) for stored, codes, scales in runs)


def numbers_of(tensor: TensorSlice) -> torch.Tensor:
    """A view of the file."""
    return torch.from_numpy(bytes_of(tensor)).view(TORCH_DTYPES[tensor.dtype]).view(tensor.shape)


def bytes_of(piece: TensorSlice) -> np.ndarray:
    """A view of the file, private: nothing writes into it, and torch wants memory that could be written."""
    if not piece.num_bytes:
        return np.zeros(0, np.uint8)
    return np.memmap(piece.file, np.uint8, "c", piece.offset, (piece.num_bytes,))
