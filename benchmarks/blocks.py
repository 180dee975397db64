"""Decode throughput by block size (the sequences decoded together), measured and predicted.

The knee is the block size from which doubling gains little. The roofline predicts it as P2 of MoE-Lightning's
hierarchical roofline model: the number of sequences from which the disk no longer limits decode.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from runtime.config.settings import OffloadConfig, Tier
from runtime.plan.cost.machine import Machine
from runtime.plan.cost.roofline import OperatingPoint, operating_point
from runtime.plan.cost.work import LayerWork

from .report import table
from .runner import ask_worker
from .task import BenchmarkTask, Result
from .weightstream import open_runtime

KNEE_GAIN = 1.2  # throughput of a doubled block, relative to the block
HEIGHT_PIXELS = 520
MEASURED_COLOR, PREDICTED_COLOR, ROOFLINE_COLOR = "#4c78a8", "#f58518", "#e45756"


@dataclass(frozen=True, kw_only=True)
class BlockRates:
    """Tokens per second of decode passes with `block` sequences. `measured` is the median of all rounds, and `spread`
    the rates of the slowest and the fastest round."""

    block: int
    measured: float
    predicted: float
    spread: tuple[float, float]


def block_sizes(max_size: int) -> list[int]:
    """The powers of two up to `max_size`, and `max_size`."""
    return sorted({*(1 << exponent for exponent in range(max_size.bit_length())), max_size})


def block_rates(rounds: Mapping[int, Sequence[Result]], num_new_tokens: int) -> list[BlockRates]:
    """Decode rates for each block size of `rounds`. The first token of each sequence is not counted: prefill computes
    it."""
    by_block = []
    for block, results in sorted(rounds.items()):
        tokens = block * (num_new_tokens - 1)
        measured = sorted(tokens / (result.seconds - result.prefill_seconds) for result in results)
        by_block.append(
            BlockRates(
                block=block,
                measured=median(measured),
                predicted=median(tokens / result.predicted_decode_seconds for result in results),
                spread=(measured[0], measured[-1]),
            )
        )
    return by_block


def knee(rates: Mapping[int, float]) -> int | None:
    """The first block size that gains less than `KNEE_GAIN` times when doubled; None if all gain more. `rates`:
    tokens/s by block size."""
    return next(
        (block for (block, rate), (_, doubled) in pairwise(sorted(rates.items())) if doubled < KNEE_GAIN * rate), None
    )


def blocks_table(name: str, rates: Sequence[BlockRates], needed_sequences: float) -> str:
    rows: list[list[str]] = []
    previous: BlockRates | None = None
    for each in rates:
        low, high = each.spread
        rows.append(
            [
                f"{each.block}",
                f"{each.measured:.2f} tok/s ({low:.2f}-{high:.2f})",
                f"{each.measured / previous.measured:.2f}" if previous is not None else "-",
                f"{each.predicted:.2f} tok/s",
                f"{each.predicted / each.measured:.2f}",
            ]
        )
        previous = each
    headings = [f"{name}, nvme, block", "decode, measured", "x the previous block", "decode, predicted"]
    measured, predicted = (knee(by_block) for by_block in _rates_by_block(rates))
    return (
        f"{table([*headings, 'predicted / measured'], rows)}\n\n"
        f"The knee, the first block that gains less than {KNEE_GAIN} times when doubled: "
        f"measured {measured or 'none'}, predicted {predicted or 'none'}. "
        f"Roofline (P2): with {needed_sequences:.0f} sequences or more, the disk no longer limits decode."
    )


def _rates_by_block(rates: Sequence[BlockRates]) -> tuple[dict[int, float], dict[int, float]]:
    return {each.block: each.measured for each in rates}, {each.block: each.predicted for each in rates}


def draw_blocks(path: Path, rates: Sequence[BlockRates], needed_sequences: float, title: str) -> None:
    """Draws measured and predicted rates over block sizes, as svg or png by the suffix of `path`. Raises
    OutputError."""
    from jobs.pictures.figure import figure  # matplotlib

    blocks = [each.block for each in rates]
    measured = [each.measured for each in rates]
    # Lengths of the error bars below and above each median.
    errors = [[each.measured - each.spread[0] for each in rates], [each.spread[1] - each.measured for each in rates]]
    with figure(path, HEIGHT_PIXELS) as picture:
        axes = picture.subplots()
        axes.errorbar(blocks, measured, yerr=errors, color=MEASURED_COLOR, marker="o", capsize=2, label="measured")
        axes.plot(blocks, [each.predicted for each in rates], color=PREDICTED_COLOR, linestyle="--", label="predicted")
        axes.axvline(needed_sequences, color=ROOFLINE_COLOR, linewidth=1, label=f"roofline, P2: {needed_sequences:.0f}")
        measured_knee = knee(_rates_by_block(rates)[0])
        if measured_knee is not None:
            axes.axvline(measured_knee, color=MEASURED_COLOR, linestyle=":", label=f"knee, measured: {measured_knee}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("sequences of a block")
        axes.set_ylabel("generated tokens/s of decode passes")
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend(frameon=False)
        picture.tight_layout()


def needed_sequences(task: BenchmarkTask) -> float:
    """The number of sequences from which the disk no longer limits decode (P2). Computed in a separate process."""
    return ask_worker(__name__, asdict(task))["needed_sequences"]


def measure_operating_point(task: BenchmarkTask) -> OperatingPoint:
    """The roofline of a block of all prompts, with weights streamed from disk at measured rates."""
    runtime, requests = open_runtime(task, OffloadConfig(tier=Tier.nvme))
    plan = runtime.plan(requests)
    assert plan.rates is not None, "planning measures the rates"
    budgets = runtime.budgets()
    machine = Machine(
        name="this machine", host_bytes=budgets.host_bytes, device_bytes=budgets.device_bytes, rates=plan.rates
    )
    work = LayerWork.from_shape(runtime.model.shape)
    return operating_point(work, machine, reads=True, num_sequences=task.num_prompts, num_rows=plan.lane_size)


def answers(question: dict[str, Any]) -> Iterator[dict[str, float]]:
    """The worker's entry point (`benchmarks.worker`)."""
    yield {"needed_sequences": measure_operating_point(BenchmarkTask(**question)).needed_sequences}
