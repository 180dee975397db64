"""Baselines without a model: disk reads, memory reads, and decode attention.

Attention is computed over KV pages with the sizes of a Llama-3-8B layer: 64 sequences of 512 positions, 32 query heads,
8 KV heads. A sweep visits all layers once, which are together larger than the processor's cache.
"""

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from threading import local

import torch

from runtime.attention.host_attention import decode_attention, decode_attention_torch
from runtime.attention.views import Rule
from runtime.cache.pages import split_pages
from runtime.config.settings import DType, OffloadConfig
from runtime.library.api import Runtime
from runtime.plan.placement.memory import PAGE_TOKENS
from runtime.plan.schedule.actions import WEIGHT_OPS
from runtime.plan.schedule.schedule import make_schedule
from runtime.plan.shape.extents import Extent, slot_layout
from runtime.sequences.sequence import Request
from runtime.stream.device import ComputeDevice
from runtime.stream.host_memory import peak_resident_bytes, resident_bytes
from runtime.stream.weights import WeightStream
from runtime.units import MIB

from .contenders import AttentionBaseline, KVAccess
from .task import Result

READ_PASSES = 4
NUM_ROWS, NUM_POSITIONS, NUM_KV_HEADS, GROUP, HEAD_DIM = 64, 512, 8, 4, 128  # GROUP: query heads of a KV head
NUM_PAGES = NUM_ROWS * NUM_POSITIONS // PAGE_TOKENS
SWEPT_BYTES = 1536 * MIB  # three times the largest cache of known processors (480 MiB)
NUM_SWEEPS = 5


def read_layers(runtime: Runtime, requests: Sequence[Request], *, is_plain: bool) -> Result:
    """Reads every streamed layer READ_PASSES times, with the read actions of the schedule, or with as many plain
    threads."""
    plan = runtime.plan(requests)
    shape, walk = runtime.model.shape, plan.placement.walk
    with runtime.reader() as reader:
        if is_plain:
            extents = [e for stage in walk.streamed for e in slot_layout(shape.stages[stage]).extents]
            seconds, num_bytes = _read_plainly(extents, runtime.config.offload)
        else:
            schedule = make_schedule(walk, 1)
            loads = [action for action in schedule.cycle if action.op in WEIGHT_OPS]
            with WeightStream(shape, plan.placement, runtime.device, reader) as stream:
                begin = time.monotonic()
                for action in [*schedule.prologue, *loads * READ_PASSES]:
                    getattr(stream, action.op.value)(action.stage)
                seconds = time.monotonic() - begin
                num_bytes = stream.take_counters().bytes_read
    return _result(seconds, num_bytes, runtime.baseline_bytes)


def _read_plainly(extents: Sequence[Extent], offload: OffloadConfig) -> tuple[float, int]:
    """Reads with plain threads, each into its own buffer. Returns seconds and bytes."""
    chunk_bytes = offload.read_chunk_mib * MIB
    files = {e.file: os.open(e.file, os.O_RDONLY | os.O_DIRECT) for e in extents}
    chunks = [  # file descriptor, offset, bytes
        (files[e.file], e.offset + begin_byte, min(chunk_bytes, e.num_bytes - begin_byte))
        for e in extents
        for begin_byte in range(0, e.num_bytes, chunk_bytes)
    ]
    buffers = local()

    def read(chunk_to_read: tuple[int, int, int]) -> int:
        descriptor, offset, num_bytes = chunk_to_read
        if not hasattr(buffers, "mine"):
            buffers.mine = mmap.mmap(-1, chunk_bytes)  # page-aligned, as O_DIRECT requires
        return os.preadv(descriptor, [memoryview(buffers.mine)[:num_bytes]], offset)

    begin = time.monotonic()
    with ThreadPoolExecutor(offload.reader_threads) as pool:
        num_bytes = sum(pool.map(read, islice(cycle(chunks), READ_PASSES * len(chunks))))
    seconds = time.monotonic() - begin
    for descriptor in files.values():
        os.close(descriptor)
    return seconds, num_bytes


def sweep(entry: AttentionBaseline) -> Result:
    """Measures NUM_SWEEPS sweeps over layers of SWEPT_BYTES, after one that compiles kernels and touches all pages."""
    baseline, device, num_bytes = resident_bytes(), ComputeDevice("cpu"), layer_bytes(entry.dtype)
    layers = [_random_layer(device, entry.dtype) for _ in range(SWEPT_BYTES // num_bytes)]
    visit = torch.sum if entry.access is KVAccess.read else _attention(entry)
    begin = 0.0
    for number in range(NUM_SWEEPS + 1):
        if number == 1:
            begin = time.monotonic()
        for layer in layers:
            visit(layer)
    return _result(time.monotonic() - begin, NUM_SWEEPS * len(layers) * num_bytes, baseline)


def _result(seconds: float, num_bytes: int, baseline_bytes: int) -> Result:
    return Result(
        seconds=seconds,
        prefill_seconds=0.0,
        rate=num_bytes / seconds,
        peak_bytes=peak_resident_bytes(),
        baseline_bytes=baseline_bytes,
        bytes_read=num_bytes,
        tokens=[],
    )


def layer_bytes(dtype: DType) -> int:
    """Bytes of the keys and values of one layer."""
    return 2 * NUM_PAGES * PAGE_TOKENS * NUM_KV_HEADS * HEAD_DIM * _torch_dtype(dtype).itemsize


def _torch_dtype(dtype: DType) -> torch.dtype:
    return getattr(torch, dtype.value)


def _random_layer(device: ComputeDevice, dtype: DType) -> torch.Tensor:
    """Random KV pages of shape (pages, numbers in a page), keys before values, in the kind of memory that runs use."""
    num_bytes = layer_bytes(dtype)
    flat = device.zeros(num_bytes)[:num_bytes].view(_torch_dtype(dtype))
    return flat.uniform_(-1, 1).view(NUM_PAGES, -1)


def _attention(entry: AttentionBaseline) -> Callable[[torch.Tensor], object]:
    """A function that computes decode attention over a layer, with pages in random order."""
    tables = torch.randperm(NUM_PAGES).view(NUM_ROWS, -1).to(torch.int32)
    begins, ends = torch.zeros(NUM_ROWS, dtype=torch.int32), torch.full((NUM_ROWS,), NUM_POSITIONS, dtype=torch.int32)
    dtype = _torch_dtype(entry.dtype)
    q = torch.randn(NUM_ROWS, NUM_KV_HEADS * GROUP, HEAD_DIM).to(dtype)
    token = torch.empty(1, NUM_KV_HEADS, 1, HEAD_DIM, dtype=dtype)
    attention = decode_attention_torch if entry.access is KVAccess.operators else decode_attention

    def visit(layer: torch.Tensor) -> None:
        k, v = split_pages(layer.view(torch.uint8), token, token)
        attention(q, k, v, tables, begins, ends, Rule(HEAD_DIM**-0.5))

    return visit
