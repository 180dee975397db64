"""What the kernel says about memory and I/O of this process and machine. Linux; every figure in bytes."""

import ctypes
import os
from pathlib import Path

from ..units import KIB, MIB
from .memory_limits import bytes_within_limits

STATUS = Path("/proc/self/status")
MALLOC_FAST_BINS, MALLOC_TRIM_THRESHOLD, MALLOC_MMAP_THRESHOLD = 1, -1, -3  # glibc's malloc.h
HEAP_TUNABLE = "glibc.malloc.tcache_count=0"
LARGEST_HEAP_BLOCK_BYTES = 32 * MIB  # glibc allows no higher threshold
SMALLEST_MAPPED_BYTES = MIB


def available_bytes() -> int:
    """What can be taken without swapping: the kernel's estimate, or what the limits of this process's groups leave."""
    free = _field(Path("/proc/meminfo"), "MemAvailable") * KIB
    within_limits = bytes_within_limits()
    return free if within_limits is None else min(free, within_limits)


def resident_bytes() -> int:
    return _field(STATUS, "VmRSS") * KIB


def peak_resident_bytes() -> int:
    """Since the start, or since `reset_peak`."""
    return _field(STATUS, "VmHWM") * KIB


def reset_peak() -> None:
    """Best effort: some containers forbid it, and the peak then includes the start-up's."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def disk_read_bytes() -> int:
    """Bytes this process caused to be fetched from storage; 0 where the kernel does not count."""
    try:
        return _field(Path("/proc/self/io"), "read_bytes")
    except OSError:
        return 0


def is_heap_exact() -> bool:
    """Whether this process was started so that glibc reuses freed blocks of the same size, see `set_allocator`."""
    return HEAP_TUNABLE in os.environ.get("GLIBC_TUNABLES", "")


def set_allocator(*, is_budget_hard: bool) -> None:
    """Tells glibc what to do with freed activations; a no-op with another C library.

    They should stay in the heap and be used again: a page fault for each 4 KiB costs a tenth of a prefill. But up to
    glibc 2.37 an aligned block leaves two slivers beside it, which its thread cache hands to small objects, so that the
    block's hole does not fit the next one of its size, and the heap was seen to grow to twice the need. Without the
    thread cache (`HEAP_TUNABLE`) and fast bins it does not. Where a budget is hard and the cache is on, every block
    from 1 MiB up is mapped and unmapped by itself instead.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if is_budget_hard and not is_heap_exact():
        mallopt(MALLOC_MMAP_THRESHOLD, SMALLEST_MAPPED_BYTES)
        return
    mallopt(MALLOC_FAST_BINS, 0)
    mallopt(MALLOC_MMAP_THRESHOLD, LARGEST_HEAP_BLOCK_BYTES)
    mallopt(MALLOC_TRIM_THRESHOLD, 2**31 - 1)


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise OSError(f"{path} has no field {name}")
