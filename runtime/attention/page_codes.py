"""Storage of keys and values for each `kv.dtype`, in plain torch operators: casts of values, or quantized pages.

For int8, value = scale * code. For int4, value = scale * (code + zero), with a zero point of 8 bits, so that channels
with values far from zero also use all 16 codes. The scale of int4 is at least as large as that of int8. Scales are
rounded to bfloat16 before codes are computed. A value that is not finite makes all values with its scale not finite.

Letters of tensor dimensions: M pages, P positions of a page, H KV heads, D elements of a head (Dk of a key, Dv of a
value), T tokens.
"""

from dataclasses import dataclass

import torch

from ..config.settings import KVDType
from ..plan.shape.dtypes import PAGE_TOKENS, page_parts

FLOAT8, MAX_FLOAT8 = torch.float8_e4m3fn, 448.0
MAX_CODE = {KVDType.int8: 127, KVDType.int4: 15}


def stored_dtype(kv_dtype: KVDType, computed: torch.dtype) -> torch.dtype:
    """The dtype of pages that are not quantized. float8 is stored as uint8 bits, as few operators support float8.

    `computed`: dtype of the computed keys and values.
    """
    return {KVDType.bfloat16: torch.bfloat16, KVDType.float8: torch.uint8}.get(kv_dtype, computed)


def cast_to_stored(x: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """Casts to the dtype of pages. Values beyond the range of float8 become its largest value."""
    if stored is torch.uint8:
        return x.clamp(-MAX_FLOAT8, MAX_FLOAT8).to(FLOAT8).view(torch.uint8)
    return x.to(stored)


def cast_to_compute(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Casts values from `cast_to_stored` to `dtype`."""
    return (x.view(FLOAT8) if x.dtype is torch.uint8 else x).to(dtype)


@dataclass(frozen=True)
class PageFormat:
    """Format of a layer's quantized pages. Keys have a scale per channel, values have one per head and position."""

    kv_dtype: KVDType
    num_heads: int
    key_dim: int
    value_dim: int

    @staticmethod
    def from_dtypes(kv_dtype: KVDType, like_k: torch.Tensor, like_v: torch.Tensor) -> "PageFormat":
        """Makes the format for keys and values (1, H, T, D) with the shapes of these tensors."""
        return PageFormat(kv_dtype, like_k.shape[1], like_k.shape[3], like_v.shape[3])

    @property
    def page_bytes(self) -> int:
        return page_parts(self.kv_dtype, self.num_heads, self.key_dim, self.value_dim).page_bytes

    @property
    def codes_in_byte(self) -> int:
        return 2 if self.kv_dtype is KVDType.int4 else 1

    def split(self, pages: torch.Tensor) -> list[torch.Tensor]:
        """Views of the parts of pages (M, bytes): codes, scales and zero points, each of keys, then of values.

        Codes are (M, P, H, D), or (M, P, H, D/2) for int4. Scales are bfloat16 (M, H, Dk) and (M, H, P). Zero points
        are int8 with the shapes of the scales, and empty for int8 pages.
        """
        parts = page_parts(self.kv_dtype, self.num_heads, self.key_dim, self.value_dim)
        views, begin = [], 0
        code = torch.int8 if self.kv_dtype is KVDType.int8 else torch.uint8
        for num_bytes, dtype in zip(parts, (code, code, *(torch.bfloat16,) * 2, *(torch.int8,) * 2), strict=True):
            views.append(pages[:, begin : begin + num_bytes].view(dtype))
            begin += num_bytes
        codes, channels = (PAGE_TOKENS, self.num_heads, -1), (self.num_heads, -1)
        tokens = self.num_heads, PAGE_TOKENS
        shapes = (codes, codes, channels, tokens, channels, tokens)
        return [view.unflatten(1, shape) if view.shape[1] else view for view, shape in zip(views, shapes, strict=True)]

    def encode(self, k_MPHD: torch.Tensor, v_MPHD: torch.Tensor) -> torch.Tensor:
        """Quantizes keys and values of full pages to uint8 (M, bytes)."""
        pages = torch.zeros(len(k_MPHD), self.page_bytes, dtype=torch.uint8, device=k_MPHD.device)
        k_codes, v_codes, k_scales, v_scales, k_zeros, v_zeros = self.split(pages)
        for x, codes, scales, zeros, dim in (
            (k_MPHD, k_codes, k_scales, k_zeros, 1),
            (v_MPHD, v_codes, v_scales.transpose(1, 2), v_zeros, 3),
        ):
            code, scale, zero = self._quantize(x.float(), dim)
            if self.kv_dtype is KVDType.int4:  # element d in the low nibble of a byte, d + D/2 in the high one
                low, high = code.to(torch.uint8).chunk(2, -1)
                code = low | high << 4
            codes.copy_(code)
            scales.copy_(scale.squeeze(dim))
            if zeros.numel():
                (zeros if dim == 1 else zeros.transpose(1, 2)).copy_(zero.squeeze(dim))
        return pages

    def _quantize(self, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scales and zero points, float32; numbers along `dim` share a scale."""
        max_code, low, high = MAX_CODE[self.kv_dtype], x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
        scale = torch.maximum(-low, high) / 127
        if self.kv_dtype is KVDType.int4:
            scale = torch.maximum(scale, (high - low) / max_code)
        scale = scale.bfloat16().float()  # exactness: decode uses the rounded scale
        steps = torch.where(scale > 0, 1 / scale, 0)
        levels = (x * steps).round_()
        if self.kv_dtype is KVDType.int8:
            return levels.clamp_(-max_code, max_code).nan_to_num_(0), scale, torch.zeros_like(scale)
        zero = (low * steps).round_().clamp_(-128, 127).nan_to_num_(0)
        return (levels - zero).clamp_(0, max_code).nan_to_num_(0), scale, zero

    def decode(self, pages: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantizes pages (M, bytes) in float32 to keys and values (M, P, H, D) of `dtype`."""
        k_codes, v_codes, k_scales, v_scales, k_zeros, v_zeros = self.split(pages)
        k, v = (
            codes.float() if self.kv_dtype is KVDType.int8 else torch.cat([codes & 15, codes >> 4], -1).float()
            for codes in (k_codes, v_codes)
        )
        if k_zeros.numel():
            k, v = k + k_zeros[:, None].float(), v + v_zeros.transpose(1, 2)[..., None].float()
        k_scales, v_scales = k_scales[:, None].float(), v_scales.transpose(1, 2)[..., None].float()
        return (k * k_scales).to(dtype), (v * v_scales).to(dtype)
