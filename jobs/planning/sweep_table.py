"""The outcomes of a sweep as lines to print and as a CSV file."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from runtime.plan.facts import PlanFacts

from ..files.publishing import publish, write_all
from .planning import Planned
from .sweep import Outcome

HEAD = (
    f"{'':<34}  {'N':>6} {'mu':>5}  {'attention':<9} {'schedule':<14} {'resident':>8}  "
    f"{'prefill':>10} {'decode':>10} {'total':>10}  binds prefill / decode"
)


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """Columns of the file. What is varied is `value` in `unit`; tokens per second are predicted. All of a plan is None
    where none fits, and `refusal` says why."""

    varied: str
    value: float
    unit: str
    fits: bool
    num_sequences: int | None = None  # of a block
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None
    attention: str | None = None
    schedule: str | None = None
    resident_share: float | None = None  # of the layers
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    total_tokens_per_second: float | None = None
    prefill_binding: str | None = None
    decode_binding: str | None = None
    refusal: str = ""

    @staticmethod
    def of(outcome: Outcome) -> "SweepRow":
        axis, planned = outcome.axis, outcome.planned
        fits = planned is not None
        varied = SweepRow(varied=axis.name, value=outcome.value, unit=axis.unit, fits=fits, refusal=outcome.refusal)
        return varied if planned is None else _filled(varied, planned)

    def __str__(self) -> str:
        value = f"{self.value:,.0f}" if self.value >= 1000 else f"{self.value:.4g}"
        varied = f"{self.varied:<16}{value:>8} {self.unit:<9}  "
        if not self.fits:
            return f"{varied}does not fit"
        rates = (self.prefill_tokens_per_second, self.decode_tokens_per_second, self.total_tokens_per_second)
        speeds = " ".join("-".rjust(10) if rate is None else f"{rate:>10,.1f}" for rate in rates)
        return (
            f"{varied}{self.num_sequences:>6} {self.micro_batch_size:>5}  {self.attention:<9} {self.schedule:<14} "
            f"{self.resident_share:>8.0%}  {speeds}  "
            f"{self.prefill_binding or '-'} / {self.decode_binding or '-'}"
        )


def _filled(row: SweepRow, planned: Planned) -> SweepRow:
    run, layers = planned.run, planned.shape.layers
    facts = PlanFacts.of(planned.config, planned.shape, run, dtype=planned.dtype.value)
    rates, phases = planned.throughput, planned.prediction
    return replace(
        row,
        num_sequences=max(len(block.members) for block in run.blocks),
        micro_batch_size=run.lane_size,
        num_micro_batches=run.num_lanes,
        attention=facts.attention,
        schedule=facts.schedule,
        resident_share=sum(stage.index in run.placement.resident for stage in layers) / len(layers),
        prefill_tokens_per_second=rates.prefill,
        decode_tokens_per_second=rates.decode,
        total_tokens_per_second=rates.total,
        prefill_binding=phases.prefill.binding.value if phases.prefill.binding else None,
        decode_binding=phases.decode.binding.value if phases.decode.binding else None,
    )


def write_csv(path: Path, rows: Sequence[SweepRow]) -> None:
    """An older file is replaced. Raises OutputError."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(asdict(rows[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    publish(path, lambda file: write_all(file, text.getvalue().encode()), exclusive=False)
