"""How fast attention goes: decode over pages of keys and values, by their bytes, and prompts, by FLOPs.

The shape is a layer of Llama-3-8B: 32 query heads over 8 KV heads of 128.
"""

import torch

from ..attention.even_rows import EvenRows, attend_prompt
from ..cache.pages import split_pages
from ..plan.placement.memory import PAGE_TOKENS
from ..stream.device import ComputeDevice
from .products import DTYPES
from .timing import Probe, Timed

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
NUM_POSITIONS = 512


def attention_name(dtype: str, *, is_on_cpu: bool) -> str:
    return f"decode attention, {dtype}, " + ("CPU" if is_on_cpu else "device")


def prefill_name(dtype: str) -> str:
    return f"prefill attention, {dtype}"


def attention_probes(dtype: str, device: ComputeDevice, *, num_bytes: int) -> list[Probe]:
    """`num_bytes` of keys and values: more than a cache holds."""
    places = [ComputeDevice("cpu"), *([device] if device.is_accelerator else [])]
    return [*(_decode(dtype, place, num_bytes) for place in places), _prefill(dtype, device)]


def _decode(dtype: str, device: ComputeDevice, num_bytes: int) -> Probe:
    """Rows of `NUM_POSITIONS` positions, whose pages lie in any order."""
    place, number = device.torch_device, DTYPES[dtype]
    page_bytes = 2 * PAGE_TOKENS * NUM_KV_HEADS * HEAD_DIM * number.itemsize
    num_row_pages = NUM_POSITIONS // PAGE_TOKENS
    num_rows = max(1, num_bytes // (page_bytes * num_row_pages))
    num_pages = num_rows * num_row_pages
    pages = device.zeros(num_pages * page_bytes)[: num_pages * page_bytes]
    pages.view(number).copy_(torch.rand(page_bytes).to(number).repeat(len(pages) // page_bytes // number.itemsize))
    token = torch.empty(1, NUM_KV_HEADS, 1, HEAD_DIM, dtype=number)
    k_NPHD, v_NPHD = split_pages(pages.view(num_pages, page_bytes), token, token)
    q_BHD = torch.randn(num_rows, NUM_HEADS, HEAD_DIM).to(number).to(place)
    tables = torch.randperm(num_pages).view(num_rows, -1).tolist()
    rows = EvenRows(tables, NUM_POSITIONS, device)

    def act() -> None:
        rows.attend(q_BHD, k_NPHD, v_NPHD)

    name = attention_name(dtype, is_on_cpu=not device.is_accelerator)
    return Probe(name=name, unit="GB/s", read=Timed(num_pages * page_bytes, act, device.finish))


def _prefill(dtype: str, device: ComputeDevice) -> Probe:
    """A prompt of `NUM_POSITIONS`. FLOPs of the pairs that see each other: products with keys, then with values."""
    q, k, v = (
        torch.randn(1, num_heads, NUM_POSITIONS, HEAD_DIM).to(DTYPES[dtype]).to(device.torch_device)
        for num_heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    num_pairs = NUM_POSITIONS * (NUM_POSITIONS + 1) / 2
    flops = 4.0 * num_pairs * NUM_HEADS * HEAD_DIM

    def act() -> None:
        attend_prompt(q, k, v, device)

    return Probe(name=prefill_name(dtype), unit="GFLOP/s", read=Timed(flops, act, device.finish))
