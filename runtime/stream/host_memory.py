"""What the kernel says about memory and I/O of this process and machine, and the limits of the control groups that the
process is in: a container's, and those of a Slurm step within it. Linux alone; every figure is in bytes.

A limit holds for a group and all below it, so every group on the way up to the root counts. Version 1 of Linux's
control groups has a hierarchy for memory alone, version 2 one for everything; a machine may mount both (cgroups(7)).
"""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..units import KIB, MIB

PROC = Path("/proc/self")


@dataclass(frozen=True, kw_only=True)
class _Version:
    """How a version of control groups calls its files. `reclaimable` is the line of memory.stat that counts page cache
    which the kernel gives up first: it is in the usage, and it is in nobody's way."""

    file_system: str
    controllers: str  # as the group's line in /proc/self/cgroup names them, among others
    limits: tuple[str, ...]
    usage: str
    reclaimable: str

    def limits_of(self, group: Path) -> Iterator[int]:
        return (limit for name in self.limits if (limit := _number(group / name)) is not None)

    def groups(self, proc: Path) -> Iterator[Path]:
        """The folders of this process's own group and of those above it, as far as they are mounted."""
        # Lines are `number:controllers:path`; version 2's has the number 0 and no controllers.
        lines = (line.split(":", 2) for line in _lines(proc / "cgroup"))
        own = next((PurePosixPath(path) for _, names, path in lines if self.controllers in names.split(",")), None)
        mount = self._mount(proc)
        if own is None or mount is None:
            return
        root, mounted_at = mount
        inside = own.relative_to(root) if own.is_relative_to(root) and ".." not in own.parts else PurePosixPath()
        group = mounted_at / inside
        yield group
        yield from group.parents[: len(inside.parts)]

    def _mount(self, proc: Path) -> tuple[PurePosixPath, Path] | None:
        """Which part of the hierarchy is mounted, and where; see proc(5) on mountinfo."""
        for line in _lines(proc / "mountinfo"):
            mount, _, file_system = line.partition(" - ")
            root, mounted_at = mount.split()[3:5]
            kind, _, options = file_system.split()[:3]
            if kind == self.file_system and (not self.controllers or self.controllers in options.split(",")):
                return PurePosixPath(_unescaped(root)), Path(_unescaped(mounted_at))
        return None


VERSION_1 = _Version(
    file_system="cgroup",
    controllers="memory",
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    reclaimable="total_inactive_file",
)
VERSION_2 = _Version(
    file_system="cgroup2",
    controllers="",
    limits=("memory.max", "memory.high"),  # beyond `high` a process is slowed down instead of killed
    usage="memory.current",
    reclaimable="inactive_file",
)


def bytes_within_limits(proc: Path = PROC) -> int | None:
    """How many more bytes this process can take before the strictest of its limits; None where there is none."""
    left = list[int]()
    groups = [(version, group) for version in (VERSION_1, VERSION_2) for group in version.groups(proc)]
    for version, group in groups:
        used = _number(group / version.usage)
        if used is not None:
            statistics = dict(line.split()[:2] for line in _lines(group / "memory.stat"))
            needed = used - int(statistics.get(version.reclaimable, 0))
            left += [max(0, limit - needed) for limit in version.limits_of(group)]
    return min(left, default=None)


def strictest_limit(proc: Path = PROC) -> int | None:
    """The bytes that this process's groups may have at most, whoever uses them; None where there is no limit."""
    groups = ((version, group) for version in (VERSION_1, VERSION_2) for group in version.groups(proc))
    return min((limit for version, group in groups for limit in version.limits_of(group)), default=None)


def _unescaped(path: str) -> str:
    """Blanks stand as octal numbers there."""
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def _number(path: Path) -> int | None:
    """The number in a file of a control group; None for `max`, and for a file that is not there or must not be read."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


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


def total_bytes() -> int:
    """What this machine has, or what the limits of this process's groups leave of it."""
    installed, limit = _field(Path("/proc/meminfo"), "MemTotal") * KIB, strictest_limit()
    return installed if limit is None else min(installed, limit)


def resident_bytes(num_sharers: int = 1) -> int:
    """Memory that this process holds. Where `num_sharers` processes have pages in common, a share of those."""
    return (_field(STATUS, "VmRSS") - _others_kib(num_sharers)) * KIB


def peak_resident_bytes(num_sharers: int = 1) -> int:
    """The most memory that this process held since its start, or since `reset_peak`; of shared pages as above, by how
    many it has now."""
    return (_field(STATUS, "VmHWM") - _others_kib(num_sharers)) * KIB


def _others_kib(num_sharers: int) -> int:
    """What of the pages that this process shares counts for the others."""
    return 0 if num_sharers == 1 else _field(STATUS, "RssShmem") * (num_sharers - 1) // num_sharers


def reset_peak() -> None:
    """Best effort: some containers forbid it, and the peak then includes the start-up's."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def trim_heap() -> None:
    """Gives the kernel back what is free in the heap; a no-op with another C library than glibc. What is allocated
    from here on shows in `resident_bytes`, where it would have hidden in memory that was freed before."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def disk_read_bytes() -> int:
    """Bytes this process caused to be fetched from storage; 0 where the kernel does not count."""
    try:
        return _field(Path("/proc/self/io"), "read_bytes")
    except OSError:
        return 0


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
    if is_budget_hard and HEAP_TUNABLE not in os.environ.get("GLIBC_TUNABLES", ""):
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
