"""Memory and I/O statistics of this process and machine in bytes, and memory limits of its control groups (containers,
Slurm steps). Linux only. A cgroup's limit applies to all groups below it. Version 1 has a hierarchy for memory only,
version 2 one for all controllers, and a machine may mount both (cgroups(7))."""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..units import KIB, MIB

PROC = Path("/proc/self")


@dataclass(frozen=True, kw_only=True)
class _CgroupVersion:
    """File names of one cgroup version. `reclaimable`: the entry of memory.stat for page cache that the kernel drops
    first; `usage` includes it."""

    file_system: str
    controllers: str  # as in the group's line in /proc/self/cgroup
    limits: tuple[str, ...]
    usage: str
    reclaimable: str

    def read_limits(self, group: Path) -> Iterator[int]:
        return (limit for name in self.limits if (limit := _read_number(group / name)) is not None)

    def groups(self, proc: Path) -> Iterator[Path]:
        """Directories of this process's group and of its mounted ancestors."""
        # Lines are `number:controllers:path`; version 2's has the number 0 and no controllers.
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
        """The mounted root of the hierarchy and its mount point; see proc(5) on mountinfo."""
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
    limits=("memory.max", "memory.high"),  # beyond `high` a process is slowed down instead of killed
    usage="memory.current",
    reclaimable="inactive_file",
)


def bytes_within_limits(proc: Path = PROC) -> int | None:
    """Bytes that this process can still allocate within its strictest limit; None if there is no limit."""
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
    """The lowest memory limit of this process's groups; None if there is no limit."""
    groups = ((version, group) for version in (VERSION_1, VERSION_2) for group in version.groups(proc))
    return min((limit for version, group in groups for limit in version.read_limits(group)), default=None)


def _unescape(path: str) -> str:
    """Decodes the octal escapes of blanks in mountinfo."""
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def _read_number(path: Path) -> int | None:
    """The number in a control group's file; None for `max` and for a file that cannot be read."""
    text = "".join(_read_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _read_lines(path: Path) -> list[str]:
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
    """Memory that can be allocated without swapping, by the kernel's estimate and this process's limits."""
    free = _read_field(Path("/proc/meminfo"), "MemAvailable") * KIB
    within_limits = bytes_within_limits()
    return free if within_limits is None else min(free, within_limits)


def total_bytes() -> int:
    """Memory of the machine, or this process's limit if that is lower."""
    installed, limit = _read_field(Path("/proc/meminfo"), "MemTotal") * KIB, strictest_limit()
    return installed if limit is None else min(installed, limit)


def resident_bytes(num_sharers: int = 1) -> int:
    """Resident memory of this process. Shared pages count as 1 / `num_sharers`."""
    return (_read_field(STATUS, "VmRSS") - _other_sharers_kib(num_sharers)) * KIB


def peak_resident_bytes(num_sharers: int = 1) -> int:
    """Peak resident memory since the start or `reset_peak`. The shared pages of now count as 1 / `num_sharers`."""
    return (_read_field(STATUS, "VmHWM") - _other_sharers_kib(num_sharers)) * KIB


def _other_sharers_kib(num_sharers: int) -> int:
    """The share of shared pages that is attributed to the other processes, in KiB."""
    return 0 if num_sharers == 1 else _read_field(STATUS, "RssShmem") * (num_sharers - 1) // num_sharers


def reset_peak() -> None:
    """Resets the peak if the container allows it; otherwise the peak includes the start-up."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def trim_heap() -> None:
    """Returns free heap memory to the kernel, so that `resident_bytes` excludes it. A no-op without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def disk_read_bytes() -> int:
    """Bytes that this process read from storage; 0 if the kernel does not count them."""
    try:
        return _read_field(Path("/proc/self/io"), "read_bytes")
    except OSError:
        return 0


def set_allocator(*, is_budget_hard: bool) -> None:
    """Configures glibc's malloc for activations; a no-op with another C library.

    Freed activations should stay in the heap for reuse: page faults cost a tenth of a prefill. But up to glibc 2.37 the
    thread cache puts small objects into gaps between aligned blocks. Freed blocks are then too small for reuse, and the
    heap doubles. Turning off the thread cache (`HEAP_TUNABLE`) and fast bins prevents that. If it is on and the budget
    is hard, blocks from 1 MiB are mapped individually instead."""
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
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    raise OSError(f"{path} has no field {name}")
