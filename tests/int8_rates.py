"""How fast products in int8 are beside exact ones, with weights that no cache of this size holds.

    python -m tests.int8_rates    prints the table, on all cores, in half a minute

Rounds alternate; medians, the least and the most. `w`: bytes of weights as they are read.
"""

import os
import time
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median

import torch

from runtime.linear.tile_products import multiply_in_tiles, prepare_tiles
from runtime.model.int8_products import has_int8_unit, multiply_in_int8, prepare_int8_products

SHAPES = ((2048, 8192), (8192, 2048))  # inputs, outputs: up and down in Llama 3.2 1B
ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
NUM_MATRICES, NUM_ROUNDS = 8, 5  # 268 MB in turns

Multiply = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]


def rates(num_rows: int, weights: Sequence[torch.Tensor]) -> dict[str, list[float]]:
    """GFLOP/s of each round; one before them warms up."""
    x = torch.randn(num_rows, weights[0].shape[1])
    ways: dict[str, Multiply] = {"exact": multiply_in_tiles, "int8": multiply_in_int8}
    flops = 2.0 * num_rows * sum(weight.numel() for weight in weights)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(NUM_ROUNDS + 1):
        for name, multiply in ways.items():
            begin = time.perf_counter()
            for weight in weights:
                multiply(x, [weight])
            found[name].append(flops / (time.perf_counter() - begin) / 1e9)
    return {name: values[1:] for name, values in found.items()}


def main() -> None:
    if not has_int8_unit():
        raise SystemExit("this processor has no matrix unit for int8 that Linux lets us use")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    prepare_tiles()
    prepare_int8_products()
    print(f"{torch.get_num_threads()} threads; GFLOP/s")
    made = {shape: [torch.randn(*shape[::-1]).bfloat16() for _ in range(NUM_MATRICES)] for shape in SHAPES}
    for shape, num_rows in product(SHAPES, ROWS):
        found = rates(num_rows, made[shape])
        exact, int8 = (median(values) for values in found.values())
        spans = "  ".join(f"{n} {median(v):7.1f} ({min(v):.0f}-{max(v):.0f})" for n, v in found.items())
        read = int8 / num_rows  # two FLOPs for each row, and two bytes, of a number of w
        print(f"K {shape[0]} N {shape[1]} M {num_rows:3}  {spans}  x{int8 / exact:.2f}  w {read:.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
