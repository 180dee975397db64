"""GPTQ, as AutoGPTQ and GPTQModel write it: `qweight` (K / codes per word, N), `qzeros` (G, N / codes per word),
`scales` (G, N), and `g_idx` (K,), the group number of each column.

Words have 32 bits. A word of `qweight` holds codes of neighboring columns of one row, lowest bits first; a word of
`qzeros` holds zero points of neighboring rows. The number is (code - zero) * scale. checkpoint_format `gptq` stores
zero points minus one, modulo the number of codes; `gptq_v2` stores them unchanged.

Shapes: a weight of N rows (outputs) and K columns (inputs), R rows selected; E concatenated matrices; G groups of
columns; W words.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from math import prod

import numpy as np
import torch

from ...errors import CheckpointError
from ...kernels.arguments import WORDS4, WORDS8
from ...linear.packed_rows import ColumnCodes, supports_column_codes
from ...linear.rows import Codes, Rows
from ...plan.shape.shapes import Companion, TensorSlice
from ...store.checkpoint import read_integers
from ..module_tensors import (
    FLOATS,
    GROUPS,
    SCALES,
    ZEROS,
    ModuleTensors,
    column_groups,
    get_integer,
    modules_with,
    replace_tensors,
    require_matrix,
    require_shape,
    unsupported_error,
)
from ..scaled_rows import WORD_BITS, IntegerRows, RowSelection, byte_halves, pack_pairs, select_columns, write_words
from ..storage_format import Loss, StorageFormat, StoredMatrix, join_by_columns

BITS, LEAVES = (4, 8), ("qweight", "qzeros", "scales", "g_idx")
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # added to stored zero points, by checkpoint_format
READABLE = "GPTQ of 4 or 8 bits with checkpoint_format gptq or gptq_v2"
USUAL_WIDTH = 128
ENCODINGS = {4: WORDS4, 8: WORDS8}


def _rows(num_bits: int, stored: StoredMatrix) -> Rows:
    source, companions = stored.source, stored.companions
    num_rows, num_columns = source.shape
    words_WN = stored.raw.view(torch.int32).view(num_columns * num_bits // WORD_BITS, -1)
    position = (num_rows, source.first_row)  # of these rows in the whole weight, see `select_columns`
    zero_offset = int(source.constants[0])

    def write(rows: RowSelection, out_RK: torch.Tensor) -> None:
        words_RW = select_columns(words_WN, rows, *position).t().clone(memory_format=torch.contiguous_format)
        write_words(words_RW, num_bits, out_RK)

    def zeros(rows: RowSelection) -> torch.Tensor:
        """Looks up the bytes of zero points in a table; for a slice, only bytes of words that overlap it."""
        words_GW, first_word, per_word = companions[ZEROS], 0, WORD_BITS // num_bits
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(num_rows)
            first_word, last_word = (source.first_row + start) // per_word, -(-(source.first_row + stop) // per_word)
            words_GW = words_GW[:, first_word:last_word]
        table = _byte_zeros(num_bits, zero_offset, stored.raw.device)
        zeros_GN = table.index_select(0, words_GW.contiguous().view(torch.uint8).flatten().int())
        zeros_GN = zeros_GN.view(torch.float32).view(len(words_GW), -1)
        return select_columns(zeros_GN, rows, num_rows, source.first_row - first_word * per_word).t()

    def scales(rows: RowSelection) -> torch.Tensor:
        return select_columns(companions[SCALES], rows, *position).t().float()

    width = next(companion.block_columns for companion in source.companions if companion.role == SCALES)
    shape, device, groups = (num_rows, num_columns), stored.raw.device, companions.get(GROUPS)

    def codes() -> Codes:
        begin, end = source.first_row, source.first_row + num_rows
        groups_EK = None if groups is None else groups.view(-1, num_columns)
        matrices = (1 if groups_EK is None else len(groups_EK), -1)  # splits rows into E matrices
        body = words_WN.t()[begin:end].unflatten(0, matrices)
        return Codes(
            encoding=ENCODINGS[num_bits],
            shape=(body.shape[1], num_columns),
            body=body,
            scales=companions[SCALES].t()[begin:end].unflatten(0, matrices),
            width=width,
            groups=groups_EK,
            zeros=companions[ZEROS].t().unflatten(0, matrices),
            zero_bits=num_bits,
            zero_offset=zero_offset,
            first_row=source.first_row,
        )

    rows, encoding = IntegerRows(shape, device, write, zeros, scales, width, groups, codes=codes), ENCODINGS[num_bits]
    if not supports_column_codes(shape, device, encoding, source.first_row):
        return rows
    return ColumnCodes(
        rows, words_WN, encoding, source.first_row, len(companions[SCALES]), rows.zeros_and_scales, width, groups
    )


@lru_cache
def _byte_zeros(num_bits: int, zero_offset: int, device: torch.device) -> torch.Tensor:
    """Returns a table (256,) from a byte to its zero points plus `zero_offset`, modulo the number of codes. For 8 bits
    an element is a float32, for 4 bits a pair (see `scaled_rows.py`)."""
    if num_bits == 8:
        return (torch.arange(256) + zero_offset & 255).float().to(device)
    low, high = byte_halves(device)
    return pack_pairs(low + zero_offset & 15, high + zero_offset & 15)


def _pair(tensors: Mapping[str, TensorSlice], quantization: Mapping[str, object]) -> Mapping[str, TensorSlice]:
    """See `storage_format.Method`. Raises CheckpointError if tensors have GPTQ's names but the config has no
    quantization_config: they could be AWQ's, which have the same names."""
    words = next(modules_with(tensors, "qweight"), None)
    if words is not None and not quantization:
        raise CheckpointError(
            f"{tensors[words.path + 'qweight'].file}: {words.path + 'qweight'!r} is GPTQ's or AWQ's, but config.json "
            "has no quantization_config: add the contents of quantize_config.json under that key"
        )
    if quantization.get("quant_method") != "gptq":
        return tensors
    version = str(quantization.get("checkpoint_format") or quantization.get("format") or "gptq")
    if version not in ZERO_OFFSETS or quantization.get("is_marlin_format"):
        raise unsupported_error(f"its weights are GPTQ with checkpoint_format {version!r}", READABLE)
    modules = {module.path: module for module in modules_with(tensors, "qweight")}
    weights = {path: _weight(module, quantization, version) for path, module in modules.items()}
    if quantization.get("desc_act") or not all(
        _has_consecutive_groups(module, weights[path]) for path, module in modules.items()
    ):
        for path, module in modules.items():
            weight, indices = weights[path], module.require("g_idx", "I32")
            groups = column_groups(indices, weight.shape[1], weight.companions[0].tensor.shape[0])
            weights[path] = replace(weight, companions=(*weight.companions, groups))
    return replace_tensors(tensors, weights, LEAVES)


