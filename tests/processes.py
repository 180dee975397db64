"""Processes that are forked off one which has loaded the libraries and done nothing with them."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "tests.unsynced",
        "jobs.generate",
        "jobs.run.run",
        *(f"runtime.kernels.{name}" for name in ("attention", "rowwise", "linear_narrow", "linear_wide")),
        "transformers.models.llama.modeling_llama",  # what follows would be imported late
        "pandas",
        "tests.fuzz.child",
        "tests.frozen",
    ]
)


def alone(function: Callable[..., T], *arguments: object) -> T:
    """What `function` returns in such a process; it must be one of a module."""
    with ProcessPoolExecutor(1, mp_context=PROCESSES) as pool:
        return pool.submit(function, *arguments).result()


def at_once(num_processes: int, function: Callable[..., T], *arguments: object) -> list[T]:
    """What it returns in each of several, which begin together."""
    begin = PROCESSES.Barrier(num_processes).wait
    with ProcessPoolExecutor(num_processes, mp_context=PROCESSES, initializer=begin) as pool:
        running = [pool.submit(function, *arguments) for _ in range(num_processes)]
        return [each.result() for each in running]
