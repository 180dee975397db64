"""An accelerator's memory as torch's allocators hold it. They keep what was freed, on the device and of pinned memory,
and what they keep is taken in the eyes of the driver and of the system.
"""

from typing import NamedTuple

import torch

from ..out_of_memory import first_line, is_out_of_memory
from ..units import format_bytes


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
