"""The files that `jobs.plan` writes beside its text: the table and pictures of a sweep, and the trace of the simulated
passes with its picture, like a run's.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from runtime.plan.roofs import roofs_of
from runtime.plan.timeline import Timeline, make_timeline
from runtime.resources import Resource
from runtime.trace import Span

from ..files.named import publish_named, require_replaceable
from ..files.publishing import write_all
from ..pictures.trace_file import PREDICTED, publish_trace
from ..pictures.trace_picture import TimeWindow, draw
from .config import PlanConfig, Sweep
from .pictures import draw_roofline, draw_sweep
from .planning import Planned
from .sweep import RANKS, Outcome, sweep, sweep_axes

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
    note: str = ""

    @staticmethod
    def of(outcome: Outcome) -> "SweepRow":
        axis, planned = outcome.axis, outcome.planned
        fits = planned is not None
        varied = SweepRow(
            varied=axis.name,
            value=outcome.value,
            unit=axis.unit,
            fits=fits,
            refusal=outcome.refusal,
            note=axis.note or (outcome.refusal if axis.unit == RANKS else ""),
        )
        return varied if planned is None else _filled(varied, planned)

    def __str__(self) -> str:
        return f"{self._line}  {self.note}" if self.note else self._line

    @property
    def _line(self) -> str:
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
    facts = planned.facts
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
    """Raises OutputError."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(asdict(rows[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    publish_named(path, lambda file: write_all(file, text.getvalue().encode()))


def run_sweep(config: PlanConfig, planned: Planned, directory: Path) -> Iterator[str]:
    """The table's lines, each as its plan is made; behind the last one <sweep>.csv, <sweep>.png and roofline.png are
    published. Raises ConfigError, OutputError."""
    kind = config.plan.sweep
    assert kind is not None, "no sweep is asked for"
    names = (f"{kind.value}.csv", f"{kind.value}.png", "roofline.png")
    require_replaceable((directory / name for name in names), f"plan.directory={directory}")
    roofs = roofs_of(planned.shape, planned.view.machine, planned.run)
    name = f"{planned.shape.name} on {planned.machine.name}"
    outcomes, rows = list[Outcome](), list[SweepRow]()
    yield HEAD
    for outcome in sweep(sweep_axes(config, planned)):
        outcomes.append(outcome)
        rows.append(SweepRow.of(outcome))
        yield str(rows[-1])
    write_csv(directory / f"{kind.value}.csv", rows)
    knees = _knees(outcomes, roofs.needed_sequences) if kind is Sweep.batch else {}
    marks = _named_formats(outcomes) if kind is Sweep.format else knees
    shown = _by_bytes(outcomes) if kind is Sweep.format else outcomes
    draw_sweep(directory / f"{kind.value}.png", shown, f"{name}, policy={config.policy.kind.value}", marks)
    block = f"a block of {roofs.num_sequences:,} sequences, {roofs.num_rows:,} at once in feed-forward layers"
    draw_roofline(directory / "roofline.png", roofs, f"{name}: a decode pass over {block}")
    yield from (f"{knee}: {num_sequences:,.0f} sequences" for knee, num_sequences in knees.items())


WEIGHT_ROADS = (Resource.disk, Resource.host_to_device, Resource.host_memory)


def _knees(outcomes: Sequence[Outcome], needed_sequences: float) -> dict[str, float]:
    """Blocks from which on it is no longer the link of weights that binds: by the simulator, all of a decode pass; and
    P2, by the roofline, feed-forward layers alone."""
    fitting = [(each.value, each.planned.prediction.decode.binding) for each in outcomes if each.planned is not None]
    is_reached = [value for value, binding in fitting if binding not in WEIGHT_ROADS]
    simulated = {"knee, weights no longer bind": is_reached[0]} if is_reached else {}
    return simulated | {"P2 of feed-forward layers": needed_sequences}


def _by_bytes(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those of formats, each with an axis of its own, on one for all of them."""
    axis = replace(outcomes[0].axis, name="weights")
    return sorted((replace(each, axis=axis) for each in outcomes), key=lambda each: each.value)


def _named_formats(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The bytes of weights, by the names of the formats that have as many."""
    names = dict[float, list[str]]()
    for each in outcomes:
        names.setdefault(each.value, []).append(each.axis.name)
    return {", ".join(named): value for value, named in names.items()}


NUM_LAYERS_SHOWN = 3  # in the panel that looks closer


def write_timeline(planned: Planned, directory: Path) -> str:
    """Publishes timeline.json and timeline.png; says which passes they show. Raises ConfigError where one of them is
    somebody's own, OutputError."""
    names = ("timeline.json", "timeline.png")
    require_replaceable((directory / name for name in names), f"plan.directory={directory}")
    view = planned.view
    timeline = make_timeline(view.shape, planned.run, view.sizes(planned.sizes), view.machine.rates)
    spans = [Span(s.resource, str(s.action), s.begin, s.end) for s in timeline.spans]
    publish_trace(directory / "timeline.json", PREDICTED, spans)
    draw(directory / "timeline.png", spans, _windows(planned, timeline))
    return timeline.which


def _windows(planned: Planned, timeline: Timeline) -> list[TimeWindow]:
    """All of it, and some layers in the middle of the last pass."""
    passes = timeline.passes
    title = f"{planned.shape.name} on {planned.machine.name}, predicted: {timeline.which}"
    marks = [(each.begin, name) for each, name in zip(passes, timeline.names, strict=True)]
    every = TimeWindow(begin=0.0, end=passes[-1].end, title=title, marks=marks)
    last = passes[-1]
    half = (last.end - last.begin) * NUM_LAYERS_SHOWN / (2 * len(planned.shape.stages))
    middle = (last.begin + last.end) / 2
    closer = TimeWindow(
        begin=max(last.begin, middle - half),
        end=min(last.end, middle + half),
        title=f"about {NUM_LAYERS_SHOWN} layers in the middle of the last pass",
    )
    return [every, closer]
