"""Peak rates of a processor: multiply-adds of vectors in registers, and memory reads."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from runtime.kernels.primitives import FLOATS, INT, LANES, Builder, Value, multiply_add

NUM_SUMS = 12 if LANES == 8 else 24  # independent sums: enough to hide the latency (4-5 cycles) of two FMA units
TURNS = 1_000_000  # of the loop: a few milliseconds
TRIES = 5  # of a rate: the first compiles and starts threads


@intrinsic
def _multiply_adds(typing: Any, turns: Any) -> Any:
    def build(context: Any, builder: Builder, signature: Any, arguments: list[Value]) -> Value:
        sums = [cgutils.alloca_once(builder, FLOATS) for _ in range(NUM_SUMS)]
        factor = cgutils.alloca_once(builder, FLOATS)
        for register in (factor, *sums):
            builder.store(FLOATS([1.0000001] * LANES), register)
        number = builder.load(factor)
        with cgutils.for_range(builder, arguments[0], intp=arguments[0].type):
            for register in sums:
                builder.store(multiply_add(builder, builder.load(register), number, number), register)
        total = builder.load(sums[0])
        for register in sums[1:]:  # the compiler would drop unused sums
            total = builder.fadd(total, builder.load(register))
        return builder.extract_element(total, INT(0))

    return types.float32(types.intp), build


@njit(nogil=True)
def multiply_adds(turns: int) -> float:
    return _multiply_adds(turns)  # pyright: ignore[reportCallIssue] - its first argument is the compiler's


@njit(nogil=True, fastmath=True)
def _sum(numbers: np.ndarray) -> np.float32:
    total = np.float32(0)
    for i in range(len(numbers)):
        total += numbers[i]
    return total


def flops_per_second(num_threads: int) -> float:
    """The rate of `num_threads` threads that multiply and add in registers."""
    seconds = _seconds(lambda pool: pool.map(multiply_adds, [TURNS] * num_threads), num_threads)
    return 2.0 * LANES * NUM_SUMS * TURNS * num_threads / seconds


def bytes_per_second(matrices: Sequence[torch.Tensor], num_threads: int) -> float:
    """The rate of reading matrices larger than caches: the faster of torch's sum and a compiled loop per thread."""
    parts = [part.view(-1).numpy() for matrix in matrices for part in matrix.chunk(num_threads)]
    by_threads = _seconds(lambda pool: pool.map(_sum, parts), num_threads)
    by_torch = _seconds(lambda _: (matrix.sum() for matrix in matrices), num_threads)
    return sum(matrix.nbytes for matrix in matrices) / min(by_threads, by_torch)


def _seconds(make_work: Callable[[ThreadPoolExecutor], Any], num_threads: int) -> float:
    """The shortest of several times to exhaust the iterator that `make_work` returns."""
    with ThreadPoolExecutor(num_threads) as pool:
        times = []
        for _ in range(TRIES):
            begin = time.perf_counter()
            list(make_work(pool))
            times.append(time.perf_counter() - begin)
    return min(times)
