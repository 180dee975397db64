"""KV cache dtypes and their page sizes, error classes of storage formats, and the dtype for `model.dtype=auto`.

A **page** holds the keys and values of P positions of one sequence in one layer. A quantized page stores them as codes
of one byte (int8) or half a byte (int4). Keys have a bfloat16 scale per channel; values have one per head and position
(KIVI, Liu et al. 2024). For int4 each scale has a zero point of one byte. With H KV heads, and Dk and Dv elements per
head for keys and values, the bytes of a page are:

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

PAGE_TOKENS = 16  # P, see cache/pages.py
PAGE_ALIGNMENT_BYTES = 16  # sizes of quantized pages are multiples of it, and so whole bytes per position
FLOATS = ("F16", "BF16", "F32")  # safetensors dtypes of unquantized weights
KV_ITEM_BYTES = {KVDType.bfloat16: 2, KVDType.float8: 1}  # bytes per element of KV dtypes without scales


class PageParts(NamedTuple):
    """Sizes in bytes of the parts of a quantized page, in storage order. Only int4 has zero points."""

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
    """Returns the part sizes of an int8 or int4 page. `key_dim` and `value_dim` must be even for int4."""
    num_key_scales, num_value_scales = num_heads * key_dim, PAGE_TOKENS * num_heads
    is_int4 = dtype is KVDType.int4
    codes_per_byte = 2 if is_int4 else 1
    return PageParts(
        key_codes=PAGE_TOKENS * num_heads * key_dim // codes_per_byte,
        value_codes=PAGE_TOKENS * num_heads * value_dim // codes_per_byte,
        key_scales=2 * num_key_scales,
        value_scales=2 * num_value_scales,
        key_zeros=num_key_scales if is_int4 else 0,
        value_zeros=num_value_scales if is_int4 else 0,
    )


def with_kv_dtype(shape: ModelShape, dtype: KVDType) -> ModelShape:
    """Returns `shape` with its KV cache stored as `dtype`, and sets its `kv_layer_bytes` accordingly.

    Raises ConfigError if the model does not support this `kv.dtype`.
    """
    if dtype is KVDType.auto:
        return shape
    if reason := kv_dtype_obstacle(shape, dtype):
        raise ConfigError(f"kv.dtype={dtype.value}: {shape.name} {reason}: set kv.dtype=auto")
    # Each sequence keeps its tail, the newest partly filled page, unquantized.
    tail_bytes = sum(shape.kv_layer_bytes) * PAGE_TOKENS if dtype.is_quantized else 0
    if dtype.is_quantized:
        parts = [page_parts(dtype, *_kv_head_sizes(shape, layer)) for layer in range(len(shape.kv_layer_bytes))]
        sizes = tuple(part.page_bytes // PAGE_TOKENS for part in parts)
    else:
        sizes = tuple(size // shape.compute_dtype_bytes * KV_ITEM_BYTES[dtype] for size in shape.kv_layer_bytes)
    return replace(shape, kv_dtype=dtype, kv_layer_bytes=sizes, kv_tail_bytes_per_sequence=tail_bytes)


def kv_dtype_obstacle(shape: ModelShape, dtype: KVDType) -> str:
    """Returns why the model cannot store its KV cache as `dtype`; empty if it can."""
    if not shape.is_packed:
        return "runs in padded lanes, where transformers stores keys and values in the compute dtype"
    if dtype.is_quantized and shape.expanded_kv_width:
        return "caches latents (MLA), which attention reads from the cache even for new positions"
    dims = {dim for layer in range(len(shape.kv_layer_bytes)) for dim in _kv_head_sizes(shape, layer)[1:]}
    if dtype is KVDType.int4 and any(dim % 2 for dim in dims):
        return "has an odd head size, and int4 packs two codes per byte"
    return ""


def _kv_head_sizes(shape: ModelShape, layer: int) -> tuple[int, int, int]:
    """Returns a layer's number of KV heads, and the elements per head of keys and of values.

    If the shape does not list them, assumes keys and values of equal size.
    """
    if shape.kv_heads:
        return shape.kv_heads[layer]
    dim = shape.kv_layer_bytes[layer] // (2 * max(1, shape.num_kv_heads) * shape.compute_dtype_bytes)
    return (shape.num_kv_heads, dim, dim) if dim else (0, 0, 0)


class Loss(Enum):
    """The error that a storage format introduces."""

    exact = "exact"  # the published bytes, decoded as the format defines
    lossless = "lossless"  # repacked, bit-identical to the published values
    lossy = "lossy"  # rounded


LOSS_ORDER = (Loss.exact, Loss.lossless, Loss.lossy)
LOSS_TEXTS = {
    Loss.exact: "exact, as published",
    Loss.lossless: "lossless, same bits as published",
}


@dataclass(frozen=True, kw_only=True)
class WeightStorage:
    """Summary of the storage formats of a model's matrices."""

    formats: tuple[str, ...]  # format names, or dtypes of unquantized matrices; most bytes first
    loss: Loss  # of the worst format
    relative_error: float | None = None  # RMS error of rounded weights relative to their RMS; None: unknown or zero

    @staticmethod
    def from_losses(
        shape: ModelShape, losses: Mapping[str, Loss], relative_error: float | None = None
    ) -> "WeightStorage":
        """Makes the summary of a model. `losses`: error classes by format; formats that it omits are exact."""
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


NATIVE_SHARE = 0.5  # a device emulates bfloat16 if its FLOP/s are at most this share of those of float16


def resolve_auto_dtype(stored: DType, *, has_device: bool, has_bfloat16: bool = True) -> DType:
    """Returns the dtype for `model.dtype=auto`.

    On a CPU this is float32, the most accurate and on most CPUs the fastest dtype. On a device it is the dtype of the
    checkpoint. A device without bfloat16 units runs bfloat16 checkpoints in float16, which overflows at 65,504.
    """
    if not has_device:
        return DType.float32
    return DType.float16 if stored is DType.bfloat16 and not has_bfloat16 else stored


def has_bfloat16_units(machine: MachineConfig) -> bool:
    """True if the machine computes bfloat16 natively, by its data sheet or its measured rates."""
    if machine.sheet is not None:
        return machine.sheet.bfloat16_tflops is not None
    wide, narrow = (machine.rates.bfloat16, machine.rates.float16) if machine.rates is not None else (None, None)
    return wide is None or narrow is None or max(wide.gemm_gflops) > NATIVE_SHARE * max(narrow.gemm_gflops)
