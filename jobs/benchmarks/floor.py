"""How near passes come to the floor: what reading their bytes, or multiplying as often, takes at least on this machine,
whichever is longer, both measured beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from .isolated import answer
from .predictions import Case
from .task import Result, Task, prompts

FEW_ROWS, MANY_ROWS = 64, 512  # at which products are measured: of a decode pass, and where more gain nothing
VOCABULARY = 32000  # does not matter to lengths


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Of one phase of a run, in seconds, and what it took."""

    case: Case
    phase: str
    reading: float
    multiplying: float
    measured: float

    @property
    def share(self) -> float:
        return max(self.reading, self.multiplying) / self.measured


@dataclass(frozen=True, kw_only=True)
class ProductSeconds:
    """Of all products of one pass with so many rows."""

    layers: float
    head: float


def product_seconds(task: Task) -> dict[int, ProductSeconds]:
    """By rows; in a process of its own."""
    question = {"path": task.path, "rows": [FEW_ROWS, MANY_ROWS], "num_threads": task.num_threads}
    found = answer("jobs.benchmarks.floor_worker", question)
    return {int(num_rows): ProductSeconds(layers=layers, head=head) for num_rows, (layers, head) in found.items()}


def floors_of(
    case: Case, task: Task, results: Sequence[Result], bytes_per_second: float, seconds: Mapping[int, ProductSeconds]
) -> list[Floor]:
    """Prefill and decode, medians over rounds. Every pass reads alike. Products of a decode pass take what they take
    for 64 rows or for 512, in proportion, whichever is less; those of prefill leave the head to last tokens."""
    num_tokens = sum(map(len, prompts(task.num_prompts, VOCABULARY, task.prompt_tokens)))
    num_decodes = task.num_new_tokens - 1
    num_prefills = median(result.num_passes for result in results) - num_decodes
    reading = median(result.bytes_read / result.num_passes for result in results) / bytes_per_second
    whole = max(1.0, task.num_prompts / FEW_ROWS)
    decode = min(whole * FEW_ROWS / rows * (taken.layers + taken.head) for rows, taken in seconds.items())
    head = whole * seconds[FEW_ROWS].head
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
    lines = [
        "| checkpoint, tier, block, phase | read at least | multiply at least | took | floor |",
        "|---|---|---|---|---|",
    ]
    for floor in floors:
        name = f"{floor.case.name}, {floor.case.contender}, {floor.case.num_sequences}, {floor.phase}"
        seconds = (floor.reading, floor.multiplying, floor.measured)
        lines.append(f"| {name} | {' | '.join(f'{each:.1f} s' for each in seconds)} | {floor.share:.0%} |")
    return "\n".join(lines)
