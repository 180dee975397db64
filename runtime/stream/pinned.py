"""Allocates pinned (page-locked) host memory.

torch's pinned allocator rounds up to powers of two and caches freed memory: a KV cache of 33.6 GiB would take 64 GiB.
So large buffers are mapped here and registered with the CUDA driver; the system gets them back when the last tensor
that uses them is deleted. Small buffers come from torch."""

import mmap
from contextlib import suppress
from typing import Protocol, TypeVar, cast

import torch

from ..out_of_memory import first_line, is_out_of_memory
from ..plan.shape.extents import ALIGNMENT_BYTES, REGISTERED_BYTES
from ..units import MIB, format_bytes, round_up

Mapped = TypeVar("Mapped", bound=mmap.mmap)
HUGE_PAGE_BYTES = 2 * MIB
OUT_OF_MEMORY = 2  # error code cudaErrorMemoryAllocation
PORTABLE = 1  # flag cudaHostRegisterPortable: pinned for every device of the process


def allocate_pinned(num_bytes: int, *, is_aligned: bool) -> torch.Tensor:
    """Returns pinned uint8 memory, page-aligned if `is_aligned`. Raises MemoryError; the limit may be lower than the
    system's memory (WSL 2: half of it)."""
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
    start = -buffer.data_ptr() % ALIGNMENT_BYTES  # bytes up to the first aligned address
    return buffer[start : start + num_bytes]


def _pinning_error(num_bytes: int, error: RuntimeError) -> MemoryError:
    return MemoryError(f"{format_bytes(num_bytes)} of host memory cannot be pinned ({first_line(error)})")


def allocate_anonymous(num_bytes: int, *, huge: bool) -> torch.Tensor:
    """Returns zeroed uint8 memory outside of the heap. The system provides its pages at the first access, as huge pages
    if `huge` and possible."""
    return torch.frombuffer(_map(mmap.mmap, num_bytes, huge=huge), dtype=torch.uint8)


class Driver(Protocol):
    """Page-locking functions of the CUDA runtime; they return 0 on success."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int: ...

    def cudaHostUnregister(self, address: int) -> int: ...


def cuda_driver() -> Driver:
    return cast(Driver, torch.cuda.cudart())


class Pinnable(mmap.mmap):
    """A memory map that may be registered with the driver; its deletion ends the registration. Tensors that use the
    memory keep the map alive."""

    registration: tuple[Driver, int] | None = None  # the driver and the registered address

    def __del__(self) -> None:
        if self.registration is not None:
            driver, address = self.registration
            driver.cudaHostUnregister(address)  # before the pages are unmapped


def _register(memory: Pinnable, tensor: torch.Tensor) -> None:
    """Pins the memory, which `tensor` covers. Raises RuntimeError if the driver cannot pin it."""
    driver, address = cuda_driver(), tensor.data_ptr()
    code = int(driver.cudaHostRegister(address, tensor.nbytes, PORTABLE))
    if code:
        _clear_cuda_error()
        raise RuntimeError("out of memory" if code == OUT_OF_MEMORY else f"the driver's error {code}")
    memory.registration = driver, address


def pin(memory: Pinnable, tensor: torch.Tensor) -> None:
    """Pins `memory`, which `tensor` covers. Does nothing for small memory or without CUDA. Raises MemoryError."""
    if tensor.nbytes < REGISTERED_BYTES or not torch.cuda.is_available():
        return
    try:
        _register(memory, tensor)
    except RuntimeError as error:
        raise _pinning_error(tensor.nbytes, error) from error


def _clear_cuda_error() -> None:
    """Clears CUDA's last error: the next kernel launch would report it again."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _map(kind: type[Mapped], num_bytes: int, *, huge: bool) -> Mapped:
    memory = kind(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
