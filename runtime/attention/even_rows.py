"""Attention of rows of one length, or of one prompt, as a run computes it: for those who measure it. Letters as in
paged.py."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..stream.device import ComputeDevice
from .device_attention import decode_on_device, prefill_fused, prefill_in_flash
from .host_attention import decode_attention
from .layout import LayerKV, PassLayout
from .page_codes import PageFormat
from .quantized import Pair, QuantizedKV
from .quantized_attention import decode_quantized
from .rule import Rule
from .views import DecodeRows, Prompts, Reach, Segment

EVERYTHING = Reach()


class Kept(NamedTuple):
    """Quantised pages (N, bytes) of a layer, and the tails (R, P, H, D) of its rows."""

    format: PageFormat
    pages: torch.Tensor
    tails: Pair


class EvenRows:
    """`pages` of each row; all have `num_positions`, and decode the last one."""

    def __init__(self, pages: Sequence[Sequence[int]], num_positions: int, device: ComputeDevice):
        numbers, place = tuple(range(len(pages))), device.torch_device
        self._rows = DecodeRows(numbers, (num_positions - 1,) * len(pages), numbers, place)
        self._layout = PassLayout(pages, [], self._rows, [], place, expands=False, slots=numbers)
        self._is_on_accelerator = device.is_accelerator

    def attend(self, q_BHD: torch.Tensor, k_NPHD: torch.Tensor, v_NPHD: torch.Tensor) -> torch.Tensor:
        scale = q_BHD.shape[2] ** -0.5
        if self._is_on_accelerator:
            kv = LayerKV(k_NPHD, v_NPHD, self._layout, dtype=q_BHD.dtype)
            return decode_on_device(q_BHD, kv, self._rows, EVERYTHING, Rule(scale))
        rows = self._layout.tables_Bn, self._rows.begins(EVERYTHING), self._rows.ends
        return decode_attention(q_BHD, k_NPHD, v_NPHD, *rows, scale=scale)

    def attend_quantized(self, q_BHD: torch.Tensor, kept: Kept) -> torch.Tensor:
        kv, rule = QuantizedKV(kept.format, kept.pages, kept.tails, {}, self._layout), Rule(q_BHD.shape[2] ** -0.5)
        if self._is_on_accelerator:
            return decode_on_device(q_BHD, kv, self._rows, EVERYTHING, rule)
        return decode_quantized(q_BHD, kv, self._rows, EVERYTHING, rule)


def attend_prompt(
    q_1HTD: torch.Tensor, k_1HTD: torch.Tensor, v_1HTD: torch.Tensor, device: ComputeDevice
) -> torch.Tensor:
    """Attention of one prompt that nothing is cached of: (T, H, D)."""
    num_tokens = q_1HTD.shape[2]
    if device.is_accelerator:
        place, scale = device.torch_device, q_1HTD.shape[3] ** -0.5
        prompt = Segment(0, 0, num_tokens, 0, 0, place)
        qkv = q_1HTD, k_1HTD, v_1HTD
        found = prefill_in_flash(qkv, None, Prompts([prompt], place), EVERYTHING, Rule(scale))
        if found is not None:
            return found[0][1]
        return prefill_fused(q_1HTD[0], k_1HTD[0], v_1HTD[0], prompt, EVERYTHING, scale)
    is_grouped = q_1HTD.shape[1] != k_1HTD.shape[1]
    out = F.scaled_dot_product_attention(q_1HTD, k_1HTD, v_1HTD, is_causal=num_tokens > 1, enable_gqa=is_grouped)
    return out[0].transpose(0, 1)
