"""The benchmark of scaling: the cost of a token as layers, vocabulary, prompts, block and rows grow.

The model is a small Llama with streamed weights. A block is the sequences that are decoded together.
"""

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from runtime.config.settings import (
    MachineConfig,
    ModelConfig,
    OffloadConfig,
    PolicyConfig,
    PolicyKind,
    RuntimeConfig,
    SamplingConfig,
    Tier,
)
from runtime.library.api import Runtime
from runtime.plan.placement.memory import PAGE_TOKENS
from runtime.synthesize.checkpoints import synthesize_checkpoint
from runtime.units import MIB, round_up

from .report import table
from .rows import NUMBERS_OF_ROWS, StartCase, measure_start
from .runner import ask_worker
from .task import Result, Say, drop_page_cache
from .weightstream import make_requests, measure_generation

HEAD_DIM, LANE_SIZE, NUM_NEW_TOKENS = 64, 64, 9
KV_BYTES = 2 * HEAD_DIM * 4  # of one position in one layer: one KV head in float32


@dataclass(frozen=True, kw_only=True)
class ModelScale:
    """A small Llama, and `block` prompts of `prompt_tokens` each."""

    num_layers: int = 4
    vocab_size: int = 2048
    prompt_tokens: int = 64
    block: int = 32
    hidden_size: int = 384

    def doubled(self, quantity: str, times: int) -> "ModelScale":
        """This size with the field `quantity` multiplied by 2 ** `times`."""
        return replace(self, **{quantity: getattr(self, quantity) << times})

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values at the end of generation, in whole KV pages."""
        return self.num_layers * self.block * round_up(self.prompt_tokens + NUM_NEW_TOKENS, PAGE_TOKENS) * KV_BYTES

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers, vocabulary {self.vocab_size}, prompts of {self.prompt_tokens}, "
            f"block {self.block}"
        )


QUANTITIES = ("num_layers", "vocab_size", "prompt_tokens", "block")
NUM_DOUBLINGS = 3


def doubled_sizes(base: ModelScale) -> dict[str, list[ModelScale]]:
    """The sizes to measure by quantity: `base`, and `base` with this quantity doubled 1 to NUM_DOUBLINGS times."""
    times = range(NUM_DOUBLINGS + 1)
    return {quantity: [base.doubled(quantity, each) for each in times] for quantity in QUANTITIES}


MeasureSize = Callable[[ModelScale, Path, int], Result]
MeasureRows = Callable[[StartCase], Result]
Measurements = Mapping[ModelScale, Sequence[Result]]


def measure_size(size: ModelScale, path: Path, num_threads: int) -> Result:
    """Measures in a separate process."""
    question = {"size": asdict(size), "path": str(path), "num_threads": num_threads}
    return Result(**ask_worker(__name__, question))


def measure_sizes(
    base: ModelScale, num_rounds: int, num_threads: int, say: Say, measure: MeasureSize = measure_size
) -> dict[ModelScale, list[Result]]:
    """Measures every size once in each round, with checkpoints in a temporary directory."""
    rounds: dict[ModelScale, list[Result]] = {size: [] for each in doubled_sizes(base).values() for size in each}
    with tempfile.TemporaryDirectory() as folder:
        paths = {size: Path(folder) / f"{size.num_layers}-{size.vocab_size}-{size.prompt_tokens}" for size in rounds}
        for path, size in {path: size for size, path in paths.items()}.items():
            synthesize(size, path)
        for number in range(1, num_rounds + 1):
            for size, results in rounds.items():
                results.append(measure(size, paths[size], num_threads))
                say(f"round {number} {size}: {results[-1].seconds:.1f} s")
    return rounds


def measure_rows(say: Say, measure: MeasureRows = measure_start) -> dict[StartCase, Result]:
    """Measures the start of a run once for each number of rows and policy."""
    results: dict[StartCase, Result] = {}
    for rows in (StartCase(num_rows=count, policy=policy) for policy in ("auto", "hrm") for count in NUMBERS_OF_ROWS):
        results[rows] = measure(rows)
        say(f"{rows}: {results[rows].seconds:.1f} s")
    return results


def scale_table(base: ModelScale, rounds: Measurements, rows: Mapping[StartCase, Result]) -> str:
    """A table of sizes, with medians of rounds, and one of numbers of rows."""
    headings = ["doubled", "to", "prefill, per token", "x", "decode, per token", "x", "all", "x"]
    headings += ["peak above baseline", "of it KV", "read"]
    lines = [
        _row(quantity, size, before, rounds)
        for quantity, doubled in doubled_sizes(base).items()
        for before, size in zip([None, *doubled], doubled, strict=False)
    ]
    return "\n\n".join([table(headings, lines), _layer_growth(base, rounds), rows_table(rows)])


def rows_table(results: Mapping[StartCase, Result]) -> str:
    """A row for each start. Time and memory per row are those beyond the start with the fewest rows of the same
    policy."""
    table_rows = []
    for rows, result in results.items():
        fewest = min((each for each in results if each.policy == rows.policy), key=lambda each: each.num_rows)
        num_more = rows.num_rows - fewest.num_rows
        seconds, num_bytes = "-", "-"
        if num_more:
            seconds = f"{(result.seconds - results[fewest].seconds) / num_more * 1e3:.3f} ms"
            num_bytes = f"{(result.peak_bytes - results[fewest].peak_bytes) / num_more / 1024:.2f} KiB"
        peak = f"{result.peak_bytes / MIB:.0f} MiB"
        table_rows.append([f"{rows.num_rows:,}", rows.policy, f"{result.seconds:.1f} s", seconds, peak, num_bytes])
    more = "per row beyond the fewest"
    return table(["rows", "policy", "to the first pass", more, "peak memory", more], table_rows)


def _row(quantity: str, size: ModelScale, before: ModelScale | None, rounds: Measurements) -> list[object]:
    cells = [quantity, getattr(size, quantity)]
    for seconds in (_prefill_seconds, _decode_seconds, _seconds):
        now = seconds(size, rounds[size])
        cells.append(f"{now:.2f} s" if seconds is _seconds else f"{now * 1e3:.3f} ms")
        cells.append(f"{now / seconds(before, rounds[before]):.2f}" if before is not None else "-")
    read = median(each.bytes_read for each in rounds[size])
    return [*cells, *(f"{num / MIB:.0f} MiB" for num in (_peak_bytes(rounds[size]), size.kv_bytes, read))]


def _layer_growth(base: ModelScale, rounds: Measurements) -> str:
    """A sentence on how time and memory without KV grow with each doubling of the layers."""
    doubled = doubled_sizes(base)[QUANTITIES[0]]
    times = [_seconds(each, rounds[each]) for each in doubled]
    memory = [_peak_bytes(rounds[each]) - each.kv_bytes for each in doubled]
    return (
        f"Each doubling of the layers takes {_ratios(times)} times as long and {_ratios(memory)} times the memory "
        "without keys and values."
    )


def _ratios(values: Sequence[float]) -> str:
    return ", ".join(f"{later / earlier:.2f}" for earlier, later in pairwise(values))


def _prefill_seconds(size: ModelScale, results: Sequence[Result]) -> float:
    return median(each.prefill_seconds for each in results) / (size.block * size.prompt_tokens)


def _decode_seconds(size: ModelScale, results: Sequence[Result]) -> float:
    """Seconds per decoded token. The first token of each sequence comes from prefill."""
    tokens = size.block * (NUM_NEW_TOKENS - 1)
    return median(each.seconds - each.prefill_seconds for each in results) / tokens


def _seconds(size: ModelScale, results: Sequence[Result]) -> float:
    return median(each.seconds for each in results)


def _peak_bytes(results: Sequence[Result]) -> float:
    return median(each.peak_bytes - each.baseline_bytes for each in results)


def synthesize(size: ModelScale, path: Path) -> None:
    """Writes random weights in bfloat16 to `path`, which must be empty or not exist."""
    architecture = {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_size,
        "intermediate_size": 11 * size.hidden_size // 4,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.hidden_size // HEAD_DIM,
        "num_key_value_heads": 1,
        "max_position_embeddings": size.prompt_tokens + NUM_NEW_TOKENS,
        "tie_word_embeddings": False,
    }
    synthesize_checkpoint(model="llama", overrides=architecture, directory=path, dtype=torch.bfloat16)


def measure(size: ModelScale, path: Path, num_threads: int) -> Result:
    """Measures with all layers streamed, regardless of free memory. Drops the checkpoint from the page cache first."""
    torch.set_num_threads(num_threads)
    drop_page_cache(path)
    runtime = Runtime(_config(size, path, num_threads))
    draw = random.Random(size.prompt_tokens)
    ids = [[draw.randrange(10, size.vocab_size) for _ in range(size.prompt_tokens)] for _ in range(size.block)]
    requests = make_requests(runtime, ids)
    return replace(measure_generation(runtime, requests).result, tokens=[])


def _config(size: ModelScale, path: Path, num_threads: int) -> RuntimeConfig:
    return RuntimeConfig(
        model=ModelConfig(name="bench", path=str(path)),
        offload=OffloadConfig(tier=Tier.nvme, resident_layers=0),
        policy=PolicyConfig(
            kind=PolicyKind.fixed, micro_batch_size=LANE_SIZE, num_micro_batches=-(-size.block // LANE_SIZE)
        ),
        sampling=SamplingConfig(max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True),
        machine=MachineConfig(num_threads=num_threads),
    )


def answers(question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The worker's entry point (`benchmarks.worker`)."""
    size = ModelScale(**question["size"])
    yield asdict(measure(size, Path(question["path"]), question["num_threads"]))
