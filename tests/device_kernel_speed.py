"""python -m tests.device_kernel_speed: what kernels on stored matrices take on a CUDA device, beside torch's operators.

About two minutes, of which quantising matrices takes most. Of each format ms and GB/s (codes read and numbers written)
of decoding a matrix to bfloat16, by the kernel and by torch; of products with 1 to 128 rows, decoding inside and on
numbers that are there; and of grouped products of plain experts, by the kernel, torch's grouped product where it takes
them, and a product for each expert. TRITON_INTERPRET=1 tries this script itself on a CPU, on tiny matrices.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from runtime.linear import device_codes
from tests.runtime.stored_rows import MAKERS, random

NAMES = (
    *("int8-rows", "int4-groups of 64", "window4", "float-quantized, rows", "mxfp4-pack-quantized"),
    *("nvfp4-pack-quantized", "gptq", "gptq, desc_act, 8 bits", "awq", "pack-quantized, zero points"),
    *("bitsandbytes nf4", "GGUF's Q4_K", "GGUF's Q6_K"),
)
NUM_EXPERTS, LAUNCHES, WAIT_CYCLES = 32, 20, 12_000_000  # some 7 ms


def milliseconds(act: Callable[[], object], device: torch.device) -> float:
    """Of the device, for one of many launches that are queued behind a wait, so that the host is always ahead; the
    median of three rounds, after one that compiles."""
    act()
    times = list[float]()
    for _ in range(3):
        start = time.perf_counter()
        if device.type != "cuda":
            act()
            times.append((time.perf_counter() - start) * 1e3)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(WAIT_CYCLES)
        begin.record()
        for _ in range(LAUNCHES):
            act()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end) / LAUNCHES)
    return median(times)


def stored(name: str, shape: tuple[int, int], device: torch.device, directory: Path) -> None:
    rows = MAKERS[name](shape, directory, device)
    codes = rows.codes()
    assert codes is not None
    numbers, exact = (
        torch.empty(rows.shape, dtype=torch.bfloat16, device=device),
        torch.empty(rows.shape, device=device),
    )
    if not device_codes.can_decode(rows, torch.bfloat16):
        print(f"{name}: not taken", flush=True)
        return
    own = milliseconds(lambda: device_codes.decode(codes, numbers), device)
    by_torch = milliseconds(lambda: (rows.dequantize(slice(None), exact), exact.to(torch.bfloat16)), device)
    rate = (codes.body.nbytes + numbers.nbytes) / own / 1e6
    print(f"{name:28} decode {own:.3f} ms, {rate:.0f} GB/s, torch {by_torch:.3f} ms", end="", flush=True)
    for num_rows in (1, 16, 128) if device_codes.can_multiply(rows, torch.bfloat16) else ():
        x = random(num_rows, rows.shape[1]).to(device, torch.bfloat16)
        packed = milliseconds(lambda x=x: device_codes.multiply(x, codes), device)
        plain = milliseconds(lambda x=x: F.linear(x, numbers), device)
        print(f"; {num_rows} rows {packed:.3f}, of numbers {plain:.3f}", end="", flush=True)
    print(flush=True)


def grouped(visits: int, shape: tuple[int, int], device: torch.device) -> None:
    stack = random(NUM_EXPERTS, *shape).to(device, torch.bfloat16).mT
    x = random(visits, shape[1]).to(device, torch.bfloat16)
    ends = torch.linspace(0, visits, NUM_EXPERTS + 1, device=device).int()[1:]
    spans = [slice(begin, end) for begin, end in zip([0, *ends.tolist()[:-1]], ends.tolist(), strict=True)]
    acts = {
        "kernel": lambda: device_codes.grouped_mm(x, stack, offs=ends),
        "F.grouped_mm": lambda: F.grouped_mm(x, stack, offs=ends),
        "one by one": lambda: [torch.mm(x[rows], stack[expert]) for expert, rows in enumerate(spans)],
    }
    shown = ", ".join(f"{name} {milliseconds(act, device):.3f}" for name, act in acts.items())
    print(f"{NUM_EXPERTS} experts of {shape[0]} x {shape[1]}, {visits} visits, ms: {shown}", flush=True)


def main() -> int:
    is_there = torch.cuda.is_available()
    if not is_there and os.environ.get("TRITON_INTERPRET") != "1":
        print("needs a CUDA device")
        return 2
    device = torch.device("cuda" if is_there else "cpu")
    shape = (8192, 4096) if is_there else (64, 256)
    with nullcontext() if is_there else device_codes.interpreted(), tempfile.TemporaryDirectory() as directory:
        print(torch.cuda.get_device_name(device) if is_there else "interpreter: times mean nothing", flush=True)
        for visits in (64, 1024) if is_there else (8,):
            grouped(visits, (2048, 2048) if is_there else (16, 64), device)
        for name in NAMES:
            stored(name, shape, device, Path(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
