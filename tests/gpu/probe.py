"""Measures what plans assume of a GPU, in a minute or two: link, overlap, launches, lane turns, attention, products
with stored weights, disk.

    python3 -m tests.gpu.probe

Prints a line `name: value` for each measurement. A failed one is reported, and the next one starts. Without a GPU it
runs small on the CPU, as a test.
"""

import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from greenlet import getcurrent, greenlet

from benchmarks.gpu.device import measure_link
from benchmarks.weightstream import make_requests, measure_generation
from runtime.config.settings import (
    DType,
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    SamplingConfig,
    Tier,
)
from runtime.formats.kinds.rounded import ENCODINGS, Rounding
from runtime.formats.registry import FORMATS
from runtime.formats.storage_format import StoredMatrix
from runtime.library.api import Runtime
from runtime.linear import device_codes
from runtime.linear.blocks import dequantize_rows
from runtime.linear.packed_rows import CodedRows
from runtime.linear.rows import Rows
from runtime.linear.stored import multiply
from runtime.plan.shape.shapes import Companion, TensorSlice
from runtime.stream.device import ComputeDevice, CopyPart
from runtime.synthesize.checkpoints import synthesize_checkpoint
from runtime.units import GIB, MIB

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
NUM_BYTES = GIB if IS_CUDA else 4 * MIB
HEIGHT, WIDTH = (14336, 4096) if IS_CUDA else (512, 256)  # of a matrix: those of Llama 8B's feed-forward
NUM_ROWS = 64  # of inputs
MODEL = {"num_hidden_layers": 6, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}

Readings = Iterator[tuple[str, str]]
Product = Callable[[torch.Tensor, Rows], torch.Tensor]  # x (M, K), w (N, K) -> x @ w.T


