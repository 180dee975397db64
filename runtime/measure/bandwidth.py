"""Bandwidth of host memory, device memory, the link between them, and the disk. The disk is read with a run's reader,
from a temporary file that is not in the page cache."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle, product

import numpy as np
import torch
import torch.nn.functional as F

from ..config.settings import OffloadConfig
from ..errors import require
from ..plan.cost.work import INNER_ROUND_TRIPS
from ..plan.shape.extents import Extent
from ..store.kv_file import free_bytes, open_unnamed
from ..store.reader import Reader
from ..stream.device import ComputeDevice
from ..units import MIB, format_bytes
from .timing import Probe, Timer

# Names of probes.
HOST_READ = "host memory, read"
HOST_COPY, DEVICE_COPY = "host memory, copied", "device memory, copied"
LINK_IN, LINK_OUT = "host to device, pinned", "device to host, pinned"
SUSTAINED, BURST = "disk, sustained", "disk, burst"
KEY = "measure.directory"  # setting for the directory of the temporary file
DEPTHS, BLOCK_MIB = (1, 4, 16), (1, 4, 16)  # reads in flight, and MiB per read, of the disk probes
REST_SECONDS = 0.25  # before a burst: caches and burst credits of a disk recover


def memory_probes(device: ComputeDevice, *, num_bytes: int) -> list[Probe]:
    """Probes of memory bandwidth, with buffers of `num_bytes`. Copies within one memory count bytes read plus bytes
    written. The probe that copies both ways at once counts the bytes of both directions."""
    host = _fill(ComputeDevice("cpu").host_buffer(num_bytes))
    probes = [
        Probe(name=HOST_READ, unit="GB/s", read=Timer(num_bytes, host.view(torch.float32).sum)),
        Probe(name=HOST_COPY, unit="GB/s", read=_copy_within(host)),
    ]
    if not device.is_accelerator:
        return probes
    num_bytes = len(host)
    pinned, host_target = (_fill(device.host_buffer(num_bytes)) for _ in range(2))
    on_device, device_target = (_fill(device.compute_buffer(num_bytes)) for _ in range(2))
    second_stream = device.new_stream()

    def copy_both_ways() -> None:
        device.copy(pinned, device_target, on=device.copy_stream, after=device.new_event())
        device.copy(on_device, host_target, on=second_stream, after=device.new_event())

    reads = {
        LINK_IN: copy_timer(device, pinned, device_target),
        LINK_OUT: copy_timer(device, on_device, host_target),
        "both ways at once, pinned": _link_timer(device, copy_both_ways, 2 * num_bytes, second_stream),
        "host to device, pageable": Timer(num_bytes, lambda: device_target.copy_(host), device.wait_for_compute),
        "device to host, pageable": Timer(num_bytes, lambda: host.copy_(on_device), device.wait_for_compute),
        DEVICE_COPY: _copy_within(on_device, device.wait_for_compute),
    }
    return [*probes, *(Probe(name=name, unit="GB/s", read=read) for name, read in reads.items())]


def copy_timer(device: ComputeDevice, source: torch.Tensor, target: torch.Tensor) -> Timer:
    """Times a copy to or from a device on its copy stream, in bytes."""
    return _link_timer(
        device, lambda: device.copy(source, target, on=device.copy_stream, after=device.new_event()), len(source)
    )


def gate_timer(num_rows: int, num_columns: int, dtype: torch.dtype, device: ComputeDevice) -> Timer:
    """Times `silu(gate) * up` with torch operators, in bytes read and written. `gate` and `up` are (num_rows,
    num_columns)."""
    gate, up = torch.ones(2, num_rows, num_columns, dtype=dtype, device=device.torch_device)
    return Timer(INNER_ROUND_TRIPS * gate.nbytes, lambda: F.silu(gate) * up, device.wait_for_compute)


def _copy_within(buffer: torch.Tensor, finish: Callable[[], object] = lambda: None) -> Timer:
    """Times a copy of the first half of `buffer` to its second half."""
    source, target = buffer.chunk(2)
    return Timer(2 * len(source), lambda: target.copy_(source), finish)


def _link_timer(
    device: ComputeDevice, act: Callable[[], object], num_bytes: int, *streams: torch.Stream | None
) -> Timer:
    """Times copies that `act` starts on the device's copy stream and the given `streams`."""

    def finish() -> None:
        for stream in (device.copy_stream, *streams):
            if stream is not None:
                stream.synchronize()

    return Timer(num_bytes, act, finish)


