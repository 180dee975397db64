"""Memory limits of the control groups that this process is in: a container's, and of a Slurm step within it.

A limit holds for a group and all below it, so every group on the way up to the root counts. Version 1 of Linux's
control groups has a hierarchy for memory alone, version 2 one for everything; a machine may mount both (cgroups(7)).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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
    left = [bytes_left for version in (VERSION_1, VERSION_2) for bytes_left in _left(version, proc)]
    return min(left, default=None)


def _left(version: _Version, proc: Path) -> Iterator[int]:
    for group in _groups(version, proc):
        used = _number(group / version.usage)
        if used is None:
            continue
        needed = used - _statistic(group / "memory.stat", version.reclaimable)
        for name in version.limits:
            limit = _number(group / name)
            if limit is not None:
                yield max(0, limit - needed)


def _groups(version: _Version, proc: Path) -> Iterator[Path]:
    """The folders of this process's own group and of those above it, as far as they are mounted."""
    own, mount = _own_group(version, proc), _mount(version, proc)
    if own is None or mount is None:
        return
    root, mounted_at = mount
    inside = own.relative_to(root) if own.is_relative_to(root) and ".." not in own.parts else PurePosixPath()
    group = mounted_at / inside
    yield group
    yield from group.parents[: len(inside.parts)]


def _own_group(version: _Version, proc: Path) -> PurePosixPath | None:
    """Lines are `number:controllers:path`; version 2's has the number 0 and no controllers."""
    for line in _lines(proc / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if version.controllers in controllers.split(","):
            return PurePosixPath(path)
    return None


def _mount(version: _Version, proc: Path) -> tuple[PurePosixPath, Path] | None:
    """Which part of the hierarchy is mounted, and where; see proc(5) on mountinfo."""
    for line in _lines(proc / "mountinfo"):
        mount, _, file_system = line.partition(" - ")
        root, mounted_at = mount.split()[3:5]
        kind, _, options = file_system.split()[:3]
        if kind == version.file_system and (not version.controllers or version.controllers in options.split(",")):
            return PurePosixPath(_unescaped(root)), Path(_unescaped(mounted_at))
    return None


def _unescaped(path: str) -> str:
    """Blanks stand as octal numbers there."""
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def _number(path: Path) -> int | None:
    """None for `max`, and for a file that is not there or must not be read."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _statistic(path: Path, name: str) -> int:
    found = [line.split()[1] for line in _lines(path) if line.split()[0] == name]
    return int(found[0]) if found else 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
