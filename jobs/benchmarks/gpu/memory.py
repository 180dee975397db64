"""The device's memory as measurements see it: capped for all alike, its peak, and given back between them."""

import gc

import torch

from runtime.stream.device import ComputeDevice


def cap(device: ComputeDevice, num_bytes: int) -> None:
    """Of what torch's allocator may take in this process from now on. Nothing on a CPU."""
    if device.torch_device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device.torch_device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device.torch_device)


def start_anew(device: ComputeDevice) -> None:
    """Frees what the last measurement left, so that the next one's peak is its own."""
    gc.collect()  # an engine refers to itself
    if device.torch_device.type == "cpu":
        return
    torch.accelerator.synchronize(device.torch_device)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(device.torch_device)


def reserved_peak_bytes(device: ComputeDevice) -> int:
    """Most that torch's allocator held since `start_anew`, in use or not; 0 on a CPU."""
    if device.torch_device.type == "cpu":
        return 0
    return torch.accelerator.max_memory_reserved(device.torch_device)
