"""The shortest time that a checkpoint's matrix products take here: `python -m jobs.benchmarks.floor_worker JSON`
answers with seconds of layers and of the head, by rows of inputs.

Each shape of matrix is multiplied in every way that there is, the fastest counts; weights are taken in turns from so
many copies that they come from memory. Nothing else of a model is computed. M rows, N outputs, K inputs.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import median

import torch

from runtime.api import Runtime
from runtime.config import ModelConfig, RuntimeConfig
from runtime.linear.multipliers import MULTIPLIERS, fitting
from runtime.plan.shape.shapes import Stage, StageKind
from runtime.profiles import Multiplier
from runtime.units import MIB

WEIGHT_BYTES = 256 * MIB  # of each shape, more than a cache holds
MOST_COPIES = 64  # small models stay in a cache in a run, too
TRIES, LEAST_SECONDS = 3, 0.03  # of each way


def products(stages: Iterable[Stage], num_rows: int) -> Counter[tuple[int, int, int]]:
    """How many there are of each (M, N, K) in one pass. Experts share the rows out evenly."""
    return Counter(sizes for stage in stages for sizes in _products(stage, num_rows))


def _products(stage: Stage, num_rows: int) -> Iterator[tuple[int, int, int]]:
    for parameter in stage.parameters:
        if len(parameter.shape) == 2:
            yield num_rows, *parameter.shape
        elif len(parameter.shape) == 3 and stage.num_experts:
            visits = max(1, round(num_rows * stage.num_experts_per_token / stage.num_experts))
            yield from [(visits, *parameter.shape[1:])] * stage.num_experts


def shortest_seconds(M: int, N: int, K: int) -> float:
    count = min(MOST_COPIES, max(2, WEIGHT_BYTES // (2 * N * K)))
    weights = [torch.randn(N, K).bfloat16() for _ in range(count)]
    x_MK = torch.randn(M, K)
    return min(_seconds(way, x_MK, weights) for way in fitting(x_MK, weights[:1]))


def _seconds(way: Multiplier, x_MK: torch.Tensor, weights: list[torch.Tensor]) -> float:
    found = []
    for _ in range(TRIES):
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < LEAST_SECONDS:
            MULTIPLIERS[way](x_MK, [weights[count % len(weights)]])
            count += 1
        found.append((time.perf_counter() - begin) / count)
    return median(found)


@torch.inference_mode()
def measure(*, path: str, rows: list[int], num_threads: int) -> dict[int, tuple[float, float]]:
    torch.set_num_threads(num_threads)
    shape = Runtime(RuntimeConfig(model=ModelConfig(name="bench", path=path))).model.shape
    layers = [stage for stage in shape.stages if stage.kind.is_layer]
    parts = layers, shape.of_kind(StageKind.head)

    def seconds(stages: Iterable[Stage], num_rows: int) -> float:
        return sum(count * shortest_seconds(*sizes) for sizes, count in products(stages, num_rows).items())

    return {num_rows: (seconds(parts[0], num_rows), seconds(parts[1], num_rows)) for num_rows in rows}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(**json.loads(sys.argv[1]))) + "\n")
