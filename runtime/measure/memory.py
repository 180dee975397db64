"""How fast memory is read and copied: the host's, the device's, and from one to the other."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..plan.cost.work import INNER_TRIPS
from ..stream.device import ComputeDevice
from .timing import Probe, Timed

HOST_READ = "host memory, read"
HOST_COPY, DEVICE_COPY = "host memory, copied", "device memory, copied"
LINK_IN, LINK_OUT = "host to device, pinned", "device to host, pinned"


def memory_probes(device: ComputeDevice, *, num_bytes: int) -> list[Probe]:
    """Copies count what is read and what is written; both directions of a link at once are counted together."""
    host = _filled(ComputeDevice("cpu").host_buffer(num_bytes))
    probes = [
        Probe(name=HOST_READ, unit="GB/s", read=Timed(num_bytes, host.view(torch.float32).sum)),
        Probe(name=HOST_COPY, unit="GB/s", read=_within(host)),
    ]
    return [*probes, *_device_probes(device, host)] if device.is_accelerator else probes


def copying(device: ComputeDevice, source: torch.Tensor, target: torch.Tensor) -> Timed:
    """Bytes copied to or from a device, on its copy stream."""
    return _copies(
        device, lambda: device.copy(source, target, on=device.copy_stream, after=device.new_event()), len(source)
    )


def gating(num_rows: int, num_columns: int, dtype: torch.dtype, device: ComputeDevice) -> Timed:
    """Bytes that a gate's activation and its product with what it lets through read and write, of (num_rows,
    num_columns) each, as torch's own operators go over them."""
    gate, up = torch.ones(2, num_rows, num_columns, dtype=dtype, device=device.torch_device)
    return Timed(INNER_TRIPS * gate.nbytes, lambda: F.silu(gate) * up, device.finish)


def _within(buffer: torch.Tensor, finish: Callable[[], object] = lambda: None) -> Timed:
    source, target = buffer.chunk(2)
    return Timed(2 * len(source), lambda: target.copy_(source), finish)


def _device_probes(device: ComputeDevice, pageable: torch.Tensor) -> list[Probe]:
    pinned, back = (_filled(device.host_buffer(len(pageable))) for _ in range(2))
    on_device, arrived = (_filled(device.compute_buffer(len(pageable))) for _ in range(2))
    other_stream = device.new_stream()

    def both() -> None:
        device.copy(pinned, arrived, on=device.copy_stream, after=device.new_event())
        device.copy(on_device, back, on=other_stream, after=device.new_event())

    num_bytes = len(pageable)
    reads = {
        LINK_IN: copying(device, pinned, arrived),
        LINK_OUT: copying(device, on_device, back),
        "both ways at once, pinned": _copies(device, both, 2 * num_bytes, other_stream),
        "host to device, pageable": Timed(num_bytes, lambda: arrived.copy_(pageable), device.finish),
        "device to host, pageable": Timed(num_bytes, lambda: pageable.copy_(on_device), device.finish),
        DEVICE_COPY: _within(on_device, device.finish),
    }
    return [Probe(name=name, unit="GB/s", read=read) for name, read in reads.items()]


def _copies(device: ComputeDevice, act: Callable[[], object], num_bytes: int, *streams: torch.Stream | None) -> Timed:
    def finish() -> None:
        for stream in (device.copy_stream, *streams):
            if stream is not None:
                stream.synchronize()

    return Timed(num_bytes, act, finish)


def _filled(buffer: torch.Tensor) -> torch.Tensor:
    """`buffer`, with numbers around 1: pages of zeros may be one page, and bits at random may be denormal numbers."""
    buffer.view(torch.float32).fill_(1.0).view(-1)[::3].mul_(1.5)
    return buffer
