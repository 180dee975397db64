"""What a token costs as a model and what is asked of it grow: layers, vocabulary, prompts, block, rows."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median

from runtime.units import MIB

from .isolated import answer
from .rows import NUMBERS_OF_ROWS, Rows, measured_rows, rows_table
from .scale_size import NUM_NEW_TOKENS, QUANTITIES, Size, sizes
from .scale_worker import synthesize
from .task import Result

MeasureSize = Callable[[Size, Path, int], Result]
MeasureRows = Callable[[Rows], Result]
Say = Callable[[str], object]
Measurements = Mapping[Size, Sequence[Result]]


def measured_size(size: Size, path: Path, num_threads: int) -> Result:
    """In a process of its own."""
    asked = {"size": asdict(size), "path": str(path), "num_threads": num_threads}
    return Result(**answer("jobs.benchmarks.scale_worker", asked))


def measure_sizes(
    base: Size, num_rounds: int, num_threads: int, say: Say, measure: MeasureSize = measured_size
) -> dict[Size, list[Result]]:
    """Rounds alternate. Checkpoints lie in a temporary folder for as long."""
    rounds: dict[Size, list[Result]] = {size: [] for each in sizes(base).values() for size in each}
    with tempfile.TemporaryDirectory() as folder:
        paths = {size: Path(folder) / f"{size.num_layers}-{size.vocab_size}-{size.prompt_tokens}" for size in rounds}
        for path, size in {path: size for size, path in paths.items()}.items():
            synthesize(size, path)
        for turn in range(num_rounds):
            for size, results in rounds.items():
                results.append(measure(size, paths[size], num_threads))
                say(f"round {turn + 1} {size}: {results[-1].seconds:.1f} s")
    return rounds


def measure_rows(say: Say, measure: MeasureRows = measured_rows) -> dict[Rows, Result]:
    """Each once: what is asked is how it grows."""
    found: dict[Rows, Result] = {}
    for rows in (Rows(count=count, policy=policy) for policy in ("auto", "hrm") for count in NUMBERS_OF_ROWS):
        found[rows] = measure(rows)
        say(f"{rows}: {found[rows].seconds:.1f} s")
    return found


def scale_table(base: Size, rounds: Measurements, rows: Mapping[Rows, Result]) -> str:
    """Of several rounds the medians."""
    lines = [
        "| doubled | to | prefill, per token | x | decode, per token | x | all | x | peak above baseline | of it KV "
        "| read |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for quantity, grown in sizes(base).items():
        before: Size | None = None
        for size in grown:
            lines.append(_row(quantity, size, before, rounds))
            before = size
    return "\n".join([*lines, "", _layers(base, rounds), "", rows_table(rows)])


def _row(quantity: str, size: Size, before: Size | None, rounds: Measurements) -> str:
    times = [_prefill_seconds, _decode_seconds, _seconds]
    cells = []
    for seconds in times:
        now = seconds(size, rounds[size])
        ratio = f"{now / seconds(before, rounds[before]):.2f}" if before is not None else "-"
        cells.append(f"{now:.2f} s | {ratio}" if seconds is _seconds else f"{now * 1e3:.3f} ms | {ratio}")
    return (
        f"| {quantity} | {getattr(size, quantity)} | {' | '.join(cells)} | {_peak_bytes(rounds[size]) / MIB:.0f} MiB "
        f"| {size.kv_bytes / MIB:.0f} MiB | {median(each.bytes_read for each in rounds[size]) / MIB:.0f} MiB |"
    )


def _layers(base: Size, rounds: Measurements) -> str:
    """What doubling the layers does to time and to memory beside keys and values."""
    grown = sizes(base)[QUANTITIES[0]]
    times = [_seconds(each, rounds[each]) for each in grown]
    rooms = [_peak_bytes(rounds[each]) - each.kv_bytes for each in grown]
    return (
        f"Each doubling of the layers takes {_ratios(times)} times as long and {_ratios(rooms)} times the memory "
        "beside keys and values."
    )


def _ratios(values: Sequence[float]) -> str:
    return ", ".join(f"{later / earlier:.2f}" for earlier, later in pairwise(values))


def _prefill_seconds(size: Size, results: Sequence[Result]) -> float:
    return median(each.prefill_seconds for each in results) / (size.block * size.prompt_tokens)


def _decode_seconds(size: Size, results: Sequence[Result]) -> float:
    """Prefill gives the first of each sequence's tokens."""
    tokens = size.block * (NUM_NEW_TOKENS - 1)
    return median(each.seconds - each.prefill_seconds for each in results) / tokens


def _seconds(size: Size, results: Sequence[Result]) -> float:
    return median(each.seconds for each in results)


def _peak_bytes(results: Sequence[Result]) -> float:
    return median(each.peak_bytes - each.baseline_bytes for each in results)
