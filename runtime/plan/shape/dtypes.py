"""The numbers that weights, keys and values are kept in: how many bytes keys and values take in each `kv.dtype` and
which models can keep them so; what a way of storing does to numbers, three classes of error; and which precision
`model.dtype=auto` is, for runs and for plans of machines that are not there.

A **page** of quantised keys and values holds codes of P positions, of int8 a byte each and of int4 half a byte; one
scale for each channel of the keys and one for each head and position of the values (KIVI, Liu et al. 2024), bfloat16;
and beside each scale of int4 its zero, a byte. Of H heads with Dk and Dv numbers:

    int8: P H (Dk + Dv)     + 2 (H Dk + P H)
    int4: P H (Dk + Dv) / 2 + 3 (H Dk + P H)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from ...config.settings import DType, KVDType, MachineConfig
from ...errors import ConfigError
from ...units import round_up
from .model import ModelShape

PAGE_TOKENS = 16  # P, positions of a KV page, see cache/pages.py
PAGE_ALIGNMENT_BYTES = 16  # of quantised pages, so that a position takes whole bytes
KV_ITEM_BYTES = {KVDType.bfloat16: 2, KVDType.float8: 1}  # of dtypes that round each number by itself


class PageParts(NamedTuple):
    """The bytes of a quantised page's parts, in the order in which they lie; zeros are only int4's."""

    key_codes: int
    value_codes: int
    key_scales: int
    value_scales: int
    key_zeros: int
    value_zeros: int

    @property
    def page_bytes(self) -> int:
        return round_up(sum(self), PAGE_ALIGNMENT_BYTES)


def page_parts(dtype: KVDType, num_heads: int, key_dim: int, value_dim: int) -> PageParts:
    """The parts of a page of int8 or int4; two codes of int4 share a byte, so that dims must be even."""
    channels, tokens, is_half = num_heads * key_dim, PAGE_TOKENS * num_heads, dtype is KVDType.int4
    return PageParts(
        key_codes=tokens * key_dim // (2 if is_half else 1),
        value_codes=tokens * value_dim // (2 if is_half else 1),
        key_scales=2 * channels,
        value_scales=2 * tokens,
        key_zeros=channels if is_half else 0,
        value_zeros=tokens if is_half else 0,
    )


def with_kv_dtype(shape: ModelShape, dtype: KVDType) -> ModelShape:
    """`shape` with keys and values kept in `dtype`: `kv_layer_bytes` are then those that a position takes of a page.

    Raises ConfigError, which names `kv.dtype`, where the model's lanes or heads do not allow it.
    """
    if dtype is KVDType.auto:
        return shape
    if reason := kv_dtype_obstacle(shape, dtype):
        raise ConfigError(f"kv.dtype={dtype.value}: {shape.name} {reason}: kv.dtype=auto")
    tails = sum(shape.kv_layer_bytes) * PAGE_TOKENS if dtype.is_quantized else 0
    if dtype.is_quantized:
        parts = [page_parts(dtype, *_kv_head_sizes(shape, layer)) for layer in range(len(shape.kv_layer_bytes))]
        sizes = tuple(each.page_bytes // PAGE_TOKENS for each in parts)
    else:
        sizes = tuple(size // shape.compute_dtype_bytes * KV_ITEM_BYTES[dtype] for size in shape.kv_layer_bytes)
    return replace(shape, kv_dtype=dtype, kv_layer_bytes=sizes, kv_tail_bytes_per_sequence=tails)


def kv_dtype_obstacle(shape: ModelShape, dtype: KVDType) -> str:
    """Empty where nothing speaks against `dtype`."""
    if not shape.is_packed:
        return "runs in padded lanes, whose keys and values transformers keeps as they are computed"
    if dtype.is_quantized and shape.expanded_kv_width:
        return "caches latents that its layers expand, and they would attend to all of them as quantised"
    dims = {dim for layer in range(len(shape.kv_layer_bytes)) for dim in _kv_head_sizes(shape, layer)[1:]}
    if dtype is KVDType.int4 and any(dim % 2 for dim in dims):
        return "has heads of an odd size, and two codes share a byte"
    return ""


def _kv_head_sizes(shape: ModelShape, layer: int) -> tuple[int, int, int]:
    """Heads of a layer's keys and values, and the numbers of each: where nobody looked, what its bytes come to."""
    if shape.kv_heads:
        return shape.kv_heads[layer]
    dim = shape.kv_layer_bytes[layer] // (2 * max(1, shape.num_kv_heads) * shape.compute_dtype_bytes)
    return (shape.num_kv_heads, dim, dim) if dim else (0, 0, 0)


