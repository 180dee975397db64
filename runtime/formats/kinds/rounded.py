"""Weights rounded by `weightstream pack format=int8|int4|fp8`: codes with a scale per row or per group of columns.

For weight X it writes the codes as `X_int8-rows`, `X_int4-groups` or `X_fp8-rows` (uint8), and `X_scales`, bfloat16
(N, G). The layout of codes is in `linear/packed_rows.py`. Rows are rounded in chunks, to bound memory.

Shapes: N rows of K columns, R rows of a chunk, B bytes of codes per row, G groups of W columns.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import NamedTuple

import torch

from ...kernels.arguments import CODE_RUN, FLOAT8, GROUP_NUMBERS, INT4, INT4_MIDDLE, INT8
from ...linear.packed_rows import FORMAT_NAMES, ROUNDED_ENCODINGS, CodedRows, code_bytes
from ...plan.shape.dtypes import FLOATS
from ...plan.shape.shapes import Companion, TensorSlice
from ..module_tensors import METHOD, mismatch_error, pair_parts
from ..scaled_rows import SCALES
from ..storage_format import Loss, StorageFormat

ENCODINGS = {"int8": INT8, "int4": INT4, "fp8": FLOAT8}  # by the value of model.quantize, or of `format` for pack
MAX_INT8, MAX_FLOAT8 = 127, 448  # largest codes
CLIPS = (1.0, 0.93, 0.86, 0.79)  # clipping ratios tried for a group's largest number
NUMBERS_AT_ONCE = 1 << 17  # of a chunk, which stays in the CPU cache while all clipping ratios are tried
DEFAULT_GROUP_SIZE = 64  # columns
LAYER_TENSOR = re.compile(r"\.\d+\.")  # names with a layer number
ROUTERS = {"gate", "router", "shared_expert_gate"}  # modules that choose experts


class RoundedRows(NamedTuple):
    """A chunk of rounded rows."""

    codes_RB: torch.Tensor
    scales_RG: torch.Tensor
    squared_error: float  # sum over squared rounding errors
    squared_norm: float  # sum over squared numbers, before rounding


Squares = tuple[float, float]  # sums over a weight's squared rounding errors, and over its squared numbers


def relative_rms_error(squares: Iterable[Squares]) -> float | None:
    """Returns the RMS rounding error relative to the RMS of the numbers, over several weights; None if all are 0."""
    pairs = list(squares)
    squared_norm = sum(norm for _, norm in pairs)
    return sqrt(sum(error for error, _ in pairs) / squared_norm) if squared_norm else None


@dataclass(frozen=True)
class Rounding:
    """A way to round weights."""

    name: str  # key of `ENCODINGS`
    group_size: int = DEFAULT_GROUP_SIZE  # columns per scale of int4; int8 and fp8 have one scale per row

    @property
    def encoding(self) -> int:
        return ENCODINGS[self.name]

    @property
    def format(self) -> str:
        """The storage format's name."""
        return FORMAT_NAMES[self.encoding]

    def __str__(self) -> str:
        return f"{self.name}, groups of {self.group_size}" if self.encoding == INT4 else self.name

    def skip_reason(self, name: str, dtype: str, shape: tuple[int, ...]) -> str | None:
        """Returns the reason why a tensor must not be rounded; None if it can be."""
        if dtype not in FLOATS or len(shape) not in (2, 3) or 0 in shape:
            return f"{dtype}, not a float matrix"
        if LAYER_TENSOR.search(name) is None:
            return "not in a layer: embeddings and head are not rounded"
        if not ROUTERS.isdisjoint(name.split(".")):
            return "router of experts"
        if shape[-1] % GROUP_NUMBERS or (self.encoding == INT4 and shape[-1] % self.group_size):
            return f"columns not a multiple of {max(GROUP_NUMBERS, self.group_size)}"
        return None

    def num_groups(self, num_columns: int) -> int:
        return num_columns // self.group_size if self.encoding == INT4 else 1

    def packed_columns(self, num_columns: int) -> int:
        """Bytes per row of codes."""
        return code_bytes(self.encoding, num_columns)

    def round_rows(self, stored_NK: torch.Tensor) -> Iterator[RoundedRows | None]:
        """Yields the rounded rows in chunks, in order. Yields None for a chunk with infinities or NaN."""
        for stored_RK in stored_NK.split(max(1, NUMBERS_AT_ONCE // stored_NK.shape[1])):
            numbers_RK = stored_RK.float()
            if not numbers_RK.isfinite().all():
                yield None
                continue
            scales_RG = self.choose_scales(numbers_RK)
            codes_RB = self.encode(numbers_RK, scales_RG)
            error = float((self.decode(codes_RB, scales_RG) - numbers_RK).square().sum(dtype=torch.float64))
            yield RoundedRows(codes_RB, scales_RG, error, float(numbers_RK.square().sum(dtype=torch.float64)))

    def decode(self, codes_RB: torch.Tensor, scales_RG: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of these codes: (R, K) float32."""
        rows = CodedRows(codes_RB, scales_RG, self.encoding)
        out_RK = torch.empty(rows.shape)
        rows.dequantize(slice(None), out_RK)
        return out_RK

    def choose_scales(self, numbers_RK: torch.Tensor) -> torch.Tensor:
        """Returns scales (R, G) bfloat16 for finite float32 numbers, chosen by the number x with the largest magnitude.
        int8 and fp8: |x| gets the largest code. int4: c * x gets code -8, for the ratio c of `CLIPS` that gives the
        smallest squared error in the group."""
        groups_RGW = numbers_RK.unflatten(1, (self.num_groups(numbers_RK.shape[1]), -1))
        if self.encoding != INT4:
            largest_RG = groups_RGW.abs().amax(2)
            exact = largest_RG / (MAX_INT8 if self.encoding == INT8 else MAX_FLOAT8)
            nearest = exact.to(torch.bfloat16)
            above = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
            return torch.where(nearest.float() < exact, above, nearest)  # round up: no code may exceed the largest
        largest_RG = groups_RGW.gather(2, groups_RGW.abs().argmax(2, keepdim=True))[..., 0]  # with its sign
        best_RG = torch.full_like(largest_RG, torch.inf)  # smallest squared errors so far
        scales_RG = torch.zeros_like(largest_RG, dtype=torch.bfloat16)
        rounded = torch.empty_like(groups_RGW)
        for ratio in CLIPS:
            trial_RG = (largest_RG * (-ratio / INT4_MIDDLE)).to(torch.bfloat16)
            _round_to(groups_RGW, trial_RG, -INT4_MIDDLE, INT4_MIDDLE - 1, rounded)
            errors_RG = rounded.mul_(trial_RG.float()[..., None]).sub_(groups_RGW).square_().sum(2)
            is_better_RG = errors_RG < best_RG
            scales_RG = torch.where(is_better_RG, trial_RG, scales_RG)
            best_RG = torch.where(is_better_RG, errors_RG, best_RG)
        return scales_RG

    def encode(self, numbers_RK: torch.Tensor, scales_RG: torch.Tensor) -> torch.Tensor:
        """Returns the nearest codes of float32 numbers, ties to even: (R, B) uint8."""
        groups_RGW = numbers_RK.unflatten(1, (scales_RG.shape[1], -1))
        rounded = torch.empty_like(groups_RGW)
        if self.encoding == FLOAT8:
            torch.div(groups_RGW, _divisors(scales_RG), out=rounded)
            return rounded.clamp_(-MAX_FLOAT8, MAX_FLOAT8).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
        if self.encoding == INT8:
            _round_to(groups_RGW, scales_RG, -MAX_INT8, MAX_INT8, rounded)
            return rounded.to(torch.int8).view(torch.uint8).flatten(1)
        _round_to(groups_RGW, scales_RG, -INT4_MIDDLE, INT4_MIDDLE - 1, rounded)
        # In each run of CODE_RUN codes, the first half are low nibbles and the second half high nibbles.
        halves = rounded.add_(INT4_MIDDLE).to(torch.uint8).flatten(1).unflatten(1, (-1, 2, CODE_RUN // 2))
        return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def _round_to(groups_RGW: torch.Tensor, scales_RG: torch.Tensor, minimum: int, maximum: int, out: torch.Tensor) -> None:
    """Writes numbers divided by their scales to `out`, rounded and clamped."""
    torch.div(groups_RGW, _divisors(scales_RG), out=out).round_().clamp_(minimum, maximum)


def _divisors(scales_RG: torch.Tensor) -> torch.Tensor:
    """Returns the scales as float32 (R, G, 1), with 0 replaced by 1, so that a group of zeros gets codes of 0."""
    scales = scales_RG.float()
    return torch.where(scales == 0, 1, scales)[..., None]


def _pair(tensors: Mapping[str, TensorSlice], quantization: Mapping[str, object]) -> Mapping[str, TensorSlice]:
    """See `storage_format.Method`."""
    for name in ROUNDED_ENCODINGS:
        tensors = pair_parts(tensors, quantization, name, SCALES, partial(_weight, name))
    return tensors


def _weight(name: str, codes: TensorSlice, scales: TensorSlice) -> TensorSlice:
    """Returns the weight of codes in format `name`, with its scales."""
    if len(codes.shape) < 2 or scales.dtype != "BF16" or scales.shape[:-1] != codes.shape[:-1]:
        raise mismatch_error(codes, scales)
    *rows, num_bytes = codes.shape
    num_columns = num_bytes * GROUP_NUMBERS // code_bytes(ROUNDED_ENCODINGS[name], GROUP_NUMBERS)
    num_groups = scales.shape[-1]
    # One group per row, or equal groups of a power-of-two width from 32 to 256.
    width, rest = divmod(num_columns, max(1, num_groups))
    if num_columns % GROUP_NUMBERS or num_groups < 1 or (num_groups > 1 and (rest or width not in (32, 64, 128, 256))):
        raise mismatch_error(codes, scales)
    companion = Companion(role=SCALES, tensor=scales, block_rows=1, block_columns=width)
    shape = (*rows, num_columns)
    return replace(codes, dtype="BF16", format=name, shape=shape, companions=(companion,))


FORMATS = tuple(
    StorageFormat(
        name=name,
        loss=Loss.lossy,
        row_bytes=lambda num_columns, encoding=encoding: (
            code_bytes(encoding, num_columns) + 2 * (num_columns / DEFAULT_GROUP_SIZE if encoding == INT4 else 1)
        ),
        rows=lambda stored, encoding=encoding: CodedRows(stored.raw_NB, stored.companions[SCALES], encoding),
        companions=(SCALES,),
    )
    for name, encoding in ROUNDED_ENCODINGS.items()
)
METHODS = {METHOD: _pair}
