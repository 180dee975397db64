"""Pinned host memory, from and to which a device copies by itself.

torch's allocator of pinned memory rounds up to powers of two and keeps what was freed: keys and values of 33.6 GiB take
64. So large pieces are pages of our own that are registered with the device's driver, and go back to the system with
the last tensor that looks at them; small ones, which come and go, are torch's.
"""

import mmap
from contextlib import suppress
from typing import Protocol, TypeVar, cast

import torch

from ..out_of_memory import first_line, is_out_of_memory
from ..plan.shape.extents import ALIGNMENT_BYTES, REGISTERED_BYTES
from ..units import MIB, format_bytes, round_up

Mapped = TypeVar("Mapped", bound=mmap.mmap)
HUGE_PAGE_BYTES = 2 * MIB
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


def allocate_pinned(num_bytes: int, *, is_aligned: bool) -> torch.Tensor:
    """uint8, at the start of a page where it is to be aligned. Raises MemoryError, which says that it was pinned
    memory: the device's own error does not, and a system may pin less than it has (WSL 2: half)."""
    try:
        if num_bytes >= REGISTERED_BYTES and torch.cuda.is_available():
            size = round_up(num_bytes, ALIGNMENT_BYTES)
            memory = _map(Pinnable, size, huge=size >= HUGE_PAGE_BYTES)
            tensor = torch.frombuffer(memory, dtype=torch.uint8)
            _register(memory, tensor)
            return tensor[:num_bytes]
        if not is_aligned:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        buffer = torch.empty(num_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        if is_out_of_memory(error) or num_bytes >= REGISTERED_BYTES:
            raise _pinning_error(num_bytes, error) from error
        raise
    start = -buffer.data_ptr() % ALIGNMENT_BYTES
    return buffer[start : start + num_bytes]


def _pinning_error(num_bytes: int, error: RuntimeError) -> MemoryError:
    return MemoryError(f"{format_bytes(num_bytes)} of host memory cannot be pinned ({first_line(error)})")


def allocate_anonymous(num_bytes: int, *, huge: bool) -> torch.Tensor:
    """uint8 pages from the kernel, zeroed as they are touched, and huge ones where it has them."""
    return torch.frombuffer(_map(mmap.mmap, num_bytes, huge=huge), dtype=torch.uint8)


class Driver(Protocol):
    """What the CUDA runtime offers of locking pages; 0 is success."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int: ...

    def cudaHostUnregister(self, address: int) -> int: ...


def cuda_driver() -> Driver:
    return cast(Driver, torch.cuda.cudart())


class Pinnable(mmap.mmap):
    """Pages that the driver may know of, until nobody looks at them any more."""

    registration: tuple[Driver, int] | None = None  # to whom, and at which address

    def __del__(self) -> None:
        if self.registration is not None:
            registrar, address = self.registration
            registrar.cudaHostUnregister(address)


def _register(memory: Pinnable, tensor: torch.Tensor) -> None:
    """Raises RuntimeError where the driver cannot lock so many bytes."""
    registrar, address = cuda_driver(), tensor.data_ptr()
    code = int(registrar.cudaHostRegister(address, tensor.nbytes, PORTABLE))
    if code:
        _clear_cuda_error()
        raise RuntimeError("out of memory" if code == OUT_OF_MEMORY else f"the driver's error {code}")
    memory.registration = registrar, address


def pin(memory: Pinnable, tensor: torch.Tensor) -> None:
    """Pins all of it, which `tensor` looks at, until both are gone; a piece that is small, or in front of a device
    without such a driver, stays as it is. Raises MemoryError."""
    if tensor.nbytes < REGISTERED_BYTES or not torch.cuda.is_available():
        return
    try:
        _register(memory, tensor)
    except RuntimeError as error:
        raise _pinning_error(tensor.nbytes, error) from error


def _clear_cuda_error() -> None:
    """CUDA tells of a failed call once more at the next launch."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _map(kind: type[Mapped], num_bytes: int, *, huge: bool) -> Mapped:
    memory = kind(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
