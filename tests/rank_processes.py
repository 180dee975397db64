"""Ranks of a run, each in a process of its own, that meet by a file instead of a launcher."""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch

from runtime.ranks.launch import Launch
from runtime.ranks.ranks import Ranks
from tests.processes import PROCESSES

T = TypeVar("T")
P = ParamSpec("P")


def in_ranks(
    size: int, function: Callable[Concatenate[Ranks, P], T], *arguments: P.args, **keywords: P.kwargs
) -> list[T]:
    """What `function` of a module returns in each of `size` ranks, by rank."""
    return _in_ranks([None] * size, function, *arguments, **keywords)


def in_nodes(
    size: int, function: Callable[Concatenate[Ranks, P], T], *arguments: P.args, **keywords: P.kwargs
) -> list[T]:
    """The same where each rank is in a node of its own, as Slurm has them."""
    return _in_ranks([f"n{rank}" for rank in range(size)], function, *arguments, **keywords)


def _in_ranks(
    nodes: list[str | None], function: Callable[Concatenate[Ranks, P], T], *arguments: P.args, **keywords: P.kwargs
) -> list[T]:
    """Each process ends behind its rank, as a run's does: by that alone others know that they wait in vain."""
    size = len(nodes)
    pool = ProcessPoolExecutor(size, mp_context=PROCESSES, max_tasks_per_child=1)
    with tempfile.TemporaryDirectory() as folder, pool:
        url = f"file://{Path(folder) / 'meet'}"
        launches = [Launch(rank=rank, size=size, url=url) for rank in range(size)]
        running = [
            pool.submit(_as_rank, launch, node, function, *arguments, **keywords)
            for launch, node in zip(launches, nodes, strict=True)
        ]
        return [each.result() for each in running]


def _as_rank(
    launch: Launch,
    node: str | None,
    function: Callable[Concatenate[Ranks, P], T],
    *arguments: P.args,
    **keywords: P.kwargs,
) -> T:
    if node is not None:
        os.environ["SLURMD_NODENAME"] = node
    torch.set_num_threads(1)
    with Ranks(launch) as ranks:
        return function(ranks, *arguments, **keywords)
