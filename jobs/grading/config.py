"""Settings of `jobs.metrics`; conf/metrics.yaml mirrors them."""

from dataclasses import dataclass
from enum import Enum

from runtime.errors import require


class Metric(Enum):
    """Metrics. `gsm8k`: the number after `####`, else the last one. `bbh`: the text after `the answer is`, else the
    whole answer. `rouge` needs the extra `eval`. `judge`: ratings of a run of dataset=mtbench_judge."""

    exact_match = "exact_match"
    gsm8k = "gsm8k"
    bbh = "bbh"
    rouge = "rouge"
    judge = "judge"


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """All settings of `jobs.metrics`; mirrors conf/metrics.yaml."""

    run: str | list[str] | None = None
    metric: Metric | list[Metric] = Metric.exact_match
    reference_field: str = "reference"
    out: str | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        require(bool(self.runs) and all(self.runs), "run is not set: a run's directory, e.g. run=outputs/generate/mine")
        require(bool(self.metrics), "metric is empty: set one or several, e.g. metric=[exact_match,rouge]")
        require(len(set(self.metrics)) == len(self.metrics), "metric has the same value twice")
        is_valid = Metric.judge not in self.metrics or len(self.metrics) == 1
        require(is_valid, "metric=judge reads ratings, the others need references: set metric=judge alone")
        require(bool(self.reference_field), "reference_field is empty: set the column of the correct answers")

    @property
    def runs(self) -> list[str]:
        return [self.run] if isinstance(self.run, str) else self.run or []

    @property
    def metrics(self) -> list[Metric]:
        return [self.metric] if isinstance(self.metric, Metric) else self.metric
