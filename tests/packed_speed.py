"""python -m tests.packed_speed [MODEL_DIR OTHER_DIR [nvme|cpu [DTYPE]]]: what packed weights cost in a product, and
gain in a run.

Without directories two minutes: ms of products with as many copies of a matrix as no cache holds, plain and packed in
turns, the best of many. With them the same 64 prompts by two forms of one model in turns (`python -m jobs.pack` makes
the second, or `python -m jobs.synthesize alignment_bytes=...`), from disk with memory for a quarter of the first's
bytes, or in memory, computing in float32 or DTYPE: tokens per second of each, as a whole and of decode passes, and that
tokens are equal. For a quiet machine.
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import cast

import torch

from runtime import ModelConfig, OffloadConfig, PolicyConfig, Runtime, RuntimeConfig, SamplingConfig
from runtime.config.settings import DType, MachineConfig, PolicyKind, Tier
from runtime.engine.records import PassRecord, Phase
from runtime.formats.kinds.rounded import ENCODINGS
from runtime.linear.blocks import Block
from runtime.linear.kernel_products import multiply_in_vectors
from runtime.sequences.sequence import Completion, Request
from runtime.units import GIB
from tests.packed import packed_rows, rounded_rows, tensor_of, words_of

NUM_THREADS = len(os.sched_getaffinity(0))  # tests are told to take one
NUM_COPIES, ROUNDS, TURNS, NUM_PROMPTS, NUM_NEW_TOKENS = 6, 30, 5, 64, 16


def products(outputs: int, inputs: int) -> None:
    numbers = torch.distributions.StudentT(4.0).sample((outputs, inputs)).mul_(0.02)
    words = words_of(numbers.numpy())
    blocks: dict[str, list[Block]] = {
        "plain": [tensor_of(words.copy()) for _ in range(NUM_COPIES)],
        "window4": [packed_rows(words) for _ in range(NUM_COPIES)],
    } | {name: [rounded_rows(numbers, name) for _ in range(NUM_COPIES)] for name in ENCODINGS}
    for num_rows in (1, 8, 64, 256):
        x = torch.randn(num_rows, inputs)
        best = _best({way: (lambda block, x=x: multiply_in_vectors(x, [block])) for way in blocks}, blocks)
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


def runs(first: Path, second: Path, tier: Tier, dtype: DType) -> None:
    num_bytes = sum(path.stat().st_size for path in first.glob("*.safetensors"))
    budget = num_bytes / 4 / GIB if tier is Tier.nvme else None
    prompts = [[7 + turn, *range(5, 37)] for turn in range(NUM_PROMPTS)]
    tokens = dict[Path, list[object]]()
    figures = {name: defaultdict[Path, list[float]](list) for name in ("tokens/s", "tokens/s of decode passes")}
    for directory in (first, second) * TURNS:
        records = list[PassRecord]()
        with Runtime(_config(directory, tier, dtype, budget)) as runtime:
            start = time.perf_counter()
            tokens[directory] = [one.token_ids for one in _completions(runtime, prompts, records)]
            took = time.perf_counter() - start
        of_passes = median(record.seconds for record in records if record.phase is Phase.decode)
        for name, rate in zip(figures, (NUM_PROMPTS * NUM_NEW_TOKENS / took, NUM_PROMPTS / of_passes), strict=True):
            figures[name][directory].append(rate)
    for name, rates in figures.items():
        for directory, found in rates.items():
            ratio = median(found) / median(rates[first])
            print(f"{directory}: {median(found):.2f} {name} ({min(found):.2f}-{max(found):.2f}), {ratio:.3f} x")
    print("tokens are equal" if tokens[first] == tokens[second] else "TOKENS DIFFER")


def _completions(runtime: Runtime, prompts: Sequence[list[int]], records: list[PassRecord]) -> list[Completion]:
    requests = [cast(Request, runtime.request(str(number), prompt)) for number, prompt in enumerate(prompts)]
    with runtime.open_with_backoff(requests) as (_, session):
        completions = dict(session.generate(requests, records.append))
    return [completions[number] for number in range(len(requests))]


def _config(directory: Path, tier: Tier, dtype: DType, memory_gib: float | None) -> RuntimeConfig:
    return RuntimeConfig(
        model=ModelConfig(name="measured", path=str(directory), dtype=dtype),
        offload=OffloadConfig(tier=tier, host_memory_gib=memory_gib),
        policy=PolicyConfig(kind=PolicyKind.fixed, micro_batch_size=NUM_PROMPTS, num_micro_batches=1),
        sampling=SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True),
        machine=MachineConfig(num_threads=NUM_THREADS),
    )


if __name__ == "__main__":
    if len(sys.argv) > 2:
        tier, dtype = (*sys.argv[3:], *("nvme", "float32")[len(sys.argv) - 3 :])
        runs(*map(Path, sys.argv[1:3]), Tier(tier), DType(dtype))
    else:
        torch.set_num_threads(NUM_THREADS)
        products(8192, 2048)
        products(2048, 14336)
