"""An accelerator's memory as torch's allocators hold it. They keep what was freed, on the device and of pinned memory,
and what they keep is taken in the eyes of the driver and of the system.
"""

import logging
import os
from typing import NamedTuple

import torch

from ..out_of_memory import first_line, is_out_of_memory
from ..units import format_bytes

log = logging.getLogger(__name__)

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
GROWING = "expandable_segments"


class DeviceMemory(NamedTuple):
    """Bytes. `unreserved`: what no process has. Of those that torch reserved, `allocated` are in tensors."""

    unreserved: int
    reserved: int
    allocated: int

    @property
    def free_bytes(self) -> int:
        return self.unreserved + self.reserved - self.allocated


def memory_of(device: torch.device) -> DeviceMemory:
    return DeviceMemory(
        unreserved=torch.get_device_module(device).mem_get_info(device)[0],
        reserved=torch.accelerator.memory_reserved(device),
        allocated=torch.accelerator.memory_allocated(device),
    )


def empty_caches() -> None:
    """Gives back what no tensor is in."""
    torch.accelerator.empty_cache()
    empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)  # not before torch 2.12
    if empty_host_cache is not None:
        empty_host_cache()
    elif torch.cuda.is_available():
        torch._C._host_emptyCache()


def limit_memory(device: torch.device, num_bytes: int | None) -> None:
    """Of what torch's allocator may hold in this process; None: all of it. Beyond it torch is out of memory."""
    module = torch.get_device_module(device)
    share = 1.0 if num_bytes is None else min(1.0, num_bytes / module.mem_get_info(device)[1])
    module.set_per_process_memory_fraction(share, device)


def let_segments_grow(device: torch.device) -> None:
    """Has torch map device memory in pages that segments grow by, so that blocks of many sizes, as prompts have, leave
    no holes of their own. Whoever configures the allocator by its environment variables has the last word, and so have
    virtual devices that cannot map pages."""
    if device.type != "cuda" or torch.version.hip is not None or any(map(os.environ.get, ALLOCATOR_VARIABLES)):
        return
    _configure(f"{GROWING}:True")
    try:
        torch.empty(1, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        _configure(f"{GROWING}:False")
        log.warning(
            "memory of %s is allocated in whole segments, as it cannot map pages: %s", device, first_line(error)
        )


def _configure(settings: str) -> None:
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (configure or torch.cuda.memory._set_allocator_settings)(settings)


def pinned(num_bytes: int) -> torch.Tensor:
    """uint8. Raises MemoryError, which says that it was pinned memory: the device's own error does not, and a system
    may pin less than it has (WSL 2: half)."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise MemoryError(
                f"{format_bytes(num_bytes)} of host memory cannot be pinned ({first_line(error)})"
            ) from error
        raise
