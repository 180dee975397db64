"""The benchmark of predictions: predicted and measured seconds of runs, and the median and largest deviation."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from .report import table
from .task import Result


@dataclass(frozen=True, kw_only=True)
class BlockCase:
    """A run with one block of `num_sequences`, decoded together."""

    path: str
    contender: str
    num_sequences: int

    def __str__(self) -> str:
        return f"{self.name} {self.contender} {self.num_sequences}"

    @property
    def name(self) -> str:
        """The checkpoint's directory name."""
        return Path(self.path).name


@dataclass(frozen=True, kw_only=True)
class PredictionResult:
    """Predicted and measured seconds of one phase, prefill or decode, without loading. If the ratio is above 1, the
    prediction was too long."""

    case: BlockCase
    phase: str
    predicted_seconds: float
    measured_seconds: float

    @property
    def ratio(self) -> float:
        return self.predicted_seconds / self.measured_seconds

    @property
    def deviation(self) -> float:
        """Relative error of the prediction."""
        return abs(self.ratio - 1)


def median_predictions(case: BlockCase, results: Sequence[Result]) -> list[PredictionResult]:
    """The predictions of prefill and of decode, each from the round with the median ratio."""
    outcomes = []
    for phase in ("prefill", "decode"):
        rounds = [_prediction(case, phase, result) for result in results]
        outcomes.append(sorted(rounds, key=lambda outcome: outcome.ratio)[(len(rounds) - 1) // 2])
    return outcomes


def _prediction(case: BlockCase, phase: str, result: Result) -> PredictionResult:
    is_prefill = phase == "prefill"
    return PredictionResult(
        case=case,
        phase=phase,
        predicted_seconds=result.predicted_prefill_seconds if is_prefill else result.predicted_decode_seconds,
        measured_seconds=result.prefill_seconds if is_prefill else result.seconds - result.prefill_seconds,
    )


def predictions_table(predictions: Sequence[PredictionResult]) -> str:
    headings = ["checkpoint", "contender", "block", "phase", "predicted", "measured", "predicted / measured"]
    rows = [
        [
            each.case.name,
            each.case.contender,
            each.case.num_sequences,
            each.phase,
            f"{each.predicted_seconds:.2f} s",
            f"{each.measured_seconds:.2f} s",
            f"{each.ratio:.2f}",
        ]
        for each in predictions
    ]
    worst = max(predictions, key=lambda outcome: outcome.deviation)
    where = f"{worst.case.name}, {worst.case.contender}, block {worst.case.num_sequences}, {worst.phase}"
    return (
        f"{table(headings, rows)}\n\nOff by {median(each.deviation for each in predictions):.1%} in the median, by "
        f"{worst.deviation:.1%} at worst ({where})."
    )
