"""The benchmark of policy=hrm, which searches a policy, against a fixed grid of policies with the same budget."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from runtime.config.settings import Attention, Order, PolicyKind

from .config import BenchConfig, make_task
from .contenders import Contender
from .report import table
from .task import BenchmarkTask, Result

# Number of micro-batches in a block, and the divisor of num_prompts that gives the size of a micro-batch.
SIZES = ((1, 4), (1, 2), (1, 1), (4, 4), (2, 2))
VARIANTS = (
    (Order.zigzag, Attention.device),
    (Order.zigzag, Attention.cpu),
    (Order.flexgen, Attention.device),
    (Order.module_batched, Attention.device),
)
NUM_REPEATED = 3  # fastest policies of the grid, which later rounds measure again


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A policy and the checkpoint that it is measured with."""

    path: str
    task: BenchmarkTask

    @property
    def is_searched(self) -> bool:
        return self.task.policy == PolicyKind.hrm.value

    @property
    def name(self) -> str:
        task = self.task
        if self.is_searched:
            return "hrm"
        attention = "" if task.attention == Attention.device.value else ", attention on workers"
        return f"{task.num_micro_batches} x {task.micro_batch_size}, {task.schedule}{attention}"

    def __str__(self) -> str:
        return f"{Path(self.path).name} {self.name}"


def policy_attempts(config: BenchConfig, path: str) -> Iterator[Attempt]:
    """The searched policy, then the grid, all with a memory budget for the KV of all prompts."""
    base = replace(make_task(config, Contender.nvme, path, config.num_prompts), num_kv_slots=config.num_prompts)
    yield Attempt(path=path, task=replace(base, policy=PolicyKind.hrm.value))
    for count, divisor in SIZES:
        for order, attention in VARIANTS:
            task = replace(
                base,
                micro_batch_size=max(1, config.num_prompts // divisor),
                num_micro_batches=count,
                schedule=order.value,
                attention=attention.value,
            )
            yield Attempt(path=path, task=task)


def select_repeated(rounds: Mapping[Attempt, Sequence[Result]]) -> list[Attempt]:
    """The searched policy of each checkpoint, and the NUM_REPEATED fastest policies of its grid."""
    chosen: list[Attempt] = []
    for path in dict.fromkeys(attempt.path for attempt in rounds):
        candidates = [attempt for attempt in rounds if attempt.path == path]
        grid = sorted((a for a in candidates if not a.is_searched), key=lambda a: -_rate(rounds[a]))
        chosen += [*(a for a in candidates if a.is_searched), *grid[:NUM_REPEATED]]
    return chosen


def policies_table(rounds: Mapping[Attempt, Sequence[Result]]) -> str:
    """A table for each checkpoint, the fastest policy first. The best of many policies measured once seems faster than
    it is, so only the best ones are measured again."""
    lines: list[str] = []
    headings = ["policy", "tokens/s, median (min-max)", "rounds", "predicted"]
    for path in dict.fromkeys(attempt.path for attempt in rounds):
        ranked = sorted((a for a in rounds if a.path == path), key=lambda a: -_rate(rounds[a]))
        searched = next(a for a in ranked if a.is_searched)
        best = next(a for a in ranked if not a.is_searched)
        ratio = _rate(rounds[searched]) / _rate(rounds[best])
        lines += [
            f"{Path(path).name}: hrm at {ratio:.2f} of the best of {len(ranked) - 1} policies ({best.name})",
            "",
            table(headings, [_row(attempt, rounds[attempt]) for attempt in ranked]),
            "",
        ]
    return "\n".join(lines).rstrip()


def _row(attempt: Attempt, results: Sequence[Result]) -> list[object]:
    rates = [result.rate for result in results]
    seconds = median(result.predicted_prefill_seconds + result.predicted_decode_seconds for result in results)
    predicted = f"{sum(map(len, results[0].tokens)) / seconds:.1f}" if seconds else "-"
    name = attempt.name + (f": {results[0].policy}" if attempt.is_searched else "")
    return [name, f"{median(rates):.1f} ({min(rates):.1f}-{max(rates):.1f})", len(rates), predicted]


def _rate(results: Sequence[Result]) -> float:
    return median(result.rate for result in results)