def _fill(buffer: torch.Tensor) -> torch.Tensor:
    """Fills `buffer` with the float32 numbers 1 and 1.5. Pages of zeros may share memory, and random bits may be slow
    subnormal numbers."""
    buffer.view(torch.float32).fill_(1.0).view(-1)[::3].mul_(1.5)
    return buffer


def read_timer(reader: Reader, batches: Sequence[Sequence[Extent]], target: torch.Tensor) -> Timer:
    """Times reading batches of extents (byte ranges of files), all submitted at once, in bytes. `target`: page-aligned
    uint8 host memory, at least as large as the largest batch; all batches overwrite it."""
    view = target.numpy().data

    def act() -> None:
        for pending in [reader.submit(extents, view) for extents in batches]:
            pending.wait()

    return Timer(sum(extent.num_bytes for extents in batches for extent in extents), act)


@contextmanager
def disk_probes(directory: str, device: ComputeDevice, *, file_bytes: int, piece_bytes: int) -> Iterator[list[Probe]]:
    """Yields probes that read a temporary file of `file_bytes` in `directory`. SUSTAINED reads all of it per call, and
    BURST `piece_bytes` after a pause, both with the default settings of runs. The other probes read `piece_bytes` per
    call, with each combination of `DEPTHS` and `BLOCK_MIB`. Raises ConfigError if the disk has too little space."""
    with ExitStack() as stack:
        file = stack.enter_context(open_unnamed(directory, key=KEY))
        free = free_bytes(directory, key=KEY)
        require(
            file_bytes <= free,
            f"{KEY}={directory}: needs {format_bytes(file_bytes)}, {format_bytes(free)} are free; "
            "set another directory or lower measure.disk_mib",
        )
        random = np.random.default_rng(0)
        for _ in range(file_bytes // MIB):
            file.write(random.bytes(MIB))  # random: neither compressed nor deduplicated by the disk
        os.fsync(file.fileno())  # before the next line, which drops only pages that are on disk from the page cache
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        path = f"/proc/self/fd/{file.fileno()}"  # a path by which the reader can open the unnamed file
        target = device.host_buffer(file_bytes)
        defaults = OffloadConfig()

        def reader(num_threads: int, chunk_mib: int) -> Reader:
            return stack.enter_context(Reader(num_threads=num_threads, chunk_bytes=chunk_mib * MIB))

        whole = reader(defaults.reader_threads, defaults.read_chunk_mib)
        pieces = _split_file(path, file_bytes, piece_bytes)
        read_piece = _piece_timer(whole, pieces, target)

        def read_rested() -> float:
            time.sleep(REST_SECONDS)
            return read_piece()

        read_all = read_timer(whole, [_split_file(path, file_bytes, file_bytes)], target)
        probes = [Probe(name=SUSTAINED, unit="GB/s", read=read_all), Probe(name=BURST, unit="GB/s", read=read_rested)]
        for depth, block in product(DEPTHS, BLOCK_MIB):
            read = _piece_timer(reader(depth, block), pieces, target)
            probes.append(Probe(name=f"disk, {depth} x {block} MiB", unit="GB/s", read=read))
        yield probes


def _piece_timer(reader: Reader, pieces: Sequence[Extent], target: torch.Tensor) -> Timer:
    """Times reads of one piece per call, and of the next piece at the next call."""
    view, piece_cycle = target.numpy().data, cycle(pieces)
    return Timer(pieces[0].num_bytes, lambda: reader.submit([next(piece_cycle)], view).wait())


def _split_file(path: str, file_bytes: int, piece_bytes: int) -> list[Extent]:
    """Splits a file into pieces of equal size, without a smaller rest at its end."""
    piece_bytes = min(piece_bytes, file_bytes)
    return [
        Extent(file=path, offset=offset, num_bytes=piece_bytes, used_bytes=piece_bytes, slot_offset=0)
        for offset in range(0, file_bytes - piece_bytes + 1, piece_bytes)
    ]
