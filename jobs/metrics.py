"""python -m jobs.metrics: scores the answers of a finished run against references from a column."""

import hydra

from jobs.config.cli import as_job, print_line, run_job
from jobs.config.logs import setup_plain_logging
from jobs.config.settings import Composed, LogLevel, load
from jobs.grading.config import Metric, MetricsConfig


@hydra.main(config_path="../conf", config_name="metrics", version_base=None)
@as_job
def main(composed: Composed) -> None:
    config = load(MetricsConfig, composed)
    setup_plain_logging(LogLevel.warning)

    from jobs.grading.grading import format_grading, grade
    from jobs.grading.judging import format_judging, grade_judgments

    lines = format_judging(grade_judgments(config)) if Metric.judge in config.metrics else format_grading(grade(config))
    for line in lines:
        print_line(line)


if __name__ == "__main__":
    run_job(main, MetricsConfig)
