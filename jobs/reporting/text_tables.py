"""Tables of text in columns."""

from collections.abc import Sequence

from .directories import EvaluationDirectory, TaskMetric

METRIC_HEAD = ("task", "metric", "value", "stderr")


def format_columns(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> list[str]:
    """Formats lines with columns two spaces apart. Columns in `numbers` are aligned to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(
            f"{cell:>{width}}" if i in numbers else f"{cell:<{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def metric_cells(metric: TaskMetric) -> list[str]:
    error = "-" if metric.error is None else f"{metric.error:.4f}"
    return [metric.task, metric.name, f"{metric.value:.4f}", error]


def format_evaluations(evaluations: Sequence[EvaluationDirectory]) -> list[str]:
    """Formats the metrics of evaluations, or their states before the end."""
    rows = list[list[str]]()
    for evaluation in evaluations:
        first = [evaluation.path.name, evaluation.model, evaluation.state]
        metrics = [[*first, *metric_cells(metric)] for metric in evaluation.metrics]
        rows += metrics or [[*first, ", ".join(evaluation.tasks), "-", "-", "-"]]
    return format_columns(("evaluation", "model", "state", *METRIC_HEAD), rows, numbers=(5, 6))