def synchronize() -> None:
    if IS_CUDA:
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds between two synchronizations, after a warm-up."""
    times = []
    for _ in range(repeats + 1):
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def microseconds(work: Callable[[], object], count: int) -> float:
    """Microseconds of each of `count` queued calls."""
    return seconds(lambda: [work() for _ in range(count)]) / count * 1e6


def link() -> Readings:
    device = ComputeDevice(str(DEVICE))
    for name, rate in measure_link(device).items():
        yield name, f"{rate:.1f} GB/s"
    begin = time.perf_counter()
    pinned = device.host_buffer(4 * NUM_BYTES)
    rate = 4 * NUM_BYTES / (time.perf_counter() - begin) / 1e9
    yield "host buffer, allocated and pinned", f"{rate:.1f} GB/s, is_pinned={IS_CUDA and pinned.is_pinned()}"
    target_buffer = device.compute_buffer(NUM_BYTES)
    for size in (NUM_BYTES, 64 * MIB):
        pieces = list(zip(target_buffer.split(size), pinned[:NUM_BYTES].split(size), strict=True))
        elapsed = seconds(lambda pieces=pieces: [target.copy_(source, non_blocking=True) for target, source in pieces])
        yield f"host buffer to the device, {size >> 20} MiB at a time", f"{NUM_BYTES / elapsed / 1e9:.1f} GB/s"


def overlap() -> Readings:
    """Copies during products: seconds of both at once relative to the longer one alone."""
    device = ComputeDevice(str(DEVICE))
    if not device.is_accelerator:
        return
    source, slot = device.host_buffer(NUM_BYTES), device.compute_buffer(NUM_BYTES)
    x = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)

    def copy() -> None:
        device.copy_ahead([CopyPart(source[:NUM_BYTES], slot)], after=device.new_event())

    copying = seconds(copy)
    count = max(1, round(copying / seconds(lambda: x @ x)))
    computing = seconds(lambda: [x @ x for _ in range(count)])
    both = seconds(lambda: (copy(), [x @ x for _ in range(count)]))
    yield (
        "overlap",
        f"copy {copying * 1e3:.0f} ms, products {computing * 1e3:.0f} ms, both {both * 1e3:.0f} ms: "
        f"{both / max(copying, computing):.2f} x the longer; 1.00 to 1.10 is right",
    )


def launches() -> Readings:
    """Host time of launches, with inputs so small that the device never lags."""
    with torch.inference_mode():
        x = torch.zeros(64, device=DEVICE)
        yield "launch of an operator", f"{microseconds(lambda: x.add_(1), 2000):.1f} us"
        small = torch.randn(16, 16, device=DEVICE)
        yield "launch of a product", f"{microseconds(lambda: small @ small, 1000):.1f} us"
    home = getcurrent()

    def ping() -> None:
        while True:
            home.switch()

    lane = greenlet(ping)
    yield "to a lane and back", f"{microseconds(lane.switch, 2000):.2f} us"


def turns() -> Readings:
    """Time that one more lane adds to a layer of a decode pass of a small model: mostly Python, dispatch and
    launches."""
    with tempfile.TemporaryDirectory() as folder:
        for model, more in (("llama", {}), ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2})):
            path = Path(folder) / model
            synthesize_checkpoint(model=model, overrides={**MODEL, **HEADS, **more}, directory=path)
            one, four = (_decode_seconds(path, num_lanes) for num_lanes in (1, 4))
            turn = (four - one) / 3 / MODEL["num_hidden_layers"]
            yield (
                f"a lane's turn through a layer of {model}",
                f"{turn * 1e3:.2f} ms (a pass of one lane {one * 1e3:.1f} ms, of four {four * 1e3:.1f} ms)",
            )


def _decode_seconds(path: Path, num_lanes: int) -> float:
    config = RuntimeConfig(
        model=ModelConfig(name="probe", path=str(path), dtype=DType.bfloat16),
        offload=OffloadConfig(tier=Tier.none),
        policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=4, num_micro_batches=num_lanes),
        sampling=SamplingConfig(max_new_tokens=24, ignore_eos=True, temperature=0.0),
        machine=MachineConfig(device=str(DEVICE)),
    )
    runtime = Runtime(config)
    prompts = [[5 + row, 6, 7, 8] for row in range(4 * num_lanes)]
    passes = measure_generation(runtime, make_requests(runtime, prompts), is_warmed_up=True).passes
    return statistics.median(record.seconds for record in passes if not record.counts.prompt_tokens)


def attention() -> Readings:
    """Decode attention: one token of each of 64 rows over 300 positions, 32 query heads and 8 KV heads; flash kernels
    by torch's public function and by the operator that it calls."""
    if not IS_CUDA:
        return
    from torch.nn.attention.varlen import varlen_attn

    query, key = (torch.randn(64 * n, h, 128, device=DEVICE, dtype=torch.bfloat16) for n, h in ((1, 32), (300, 8)))
    ends = [torch.arange(65, device=DEVICE, dtype=torch.int32) * n for n in (1, 300)]
    by_operator = torch.ops.aten._flash_attention_forward
    with torch.inference_mode():
        elapsed = microseconds(lambda: varlen_attn(query, key, key, *ends, 1, 300), 50)
        yield "attention by varlen_attn", f"{elapsed:.0f} us"
        elapsed = microseconds(lambda: by_operator(query, key, key, *ends, 1, 300, 0.0, False, False), 50)
        yield "attention by aten's operator", f"{elapsed:.0f} us"