def _weight(module: ModuleTensors, quantization: Mapping[str, object], version: str) -> TensorSlice:
    """Returns a module's weight with scales and zero points. `version`: checkpoint_format."""
    words, scales, groups = module.require("qweight", "I32"), module.require("scales", *FLOATS), module.find("g_idx")
    (height, num_rows), (num_groups, _) = require_matrix(words), require_matrix(scales)
    num_bits = get_integer(quantization, "bits", 4)
    if groups is not None and prod(groups.shape):  # GPTQModel's `dynamic` sets other bits for some modules
        num_bits = WORD_BITS * height // prod(groups.shape)
    if num_bits not in BITS:
        raise unsupported_error(f"{words.name!r} has {num_bits} bits", READABLE)
    if num_rows * num_bits % WORD_BITS:
        raise unsupported_error(
            f"{words.name!r} has {num_rows} columns: their {num_bits}-bit zero points are not whole words", READABLE
        )
    num_columns = height * WORD_BITS // num_bits
    require_shape(scales, (num_groups, num_rows), f"{words.name!r}, {words.shape},")
    zeros = require_shape(module.require("qzeros", "I32"), (num_groups, num_rows * num_bits // WORD_BITS), "its module")
    width = get_integer(quantization, "group_size", -1)
    if width <= 0 or -(-num_columns // width) != num_groups:  # group_size contradicts the scales: assume equal groups
        if not num_groups or num_columns % num_groups:
            raise CheckpointError(
                f"{scales.file}: {scales.name!r} has {num_groups} groups; {num_columns} columns in groups of "
                f"{width} (group_size in config.json) need {-(-num_columns // max(width, 1))}"
            )
        width = num_columns // num_groups
    return replace(
        words,
        shape=(num_rows, num_columns),
        format=f"gptq-int{num_bits}",
        companions=(Companion(role=SCALES, tensor=scales, block_columns=width), Companion(role=ZEROS, tensor=zeros)),
        constants=(ZERO_OFFSETS[version],),
        is_interleaved=True,
    )


def _has_consecutive_groups(module: ModuleTensors, weight: TensorSlice) -> bool:
    """True if column k of the weight is in group k // width, which is always so without `desc_act`. Reads `g_idx`."""
    groups = module.find("g_idx")
    if groups is None or not prod(groups.shape):
        return True
    indices = read_integers(groups)
    expected = _consecutive_groups(len(indices), weight.companions[0].block_columns, indices.itemsize)
    return len(indices) == weight.shape[1] and bytes(indices) == expected


@lru_cache(maxsize=8)
def _consecutive_groups(num_columns: int, width: int, itemsize: int) -> bytes:
    """Returns the bytes of `g_idx` for consecutive groups of `width` columns."""
    return (np.arange(num_columns) // width).astype(f"i{itemsize}").tobytes()


FORMATS = tuple(
    StorageFormat(
        name=f"gptq-int{num_bits}",
        loss=Loss.exact,
        # A group has a float16 scale and a zero point.
        row_bytes=lambda num_columns, bits=num_bits: (
            num_columns * bits / 8 + num_columns / USUAL_WIDTH * (2 + bits / 8)
        ),
        rows=partial(_rows, num_bits),
        companions=(SCALES, ZEROS, GROUPS),
        is_output_major=True,
        join=lambda matrices, bits=num_bits: join_by_columns(matrices, matrices[0].source.shape[1] * bits // WORD_BITS),
    )
    for num_bits in BITS
)
METHODS = {"gptq": _pair}