class Loss(Enum):
    """What a format does to numbers. `exact`: they are what its definition makes of the published bytes. `lossless`:
    they are the original's, bit by bit. `lossy`: they are the original's, rounded."""

    exact = "exact"
    lossless = "lossless"
    lossy = "lossy"


LOSS_ORDER = (Loss.exact, Loss.lossless, Loss.lossy)
LOSS_TEXTS = {
    Loss.exact: "exact to the published numbers",
    Loss.lossless: "lossless, bit by bit the published numbers",
}


@dataclass(frozen=True, kw_only=True)
class WeightStorage:
    """How the matrices of a model are stored. `formats`: storage formats, and dtypes of plain ones, by their bytes, the
    most first; `loss` is the worst of theirs. `relative_error`: the root of the squares of what weights are off by, of
    those that were rounded, as a share of their own; None where nobody measured it, or nothing is off."""

    formats: tuple[str, ...]
    loss: Loss
    relative_error: float | None = None

    @staticmethod
    def from_losses(
        shape: ModelShape, losses: Mapping[str, Loss], relative_error: float | None = None
    ) -> "WeightStorage":
        """`losses`: the class of each format that is no dtype."""
        num_bytes = dict[str, int]()
        parameters = [parameter for stage in shape.stages for parameter in stage.parameters]
        pieces = [piece for parameter in parameters for entry in parameter.pieces for piece in entry]
        for piece in {piece.name: piece for piece in pieces if len(piece.shape) > 1}.values():
            name = piece.format or piece.dtype
            num_bytes[name] = num_bytes.get(name, 0) + piece.num_bytes
        formats = sorted(num_bytes, key=lambda name: -num_bytes[name])
        format_losses = [losses.get(name, Loss.exact) for name in formats]
        loss = max(format_losses, key=LOSS_ORDER.index, default=Loss.exact)
        return WeightStorage(
            formats=tuple(formats), loss=loss, relative_error=relative_error if loss is Loss.lossy else None
        )

    def __str__(self) -> str:
        return f"{self.names}: {self.loss_text}"

    @property
    def names(self) -> str:
        return ", ".join(self.formats)

    @property
    def loss_text(self) -> str:
        if self.loss is not Loss.lossy:
            return LOSS_TEXTS[self.loss]
        error = "not measured" if self.relative_error is None else f"{self.relative_error:.2%}"
        return f"lossy, relative RMS error {error}"


NATIVE_SHARE = 0.5  # of float16's FLOP/s: where products of bfloat16 reach no more, they are made of others


def auto_dtype(stored: DType, *, has_device: bool, has_bfloat16: bool = True) -> DType:
    """The dtype that `auto` means. On a CPU float32: the exact answer, and on most CPUs the faster one. On a device the
    checkpoint's own, but float16 for bfloat16 where that has no units. Both have 16 bits; float16 has more digits, and
    ends at 65,504."""
    if not has_device:
        return DType.float32
    return DType.float16 if stored is DType.bfloat16 and not has_bfloat16 else stored


def has_bfloat16_units(machine: MachineConfig) -> bool:
    """Whether the machine has units for bfloat16, by its data sheet or by its measured rates."""
    if machine.sheet is not None:
        return machine.sheet.bfloat16_tflops is not None
    wide, narrow = (machine.rates.bfloat16, machine.rates.float16) if machine.rates is not None else (None, None)
    return wide is None or narrow is None or max(wide.gemm_gflops) > NATIVE_SHARE * max(narrow.gemm_gflops)
