"""The files that `jobs.plan` writes beside its text: the table and pictures of a sweep, and the trace of the simulated
passes with its picture, like a run's.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from runtime.plan.cost.simulator import Resource
from runtime.plan.roofs import roofs_of
from runtime.plan.timeline import Timeline, make_timeline
from runtime.trace import Row, Span

from ..report.trace_events import PREDICTED
from ..report.trace_file import publish_trace
from ..report.trace_picture import Window, draw
from .config import PlanConfig, Sweep
from .planning import Planned
from .roofline_picture import draw_roofline
from .sweep import Outcome, sweep, sweep_axes
from .sweep_picture import draw_sweep
from .sweep_table import HEAD, SweepRow, write_csv


def run_sweep(config: PlanConfig, planned: Planned, directory: Path) -> Iterator[str]:
    """The table's lines, each as its plan is made; behind the last one <sweep>.csv, <sweep>.png and roofline.png are
    published. Raises ConfigError, OutputError."""
    kind = config.plan.sweep
    assert kind is not None, "no sweep is asked for"
    roofs = roofs_of(planned.shape, planned.machine, config.offload.tier, planned.run)
    name = f"{planned.shape.name} on {planned.machine.name}"
    outcomes, rows = list[Outcome](), list[SweepRow]()
    yield HEAD
    for outcome in sweep(sweep_axes(config, planned)):
        outcomes.append(outcome)
        rows.append(SweepRow.of(outcome))
        yield str(rows[-1])
    write_csv(directory / f"{kind.value}.csv", rows)
    knees = _knees(outcomes, roofs.needed_sequences) if kind is Sweep.batch else {}
    draw_sweep(directory / f"{kind.value}.png", outcomes, f"{name}, policy={config.policy.kind.value}", knees)
    block = f"a block of {roofs.num_sequences:,} sequences, {roofs.num_rows:,} at once in feed-forward layers"
    draw_roofline(directory / "roofline.png", roofs, f"{name}: a decode pass over {block}")
    yield from (f"{knee}: {num_sequences:,.0f} sequences" for knee, num_sequences in knees.items())


def _knees(outcomes: Sequence[Outcome], needed_sequences: float) -> dict[str, float]:
    """Blocks from which on it is no longer the road of weights that binds: by the simulator, all of a decode pass; and
    P2, by the roofline, feed-forward layers alone."""
    fitting = [(each.value, each.planned.prediction.decode.binding) for each in outcomes if each.planned is not None]
    is_reached = [value for value, binding in fitting if binding not in (Resource.disk, Resource.link_in)]
    simulated = {"knee, weights no longer bind": is_reached[0]} if is_reached else {}
    return simulated | {"P2 of feed-forward layers": needed_sequences}


NUM_LAYERS_SHOWN = 3  # in the panel that looks closer


def write_timeline(planned: Planned, directory: Path) -> str:
    """Publishes timeline.json and timeline.png; says which passes they show. Raises OutputError."""
    timeline = make_timeline(planned.shape, planned.run, planned.sizes, planned.machine.rates)
    spans = [Span(Row(s.resource.value), str(s.action), s.begin, s.end) for s in timeline.spans]
    publish_trace(directory / "timeline.json", PREDICTED, spans)
    draw(directory / "timeline.png", spans, _windows(planned, timeline))
    return timeline.which


def _windows(planned: Planned, timeline: Timeline) -> list[Window]:
    """All of it, and some layers in the middle of the last pass."""
    passes = timeline.passes
    title = f"{planned.shape.name} on {planned.machine.name}, predicted: {timeline.which}"
    marks = [(each.begin, name) for each, name in zip(passes, timeline.names, strict=True)]
    every = Window(begin=0.0, end=passes[-1].end, title=title, marks=marks)
    last = passes[-1]
    half = (last.end - last.begin) * NUM_LAYERS_SHOWN / (2 * len(planned.shape.stages))
    middle = (last.begin + last.end) / 2
    closer = Window(
        begin=max(last.begin, middle - half),
        end=min(last.end, middle + half),
        title=f"about {NUM_LAYERS_SHOWN} layers in the middle of the last pass",
    )
    return [every, closer]
