"""Pass times compared with a floor: a pass takes at least as long as reading its bytes, and as its matrix products.

Both times are measured on this machine. Products are x (M, K) times weights (N, K).
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from runtime.config.profiles import LinearBackend
from runtime.config.settings import ModelConfig, RuntimeConfig
from runtime.library.api import Runtime
from runtime.linear.backends import BACKENDS, supported_backends
from runtime.plan.shape.shapes import Stage, StageKind
from runtime.units import MIB

from .predictions import BlockCase
from .report import table
from .runner import ask_worker
from .task import BenchmarkTask, Result, random_prompts

FEW_ROWS, MANY_ROWS = 64, 512  # M of measured products: as in a decode pass, and where FLOP/s no longer grow with M
VOCABULARY = 32000  # any number: only the lengths of prompts are used
WEIGHT_BYTES = 256 * MIB  # of the copies of a weight: more than a cache holds
MAX_COPIES = 64  # of a small weight, which stays in the cache in a run, too
NUM_TRIES, MIN_SECONDS = 3, 0.03  # of each backend


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Seconds of one phase, prefill or decode: the minimum for reading and for multiplying, and the measured time."""

    case: BlockCase
    phase: str
    reading: float
    multiplying: float
    measured: float

    @property
    def share(self) -> float:
        """The floor as a fraction of the measured time; 1 is the best."""
        return max(self.reading, self.multiplying) / self.measured


@dataclass(frozen=True, kw_only=True)
class ProductSeconds:
    """Seconds of all products of a pass, in its layers and in its head."""

    layers: float
    head: float


def product_seconds(task: BenchmarkTask) -> dict[int, ProductSeconds]:
    """Seconds of a pass with FEW_ROWS and with MANY_ROWS rows, by number of rows. Measured in a separate process."""
    question = {"path": task.path, "rows": [FEW_ROWS, MANY_ROWS], "num_threads": task.num_threads}
    seconds = ask_worker(__name__, question)
    return {int(num_rows): ProductSeconds(layers=layers, head=head) for num_rows, (layers, head) in seconds.items()}


def compute_floors(
    case: BlockCase,
    task: BenchmarkTask,
    results: Sequence[Result],
    bytes_per_second: float,
    seconds: Mapping[int, ProductSeconds],
) -> list[Floor]:
    """The floors of prefill and of decode, as medians over rounds. `seconds`: product times by number of rows.

    Every pass reads the same bytes. Product times are scaled to the rows of a pass, for decode from the number of rows
    with the higher rate. Prefill computes the head for the last token of each prompt only.
    """
    num_tokens = sum(map(len, random_prompts(task.num_prompts, VOCABULARY, task.prompt_tokens)))
    num_decodes = task.num_new_tokens - 1
    num_prefills = median(result.num_passes for result in results) - num_decodes
    reading = median(result.bytes_read / result.num_passes for result in results) / bytes_per_second
    scale = max(1.0, task.num_prompts / FEW_ROWS)
    decode = min(scale * FEW_ROWS / rows * (times.layers + times.head) for rows, times in seconds.items())
    head = scale * seconds[FEW_ROWS].head
    prefill = median(result.prefill_seconds for result in results)
    return [
        Floor(
            case=case,
            phase="prefill",
            reading=num_prefills * reading,
            multiplying=num_tokens / MANY_ROWS * seconds[MANY_ROWS].layers + head,
            measured=prefill,
        ),
        Floor(
            case=case,
            phase="decode",
            reading=num_decodes * reading,
            multiplying=num_decodes * decode,
            measured=median(result.seconds for result in results) - prefill,
        ),
    ]


def floors_table(floors: Sequence[Floor]) -> str:
    rows = []
    for floor in floors:
        name = f"{floor.case.name}, {floor.case.contender}, {floor.case.num_sequences}, {floor.phase}"
        seconds = (floor.reading, floor.multiplying, floor.measured)
        rows.append([name, *(f"{each:.1f} s" for each in seconds), f"{floor.share:.0%}"])
    return table(["checkpoint, tier, block, phase", "read at least", "multiply at least", "took", "floor"], rows)


def products(stages: Iterable[Stage], num_rows: int) -> Counter[tuple[int, int, int]]:
    """Counts the products of a pass by (M, N, K). Rows are divided evenly among experts."""
    return Counter(sizes for stage in stages for sizes in _products(stage, num_rows))


def _products(stage: Stage, num_rows: int) -> Iterator[tuple[int, int, int]]:
    for parameter in stage.parameters:
        if len(parameter.shape) == 2:
            yield num_rows, *parameter.shape
        elif len(parameter.shape) == 3 and stage.num_experts:
            rows_per_expert = max(1, round(num_rows * stage.num_experts_per_token / stage.num_experts))
            yield from [(rows_per_expert, *parameter.shape[1:])] * stage.num_experts


def shortest_seconds(M: int, N: int, K: int) -> float:
    """Seconds of one product with the fastest backend, with weights from memory rather than a cache."""
    count = min(MAX_COPIES, max(2, WEIGHT_BYTES // (2 * N * K)))
    weights = [torch.randn(N, K).bfloat16() for _ in range(count)]
    x_MK = torch.randn(M, K)
    return min(_seconds(backend, x_MK, weights) for backend in supported_backends(x_MK, weights[:1]))


def _seconds(backend: LinearBackend, x_MK: torch.Tensor, weights: list[torch.Tensor]) -> float:
    """The median seconds of a product. Cycles through the copies of the weights."""
    tries = []
    for _ in range(NUM_TRIES):
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < MIN_SECONDS:
            BACKENDS[backend](x_MK, [weights[count % len(weights)]])
            count += 1
        tries.append((time.perf_counter() - begin) / count)
    return median(tries)


@torch.inference_mode()
def measure(*, path: str, rows: list[int], num_threads: int) -> dict[int, tuple[float, float]]:
    """Seconds of all products in layers, and of those in the head, by number of rows."""
    torch.set_num_threads(num_threads)
    shape = Runtime(RuntimeConfig(model=ModelConfig(name="bench", path=path))).model.shape
    layers = [stage for stage in shape.stages if stage.kind.is_layer]
    head = shape.stages_of_kind(StageKind.head)

    def seconds(stages: Iterable[Stage], num_rows: int) -> float:
        return sum(count * shortest_seconds(*sizes) for sizes, count in products(stages, num_rows).items())

    return {num_rows: (seconds(layers, num_rows), seconds(head, num_rows)) for num_rows in rows}


def answers(question: dict[str, Any]) -> Iterator[dict[int, tuple[float, float]]]:
    """The worker's entry point (`benchmarks.worker`)."""
    yield measure(**question)
