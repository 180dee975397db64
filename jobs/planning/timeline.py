"""The simulated passes of a plan as files: a trace like a run's, and its picture."""

from pathlib import Path

from runtime.plan.timeline import Timeline, make_timeline
from runtime.trace import Row, Span

from ..report.trace_events import PREDICTED
from ..report.trace_file import publish_trace
from ..report.trace_picture import Window, draw
from .planning import Planned

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
