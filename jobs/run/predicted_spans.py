"""What a plan says would run when in a pass, for the trace of a run: beside what did. It stands alone as it turns the
simulator's spans into a trace's, which no run without a trace asks for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.engine.records import Phase
from runtime.plan.cost.simulator import PlayedPass
from runtime.plan.placement.memory import SequenceSize
from runtime.plan.planner import RunPlan
from runtime.plan.shape.model import ModelShape
from runtime.plan.timeline import make_timeline
from runtime.trace import Span


@dataclass(frozen=True, kw_only=True)
class PredictedSpans:
    """One simulated pass of each phase that has any; it stands for all of them."""

    passes: Mapping[Phase, PlayedPass]

    @staticmethod
    def of(shape: ModelShape, plan: RunPlan, sizes: Sequence[SequenceSize]) -> "PredictedSpans":
        """The first prefill pass of the first block, and a decode pass behind others; of continuous admission a pass
        from the middle of the run. Nothing where the plan was made without rates."""
        if plan.rates is None or not plan.blocks:
            return PredictedSpans(passes={})
        timeline = make_timeline(shape, plan, sizes, plan.rates)
        first, last = timeline.passes[0], timeline.passes[-1]
        if timeline.names[0] == "mixed pass":
            return PredictedSpans(passes=dict.fromkeys(Phase, last))
        decode = {Phase.decode: last} if len(timeline.passes) > 1 else {}
        return PredictedSpans(passes={Phase.prefill: first, **decode})

    def beginning(self, phase: Phase, begin: float) -> list[Span]:
        """The spans of a pass that began at this second."""
        played = self.passes.get(phase)
        if played is None:
            return []
        late = begin - played.begin
        return [Span(s.resource, str(s.action), s.begin + late, s.end + late) for s in played.spans]
