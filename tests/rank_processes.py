"""Ranks of a run, each in a process of its own, that meet by a file instead of a launcher."""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch

from runtime.ranks.launch import Launch
from runtime.ranks.ranks import Ranks
from tests.processes import PROCESSES

PATIENCE_SECONDS = 60.0

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
    size = len(nodes)
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, mp_context=PROCESSES) as pool:
        url = f"file://{Path(folder) / 'meet'}"
        launches = [Launch(rank=rank, size=size, url=url) for rank in range(size)]
        running = [
            pool.submit(_as_rank, launch, node, function, *arguments, **keywords)
            for launch, node in zip(launches, nodes, strict=True)
        ]
        _, left = wait(running, return_when=FIRST_EXCEPTION)
        _, stuck = wait(left, timeout=PATIENCE_SECONDS)
        if stuck:  # waiting for a rank that has failed alone: the process, which would be its end, serves the pool
            failed = [error for each in running if each.done() and (error := each.exception()) is not None]
            for process in list(pool._processes.values()):
                process.kill()
            raise failed[0]
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