def products() -> Readings:
    """Products with stored weights relative to bfloat16, and the cost of dequantizing the whole matrix."""
    x = torch.randn(NUM_ROWS, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    plain = torch.randn(HEIGHT, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    about = f"{HEIGHT} x {WIDTH}, {NUM_ROWS} rows"
    with torch.inference_mode():
        base = seconds(lambda: x @ plain.T)
        yield f"bfloat16, {about}", f"{base * 1e3:.3f} ms"
        for name in STORED:
            rows = STORED[name](name)
            for kernel, product in product_kernels(rows).items():
                elapsed = seconds(lambda rows=rows, product=product: product(x, rows))
                yield f"{name} by {kernel}, {about}", f"{elapsed * 1e3:.3f} ms, {elapsed / base:.1f} x bfloat16's"
            elapsed = seconds(lambda rows=rows: dequantize_rows(rows, torch.bfloat16))
            yield f"{name}, decoded by operators", f"{elapsed * 1e3:.3f} ms, {elapsed / base:.1f} x bfloat16's product"
            out = torch.empty(HEIGHT, WIDTH, device=DEVICE, dtype=torch.bfloat16)
            if device_codes.try_decode(rows, out):
                elapsed = seconds(lambda rows=rows, out=out: device_codes.try_decode(rows, out))
                yield (
                    f"{name}, decoded to bfloat16 by a kernel",
                    f"{elapsed * 1e3:.3f} ms, {elapsed / base:.1f} x its product",
                )


def product_kernels(rows: Rows) -> Mapping[str, Product]:
    """Products to measure by name: operators that dequantize some rows at a time, and Triton's kernel."""
    kernels: dict[str, Product] = {"operators": lambda x_MK, rows: multiply(x_MK, [rows])}
    codes = rows.codes() if device_codes.can_multiply(rows, torch.bfloat16) else None
    if codes is not None:
        kernels["a kernel"] = lambda x_MK, rows: device_codes.multiply(x_MK, codes)
    return kernels


def _coded(name: str) -> Rows:
    rounding, numbers = Rounding(name), torch.randn(HEIGHT, WIDTH, device=DEVICE)
    scales = rounding.choose_scales(numbers)
    return CodedRows(rounding.encode(numbers, scales), scales, rounding.encoding)


def _mxfp4(name: str) -> Rows:
    scales = torch.randint(120, 127, (HEIGHT, WIDTH // 32), device=DEVICE, dtype=torch.uint8)
    piece = _slice(HEIGHT * WIDTH // 2, "F4", name, (Companion(role="scales", tensor=_slice(scales.nbytes, "U8")),))
    return FORMATS[name].rows(StoredMatrix(piece, _random_bytes(piece.num_bytes), {"scales": scales}))


def _gptq(name: str) -> Rows:
    num_groups = WIDTH // 128
    companions = {
        "scales": torch.rand(num_groups, HEIGHT, device=DEVICE).half(),
        "zeros": _random_bytes(num_groups * HEIGHT // 2).view(torch.int32).view(num_groups, -1),
    }
    slices = tuple(
        Companion(role=role, tensor=_slice(tensor.nbytes, "I32"), block_columns=128 if role == "scales" else 0)
        for role, tensor in companions.items()
    )
    piece = _slice(HEIGHT * WIDTH // 2, "I32", name, slices)
    return FORMATS[name].rows(StoredMatrix(piece, _random_bytes(piece.num_bytes), companions))


STORED: Mapping[str, Callable[[str], Rows]] = {**dict.fromkeys(ENCODINGS, _coded), "mxfp4": _mxfp4, "gptq-int4": _gptq}


def _random_bytes(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), device=DEVICE, dtype=torch.uint8)


def _slice(num_bytes: int, dtype: str, format: str = "", companions: tuple[Companion, ...] = ()) -> TensorSlice:
    return TensorSlice(
        name="w",
        file="",
        offset=0,
        num_bytes=num_bytes,
        dtype=dtype,
        shape=(HEIGHT, WIDTH),
        format=format,
        companions=companions,
        constants=(1.0,),
    )


def disk() -> Readings:
    """One reader through the page cache of a new file that was dropped from it."""
    buffer = bytearray(16 * MIB)
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(NUM_BYTES // (4 * MIB)):
            file.write(os.urandom(4096) * 1024)
        file.flush()
        os.fsync(file.fileno())  # DONTNEED skips dirty pages
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        begin, done = time.perf_counter(), 0
        while count := os.readv(file.fileno(), [buffer]):
            done += count
        yield "disk, one reader", f"{done / (time.perf_counter() - begin) / 1e9:.2f} GB/s"


def main() -> None:
    for probe in (link, overlap, launches, attention, products, turns, disk):
        begin = time.perf_counter()
        try:
            for name, value in probe():
                sys.stdout.write(f"{name}: {value}\n")
                sys.stdout.flush()
        except Exception:
            sys.stdout.write(f"{probe.__name__} FAILED\n{traceback.format_exc(limit=-4)}")
        sys.stdout.write(f"({probe.__name__}: {time.perf_counter() - begin:.1f} s)\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
