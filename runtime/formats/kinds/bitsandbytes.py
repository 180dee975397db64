"""bitsandbytes: 4-bit `weight` with `weight.absmax`, `weight.quant_map` and `weight.quant_state.bitsandbytes__*`; or
int8 `weight` with `SCB`, a factor per row times 127.

4 bits: two codes per byte, the first in the high nibble, with no padding between rows. A block is a run of numbers with
one factor, such as 64; blocks continue from one row to the next. A number is `weight.quant_map[code]` times the
block's factor in `weight.absmax`.

Nested quantization also encodes the factors: `weight.absmax` then holds a byte per factor. A factor is
`weight.nested_quant_map[byte]`, times the factor of its block of factors (`weight.nested_absmax`), plus one offset for
the whole matrix. `TensorSlice.constants` are (numbers per block, factors per nested block, offset), or only the first
without nested quantization.

Shapes: N rows of K numbers in B bytes, R rows selected; E concatenated matrices; b blocks, n nested blocks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...errors import CheckpointError
from ...kernels.arguments import SIGNED_BYTES, TABLE_NIBBLES
from ...kernels.compiler import has_table_lookup
from ...linear.blocks import concat_rows, device_constant
from ...linear.packed_rows import RowCodes, supports_row_codes
from ...linear.rows import Codes, Rows
from ...plan.shape.shapes import Companion, TensorSlice
from ...store.checkpoint import read_bytes
from ..module_tensors import (
    FLOATS,
    SCALES,
    ModuleTensors,
    modules_with,
    replace_tensors,
    require_matrix,
    require_shape,
    unsupported_error,
    warn_activations,
)
from ..scaled_rows import RowSelection, apply_by_group, byte_halves, row_numbers, write_pairs
from ..storage_format import Loss, StorageFormat, StoredMatrix, have_same_layout

INT8, FOUR_BITS = "llm-int8", ("nf4", "fp4")
# Companion roles: `quant_map` (the numbers of the 16 codes), `nested_quant_map` (of the 256 codes of factors),
# `nested_absmax`.
CODES, NESTED_CODES, NESTED_SCALES = "codes", "nested codes", "nested scales"
STATE = "weight.quant_state.bitsandbytes__"
READABLE = "bitsandbytes' nf4, fp4 and int8"
LEAVES = (
    "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", "SCB", "weight_format",
    *(STATE + name for name in FOUR_BITS),
)  # fmt: skip
STORAGE = ("U8", *FLOATS)  # `bnb_4bit_quant_storage`: dtypes under which the bytes of codes may be stored
INVERSE_OF_127 = 7.874015718698502e-3  # bitsandbytes' constant: the exact result needs the same rounding
USUAL_BLOCK, USUAL_NESTED_BLOCK = 64, 256


class FourBitRows:
    """Rows of 4-bit numbers; see `linear.rows.Rows`. The companion `CODES` is (16,), or (E, 16) for E concatenated
    matrices."""

    def __init__(self, stored: StoredMatrix):
        self._bytes_NB, self._companions, self._source = stored.raw_NB, stored.companions, stored.source
        self.shape, self.device = (stored.source.shape[0], stored.source.shape[1]), stored.raw.device

    def dequantize(self, rows: RowSelection, out_RK: torch.Tensor) -> None:
        codes_E16, (low, high) = self._companions[CODES].float().view(-1, 16), byte_halves(self.device)
        pairs = torch.stack([codes_E16.index_select(1, half) for half in (high, low)], dim=2)
        pairs = pairs.view(torch.int64).flatten()  # table from byte to its two numbers; E tables of 256 in a row
        bytes_RB = self._bytes_NB[rows]
        if len(codes_E16) > 1:  # each matrix has its own table
            matrices = torch.arange(self.shape[0], device=self.device)[rows] // (self.shape[0] // len(codes_E16))
            bytes_RB = bytes_RB.int() + 256 * matrices[:, None]
        write_pairs(pairs, bytes_RB, out_RK)
        num_columns, width = self.shape[1], int(self._source.constants[0])
        if num_columns % width:  # blocks cross rows: find the block of each number
            first_numbers = row_numbers(rows, self.shape[0], self._source.first_row, self.device) * num_columns
            columns = torch.arange(num_columns, device=self.device)
            out_RK.mul_(self._factors((first_numbers[:, None] + columns) // width))
        else:
            apply_by_group(out_RK, self.zeros_and_scales(rows)[1], width, torch.Tensor.mul_)

    def codes(self) -> Codes | None:
        """See `Rows`. Returns None if blocks cross rows. Allocates factors in float32 if they are nested: 1/16 byte per
        number for blocks of 64."""
        width = int(self._source.constants[0])
        if self.shape[1] % width:
            return None
        tables = self._companions[CODES].view(-1, 16)
        body = self._bytes_NB.unflatten(0, (len(tables), -1))
        return Codes(
            encoding=TABLE_NIBBLES,
            shape=(body.shape[1], self.shape[1]),
            body=body,
            scales=self.zeros_and_scales(slice(None))[1].unflatten(0, (len(tables), -1)),
            width=width,
            table=tables,
        )

    def zeros_and_scales(self, rows: RowSelection) -> tuple[None, torch.Tensor]:
        """Returns None (no zero points) and the factors of the selected rows, (R, blocks per row) float32. Requires
        that no block crosses rows."""
        num_blocks = self.shape[1] // int(self._source.constants[0])
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self.shape[0])
            first, last = ((self._source.first_row + row) * num_blocks for row in (start, stop))
            return None, self._factors(slice(first, last)).view(stop - start, num_blocks)
        first = (rows + self._source.first_row) * num_blocks
        return None, self._factors(first[:, None] + torch.arange(num_blocks, device=self.device))

    def _factors(self, blocks: RowSelection) -> torch.Tensor:
        """Returns the float32 factors of blocks, selected by block numbers of any shape or by a slice."""
        factors = self._companions[SCALES][blocks]
        if NESTED_SCALES not in self._companions:
            return factors.float()
        _, width, offset = self._source.constants
        if isinstance(blocks, slice):
            blocks = torch.arange(blocks.start, blocks.stop, device=self.device)
        numbers = self._companions[NESTED_CODES].float()[factors.int()]
        return numbers * self._companions[NESTED_SCALES].float()[blocks // int(width)] + offset


def _join(matrices: Sequence[StoredMatrix]) -> StoredMatrix | None:
    """Concatenates 4-bit matrices and dequantizes nested factors. Returns None if a matrix does not end with a whole
    block, or layouts differ."""
    first, source = matrices[0].companions, matrices[0].source
    width = int(source.constants[0])
    if not have_same_layout(matrices) or source.first_row or (source.shape[0] * source.shape[1]) % width:
        return None
    # Factors by matrix and block; if they are nested, they are codes, with tables and factors of their own.
    factors_Eb, *nested = (
        torch.stack([stored.companions[role] for stored in matrices])
        for role in (SCALES, NESTED_CODES, NESTED_SCALES)
        if role in first
    )
    if nested:
        tables_E256, scales_En = nested
        blocks = torch.arange(factors_Eb.shape[1], device=matrices[0].raw.device) // int(source.constants[1])
        offsets = tuple(stored.source.constants[2] for stored in matrices)
        factors_Eb = tables_E256.float().gather(1, factors_Eb.long()) * scales_En.float()[:, blocks]
        factors_Eb = factors_Eb + device_constant(offsets, torch.float32, factors_Eb.device)[:, None]
    joined = replace(source, shape=(len(matrices) * source.shape[0], source.shape[1]), constants=source.constants[:1])
    codes_E16 = torch.stack([stored.companions[CODES] for stored in matrices])
    tensors = {CODES: codes_E16, SCALES: factors_Eb.flatten()}
    return StoredMatrix(joined, concat_rows([stored.raw for stored in matrices]), tensors)


def _four_bit_rows(stored: StoredMatrix) -> Rows:
    rows = FourBitRows(stored)
    num_groups, rest = divmod(rows.shape[1], int(stored.source.constants[0]))
    is_single = stored.companions[CODES].dim() == 1
    if rest or not is_single or not has_table_lookup() or not supports_row_codes(rows.shape, rows.device, num_groups):
        return rows
    return RowCodes(rows, stored.raw_NB, TABLE_NIBBLES, num_groups, rows.zeros_and_scales, stored.companions[CODES])


class Int8Rows:
    """Rows of int8 times a factor per row, divided by 127; see `linear.rows.Rows`."""

    def __init__(self, stored: StoredMatrix):
        self._codes_NK, self._scales = stored.raw_NB.view(torch.int8), stored.companions[SCALES]
        self.shape, self.device = (stored.source.shape[0], stored.source.shape[1]), stored.raw.device

    def dequantize(self, rows: RowSelection, out_RK: torch.Tensor) -> None:
        out_RK.copy_(self._codes_NK[rows])
        out_RK.mul_(self._scales[rows].float()).mul_(INVERSE_OF_127)

    def codes(self) -> Codes:
        """See `Rows`."""
        body, scales = self._codes_NK.view(torch.uint8)[None], self._scales[None]
        return Codes(
            encoding=SIGNED_BYTES,
            shape=self.shape,
            body=body,
            scales=scales,
            width=self.shape[1],
            last_factor=INVERSE_OF_127,
        )


def _pair(tensors: Mapping[str, TensorSlice], quantization: Mapping[str, object]) -> Mapping[str, TensorSlice]:
    """See `storage_format.Method`. Accepts old configs, which have load options but no `quant_method`."""
    if (quantization.get("quant_method") or "bitsandbytes") != "bitsandbytes" or not quantization:
        return tensors
    weights = {
        module.path: _four_bit_weight(module, name)
        for name in FOUR_BITS
        for module in modules_with(tensors, STATE + name)
    }
    int8_modules = list(modules_with(tensors, "SCB"))
    for module in int8_modules:
        weight, layout = module.require("weight", "I8"), module.find("weight_format")
        num_rows, _ = require_matrix(weight)
        if layout is not None and any(read_bytes(layout)):
            raise unsupported_error(f"{weight.name!r} is in the layout of a kernel (weight_format)", READABLE)
        scales = require_shape(module.require("SCB", *FLOATS), (num_rows,), f"{weight.name!r}")
        companion = Companion(role=SCALES, tensor=replace(scales, shape=(num_rows, 1)), block_rows=1)
        weights[module.path] = replace(weight, format=INT8, companions=(companion,))
    if int8_modules:
        warn_activations("LLM.int8")
    return replace_tensors(tensors, weights, LEAVES)


def _four_bit_weight(module: ModuleTensors, name: str) -> TensorSlice:
    state, words = module.require(STATE + name, "U8"), module.require("weight", *STORAGE)
    try:
        values = json.loads(read_bytes(state))
        height, width, block = *map(int, values["shape"]), int(values["blocksize"])
        nested = int(values.get("nested_blocksize", 0))  # factors per block of factors; 0: not nested
        offset = float(values.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{state.file}: {state.name!r} does not describe a 4-bit matrix") from error
    if min(height, width, block) < 1 or nested < 0:
        raise CheckpointError(f"{state.file}: {state.name!r} has sizes below 1")
    if width % 2 or words.num_bytes * 2 != height * width:
        raise unsupported_error(
            f"{words.name!r} has {words.num_bytes} bytes for {height} rows of {width} numbers", READABLE
        )
    block = min(block, height * width)  # a larger block could overflow torch's integers
    num_blocks = -(-height * width // block)
    nested = min(nested, num_blocks)
    # Role, leaf, dtype and number of elements of each companion.
    layout = [(CODES, "weight.quant_map", "F32", 16), (SCALES, "weight.absmax", "U8" if nested else "F32", num_blocks)]
    if nested:
        layout += [
            (NESTED_CODES, "weight.nested_quant_map", "F32", 256),
            (NESTED_SCALES, "weight.nested_absmax", "F32", -(-num_blocks // nested)),
        ]
    companions = [
        Companion(role=role, tensor=require_shape(module.require(leaf, dtype), (size,), f"{words.name!r}"))
        for role, leaf, dtype, size in layout
    ]
    constants = (block, nested, offset) if nested else (block,)
    return replace(
        words,
        dtype="U8",
        shape=(height, width),
        format=name,
        companions=tuple(companions),
        constants=tuple(map(float, constants)),
    )


FORMATS = (
    *(
        StorageFormat(
            name=name,
            loss=Loss.exact,
            # Nested: a byte per block, and a float32 per nested block.
            row_bytes=lambda num_columns: num_columns / 2 + num_columns / USUAL_BLOCK * (1 + 4 / USUAL_NESTED_BLOCK),
            rows=_four_bit_rows,
            companions=(CODES, SCALES, NESTED_CODES, NESTED_SCALES),
            is_output_major=True,
            join=_join,
        )
        for name in FOUR_BITS
    ),
    StorageFormat(
        name=INT8,
        loss=Loss.exact,
        row_bytes=lambda num_columns: num_columns + 4,
        rows=Int8Rows,
        companions=(SCALES,),
        is_output_major=True,
    ),
)
METHODS = {"bitsandbytes": _pair}
