"""The device's link to host memory, and its memory: limit, peak, and release between measurements."""

import gc
from collections.abc import Mapping

import torch

from runtime.measure.bandwidth import DEVICE_COPY, HOST_COPY, HOST_READ, memory_probes
from runtime.stream.device import ComputeDevice
from runtime.units import MIB

COPY_BYTES, NUM_READINGS = 256 * MIB, 4
NON_LINK_PROBES = (HOST_READ, HOST_COPY, DEVICE_COPY)


def measure_link(device: ComputeDevice) -> dict[str, float]:
    """GB/s of copies by name: pinned memory in each direction and in both at once, and pageable memory. Empty on a
    CPU."""
    probes = [probe for probe in memory_probes(device, num_bytes=COPY_BYTES) if probe.name not in NON_LINK_PROBES]
    return {probe.name: max([probe.read() for _ in range(NUM_READINGS)][1:]) for probe in probes}  # first: warm-up


def format_link(link: Mapping[str, float]) -> str:
    return "Link: " + "; ".join(f"{name} {rate:.1f} GB/s" for name, rate in link.items()) + "." if link else "No link."


def limit_memory(device: ComputeDevice, num_bytes: int) -> None:
    """Limits torch's allocator in this process. Does nothing on a CPU."""
    if device.torch_device.type == "cuda":
        device.set_memory_limit(num_bytes)


def reset_memory(device: ComputeDevice) -> None:
    """Frees memory of the last measurement and resets the peak."""
    gc.collect()  # a Runtime has reference cycles
    if device.torch_device.type == "cpu":
        return
    torch.accelerator.synchronize(device.torch_device)  # kernels may still use freed blocks
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device.torch_device)


def reserved_peak_bytes(device: ComputeDevice) -> int:
    """Peak of memory reserved by torch's allocator since `reset_memory`; 0 on a CPU."""
    if device.torch_device.type == "cpu":
        return 0
    return torch.accelerator.max_memory_reserved(device.torch_device)
