"""How fast attention goes: decode over pages of keys and values, by their bytes, and prompts, by FLOPs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..attention.even_rows import EvenRows, Kept, attend_prompt
from ..attention.page_codes import PageFormat, stored_dtype
from ..cache.pages import KVPages, num_pages_for
from ..config.settings import KVDType
from ..plan.placement.memory import PAGE_TOKENS
from ..stream.device import ComputeDevice
from .linear import DTYPES
from .timing import Probe, Timed

NUM_POSITIONS = 512  # of a row, and of a prompt, where no run says it
ANYTHING = 0.5  # what cached positions hold that nobody computed: memory never written would be read too fast


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The heads of a layer, and the dtype of its queries, keys and values, which are kept in `kv_dtype`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: KVDType = KVDType.auto

    @property
    def position_bytes(self) -> int:
        """Keys and values of one position, as they are kept."""
        if self.kv_dtype.is_quantized:
            return self.page_format.page_bytes // PAGE_TOKENS
        return 2 * self.num_kv_heads * self.head_dim * stored_dtype(self.kv_dtype, self.dtype).itemsize

    @property
    def page_format(self) -> PageFormat:
        return PageFormat(self.kv_dtype, self.num_kv_heads, self.head_dim, self.head_dim)

    @staticmethod
    def of_llama_3_8b(dtype: torch.dtype) -> "AttentionShape":
        return AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype=dtype)


def decoding(
    shape: AttentionShape, device: ComputeDevice, num_rows: int, num_positions: int, *, num_layers: int = 1
) -> Timed:
    """Bytes of keys and values: rows of a lane over pages of their own, which lie in any order, layer after layer."""
    num_row_pages = num_pages_for(num_positions)
    num_pages = num_rows * num_row_pages
    pages = KVPages(num_pages, device, dtype=shape.kv_dtype)
    q_BHD = torch.ones(num_rows, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=device.torch_device)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))
    rows = EvenRows(order.view(num_rows, -1).tolist(), num_positions, device)
    attend = _attending_codes if shape.kv_dtype.is_quantized else _attending
    layers = [attend(shape, pages, index, rows, q_BHD) for index in range(num_layers)]
    pages.fill(ANYTHING)

    def sweep() -> None:
        for layer in layers:
            layer()

    return Timed(num_layers * num_rows * num_positions * shape.position_bytes, sweep, device.finish)


def _attending(
    shape: AttentionShape, pages: KVPages, index: int, rows: EvenRows, q_BHD: torch.Tensor
) -> Callable[[], torch.Tensor]:
    token = torch.ones(1, shape.num_kv_heads, 1, shape.head_dim, dtype=shape.dtype)
    k_NPHD, v_NPHD = pages.layer(index, token, token)
    return lambda: rows.attend(q_BHD, k_NPHD, v_NPHD)


def _attending_codes(
    shape: AttentionShape, pages: KVPages, index: int, rows: EvenRows, q_BHD: torch.Tensor
) -> Callable[[], torch.Tensor]:
    tail = q_BHD.new_ones(len(q_BHD), PAGE_TOKENS, shape.num_kv_heads, shape.head_dim)
    quantized = pages.quantized_layer(index, shape.page_format)
    quantized[:] = shape.page_format.encode(tail[:1], tail[:1])
    kept = Kept(shape.page_format, quantized, (tail, tail))
    return lambda: rows.attend_quantized(q_BHD, kept)


def prefilling(shape: AttentionShape, device: ComputeDevice, num_tokens: int) -> Timed:
    """FLOPs of the pairs that see each other in one prompt: products with keys, then with values."""
    q, k, v = (
        torch.ones(1, num_heads, num_tokens, shape.head_dim, dtype=shape.dtype, device=device.torch_device)
        for num_heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    flops = 2.0 * shape.num_heads * shape.head_dim * num_tokens * (num_tokens + 1)
    return Timed(flops, lambda: attend_prompt(q, k, v, device), device.finish)


def attention_name(dtype: str, *, is_on_cpu: bool) -> str:
    return f"decode attention, {dtype}, " + ("CPU" if is_on_cpu else "device")


def prefill_name(dtype: str) -> str:
    return f"prefill attention, {dtype}"


def attention_probes(dtype: str, device: ComputeDevice, *, num_bytes: int) -> list[Probe]:
    """A layer of Llama-3-8B over `num_bytes` of keys and values: more than a cache holds."""
    shape = AttentionShape.of_llama_3_8b(DTYPES[dtype])
    row_bytes = num_pages_for(NUM_POSITIONS) * PAGE_TOKENS * shape.position_bytes
    num_rows = max(1, num_bytes // row_bytes)
    places = [ComputeDevice("cpu"), *([device] if device.is_accelerator else [])]
    probes = [
        Probe(
            name=attention_name(dtype, is_on_cpu=not place.is_accelerator),
            unit="GB/s",
            read=decoding(shape, place, num_rows, NUM_POSITIONS),
        )
        for place in places
    ]
    return [*probes, Probe(name=prefill_name(dtype), unit="GFLOP/s", read=prefilling(shape, device, NUM_POSITIONS))]
