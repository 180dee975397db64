"""Peak rates of a processor: multiply-adds of vectors in registers (FLOP/s), and memory reads (bytes/s)."""

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
NUM_ITERATIONS = 1_000_000  # of the loop: a few milliseconds
NUM_TRIES = 5  # of a rate: the first compiles and starts threads


@intrinsic
def _multiply_adds(typing: Any, num_iterations: Any) -> Any:
    """A Numba intrinsic: a loop with one fused multiply-add (FMA) for each of NUM_SUMS vector registers."""

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
        for register in sums[1:]:  # returned, because the compiler drops unused sums
            total = builder.fadd(total, builder.load(register))
        return builder.extract_element(total, INT(0))

    return types.float32(types.intp), build


@njit(nogil=True)
def multiply_adds(num_iterations: int) -> float:
    return _multiply_adds(num_iterations)  # pyright: ignore[reportCallIssue] - its first argument is the compiler's


@njit(nogil=True, fastmath=True)
def _sum(numbers: np.ndarray) -> np.float32:
    total = np.float32(0)
    for i in range(len(numbers)):
        total += numbers[i]
    return total


def flops_per_second(num_threads: int) -> float:
    """The rate of `num_threads` threads that multiply and add in registers."""
    seconds = _seconds(lambda pool: pool.map(multiply_adds, [NUM_ITERATIONS] * num_threads), num_threads)
    return 2.0 * LANES * NUM_SUMS * NUM_ITERATIONS * num_threads / seconds


def bytes_per_second(matrices: Sequence[torch.Tensor], num_threads: int) -> float:
    """The rate of reading `matrices`, which must be larger than caches: by torch's sum or by a compiled loop in each
    thread, whichever is faster."""
    parts = [part.view(-1).numpy() for matrix in matrices for part in matrix.chunk(num_threads)]
    by_threads = _seconds(lambda pool: pool.map(_sum, parts), num_threads)
    by_torch = _seconds(lambda _: (matrix.sum() for matrix in matrices), num_threads)
    return sum(matrix.nbytes for matrix in matrices) / min(by_threads, by_torch)


def _seconds(make_work: Callable[[ThreadPoolExecutor], Any], num_threads: int) -> float:
    """The shortest time in which the iterator of `make_work` is exhausted, of NUM_TRIES."""
    with ThreadPoolExecutor(num_threads) as pool:
        times = []
        for _ in range(NUM_TRIES):
            begin = time.perf_counter()
            list(make_work(pool))
            times.append(time.perf_counter() - begin)
    return min(times)
