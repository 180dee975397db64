"""What was predicted of a run beside what was measured, as bars on one scale."""

from collections.abc import Iterator
from dataclasses import dataclass

from runtime.units import format_bytes, format_seconds

from ..record.passes import PhaseTimes
from .figures import RunFigures
from .html import Html, element

NOTHING_SECONDS = 1e-9  # what sums round to
PARTS = {
    "computing": "compute_seconds",
    "reading": "load_seconds",
    "copying": "copy_seconds",
    "attention": "attention_seconds",
    "waiting": "stall_seconds",
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One figure; `predicted` is None where nobody said. `whole`: what a full bar stands for."""

    name: str
    measured: float
    predicted: float | None
    unit: str  # tokens/s, s or B
    whole: float
    is_part: bool = False

    def text(self, value: float) -> str:
        if self.unit == "tokens/s":
            return f"{value:,.1f} tokens/s"
        return format_seconds(value) if self.unit == "s" else format_bytes(value)


def comparison(figures: RunFigures) -> Html:
    pairs = list(_pairs(figures))
    has_claims = any(pair.predicted is not None for pair in pairs)
    legend = element(
        "p",
        element("i", class_="measured"),
        " measured ",
        [element("i", class_="predicted"), " predicted before the first pass"] if has_claims else None,
        class_="legend",
    )
    return element("div", legend, [_row(pair) for pair in pairs], class_="pairs")


def _row(pair: Pair) -> Html:
    ratio = pair.measured / pair.predicted if pair.predicted and pair.measured and not pair.is_part else None
    return element(
        "div",
        element("span", pair.name, class_="name"),
        element(
            "span",
            _bar(pair.measured, pair.whole, "measured"),
            _bar(pair.predicted, pair.whole, "predicted") if pair.predicted is not None else None,
            class_="bars",
        ),
        element(
            "span",
            element("b", pair.text(pair.measured)),
            element("small", pair.text(pair.predicted)) if pair.predicted is not None else None,
            class_="values",
        ),
        element("span", "" if ratio is None else f"{ratio:.2f} x", class_="ratio"),
        class_="pair part" if pair.is_part else "pair",
    )


def _bar(value: float, whole: float, class_: str) -> Html:
    share = min(1.0, value / whole) if whole > 0 else 0.0
    return element("i", class_=class_, style=f"width:{100 * share:.4g}%")


def _pairs(figures: RunFigures) -> Iterator[Pair]:
    summary = figures.summary
    measured, claimed = summary.measured, summary.predicted
    for name, rate, claim in (
        ("prefill", measured.prefill, claimed.prefill if claimed else None),
        ("decode", measured.decode_useful, claimed.decode_useful if claimed else None),
    ):
        if rate is not None:
            yield Pair(name=name, measured=rate, predicted=claim, unit="tokens/s", whole=max(rate, claim or 0.0))
    times, expected = summary.measured_times, summary.predicted_times
    yield from _phase("prefill time", times.prefill, expected.prefill if expected else None)
    yield from _phase("decode time", times.decode, expected.decode if expected else None)
    yield from _memory(figures)


def _phase(name: str, times: PhaseTimes, expected: PhaseTimes | None) -> Iterator[Pair]:
    """The time of a phase, and what worked in it, side by side; lines of two zeros are left out."""
    whole = max(times.seconds, expected.seconds if expected else 0.0)
    if not whole:
        return
    claim = expected.seconds if expected else None
    yield Pair(name=name, measured=times.seconds, predicted=claim, unit="s", whole=whole)
    for part, key in PARTS.items():
        seconds, claim = getattr(times, key), getattr(expected, key) if expected else None
        is_within = key == "attention_seconds" and not claim  # predicted as a part of computing
        if max(seconds, claim or 0.0) > NOTHING_SECONDS:
            predicted = None if is_within else claim
            yield Pair(name=part, measured=seconds, predicted=predicted, unit="s", whole=whole, is_part=True)


def _memory(figures: RunFigures) -> Iterator[Pair]:
    planned, peak = figures.noted.get("planned"), figures.summary.peak
    for name, measured in (("host", peak.host_bytes), ("device", peak.device_bytes)):
        claim = planned.get(f"{name}_bytes") if isinstance(planned, dict) else None
        planned_bytes = float(claim) if isinstance(claim, int | float) else None
        if measured:
            whole = max(measured, planned_bytes or 0.0)
            label = f"peak {name} memory"
            yield Pair(name=label, measured=measured, predicted=planned_bytes, unit="B", whole=whole)
