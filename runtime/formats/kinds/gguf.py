"""GGUF's block formats (Q8_0, Q4_K ...), by type name. A block is a fixed number of neighboring columns of a row, with
their scales. Unquantized types (F32, F16, BF16) are decoded here only if rows are stored in another order.

Numbers are `scale * q + offset` for small integers q. Types without a decoder here are decoded by the package `gguf` in
numpy, several times slower. Source of the layouts: ggml's block structures (ggml-common.h), as llama.cpp writes them.

Shapes: n blocks of B bytes; a block has G groups of W numbers with one scale each. R selected rows of K numbers.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from ...kernels.arguments import BLOCK_NUMBERS, DEVICE_GGUF, GGUF, GROUP_NUMBERS
from ...linear.packed_rows import Arrays, Layout, PackedRows
from ...linear.rows import Codes, Rows
from ...store.gguf import BLOCKS
from ..storage_format import Loss, StorageFormat, StoredMatrix


class BlockNumbers(NamedTuple):
    """Numbers `q_nGW * scale_nG + offset_nG`; q is uint8 or int8, the others float32."""

    q_nGW: torch.Tensor
    scale_nG: torch.Tensor
    offset_nG: torch.Tensor | None = None


class GgufRows:
    """Rows of a GGUF tensor; see `linear.rows.Rows`. `order`: index of the stored row for each row of the weight; None
    if the order is the same."""

    def __init__(self, raw_NB: torch.Tensor, dtype: str, num_columns: int, order: torch.Tensor | None):
        self._raw_NB, self._dtype, self._order = raw_NB, dtype, order
        self.shape = (raw_NB.shape[0], num_columns)
        self.device = raw_NB.device

    def dequantize(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        decode(self._dtype, self._raw_NB[rows if self._order is None else self._order[rows]], out_RK)

    def codes(self) -> Codes | None:
        """See `Rows`."""
        encoding = GGUF.get(self._dtype)
        if encoding not in DEVICE_GGUF:
            return None
        order = None if self._order is None else self._order[None]
        return Codes(encoding=encoding, shape=self.shape, body=self._raw_NB[None], order=order)


class KernelGgufRows(PackedRows):
    """Same as `GgufRows` for the types that the CPU's vector kernels decode inside a product."""

    def __init__(self, raw_NB: torch.Tensor, dtype: str, num_columns: int, order: torch.Tensor | None):
        super().__init__(raw_NB, num_columns)
        self._plain, self._dtype, self._order = GgufRows(raw_NB, dtype, num_columns, order), dtype, order

    def _layout(self) -> tuple[Layout, Arrays]:
        block = BLOCKS[self._dtype]
        layout = Layout(GGUF[self._dtype], *self.shape, BLOCK_NUMBERS // block.num_numbers * block.num_bytes)
        return layout, Arrays() if self._order is None else Arrays(order=self._order.int().numpy())

    def decode(self, rows: slice | torch.Tensor, out_RK: torch.Tensor) -> None:
        """See `PackedRows`."""
        self._plain.dequantize(rows, out_RK)

    def codes(self) -> Codes | None:
        """See `Rows`."""
        return self._plain.codes()


def decode(dtype: str, raw_RB: torch.Tensor, out_RK: torch.Tensor) -> None:
    """Decodes rows of bytes into `out_RK`, float32 and contiguous. `dtype`: a GGUF type name."""
    decoder = DECODERS.get(dtype)
    if dtype in PLAIN:
        out_RK.copy_(raw_RB.view(PLAIN[dtype]))
    elif decoder is None:
        import gguf  # an optional extra, installed if a GGUF file was opened

        out_RK.copy_(torch.from_numpy(gguf.dequantize(raw_RB.cpu().numpy(), gguf.GGMLQuantizationType[dtype])))
    else:
        groups = decoder(raw_RB.reshape(-1, BLOCKS[dtype].num_bytes))
        out_nGW = out_RK.view(groups.q_nGW.shape)
        out_nGW.copy_(groups.q_nGW)
        out_nGW *= groups.scale_nG[..., None]
        if groups.offset_nG is not None:
            out_nGW += groups.offset_nG[..., None]


def _load_half(blocks_nB: torch.Tensor, offset: int) -> torch.Tensor:
    """Returns the float16 at byte `offset` of each block, as float32: (n, 1)."""
    return blocks_nB[:, offset : offset + 2].view(torch.float16).float()


def _extract_fields(bytes_nB: torch.Tensor, num_bits: int, run: int) -> torch.Tensor:
    """Splits bytes into fields of `num_bits`: (n, B * 8 / num_bits). The order of fields, for each `run` of bytes: the
    lowest field of every byte, then the second field of every byte, and so on."""
    # c runs of r bytes. Contiguous bytes shift ten times as fast.
    bytes_ncr = bytes_nB.contiguous().unflatten(1, (-1, run))
    fields = [bytes_ncr >> shift & ((1 << num_bits) - 1) for shift in range(0, 8, num_bits)]
    return torch.stack(fields, dim=2).flatten(1)


def _fifth_bits(bytes_nB: torch.Tensor) -> torch.Tensor:
    """Returns bits as 0 or 16, from the lowest bit of the first byte on: (n, 8 * B). These are added to 4-bit fields to
    make 5-bit codes."""
    table = _spread_bits(bytes_nB.device)
    return table[bytes_nB.int()].view(torch.uint8)


@lru_cache
def _spread_bits(device: torch.device) -> torch.Tensor:
    """Returns a table (256,) from a byte to eight bytes, 0 or 16 for each of its bits, in one 64-bit element."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return (bits << 4).to(torch.uint8).view(torch.int64).flatten().to(device)


def _subtract_zero(q: torch.Tensor, zero: int, width: int) -> torch.Tensor:
    """Returns q - zero as int8, in groups of `width` numbers: (n, G, W). Mutates q."""
    return q.view(torch.int8).sub_(zero).unflatten(1, (-1, width))


def _scales_and_minima(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales and (negative) minima of the eight groups of Q4_K and Q5_K blocks, (n, 8) each.

    Scales and minima have six bits; a float16 factor multiplies all scales, and another all minima. Numbers 0 to 3 are
    the low six bits of a byte, whose two highest bits belong to numbers 4 to 7. `rest` has the other four bits of
    numbers 4 to 7."""
    low, high, rest = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat([low & 63, rest & 15 | low >> 6 << 4], dim=1)
    minimum = torch.cat([high & 63, rest >> 4 | high >> 6 << 4], dim=1)
    return _load_half(b, 0) * scale, -_load_half(b, 2) * minimum


PLAIN: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Decoders by type. `b`: blocks (n, B) of bytes. Byte ranges are the fields of ggml's structures: block_q4_0, for
# example, has a float16 scale (bytes 0 and 1), then 16 bytes of two codes each.
DECODERS: Mapping[str, Callable[[torch.Tensor], BlockNumbers]] = {
    "Q8_0": lambda b: BlockNumbers(b[:, None, 2:34].view(torch.int8), _load_half(b, 0)),
    "Q4_0": lambda b: BlockNumbers(_subtract_zero(_extract_fields(b[:, 2:18], 4, 16), 8, 32), _load_half(b, 0)),
    "Q4_1": lambda b: BlockNumbers(_extract_fields(b[:, 4:20], 4, 16)[:, None], _load_half(b, 0), _load_half(b, 2)),
    "Q5_0": lambda b: BlockNumbers(
        _subtract_zero(_extract_fields(b[:, 6:22], 4, 16) | _fifth_bits(b[:, 2:6]), 16, 32), _load_half(b, 0)
    ),
    "Q5_1": lambda b: BlockNumbers(
        (_extract_fields(b[:, 8:24], 4, 16) | _fifth_bits(b[:, 4:8]))[:, None], _load_half(b, 0), _load_half(b, 2)
    ),
    "Q2_K": lambda b: BlockNumbers(
        _extract_fields(b[:, 16:80], 2, 32).unflatten(1, (16, 16)),
        _load_half(b, 80) * (b[:, :16] & 15),
        -_load_half(b, 82) * (b[:, :16] >> 4),
    ),
    "Q3_K": lambda b: BlockNumbers(
        _subtract_zero(_extract_fields(b[:, 32:96], 2, 32) | _extract_fields(b[:, :32], 1, 32) << 2, 4, 16),
        _load_half(b, 108)
        * _subtract_zero(_extract_fields(b[:, 96:104], 4, 8) | _extract_fields(b[:, 104:108], 2, 4) << 4, 32, 16)[:, 0],
    ),
    "Q4_K": lambda b: BlockNumbers(_extract_fields(b[:, 16:144], 4, 32).unflatten(1, (8, 32)), *_scales_and_minima(b)),
    "Q5_K": lambda b: BlockNumbers(
        (_extract_fields(b[:, 48:176], 4, 32) | _extract_fields(b[:, 16:48], 1, 32) << 4).unflatten(1, (8, 32)),
        *_scales_and_minima(b),
    ),
    "Q6_K": lambda b: BlockNumbers(
        _subtract_zero(_extract_fields(b[:, :128], 4, 64) | _extract_fields(b[:, 128:192], 2, 32) << 4, 32, 16),
        _load_half(b, 208) * b[:, 192:208].view(torch.int8),
    ),
}


def _rows(stored: StoredMatrix) -> Rows:
    source, device = stored.source, stored.raw.device
    runs = [torch.arange(run.start, run.stop, run.step, device=device) for run in source.row_order]
    return gguf_rows(stored.raw_NB, source.dtype, prod(source.shape[1:]), torch.cat(runs) if runs else None)


def gguf_rows(raw_NB: torch.Tensor, dtype: str, num_columns: int, order: torch.Tensor | None) -> Rows:
    """Returns rows that the CPU's vector kernels decode inside a product, if they can, or `GgufRows`; arguments: see
    there."""
    fits_kernels = dtype in GGUF and raw_NB.device.type == "cpu" and num_columns % GROUP_NUMBERS == 0
    return (KernelGgufRows if fits_kernels else GgufRows)(raw_NB, dtype, num_columns, order)


FORMATS = tuple(
    StorageFormat(
        name=name,
        loss=Loss.exact,
        row_bytes=lambda num_columns, block=block: num_columns / block.num_numbers * block.num_bytes,
        rows=_rows,
    )
    for name, block in BLOCKS.items()
)
