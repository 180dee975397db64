"""The processors that this process may use, by their node of memory, and how several processes share them. It stands
alone as nothing in it starts anything: it is what the kernel says, and arithmetic."""

import os
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path

SYSTEM = Path("/sys/devices/system")


def processors_by_node(system: Path = SYSTEM, own: Collection[int] | None = None) -> list[list[int]]:
    """Those of each node that has some of them, threads of one core beside each other. `own`: None is those that this
    process may use. Where the kernel says nothing of nodes there is one."""
    own = own if own is not None else os.sched_getaffinity(0)
    listed = [_numbers(path) for path in sorted(system.glob("node/node[0-9]*/cpulist"))]
    nodes = [sorted(set(node) & set(own), key=lambda number: (_core(system, number), number)) for node in listed]
    return [node for node in nodes if node] or [sorted(own)]


def split_processors(nodes: Sequence[Sequence[int]], count: int) -> list[Sequence[int]]:
    """Makes `count` shares of them: the nodes if there are so many, otherwise neighbours; where there are fewer
    processors than shares, all of them for each."""
    if count == len(nodes):
        return list(nodes)
    flat = [number for node in nodes for number in node]
    bounds = [len(flat) * share // count for share in range(count + 1)]
    return [flat[begin:end] or flat for begin, end in pairwise(bounds)]


def _core(system: Path, number: int) -> int:
    """The first thread of its core."""
    siblings = _numbers(system / f"cpu/cpu{number}/topology/thread_siblings_list")
    return min(siblings, default=number)


def _numbers(path: Path) -> list[int]:
    """`0-3,8` as numbers; none where the file is not there."""
    try:
        ranges = [part.partition("-") for part in path.read_text().strip().split(",") if part]
    except OSError:
        return []
    return [number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)]
