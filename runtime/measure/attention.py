"""Attention rates: decode in bytes of KV per second, prefill in FLOPs per second. A row is a sequence that decodes.

B (or R) rows, N pages in a cache of P positions each, T tokens of a prompt, H heads, D numbers of a head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..attention.device_attention import decode_on_device, prefill_flash, prefill_fused
from ..attention.host_attention import decode_attention, decode_quantized
from ..attention.layout import LayerKV, Pair, PassLayout, QuantizedKV
from ..attention.page_codes import PageFormat, stored_dtype
from ..attention.views import DecodeRows, Prompts, Reach, Rule, Segment
from ..cache.pages import KVPages, num_pages_for
from ..config.settings import KVDType
from ..plan.placement.memory import PAGE_TOKENS
from ..stream.device import ComputeDevice
from .linear import DTYPES
from .timing import Probe, Timer

NUM_POSITIONS = 512  # positions of a row, or tokens of a prompt
FILL_VALUE = 0.5  # keys and values: Linux maps unwritten memory to a single page of zeros, which is read too fast
FULL_REACH = Reach()  # attention to all positions


class UniformRows:
    """Decode attention of rows with `num_positions` each, by the functions that runs use. `pages`: the page numbers of
    each row. Each row has one query, at its last position."""

    def __init__(self, pages: Sequence[Sequence[int]], num_positions: int, device: ComputeDevice):
        row_indices, torch_device = tuple(range(len(pages))), device.torch_device
        self._rows = DecodeRows(row_indices, (num_positions - 1,) * len(pages), row_indices, torch_device)
        self._layout = PassLayout(pages, [], self._rows, [], torch_device, expands=False, slots=row_indices)
        self._is_on_accelerator = device.is_accelerator

    def attend(self, q_BHD: torch.Tensor, k_NPHD: torch.Tensor, v_NPHD: torch.Tensor) -> torch.Tensor:
        scale = q_BHD.shape[2] ** -0.5
        if self._is_on_accelerator:
            kv = LayerKV(k_NPHD, v_NPHD, self._layout, dtype=q_BHD.dtype)
            return decode_on_device(q_BHD, kv, self._rows, FULL_REACH, Rule(scale))
        rows = self._layout.tables_Bn, self._rows.begins(FULL_REACH), self._rows.ends
        return decode_attention(q_BHD, k_NPHD, v_NPHD, *rows, Rule(scale))

    def attend_quantized(
        self, q_BHD: torch.Tensor, page_format: PageFormat, pages: torch.Tensor, tails: Pair
    ) -> torch.Tensor:
        """Attention over a layer's quantized pages (N, bytes) and the rows' unquantized last pages, keys and values
        (R, P, H, D) each."""
        kv, rule = QuantizedKV(page_format, pages, tails, {}, self._layout), Rule(q_BHD.shape[2] ** -0.5)
        if self._is_on_accelerator:
            return decode_on_device(q_BHD, kv, self._rows, FULL_REACH, rule)
        return decode_quantized(q_BHD, kv, self._rows, FULL_REACH, rule)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The heads of a layer, the dtype of Q, K and V, and the `kv_dtype` of the KV cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: KVDType = KVDType.auto

    @property
    def position_bytes(self) -> int:
        """Bytes of keys and values per position, as stored in the KV cache."""
        if self.kv_dtype.is_quantized:
            return self.page_format.page_bytes // PAGE_TOKENS
        return 2 * self.num_kv_heads * self.head_dim * stored_dtype(self.kv_dtype, self.dtype).itemsize

    @property
    def page_format(self) -> PageFormat:
        return PageFormat(self.kv_dtype, self.num_kv_heads, self.head_dim, self.head_dim)


def decode_timer(
    shape: AttentionShape, device: ComputeDevice, num_rows: int, num_positions: int, *, num_layers: int = 1
) -> Timer:
    """Times decode attention of `num_layers` layers in sequence, in bytes of KV. No two rows share pages, and the pages
    of a row are in random order."""
    num_row_pages = num_pages_for(num_positions)
    num_pages = num_rows * num_row_pages
    pages = KVPages(num_pages, device, dtype=shape.kv_dtype)
    q_BHD = torch.ones(num_rows, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=device.torch_device)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))
    rows = UniformRows(order.view(num_rows, -1).tolist(), num_positions, device)

    def make_layer(index: int) -> Callable[[], torch.Tensor]:
        if shape.kv_dtype.is_quantized:
            tail = q_BHD.new_ones(len(q_BHD), PAGE_TOKENS, shape.num_kv_heads, shape.head_dim)
            quantized = pages.quantized_layer(index, shape.page_format)
            quantized[:] = shape.page_format.encode(tail[:1], tail[:1])
            return lambda: rows.attend_quantized(q_BHD, shape.page_format, quantized, (tail, tail))
        example = torch.ones(1, shape.num_kv_heads, 1, shape.head_dim, dtype=shape.dtype)
        k_NPHD, v_NPHD = pages.layer(index, example, example)
        return lambda: rows.attend(q_BHD, k_NPHD, v_NPHD)

    layers = [make_layer(index) for index in range(num_layers)]
    pages.fill(FILL_VALUE)

    def sweep() -> None:
        for layer in layers:
            layer()

    return Timer(num_layers * num_rows * num_positions * shape.position_bytes, sweep, device.wait_for_compute)


def prefill_timer(shape: AttentionShape, device: ComputeDevice, num_tokens: int) -> Timer:
    """Times causal attention of one prompt, in FLOPs."""
    q, k, v = (
        torch.ones(1, num_heads, num_tokens, shape.head_dim, dtype=shape.dtype, device=device.torch_device)
        for num_heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    flops = 2.0 * shape.num_heads * shape.head_dim * num_tokens * (num_tokens + 1)
    return Timer(flops, lambda: attend_prompt(q, k, v, device), device.wait_for_compute)


def attention_name(dtype: str, *, is_on_cpu: bool) -> str:
    """The name of a probe of decode attention."""
    return f"decode attention, {dtype}, " + ("CPU" if is_on_cpu else "device")


def prefill_name(dtype: str) -> str:
    """The name of a probe of prefill attention."""
    return f"prefill attention, {dtype}"


def attention_probes(dtype: str, device: ComputeDevice, *, num_bytes: int) -> list[Probe]:
    """Probes of attention with the heads of Llama 3 8B and `num_bytes` of KV, which must be larger than the CPU
    caches."""
    shape = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype=DTYPES[dtype])
    row_bytes = num_pages_for(NUM_POSITIONS) * PAGE_TOKENS * shape.position_bytes
    num_rows = max(1, num_bytes // row_bytes)
    devices = [ComputeDevice("cpu"), *([device] if device.is_accelerator else [])]
    probes = [
        Probe(
            name=attention_name(dtype, is_on_cpu=not probed.is_accelerator),
            unit="GB/s",
            read=decode_timer(shape, probed, num_rows, NUM_POSITIONS),
        )
        for probed in devices
    ]
    return [*probes, Probe(name=prefill_name(dtype), unit="GFLOP/s", read=prefill_timer(shape, device, NUM_POSITIONS))]


def attend_prompt(
    q_1HTD: torch.Tensor, k_1HTD: torch.Tensor, v_1HTD: torch.Tensor, device: ComputeDevice
) -> torch.Tensor:
    """Returns causal attention of one prompt without cached tokens: (T, H, D)."""
    num_tokens = q_1HTD.shape[2]
    if device.is_accelerator:
        torch_device, scale = device.torch_device, q_1HTD.shape[3] ** -0.5
        prompt = Segment(0, 0, num_tokens, 0, 0, torch_device)
        qkv = q_1HTD, k_1HTD, v_1HTD
        outputs = prefill_flash(qkv, None, Prompts([prompt], torch_device), FULL_REACH, Rule(scale))
        if outputs is not None:
            return outputs[0][1]
        return prefill_fused(q_1HTD[0], k_1HTD[0], v_1HTD[0], prompt, FULL_REACH, scale)
    is_grouped = q_1HTD.shape[1] != k_1HTD.shape[1]
    out = F.scaled_dot_product_attention(q_1HTD, k_1HTD, v_1HTD, is_causal=num_tokens > 1, enable_gqa=is_grouped)
    return out[0].transpose(0, 1)
