"""How many bytes keys and values take in each `kv.dtype`, and which models can keep them so.

A **page** of quantised keys and values holds codes of P positions, of int8 a byte each and of int4 half a byte; one
scale for each channel of the keys and one for each head and position of the values (KIVI, Liu et al. 2024), bfloat16;
and beside each scale of int4 its zero, a byte. Of H heads with Dk and Dv numbers:

    int8: P H (Dk + Dv)     + 2 (H Dk + P H)
    int4: P H (Dk + Dv) / 2 + 3 (H Dk + P H)
"""

from dataclasses import replace
from typing import NamedTuple

from ...config.settings import KVDType
from ...errors import ConfigError
from ...units import round_up
from .model import ModelShape

PAGE_TOKENS = 16  # P, positions of a KV page, see cache/pages.py
PAGE_ALIGNMENT_BYTES = 16  # of quantised pages, so that a position takes whole bytes
NUMBER_BYTES = {KVDType.bfloat16: 2, KVDType.float8: 1}  # of dtypes that round each number by itself


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


def keeping_kv(shape: ModelShape, dtype: KVDType) -> ModelShape:
    """`shape` with keys and values kept in `dtype`: `kv_layer_bytes` are then those that a position takes of a page.

    Raises ConfigError, which names `kv.dtype`, where the model's lanes or heads do not allow it.
    """
    if dtype is KVDType.auto:
        return shape
    if reason := why_exact(shape, dtype):
        raise ConfigError(f"kv.dtype={dtype.value}: {shape.name} {reason}: kv.dtype=auto")
    tails = sum(shape.kv_layer_bytes) * PAGE_TOKENS if dtype.is_quantized else 0
    sizes = tuple(_position_bytes(shape, dtype, layer) for layer in range(len(shape.kv_layer_bytes)))
    return replace(shape, kv_dtype=dtype, kv_layer_bytes=sizes, kv_tail_bytes_per_sequence=tails)


def why_exact(shape: ModelShape, dtype: KVDType) -> str:
    """Empty where nothing speaks against `dtype`."""
    if not shape.is_packed:
        return "runs in padded lanes, whose keys and values transformers keeps as they are computed"
    if dtype.is_quantized and shape.expanded_kv_width:
        return "caches latents that its layers expand, and they would attend to all of them as quantised"
    dims = {dim for layer in range(len(shape.kv_layer_bytes)) for dim in _heads(shape, layer)[1:]}
    if dtype is KVDType.int4 and any(dim % 2 for dim in dims):
        return "has heads of an odd size, and two codes share a byte"
    return ""


def _heads(shape: ModelShape, layer: int) -> tuple[int, int, int]:
    """Heads of a layer's keys and values, and the numbers of each: where nobody looked, what its bytes come to."""
    if shape.kv_heads:
        return shape.kv_heads[layer]
    dim = shape.kv_layer_bytes[layer] // (2 * max(1, shape.num_kv_heads) * shape.compute_dtype_bytes)
    return (shape.num_kv_heads, dim, dim) if dim else (0, 0, 0)


def _position_bytes(shape: ModelShape, dtype: KVDType, layer: int) -> int:
    if dtype.is_quantized:
        return page_parts(dtype, *_heads(shape, layer)).page_bytes // PAGE_TOKENS
    return shape.kv_layer_bytes[layer] // shape.compute_dtype_bytes * NUMBER_BYTES[dtype]
