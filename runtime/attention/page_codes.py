"""Keys and values as `kv.dtype` keeps them, in plain torch operators: rounded one by one, or quantised page by page.

A number is its scale times its code; of int4 times its code and its zero, an integer of eight bits, so that a channel
far from zero still has sixteen levels around itself, and at least those of int8. Scales are rounded to bfloat16 before
codes are made. What is not finite makes a scale that is not, and so do all numbers that share it.

Letters as in paged.py; M pages.
"""

from dataclasses import dataclass

import torch

from ..config.settings import KVDType
from ..plan.shape.dtypes import PAGE_TOKENS, page_parts

FLOAT8, LARGEST_FLOAT8 = torch.float8_e4m3fn, 448.0
LARGEST_CODE = {KVDType.int8: 127, KVDType.int4: 15}


def stored_dtype(kv_dtype: KVDType, computed: torch.dtype) -> torch.dtype:
    """The dtype of pages whose numbers are rounded one by one. Those of float8 are kept as their bits, since few
    operators know it."""
    return {KVDType.bfloat16: torch.bfloat16, KVDType.float8: torch.uint8}.get(kv_dtype, computed)


def cast_to_stored(x: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """`x` as pages hold it; numbers beyond what float8 knows become its largest."""
    if stored is torch.uint8:
        return x.clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8).view(torch.uint8)
    return x.to(stored)


def cast_to_compute(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `narrowed` gave, to compute with."""
    return (x.view(FLOAT8) if x.dtype is torch.uint8 else x).to(dtype)


@dataclass(frozen=True)
class PageFormat:
    """How a layer's pages are quantised: a scale for each channel of the keys, for each head and position of the
    values."""

    kv_dtype: KVDType
    num_heads: int
    key_dim: int
    value_dim: int

    @staticmethod
    def from_dtypes(kv_dtype: KVDType, like_k: torch.Tensor, like_v: torch.Tensor) -> "PageFormat":
        """The format for tokens (1, H, T, D) such as these."""
        return PageFormat(kv_dtype, like_k.shape[1], like_k.shape[3], like_v.shape[3])

    @property
    def page_bytes(self) -> int:
        return page_parts(self.kv_dtype, self.num_heads, self.key_dim, self.value_dim).page_bytes

    @property
    def codes_in_byte(self) -> int:
        return 2 if self.kv_dtype is KVDType.int4 else 1

    def split(self, pages: torch.Tensor) -> list[torch.Tensor]:
        """Views of pages, uint8 (M, bytes): codes of keys and values (M, P, H, D or D/2), their scales (M, H, Dk) and
        (M, H, P), and zeros such as these, int8, empty where there are none."""
        parts = page_parts(self.kv_dtype, self.num_heads, self.key_dim, self.value_dim)
        views, begin = [], 0
        code = torch.int8 if self.kv_dtype is KVDType.int8 else torch.uint8
        for num_bytes, dtype in zip(parts, (code, code, *(torch.bfloat16,) * 2, *(torch.int8,) * 2), strict=True):
            views.append(pages[:, begin : begin + num_bytes].view(dtype))
            begin += num_bytes
        codes, channels, tokens = (
            (PAGE_TOKENS, self.num_heads, -1),
            (self.num_heads, -1),
            (self.num_heads, PAGE_TOKENS),
        )
        shapes = (codes, codes, channels, tokens, channels, tokens)
        return [view.unflatten(1, shape) if view.shape[1] else view for view, shape in zip(views, shapes, strict=True)]

    def encode(self, k_MPHD: torch.Tensor, v_MPHD: torch.Tensor) -> torch.Tensor:
        """Pages (M, bytes) of keys and values that fill them."""
        pages = torch.zeros(len(k_MPHD), self.page_bytes, dtype=torch.uint8, device=k_MPHD.device)
        k_codes, v_codes, k_scales, v_scales, k_zeros, v_zeros = self.split(pages)
        for x, codes, scales, zeros, dim in (
            (k_MPHD, k_codes, k_scales, k_zeros, 1),
            (v_MPHD, v_codes, v_scales.transpose(1, 2), v_zeros, 3),
        ):
            code, scale, zero = self._quantize(x.float(), dim)
            if self.kv_dtype is KVDType.int4:  # number d of a head in the low half of a byte, d + D/2 in the high one
                low, high = code.to(torch.uint8).chunk(2, -1)
                code = low | high << 4
            codes.copy_(code)
            scales.copy_(scale.squeeze(dim))
            if zeros.numel():
                (zeros if dim == 1 else zeros.transpose(1, 2)).copy_(zero.squeeze(dim))
        return pages

    def _quantize(self, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scales and zeros, float32; `dim` is the one over which numbers share a scale."""
        most, low, high = LARGEST_CODE[self.kv_dtype], x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
        scale = torch.maximum(-low, high) / 127
        if self.kv_dtype is KVDType.int4:
            scale = torch.maximum(scale, (high - low) / most)
        scale = scale.bfloat16().float()
        steps = torch.where(scale > 0, 1 / scale, 0)
        levels = (x * steps).round_()
        if self.kv_dtype is KVDType.int8:
            return levels.clamp_(-most, most).nan_to_num_(0), scale, torch.zeros_like(scale)
        zero = (low * steps).round_().clamp_(-128, 127).nan_to_num_(0)
        return (levels - zero).clamp_(0, most).nan_to_num_(0), scale, zero

    def decode(self, pages: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (M, P, H, D) of pages (M, bytes), in `dtype`, made in float32."""
        k_codes, v_codes, k_scales, v_scales, k_zeros, v_zeros = self.split(pages)
        k, v = (
            codes.float() if self.kv_dtype is KVDType.int8 else torch.cat([codes & 15, codes >> 4], -1).float()
            for codes in (k_codes, v_codes)
        )
        if k_zeros.numel():
            k, v = k + k_zeros[:, None].float(), v + v_zeros.transpose(1, 2)[..., None].float()
        k_scales, v_scales = k_scales[:, None].float(), v_scales.transpose(1, 2)[..., None].float()
        return (k * k_scales).to(dtype), (v * v_scales).to(dtype)
