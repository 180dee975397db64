"""Memory and I/O statistics of this process and machine in bytes, and memory limits of the process's control groups
(cgroups), which containers and Slurm steps use. Linux only.

A cgroup's limit applies to all groups below it. cgroups version 1 has a separate hierarchy for memory, version 2 has
one hierarchy for all resources. A machine may mount both; see cgroups(7)."""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..units import KIB, MIB

PROC = Path("/proc/self")


@dataclass(frozen=True, kw_only=True)
class _CgroupVersion:
    """File names of one cgroup version."""

    file_system: str
    controllers: str  # as in the group's line in /proc/self/cgroup
    limits: tuple[str, ...]  # files with a limit
    usage: str  # file with the used bytes
    reclaimable: str  # entry in memory.stat: page cache that the kernel drops first, included in `usage`

    def read_limits(self, group: Path) -> Iterator[int]:
        """Yields the memory limits of the group with this directory."""
        return (limit for name in self.limits if (limit := _read_number(group / name)) is not None)

    def groups(self, proc: Path) -> Iterator[Path]:
        """Yields the directories of this process's group and of the groups above it, as far as they are mounted."""
        # Lines are `number:controllers:path`. The line of version 2 has the number 0 and no controllers.
        lines = (line.split(":", 2) for line in _read_lines(proc / "cgroup"))
        own_path = next((PurePosixPath(path) for _, names, path in lines if self.controllers in names.split(",")), None)
        mount = self._mount(proc)
        if own_path is None or mount is None:
            return
        root, mount_point = mount
        is_inside = own_path.is_relative_to(root) and ".." not in own_path.parts
        relative = own_path.relative_to(root) if is_inside else PurePosixPath()
        group = mount_point / relative
        yield group
        yield from group.parents[: len(relative.parts)]

    def _mount(self, proc: Path) -> tuple[PurePosixPath, Path] | None:
        """Returns the group that is mounted and its mount point; see proc(5) on mountinfo."""
        for line in _read_lines(proc / "mountinfo"):
            mount, _, file_system = line.partition(" - ")
            root, mount_point = mount.split()[3:5]
            kind, _, options = file_system.split()[:3]
            if kind == self.file_system and (not self.controllers or self.controllers in options.split(",")):
                return PurePosixPath(_unescape(root)), Path(_unescape(mount_point))
        return None


VERSION_1 = _CgroupVersion(
    file_system="cgroup",
    controllers="memory",
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    reclaimable="total_inactive_file",
)
VERSION_2 = _CgroupVersion(
    file_system="cgroup2",
    controllers="",
    limits=("memory.max", "memory.high"),  # above `memory.high` a process is slowed down, not killed
    usage="memory.current",
    reclaimable="inactive_file",
)


def bytes_within_limits(proc: Path = PROC) -> int | None:
    """Returns the bytes that this process can still allocate within all limits; None if there is no limit."""
    remaining = list[int]()
    groups = [(version, group) for version in (VERSION_1, VERSION_2) for group in version.groups(proc)]
    for version, group in groups:
        used = _read_number(group / version.usage)
        if used is not None:
            statistics = dict(line.split()[:2] for line in _read_lines(group / "memory.stat"))
            needed = used - int(statistics.get(version.reclaimable, 0))
            remaining += [max(0, limit - needed) for limit in version.read_limits(group)]
    return min(remaining, default=None)


def strictest_limit(proc: Path = PROC) -> int | None:
    """Returns the lowest memory limit of this process's groups; None if there is no limit."""
    groups = ((version, group) for version in (VERSION_1, VERSION_2) for group in version.groups(proc))
    return min((limit for version, group in groups for limit in version.read_limits(group)), default=None)


def _unescape(path: str) -> str:
    """Decodes the octal escapes of blanks in mountinfo."""
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def _read_number(path: Path) -> int | None:
    """Returns the number in a cgroup's file; None for `max` and for a file that cannot be read."""
    text = "".join(_read_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


STATUS = Path("/proc/self/status")
MALLOC_FAST_BINS, MALLOC_TRIM_THRESHOLD, MALLOC_MMAP_THRESHOLD = 1, -1, -3  # parameters of mallopt, from malloc.h
HEAP_TUNABLE = "glibc.malloc.tcache_count=0"  # turns off the thread cache
# Thresholds from which malloc maps a block individually, outside of the heap.
LARGEST_HEAP_BLOCK_BYTES = 32 * MIB  # glibc's maximum
SMALLEST_MAPPED_BYTES = MIB


def available_bytes() -> int:
    """Returns the bytes that can be allocated without swapping, by the kernel's estimate and this process's limits."""
    free = _read_field(Path("/proc/meminfo"), "MemAvailable") * KIB
    within_limits = bytes_within_limits()
    return free if within_limits is None else min(free, within_limits)


def total_bytes() -> int:
    """Returns the machine's memory, or this process's limit if that is lower."""
    installed, limit = _read_field(Path("/proc/meminfo"), "MemTotal") * KIB, strictest_limit()
    return installed if limit is None else min(installed, limit)


def resident_bytes(num_sharers: int = 1) -> int:
    """Returns this process's resident memory. Shared pages count as 1 / `num_sharers` of their size."""
    return (_read_field(STATUS, "VmRSS") - _other_sharers_kib(num_sharers)) * KIB


def peak_resident_bytes(num_sharers: int = 1) -> int:
    """Returns the peak resident memory since the start or `reset_peak`. Pages that are shared at present count as
    1 / `num_sharers` of their size."""
    return (_read_field(STATUS, "VmHWM") - _other_sharers_kib(num_sharers)) * KIB


def _other_sharers_kib(num_sharers: int) -> int:
    """Returns the part of the shared pages, in KiB, that counts for other processes."""
    return 0 if num_sharers == 1 else _read_field(STATUS, "RssShmem") * (num_sharers - 1) // num_sharers


def reset_peak() -> None:
    """Resets the peak of `peak_resident_bytes`. Does nothing if the container does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def trim_heap() -> None:
    """Returns free heap memory to the kernel, so that `resident_bytes` excludes it. Does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def disk_read_bytes() -> int:
    """Returns the bytes that this process read from storage; 0 if the kernel does not count them."""
    try:
        return _read_field(Path("/proc/self/io"), "read_bytes")
    except OSError:
        return 0


def set_allocator(*, is_budget_hard: bool) -> None:
    """Configures glibc's malloc for activations; does nothing with another C library.

    Freed activations should stay in the heap for reuse: page faults would take a tenth of a prefill. But up to glibc
    2.37 the thread cache puts small objects into gaps between aligned blocks. Freed blocks are then too small for
    reuse, and the heap doubles. Turning off the thread cache (`HEAP_TUNABLE`) and fast bins prevents that. If the
    thread cache is on and the memory budget is hard, blocks from 1 MiB on are mapped individually instead."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if is_budget_hard and HEAP_TUNABLE not in os.environ.get("GLIBC_TUNABLES", ""):
        mallopt(MALLOC_MMAP_THRESHOLD, SMALLEST_MAPPED_BYTES)
        return
    mallopt(MALLOC_FAST_BINS, 0)
    mallopt(MALLOC_MMAP_THRESHOLD, LARGEST_HEAP_BLOCK_BYTES)
    mallopt(MALLOC_TRIM_THRESHOLD, 2**31 - 1)


def _read_field(path: Path, name: str) -> int:
    """Returns the number in the line `name: number` of a file in /proc. Raises OSError if there is none."""
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise OSError(f"{path} has no field {name}")
