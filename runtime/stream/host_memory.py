"""What the kernel says about memory and I/O of this process and machine. Linux; every figure in bytes."""

import ctypes
from pathlib import Path

from ..units import KIB, MIB

STATUS = Path("/proc/self/status")
MALLOC_TRIM_THRESHOLD, MALLOC_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
LARGEST_HEAP_BLOCK_BYTES = 32 * MIB  # glibc allows no higher threshold
SMALLEST_MAPPED_BYTES = MIB


def available_bytes() -> int:
    """What can be taken without swapping: the kernel's estimate, or what a container's limit leaves."""
    free = _field(Path("/proc/meminfo"), "MemAvailable") * KIB
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if Path(limit).exists() and Path(used).exists():
            text = Path(limit).read_text().strip()
            if text.isdigit():
                free = min(free, max(0, int(text) - int(Path(used).read_text())))
    return free


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


def set_allocator(*, is_budget_hard: bool) -> None:
    """Tells glibc what to do with freed activations; a no-op with another C library.

    Without a hard budget they stay in the heap and are used again, which saves the page faults. But glibc cannot
    always reuse aligned blocks and the heap was seen to grow to twice the need, now and then; so with a hard budget
    every block from 1 MiB up is mapped and unmapped by itself, and the peak is what is really in use.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(MALLOC_MMAP_THRESHOLD, SMALLEST_MAPPED_BYTES if is_budget_hard else LARGEST_HEAP_BLOCK_BYTES)
    if not is_budget_hard:
        mallopt(MALLOC_TRIM_THRESHOLD, 2**31 - 1)


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise OSError(f"{path} has no field {name}")
