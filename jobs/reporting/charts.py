"""The data of charts on the page of a run: tokens/s over time, how busy resources are, predicted and measured
numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from runtime.resources import Resource
from runtime.units import format_bytes, format_seconds

from ..pictures.trace_file import TracedProcess
from ..record.passes import PassRow, PhaseTimes
from .figures import RunFigures

NUM_BINS = 240  # equal intervals of a time axis
NEGLIGIBLE_SECONDS = 1e-9  # rounding error of sums
TIME_PARTS = {
    "computing": "compute_seconds",
    "reading": "load_seconds",
    "copying": "copy_seconds",
    "attention": "attention_seconds",
    "waiting": "stall_seconds",
}


@dataclass(frozen=True, kw_only=True)
class PhaseLine:
    """A line of the throughput chart. `tokens`: the tokens of a pass (forward) in this phase. `share`: the fraction of
    its time that is spent on them."""

    name: str
    tokens: Callable[[PassRow], float]
    share: Callable[[PassRow], float]

    def binned(self, passes: Sequence[PassRow]) -> list[float | None]:
        """Tokens per second in each of NUM_BINS intervals; None in intervals without the phase. The tokens and seconds
        of a pass are divided among the intervals that it extends over."""
        total = sum(row.seconds for row in passes)
        tokens, seconds, now = [0.0] * NUM_BINS, [0.0] * NUM_BINS, 0.0
        for row in passes:
            begin, end = now / total * NUM_BINS, (now + row.seconds) / total * NUM_BINS  # in intervals
            now += row.seconds
            for i in range(int(begin), min(NUM_BINS, int(end) + 1)):
                # The fraction of the pass that is in interval i.
                inside = max(0.0, min(end, i + 1) - max(begin, i)) / (end - begin) if end > begin else 0.0
                tokens[i] += inside * self.tokens(row)
                seconds[i] += inside * row.seconds * self.share(row)
        return [tokens[i] / seconds[i] if seconds[i] > 0 else None for i in range(NUM_BINS)]


PHASES = (
    PhaseLine(name="prefill", tokens=lambda row: row.prompt_tokens, share=lambda row: row.prefill_share),
    PhaseLine(name="decode", tokens=lambda row: row.decode_useful, share=lambda row: 1 - row.prefill_share),
)


def round_axis_limit(maximum: float) -> float:
    """The end of an axis: 1, 2, 2.5 or 5 times a power of ten, and at least `maximum`."""
    power = 10 ** len(f"{maximum:.0f}")
    limits = [power / 100 * step for step in (1, 2, 2.5, 5, 10, 20, 25, 50, 100)]
    return next((limit for limit in limits if limit >= maximum and limit > 0), power)


@dataclass(frozen=True, kw_only=True)
class BusyStrip:
    """Work of a resource. `mean`: seconds of its actions in a second of passes, as in the summary; may exceed 1, where
    several threads read. `shares`: the fraction of each of NUM_BINS equal intervals in which it was busy."""

    mean: float
    shares: Sequence[float]


def make_busy_strips(traced: TracedProcess) -> dict[str, BusyStrip]:
    """The strip of each resource in a trace, from its first action to its last."""
    first, seconds = traced.begin, max(traced.end - traced.begin, NEGLIGIBLE_SECONDS)
    pass_seconds = sum(each.seconds for each in traced.passes) or seconds
    strips = dict[str, BusyStrip]()
    for resource in Resource:
        busy, until = [0.0] * NUM_BINS, first
        spans = sorted((span for span in traced.spans if span.resource is resource), key=attrgetter("begin"))
        for span in spans:
            begin, end = ((at - first) / seconds * NUM_BINS for at in (max(span.begin, until), span.end))
            until = max(until, span.end)
            for i in range(int(begin), min(NUM_BINS, int(end) + 1)):
                busy[i] += max(0.0, min(end, i + 1) - max(begin, i))
        if spans:
            mean = sum(span.end - span.begin for span in spans) / pass_seconds
            strips[resource.value] = BusyStrip(mean=mean, shares=[min(1.0, share) for share in busy])
    return strips


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A measured number and its prediction, or None. `whole`: the value of a full bar. `is_part`: a part of the time of
    a phase, for which no ratio is shown."""

    name: str
    measured: float
    predicted: float | None
    unit: str  # tokens/s, s or B
    whole: float
    is_part: bool = False

    @property
    def ratio(self) -> float | None:
        return self.measured / self.predicted if self.predicted and self.measured and not self.is_part else None

    def share(self, value: float) -> float:
        return min(1.0, value / self.whole) if self.whole > 0 else 0.0

    def text(self, value: float) -> str:
        if self.unit == "tokens/s":
            return f"{value:,.1f} tokens/s"
        return format_seconds(value) if self.unit == "s" else format_bytes(value)


def compare_predictions(figures: RunFigures) -> Iterator[Pair]:
    """Yields the measured and predicted rates, times and memory of a run."""
    summary, planned = figures.summary, figures.recorded_summary.get("planned")
    measured, forecast = summary.measured, summary.predicted
    for name, rate, predicted in (
        ("prefill", measured.prefill, forecast.prefill if forecast else None),
        ("decode", measured.decode_useful, forecast.decode_useful if forecast else None),
    ):
        if rate is not None:
            whole = max(rate, predicted or 0.0)
            yield Pair(name=name, measured=rate, predicted=predicted, unit="tokens/s", whole=whole)
    times, expected = summary.measured_times, summary.predicted_times
    yield from _phase_pairs("prefill time", times.prefill, expected.prefill if expected else None)
    yield from _phase_pairs("decode time", times.decode, expected.decode if expected else None)
    for name, peak in (("host", summary.peak.host_bytes), ("device", summary.peak.device_bytes)):
        value = planned.get(f"{name}_bytes") if isinstance(planned, dict) else None
        predicted = float(value) if isinstance(value, int | float) else None
        if peak:
            whole = max(peak, predicted or 0.0)
            yield Pair(name=f"peak {name} memory", measured=peak, predicted=predicted, unit="B", whole=whole)


def _phase_pairs(name: str, times: PhaseTimes, expected: PhaseTimes | None) -> Iterator[Pair]:
    """Yields the time of a phase and of resources in it. Resources that take no time are left out."""
    whole = max(times.seconds, expected.seconds if expected else 0.0)
    if not whole:
        return
    predicted = expected.seconds if expected else None
    yield Pair(name=name, measured=times.seconds, predicted=predicted, unit="s", whole=whole)
    for part, key in TIME_PARTS.items():
        seconds, predicted = getattr(times, key), getattr(expected, key) if expected else None
        if max(seconds, predicted or 0.0) > NEGLIGIBLE_SECONDS:
            if key == "attention_seconds" and not predicted:  # predicted as a part of computing
                predicted = None
            yield Pair(name=part, measured=seconds, predicted=predicted, unit="s", whole=whole, is_part=True)
