"""How fast memory is read, and how fast decode attention goes over KV pages in it: bytes per second of both.

The shape is a layer of Llama-3-8B: 64 sequences of 512 positions, 32 query heads over 8 KV heads of 128. So many layers
lie side by side that a sweep over them finds nothing of the sweep before in any cache.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.attention.host_attention import decode_attention
from runtime.attention.plain_attention import decode_attention_torch
from runtime.cache.pages import split_pages
from runtime.config import DType
from runtime.plan.placement.memory import PAGE_TOKENS
from runtime.stream.device import ComputeDevice
from runtime.units import MIB

from .contenders import Act, Sweep

NUM_ROWS, NUM_POSITIONS, NUM_KV_HEADS, GROUP, HEAD_DIM = 64, 512, 8, 4, 128
NUM_PAGES = NUM_ROWS * NUM_POSITIONS // PAGE_TOKENS
SWEPT_BYTES = 1536 * MIB  # three times the largest cache that we met (480 MiB)
NUM_SWEEPS = 5
LINK_BYTES_PER_SECOND = 16e9  # PCIe 4.0 with 8 lanes, or what 16 lanes of 3.0 give


@dataclass(frozen=True, kw_only=True)
class Sweeps:
    seconds: float
    num_bytes: int


def layer_bytes(dtype: DType) -> int:
    return 2 * NUM_PAGES * PAGE_TOKENS * NUM_KV_HEADS * HEAD_DIM * _torch_dtype(dtype).itemsize


def sweep(entry: Sweep) -> Sweeps:
    """NUM_SWEEPS times over SWEPT_BYTES of layers, with as many threads as torch has. The first, which compiles and
    takes up pages, is not counted."""
    device, num_bytes = ComputeDevice("cpu"), layer_bytes(entry.dtype)
    layers = [_filled(device, entry.dtype) for _ in range(SWEPT_BYTES // num_bytes)]
    act = _read if entry.act is Act.read else _attention(entry)
    begin = 0.0
    for turn in range(NUM_SWEEPS + 1):
        if turn == 1:
            begin = time.monotonic()
        for layer in layers:
            act(layer)
    return Sweeps(seconds=time.monotonic() - begin, num_bytes=NUM_SWEEPS * len(layers) * num_bytes)


def _torch_dtype(dtype: DType) -> torch.dtype:
    return getattr(torch, dtype.value)


def _filled(device: ComputeDevice, dtype: DType) -> torch.Tensor:
    """(N, numbers of a page): keys, then values, in the memory that a run has its KV in."""
    num_bytes = layer_bytes(dtype)
    flat = device.zeros(num_bytes)[:num_bytes].view(_torch_dtype(dtype))
    return flat.uniform_(-1, 1).view(NUM_PAGES, -1)


def _read(layer: torch.Tensor) -> None:
    layer.sum()


def _attention(entry: Sweep) -> Callable[[torch.Tensor], None]:
    tables = torch.randperm(NUM_PAGES).view(NUM_ROWS, -1).to(torch.int32)
    begins, ends = torch.zeros(NUM_ROWS, dtype=torch.int32), torch.full((NUM_ROWS,), NUM_POSITIONS, dtype=torch.int32)
    dtype = _torch_dtype(entry.dtype)
    q = torch.randn(NUM_ROWS, NUM_KV_HEADS * GROUP, HEAD_DIM).to(dtype)
    token = torch.empty(1, NUM_KV_HEADS, 1, HEAD_DIM, dtype=dtype)
    attention = decode_attention_torch if entry.act is Act.operators else decode_attention

    def act(layer: torch.Tensor) -> None:
        k, v = split_pages(layer.view(torch.uint8), token, token)
        attention(q, k, v, tables, begins, ends, scale=HEAD_DIM**-0.5)

    return act
