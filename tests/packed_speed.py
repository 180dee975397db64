"""python -m tests.packed_speed [MODEL_DIR PACKED_DIR]: what packed weights cost in a product, and gain in a run.

Without directories two minutes: ms of products with as many copies of a matrix as no cache holds, plain and packed in
turns, the best of many. With them the same 64 prompts from disk, with memory for a quarter of the original's bytes,
both in turns (`python -m jobs.pack` makes the second): tokens per second of each, and that tokens are equal. For a
quiet machine.
"""

import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch

from runtime import ModelConfig, OffloadConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config import DType, PolicyKind, Tier
from runtime.formats.rounding import WAYS
from runtime.linear.panels import Block
from runtime.linear.vectors import multiply_in_vectors
from tests.packed import packed_rows, rounded_rows, tensor_of, words_of

NUM_COPIES, ROUNDS, NUM_PROMPTS, NUM_NEW_TOKENS = 6, 30, 64, 8


def products(outputs: int, inputs: int) -> None:
    numbers = torch.distributions.StudentT(4.0).sample((outputs, inputs)).mul_(0.02)
    words = words_of(numbers.numpy())
    ways: dict[str, list[Block]] = {
        "plain": [tensor_of(words.copy()) for _ in range(NUM_COPIES)],
        "window4": [packed_rows(words) for _ in range(NUM_COPIES)],
    } | {name: [rounded_rows(numbers, name) for _ in range(NUM_COPIES)] for name in WAYS}
    for num_rows in (1, 8, 64, 256):
        x = torch.randn(num_rows, inputs)
        best = _best({way: (lambda block, x=x: multiply_in_vectors(x, [block])) for way in ways}, ways)
        shown = ", ".join(f"{way} {took:.2f} ({took / best['plain'] - 1:+.1%})" for way, took in best.items())
        print(f"{outputs} x {inputs}, M = {num_rows}, ms: {shown}")


def _best(acts: dict[str, Callable[[Block], torch.Tensor]], ways: dict[str, list[Block]]) -> dict[str, float]:
    """Milliseconds of each, in turns."""
    best, copies = dict.fromkeys(acts, float("inf")), {way: cycle(ways[way]) for way in acts}
    for way in [*acts] * ROUNDS:
        block, start = next(copies[way]), time.perf_counter()
        acts[way](block)
        best[way] = min(best[way], (time.perf_counter() - start) * 1e3)
    return best


def runs(original: Path, packed: Path) -> None:
    budget = sum(path.stat().st_size for path in original.glob("*.safetensors")) / 4 / (1 << 30)
    prompts = [[7 + turn, *range(5, 37)] for turn in range(NUM_PROMPTS)]
    found = dict[Path, list[object]]()
    for directory in (original, packed) * 3:
        runtime = Runtime(_config(directory, budget))
        start = time.perf_counter()
        found[directory] = [getattr(result, "token_ids", result) for result in runtime.generate(prompts)]
        took = time.perf_counter() - start
        print(f"{directory}: {NUM_PROMPTS * NUM_NEW_TOKENS / took:.2f} tokens/s, {took:.1f} s, loading included")
    print("tokens are equal" if found[original] == found[packed] else "TOKENS DIFFER")


def _config(directory: Path, memory_gib: float) -> RuntimeConfig:
    return RuntimeConfig(
        model=ModelConfig(name="measured", path=str(directory), dtype=DType.float32),
        offload=OffloadConfig(tier=Tier.nvme, host_memory_gib=memory_gib),
        policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=NUM_PROMPTS, num_micro_batches=1),
        sampling=SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True),
    )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        runs(*map(Path, sys.argv[1:]))
    else:
        products(8192, 2048)
        products(2048, 14336)
